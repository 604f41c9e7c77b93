"""What the engine gives to the norms of a network: by what they want, never by their name or the device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import finish, tiny

from tbbn.bench.engine import forward, setup
from tbbn.bench.engine.loop import Run
from tbbn.nn import balance
from tbbn.registry import NORMS

ENGINE = Path(setup.__file__).parent


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_task_ids_are_given_on_every_device_to_norms_that_want_them(norm: str, device: str) -> None:
    options = {"norm__groups": 8} if norm in ("gn", "cn") else {}
    run = Run(tiny(norm__name=norm, **options))
    made = setup.training_forward(run.config, run.network, run.scenario, run.scenario.tasks[1], torch.device(device))
    assert (made.class_task is not None) == (norm == "adab2n")
    assert made.class_task is None or made.class_task.device.type == device
    assert made.takes_layout == (norm in ("tbbn", "weighted", "adab2n"))


def test_adab2n_gets_the_task_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class Spy(balance):
        def __init__(self, module: Any, **given: Any) -> None:
            seen.append(given)
            super().__init__(module, **given)

    monkeypatch.setattr(forward, "balance", Spy)
    finish(tiny(norm__name="adab2n"))
    tasks = {given["past_tasks"] for given in seen}
    assert len(tasks) > 1
    for given in seen:
        ids, current = given["task_ids"], given["current"]
        assert len(ids) == current + given["memory"]
        assert (ids[:current] == given["past_tasks"]).all()
        assert (ids[current:] < given["past_tasks"]).all()


def test_the_engine_knows_no_norm_by_name() -> None:
    for file in ENGINE.glob("*.py"):
        assert not re.search(r"norm\.name\s*(==|!=|in\b)", file.read_text()), file
