"""The training step: what is made for speed gives the bits of what it replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import finish, tiny

from tbbn.bench.data.types import Batch
from tbbn.bench.engine import Stepped, forward, step
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.ranks import Ranks, Share
from tbbn.bench.methods import Losses
from tbbn.bench.models import Network
from tbbn.bench.runs.saved import saved


@pytest.mark.parametrize(
    "settings", [{"norm__name": "tbbn"}, {"method__name": "lucir"}, {"batch__forward": "separate"}]
)
def test_working_copies_give_the_bits_of_autocast(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(precision="bf16", data__stop_after=2, train__epochs=1, **settings)
    by_autocast = finish(config).network.state_dict()
    made = []
    prepared = step.Step.__post_init__

    def with_copies(self: step.Step) -> None:
        prepared(self)
        self.working = forward.WorkingCopies(self.network)
        self.teacher = None if self.previous is None else forward.WorkingCopies(self.previous)
        made.append(self.working)

    calls: list[forward.WorkingCopies] = []
    called = forward.WorkingCopies.__call__

    def watched(self: forward.WorkingCopies, images: torch.Tensor) -> Any:
        calls.append(self)
        return called(self, images)

    monkeypatch.setattr(forward.WorkingCopies, "__call__", watched)
    monkeypatch.setattr(step.Step, "__post_init__", with_copies)
    by_copies = finish(config).network.state_dict()
    assert made and all(copies.weights for copies in made)
    assert all(copies in calls for copies in made), "it computes with the copies"
    assert set(by_copies) == set(by_autocast)
    assert all(torch.equal(by_copies[name], by_autocast[name]) for name in by_autocast)


def test_working_copies_leave_frozen_weights_without_a_gradient() -> None:
    network = finish(tiny(data__stop_after=1)).network.train()
    weights = {name: p for name, p in network.named_parameters() if "convs" in name}
    for name, weight in weights.items():
        weight.requires_grad_("convs.0" not in name)
    network.zero_grad()
    copies = forward.WorkingCopies(network)
    with torch.autocast("cpu", torch.bfloat16):
        loss = copies(torch.randn(4, 3, 8, 8)).logits.float().square().mean()
    loss.backward()
    copies.copy_gradients_back()
    assert len(weights) > 1
    assert all((weight.grad is None) == ("convs.0" in name) for name, weight in weights.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_ends_the_run_in_its_epoch_though_every_loss_was(bad: float) -> None:
    run = Run(tiny(train__epochs=1))
    for event in run.events():
        if isinstance(event, Stepped) and event.step == event.steps:
            with torch.no_grad():
                next(run.network.parameters())[0, 0, 0, 0] = bad
    assert run.record.status == "diverged" and not run.record.accuracy
    assert "not finite in task 1, phase 'train', epoch 1" in run.record.message


def test_the_steps_before_a_bad_loss_are_counted_over_a_stop(tmp_path: Path) -> None:
    config = tiny(train__epochs=1, data__stop_after=1)
    run, seen = Run(config), []

    def bad(self: step.Step, batch: Batch) -> Losses:
        terms = losses(self, batch)
        seen.append(1)
        worse = {name: term * (float("nan") if len(seen) == 2 else 1.0) for name, term in terms.items()}
        return worse | {"finite": torch.zeros(())}

    losses, step.Step.losses = step.Step.losses, bad  # type: ignore[method-assign]
    try:
        for _ in saved(run, tmp_path, stop=lambda: len(seen) == 2):
            pass
        again = Run(config)
        for _ in saved(again, tmp_path):
            pass
    finally:
        step.Step.losses = losses  # type: ignore[method-assign]
    assert len(seen) > 2 and again.record.status == "diverged"
    assert "since step 2 of its batch layout" in again.record.message


def test_the_forward_is_told_the_rows_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    told, balance = [], forward.balance

    def share(_: Ranks, layout: tuple[int, int], device: torch.device) -> Share:
        made = Share()
        made.counts = [layout]
        return made

    def spy(network: Network, *, rank_counts: Any, **layout: Any) -> Any:
        told.append(rank_counts == [(layout["current"], layout["memory"])])
        return balance(network, **layout)

    monkeypatch.setattr(Ranks, "share", share)
    monkeypatch.setattr(forward, "balance", spy)
    finish(tiny(norm__name="tbbn", data__stop_after=2, train__epochs=1))
    assert told and all(told)
