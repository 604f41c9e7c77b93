"""The training forward: its layout, its views, its teacher."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tinyrun import SHORT, finish, tiny
from torch import Tensor

from tbbn.bench.engine import EpochEnded, Event, TaskEnded
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.step import Step
from tbbn.bench.methods import TaskContext
from tbbn.bench.methods.terms import nca
from tbbn.bench.models import Network
from tbbn.errors import UserError
from tbbn.nn import balance, mistakes
from tbbn.registry import METHODS


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every forward in train mode."""
    rows: list[int] = []
    real = Network.forward

    def watched(self: Network, images: Tensor) -> Any:
        if self.training:
            rows.append(len(images))
        return real(self, images)

    monkeypatch.setattr(Network, "forward", watched)
    return rows


@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
def test_a_run_without_a_memory_says_that_it_means_batch_norm(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "MANY", 3)
    monkeypatch.setattr(mistakes, "_given", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = finish(tiny(norm__name=norm, memory__budget=0, data__stop_after=2))
    plain = finish(tiny(norm__name="bn", memory__budget=0, data__stop_after=2))
    same = [torch.equal(a, b) for a, b in zip(alone.network.buffers(), plain.network.buffers(), strict=False)]
    assert all(same) == (norm != "adab2n"), "which weights each task, memory or none"


def test_a_joint_forward_is_one_and_separate_ones_are_two(forwards: list[int]) -> None:
    finish(tiny(data__stop_after=2, train__epochs=1))
    assert Counter(forwards) == {8: 3 + 6}  # 24 images in 3 steps; then 12 exemplars, 2 a step
    forwards.clear()
    finish(tiny(data__stop_after=2, train__epochs=1, batch__forward="separate"))
    assert Counter(forwards) == {8: 3, 6: 6, 2: 6}


def test_separate_forwards_are_the_joint_one_where_rows_do_not_meet() -> None:
    joint, separate = (finish(tiny(norm__name="gn", norm__groups=8, batch__forward=f)) for f in ("joint", "separate"))
    for one, other in zip(joint.record.history, separate.record.history, strict=True):
        assert one["total"] == pytest.approx(other["total"], rel=1e-4)
    joint, separate = (finish(tiny(norm__name="bn", batch__forward=f)) for f in ("joint", "separate"))
    assert joint.record.history[-1]["total"] != pytest.approx(separate.record.history[-1]["total"], rel=1e-3)


@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
def test_separate_forwards_are_refused_for_a_norm_that_takes_a_layout(norm: str) -> None:
    line = rf"^norm {norm} needs the whole batch in one forward; set batch\.forward = 'joint', got 'separate'\.$"
    with pytest.raises(UserError, match=line):
        Run(tiny(norm__name=norm, batch__forward="separate"))


@pytest.mark.parametrize("norm", ["bn", "tbbn"])
def test_afc_measures_importance_on_batches_normalised_as_in_training(
    norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = METHODS.get("afc")
    real, compared = kind.after_training, []

    def energies(context: TaskContext, inside_balance: bool) -> Tensor:
        """The importance of the first stage's channels, by retained gradients."""
        total = torch.zeros(32)
        for batch in context.batches("importance"):
            net = copy.deepcopy(context.network).train().requires_grad_(True)
            layout = {"current": batch.n_current, "memory": batch.n_memory, "past_tasks": context.number}
            with balance(net, **layout) if inside_balance else nullcontext():
                out = net(batch.images)
            out.stages[0].retain_grad()
            nca(out.logits, batch.labels).backward()
            total += out.stages[0].grad.square().sum((2, 3)).mean(0)
        return total / total.mean()

    def watched(self: Any, context: TaskContext) -> None:
        real(self, context)
        found = context.network.recall("importance_0")
        torch.testing.assert_close(found, energies(context, norm == "tbbn"), rtol=1e-3, atol=1e-5)
        if norm == "tbbn" and context.number:
            assert (found - energies(context, False)).abs().max() > 1e-3
            compared.append(context.number)

    monkeypatch.setattr(kind, "after_training", watched)
    assert finish(tiny(method__name="afc", method__finetune_epochs=0, norm__name=norm)).record.status == "finished"
    assert compared == ([1, 2] if norm == "tbbn" else [])


def test_balanced_augmentation_shows_the_memory_in_many_views(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[Step, Any]] = []
    real = Step.losses

    def watched(self: Step, batch: Any) -> Any:
        batches.append((self, batch))
        return real(self, batch)

    monkeypatch.setattr(Step, "losses", watched)
    run = finish(tiny(method__name="balaug", train__epochs=1))
    mean, std = (torch.tensor(v)[:, None, None] for v in (run.source.mean, run.source.std))
    for step, batch in batches:
        past, n, m = step.spec.past_tasks, step.spec.n_current, step.spec.n_memory
        views = 3 * past if past else 1
        assert batch.n_memory == m * views and len(batch.images) == n + m * views
        plain = (run.source.train.images[batch.index].float() / 255 - mean) / std
        same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(batch.images, plain, strict=True)]
        assert all(same[: n + m])  # the task, and the first view of each memory row, are augmented as configured: not
        assert sum(same[n + m :]) <= len(same[n + m :]) // 4  # the other views are not the image itself
        for view in range(1, views):
            assert torch.equal(batch.index[n : n + m], batch.index[n + view * m : n + (view + 1) * m])
    assert {batch.n_current + batch.n_memory for _, batch in batches if batch.n_memory} >= {6 + 2 * 3, 6 + 2 * 6}


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS.get(name).needs_previous])
def test_the_teacher_is_the_network_after_the_task_before_and_stays_it(method: str) -> None:
    at_end: dict[str, Tensor] = {}
    teachers = 0

    def watch(run: Run, event: Event) -> None:
        nonlocal teachers
        if isinstance(event, TaskEnded):
            at_end.clear()
            at_end.update({k: v.clone() for k, v in run.network.state_dict().items()})
        elif isinstance(event, EpochEnded) and event.position.task:
            assert run.previous is not None and not run.previous.training
            state = run.previous.state_dict()
            assert state.keys() == at_end.keys()
            assert all(torch.equal(state[key], at_end[key]) for key in state)
            assert all(p.grad is None and not p.requires_grad for p in run.previous.parameters())
            teachers += 1

    finish(tiny(method__name=method, **SHORT.get(method, {})), watch)
    assert teachers >= 4
