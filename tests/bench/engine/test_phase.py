"""Optimisation in a phase: schedules, the best epoch, clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tinyrun import finish, tiny
from torch.nn import functional as F

from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.phase import PhaseSettings, make_optimizer
from tbbn.bench.engine.validate import check
from tbbn.bench.methods import Phase
from tbbn.errors import UserError


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
    settings = PhaseSettings.of(config, own, 0)
    assert (settings.lr, settings.epochs, settings.momentum, settings.weight_decay) == (
        pytest.approx(0.02),
        7,
        0.0,
        5e-4,
    )
    assert PhaseSettings.of(config, Phase(), 0).momentum == 0.3


def test_a_scaled_run_trains_a_fraction_of_every_phase() -> None:
    method = {"name": "eeil", "balanced_epochs": 8}
    config = tiny(method=method, train__epochs=12, train__scale=0.25, train__lr=1.0, train__milestones=[0.5])
    history = finish(config).record.history
    found = [(entry["task"], entry["phase"]) for entry in history]
    tasks = range(found[-1][0] + 1)
    wanted = [(task, phase) for task in tasks for phase in ["train"] * 3 + ["balanced"] * (2 if task else 0)]
    assert found == wanted and len(tasks) > 1
    assert [entry["lr"] for entry in history[:3]] == pytest.approx([1.0, 1.0, 0.1]), "milestones follow"


@pytest.mark.parametrize(
    ("epochs", "scale", "warmup", "trained"), [(160, 0.1, 0, (16, 0)), (10, 0.01, 9, (1, 0)), (5, 0.5, 4, (2, 1))]
)
def test_an_epoch_is_left_of_a_scaled_phase_and_the_warm_up_is_shorter(
    epochs: int, scale: float, warmup: int, trained: tuple[int, int]
) -> None:
    config = check(tiny(train__epochs=epochs, train__scale=scale, train__warmup=warmup, train__schedule="cosine"))
    settings = PhaseSettings.of(config, Phase(), 0)
    assert (settings.epochs, settings.warmup) == trained
    assert all(settings.lr_at(epoch) > 0 for epoch in range(settings.epochs))


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
        tiny(train__epochs=epochs, train__lr=1.0, train__milestones=[0.5, 0.75]), Phase("train"), 0
    )
    rates = [settings.lr_at(epoch) for epoch in range(epochs)]
    assert rates[0] == 1.0
    assert [e for e in range(1, epochs) if rates[e] < rates[e - 1]] == drops


def test_a_share_that_is_whole_but_for_rounding_is_whole() -> None:
    settings = PhaseSettings.of(tiny(train__epochs=100, train__lr=1.0, train__milestones=[0.55]), Phase("train"), 0)
    assert 0.55 * 100 > 55 and [settings.lr_at(e) for e in (54, 55)] == [1.0, pytest.approx(0.1)]


def test_the_learning_rate_rises_in_the_first_epochs_and_then_follows_its_schedule() -> None:
    def rates(**given: Any) -> list[float]:
        config = tiny(train__epochs=6, train__lr=1.0, train__warmup=2, **given)
        settings = PhaseSettings.of(config, Phase(), 1)
        return [settings.lr_at(epoch) for epoch in range(6)]

    assert rates(train__schedule="constant") == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    assert rates(train__milestones=[0.5]) == pytest.approx([1 / 3, 2 / 3, 1, 0.1, 0.1, 0.1])
    half = math.cos(math.pi / 4) / 2
    assert rates(train__schedule="cosine") == pytest.approx([1 / 3, 2 / 3, 1, 0.5 + half, 0.5, 0.5 - half])
    assert PhaseSettings.of(tiny(train__warmup=1), Phase(epochs=4), 1).warmup == 0, "a second phase starts at its rate"


def test_the_first_task_may_have_settings_of_its_own() -> None:
    first = {"epochs": 5, "lr": 0.4, "weight_decay": 0.0, "milestones": [0.2], "gamma": 0.5}
    config = tiny(train__first=first, train__lr=0.1, train__epochs=2)
    ours, later = (PhaseSettings.of(config, Phase(), task) for task in (0, 1))
    assert (ours.epochs, ours.lr, ours.weight_decay, ours.milestones, ours.gamma) == (5, 0.4, 0.0, (0.2,), 0.5)
    assert ours.schedule == later.schedule == "multistep" and ours.momentum == 0.9
    assert later == PhaseSettings.of(tiny(train__lr=0.1, train__epochs=2), Phase(), 0)
    history = finish(config).record.history
    assert [sum(entry["task"] == t for entry in history) for t in range(3)] == [5, 2, 2]
    assert [entry["lr"] for entry in history[:5]] == pytest.approx([0.4, 0.2, 0.2, 0.2, 0.2])
    assert PhaseSettings.of(tiny(train__first={"schedule": "cosine"}), Phase(), 0).schedule == "cosine"


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(decoupled: bool) -> None:
    config = tiny(train__optimizer="adamw" if decoupled else "adam", train__betas=[0.8, 0.9], train__weight_decay=0.3)
    assert config.train.lr == 1e-3, "the learning rate of SGD would be far too large"
    weight = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = make_optimizer([weight], PhaseSettings.of(config, Phase(), 0), {})
    mean, square, expected = torch.zeros(2), torch.zeros(2), weight.detach().clone()
    for step in range(1, 4):
        weight.grad = weight.detach().square() + step
        gradient = weight.grad if decoupled else weight.grad + 0.3 * expected
        expected = expected * (1 - 1e-3 * 0.3) if decoupled else expected
        mean, square = 0.8 * mean + 0.2 * gradient, 0.9 * square + 0.1 * gradient**2
        expected = expected - 1e-3 * mean / (1 - 0.8**step) / ((square / (1 - 0.9**step)).sqrt() + 1e-8)
        optimizer.step()
        assert torch.allclose(weight, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"train__warmup": 2}, r"train\.warmup must be below the 2 epochs of a task, got 2\."),
        ({"train__warmup": 1, "train__first": {"epochs": 1}}, r"below the 1 epochs of a task, got 1\."),
        ({"train__betas": [0.9]}, r"train\.betas must be two numbers, such as 0\.9,0\.999, got \[0\.9\]\."),
        ({"train__optimizer": "adamw", "train__nesterov": True}, r"train\.nesterov is for SGD; leave it out"),
        ({"data__online": True, "train__first": {"epochs": 2}}, r"train\.first\.epochs must be 1, got 2\."),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check(tiny(**settings))
