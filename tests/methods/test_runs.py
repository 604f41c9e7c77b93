"""Every method learns two tasks in a whole run, and guessing does not reach what it reaches."""

from __future__ import annotations

from typing import Any

import pytest

from tbbn.config import resolve
from tbbn.engine import run
from tbbn.methods import METHODS

CHANCE = 1 / 6
# Second phases of their usual length would take longer than all the rest.
SHORT = {
    "eeil": {"method.balanced_epochs": 6},
    "bic": {"method.correction_epochs": 20},
    "podnet": {"method.finetune_epochs": 6},
    "afc": {"method.finetune_epochs": 6},
}


def two_tasks(name: str, **settings: Any) -> Any:
    """Six made-up classes of 40 + 10 images in two tasks."""
    return run(
        resolve(
            (
                "test",
                {
                    "data.name": "synthetic:6x40x10x8",
                    "data.tasks": 2,
                    "memory.budget": 30,
                    "train.epochs": 10,
                    "device": "cpu",
                    "threads": 1,
                    "norm.name": "tbbn",
                    "method.name": name,
                    **SHORT.get(name, {}),
                    **settings,
                },
            )
        )
    )


@pytest.mark.parametrize("name", METHODS)
def test_two_tasks_beat_chance(name: str) -> None:
    record = two_tasks(name)
    assert record.status == "finished"
    (first,), last = record.accuracy
    assert first > 1 / 3 + 0.2
    assert sum(last) / 2 > CHANCE + 0.2


@pytest.mark.parametrize("name", ["eeil", "bic", "podnet", "afc"])
def test_second_phases_leave_their_trace_in_the_history(name: str) -> None:
    record = two_tasks(name, **{"train.epochs": 1})
    phases = [(entry["task"], entry["phase"]) for entry in record.history]
    second = {"eeil": "balanced", "bic": "correction"}.get(name, "finetune")
    assert phases[:2] == [(0, "train"), (1, "train")]
    assert set(phases[2:]) == {(1, second)}
    assert len(phases[2:]) == next(iter(SHORT[name].values()))
