"""On a GPU steps are captured and runs share the card; every run is still the one it would be without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from killed import run_in_pieces, same
from tinyrun import finish, tiny

from tbbn.accelerators.graphs import CapturedFunction
from tbbn.bench.config import RunConfig
from tbbn.bench.engine import Event, Run, run_lanes
from tbbn.bench.runs.retrain import retrain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES: dict[str, dict[str, Any]] = {
    "resnet20": {"backbone": "resnet20", "precision": "bf16"},
    "ssil": {"method__name": "ssil", "precision": "tf32"},
    "podnet": {"method__name": "podnet", "method__finetune_epochs": 1, "precision": "bf16"},
    "float32": {"norm__name": "bn"},
    "best epoch": {
        "norm__name": "cn",
        "train__keep": "best",
        "train__epochs": 6,
        "data__validation": 0.25,
        "data__name": "synthetic:4x220x10x32",
    },
    "adamw": {"train__optimizer": "adamw", "train__warmup": 1, "train__schedule": "cosine"},
}
cases = pytest.mark.parametrize("settings", CASES.values(), ids=CASES)


def on_gpu(**settings: Any) -> RunConfig:
    """Ten steps an epoch and more, in batches of one layout: they are captured."""
    data = {"data__name": "synthetic:4x160x10x32", "data__tasks": 2, "memory__budget": 80, "batch__size": 32}
    rest = {"device": "cuda", "norm__name": "tbbn", "batch__augment": "padded-resized", "train__epochs": 3}
    return tiny(**{**data, **rest, "backbone": "small", **settings})


def with_graphs(config: RunConfig) -> tuple[Run, int]:
    """The run after its end, and how many graphs it captured."""
    graphs = set()

    def watch(run: Run, event: Event) -> None:
        graphs.update(step.graph.graph for step in run.steps.values() if step.graph and step.graph.graph)

    return finish(config, watch), len(graphs)


def agree(one: Run, other: Run) -> bool:
    weights = same(one.network.state_dict(), other.network.state_dict())
    return weights and one.record.history == other.record.history and one.record.accuracy == other.record.accuracy


@cases
def test_a_captured_run_is_the_eager_one(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    captured, graphs = with_graphs(on_gpu(**settings))
    assert graphs >= 2  # one a task at least
    monkeypatch.setattr(CapturedFunction, "EAGER_CALLS", 10**9)
    eager, none = with_graphs(on_gpu(**settings))
    assert not none and agree(captured, eager)


@cases
def test_a_run_stopped_anywhere_goes_on_exactly(settings: dict[str, Any], tmp_path: Path) -> None:
    config = on_gpu(**settings)
    expected = finish(config)
    resumed, places = run_in_pieces(config, tmp_path, (2, 5, 9, 14, 20))
    assert places >= 4 and agree(resumed, expected)
    for task in range(2):
        assert {found.problem for found in retrain(tmp_path, task)} == {""}


def test_lanes_give_the_runs_alone_however_many_there_are() -> None:
    configs = [on_gpu(**settings, seed=seed) for seed in range(2) for settings in (CASES["resnet20"], CASES["podnet"])]
    alone = [finish(config).record for config in configs]
    for lanes in (3, None):
        for one, other in zip(run_lanes(configs, lanes), alone, strict=True):
            assert one.status == "finished"
            assert one.history == other.history and one.accuracy == other.accuracy
