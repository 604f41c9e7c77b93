"""Each method learns: two tasks of two classes, where guessing gives a quarter and knowing one task alone a half."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tbbn.bench.config import resolve
from tbbn.bench.engine import run
from tbbn.bench.engine.record import Record
from tbbn.registry import METHODS

SHORT: dict[str, dict[str, Any]] = {
    "eeil": {"method.balanced_epochs": 2},
    "bic": {"method.correction_epochs": 20},
    "podnet": {"method.finetune_epochs": 3},
    "afc": {"method.finetune_epochs": 3},
    "ssil": {"train.epochs": 4},  # only distillation ties the scores of its two softmaxes: in long training they drift
}


@functools.cache
def learnt(method: str) -> Record:
    settings = {
        "device": "cpu",
        "data.name": "synthetic:4x30x15x8",
        "data.tasks": 2,
        "memory.budget": 24,
        "train.epochs": 8,
        "batch.size": 16,
        "method.name": method,
        **SHORT.get(method, {}),
    }
    return run(resolve(("test", settings)))


@pytest.mark.parametrize("method", list(METHODS))
def test_a_two_task_run_clearly_beats_chance(method: str) -> None:
    record = learnt(method)
    assert record.status == "finished"
    assert record.accuracy[0][0] > 0.8  # two classes, alone
    assert record.metrics["final_accuracy"] > 0.6
    assert record.metrics["task_il_final_accuracy"] > 0.8
    assert min(record.accuracy[1]) > 0.25  # neither task is lost


def test_joint_training_is_the_upper_bound() -> None:
    joint, tuned = learnt("joint"), learnt("ft")
    assert joint.metrics["final_accuracy"] > tuned.metrics["final_accuracy"]
    assert joint.metrics["final_accuracy"] > 0.85
