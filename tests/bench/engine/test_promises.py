"""What is said before, during and after training: forecasts that come true, losses that are means, and why a run diverged."""

from __future__ import annotations

import math
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinyrun import tiny
from torch import distributed as dist
from torch import nn

from tbbn.bench.engine import Stepped, joining, lanes, loop
from tbbn.bench.engine.forecast import forecast
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.step import describe_divergence, read_totals


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch__current_from": "union", "method__name": "lucir"},
        {"batch__current_from": "union", "memory__budget": 30, "batch__length": "current"},
        {"batch__ratio": "1:1", "batch__length": "memory", "memory__budget": 60},
        {"batch__last": "drop", "batch__size": 7},
        {"data__base_classes": 4, "memory__budget": 20},
        {"method__name": "bic", "method__correction_epochs": 1, "memory__budget": 40},
        {"method__name": "bic", "method__correction_epochs": 1, "memory__budget": 12, "data__validation": 0.25},
        {"method__name": "bic", "method__correction_epochs": 1, "memory__budget": 6},  # all that is kept is held out
        {"method__name": "joint"},
        {"method__name": "joint", "data__online": True},
        {"memory__budget": 3, "memory__per_class": True},
        {"memory__budget": 0},
        {"data__online": True, "memory__budget": 30},
        {"train__first": {"epochs": 3}, "data__stop_after": 2, "norm__name": "tbbn"},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_a_forecast_comes_true(settings: dict[str, Any]) -> None:
    run = Run(tiny(**{"train__epochs": 1, **settings}))
    steps: Counter[tuple[int, int]] = Counter()
    for event in run.events():
        if isinstance(event, Stepped) and event.position.phase == 0:
            steps[event.position.task, event.position.epoch] += 1
    found = forecast(run.config)
    record = run.record
    assert found.note == "" and len(found.tasks) == len(record.accuracy)
    for entry in found.tasks:
        epochs = [n for (task, _), n in sorted(steps.items()) if task == entry.task]
        assert epochs == [entry.steps] * entry.epochs and entry.all_steps == sum(epochs)
        assert entry.classes == record.task_sizes[entry.task] and entry.splits == record.splits[entry.task]
        assert entry.exemplars == (record.exemplars[entry.task - 1] if entry.task else 0)
    assert found.all_steps == sum(steps.values())


def totals(names: str, values: list[float], count: int, finite: int = 0) -> Any:
    return SimpleNamespace(
        names=names.split(), totals=torch.tensor(values), count=count, finite_steps=torch.tensor(finite)
    )


def test_losses_are_means_over_the_steps_of_all_layouts_and_counted_anew() -> None:
    steps = [totals("ce total", [6.0, 8.0], 2, 2), totals("ce kd total", [1.0, 2.0, 3.0], 1, 1)]
    assert read_totals(steps) == {"ce": 7 / 3, "total": 11 / 3, "kd": 2 / 3}
    assert [(s.totals.tolist(), s.count, int(s.finite_steps)) for s in steps] == [([0, 0], 0, 0), ([0, 0, 0], 0, 0)]
    assert read_totals([totals("total", [5.0], 1)]) == {"total": 5.0}
    assert read_totals([totals("total", [0.0], 0)]) == {"total": 0.0} and read_totals([]) == {}


def test_losses_that_are_not_finite_stay_for_the_message() -> None:
    step = totals("total", [math.inf], 3, 1)
    assert read_totals([step]) == {"total": math.inf}
    assert (step.totals.tolist(), step.count, int(step.finite_steps)) == ([math.inf], 3, 1)


@pytest.mark.parametrize(
    ("gradients", "largest"),
    [
        ({"a": 3.0, "b": -4.0, "c": 1.0}, "b (4)"),
        ({"a": 4.0, "b": 3.0}, "a (4)"),
        ({"a": 5.0, "b": math.nan}, "b (nan)"),
        ({"a": math.inf, "b": 9.0}, "a (inf)"),
        ({"a": None, "b": 0.5}, "b (0.5)"),
        ({"a": None}, "none (0)"),
    ],
)
def test_the_message_of_a_run_that_diverged(gradients: dict[str, float | None], largest: str) -> None:
    network: Any = nn.ParameterDict({name: torch.zeros(1) for name in gradients})
    for name, value in gradients.items():
        network[name].grad = None if value is None else torch.tensor([value])
    good, bad, worse = totals("x", [1.0], 9, 9), totals("x", [math.nan], 9, 6), totals("x", [math.inf], 9, 4)
    said = describe_divergence(network, [good, bad, worse], {"x": math.nan})
    assert said == f"since step 5 of its batch layout; loss {{'x': nan}}; largest gradient in {largest}"
    assert describe_divergence(network, [good], {"x": 1.0}).startswith("since a step; loss {'x': 1.0}; largest ")


def test_numbers_that_are_nowhere_said() -> None:
    assert loop.LONG_LOADING == 2.0, "seconds"
    assert loop.MIN_CAPTURED_STEPS == 8 and lanes.MAX_LANES == 16
    assert timedelta(days=1) == joining.PATIENCE


def test_a_process_that_does_not_know_its_place_on_the_machine_has_the_first_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(joining, "ProcessRanks", lambda: "ranks")
    with joining.joined():
        assert chosen == [0]
