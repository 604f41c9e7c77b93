"""Optimisation in a phase: schedules, the best epoch, clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tinyrun import finish, tiny
from torch.nn import functional as F

from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.phase import PhaseSettings
from tbbn.bench.methods import Phase


def test_schedules_by_hand() -> None:
    def rates(schedule: str) -> list[float]:
        config = tiny(train__schedule=schedule, train__epochs=4, train__lr=1.0, train__milestones=[0.5, 0.75])
        return [entry["lr"] for entry in finish(config).record.history if entry["task"] == 1]

    assert rates("constant") == [1.0] * 4
    assert rates("multistep") == pytest.approx([1.0, 1.0, 0.1, 0.01])
    assert rates("cosine") == pytest.approx([1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4])


def test_a_phase_has_its_own_settings_and_else_the_runs() -> None:
    config = tiny(train__lr=0.5, train__momentum=0.3)
    own = Phase(lr=0.2, lr_factor=0.1, epochs=7, schedule="constant", momentum=0.0)
    settings = PhaseSettings.of(config, own)
    assert (settings.lr, settings.epochs, settings.momentum, settings.weight_decay) == (
        pytest.approx(0.02),
        7,
        0.0,
        5e-4,
    )
    assert PhaseSettings.of(config, Phase()).momentum == 0.3


def test_the_best_epoch_is_kept_and_not_the_last() -> None:
    # From the third epoch on the steps are far too large: the best epoch is one of the first two.
    settings = {"train__epochs": 5, "train__milestones": [0.4], "train__gamma": 60.0, "data__stop_after": 1}
    settings |= {"data__validation": 0.25, "data__tasks": 2}
    best, last = (finish(tiny(train__keep=keep, **settings)) for keep in ("best", "last"))
    losses = [entry["validation"] for entry in best.record.history]
    assert losses.index(min(losses)) < 2 and losses[-1] > 1.5 * min(losses)
    assert "validation" not in last.record.history[0]

    def loss(run: Run) -> float:
        rows = run.scenario.tasks[0].validation
        mean, std = (torch.tensor(v)[:, None, None] for v in (run.source.mean, run.source.std))
        images = (run.source.train.images[rows].float() / 255 - mean) / std
        with torch.no_grad():
            return F.cross_entropy(run.network.eval()(images).logits, run.scenario.train_labels[rows]).item()

    assert loss(best) == pytest.approx(min(losses), rel=1e-4)
    assert loss(last) == pytest.approx(losses[-1], rel=1e-3)


@pytest.mark.parametrize(("setting", "limit"), [("train__clip_value", 1e-3), ("train__clip_norm", 1e-2)])
def test_gradients_are_clipped_before_the_step(setting: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[float] = []
    real = torch.optim.SGD.step

    def watched(self: torch.optim.SGD, *arguments: Any) -> Any:
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        if setting == "train__clip_value":
            largest.append(max(g.abs().max().item() for g in gradients))
        else:
            largest.append(math.sqrt(sum(g.square().sum().item() for g in gradients)))
        return real(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    finish(tiny(data__stop_after=1, **{setting: limit}))
    assert max(largest) == pytest.approx(limit, rel=1e-3)
    largest.clear()
    finish(tiny(data__stop_after=1))
    assert max(largest) > 10 * limit


@pytest.mark.parametrize(
    ("epochs", "drops"), [(1, []), (2, [1]), (3, [2]), (4, [2, 3]), (5, [3, 4]), (10, [5, 8]), (160, [80, 120])]
)
def test_a_milestone_lies_at_its_share_of_the_epochs_rounded_up(epochs: int, drops: list[int]) -> None:
    settings = PhaseSettings.of(
        tiny(train__epochs=epochs, train__lr=1.0, train__milestones=[0.5, 0.75]), Phase("train")
    )
    rates = [settings.lr_at(epoch) for epoch in range(epochs)]
    assert rates[0] == 1.0
    assert [e for e in range(1, epochs) if rates[e] < rates[e - 1]] == drops


def test_a_share_that_is_whole_but_for_rounding_is_whole() -> None:
    settings = PhaseSettings.of(tiny(train__epochs=100, train__lr=1.0, train__milestones=[0.55]), Phase("train"))
    assert 0.55 * 100 > 55 and [settings.lr_at(e) for e in (54, 55)] == [1.0, pytest.approx(0.1)]
