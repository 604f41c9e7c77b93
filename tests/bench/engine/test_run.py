"""The training loop: what is the same, what is trained on, what is kept, and what is evaluated."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinyrun import TINY, Trained, finish, tiny
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.engine import EpochEnded, Event, Stepped, TaskEnded, run
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.phase import PhaseSettings
from tbbn.bench.engine.record import Record
from tbbn.bench.engine.step import Step
from tbbn.bench.engine.torch_settings import torch_settings
from tbbn.bench.methods import Phase, TaskContext
from tbbn.bench.methods.terms import nca
from tbbn.bench.models import Network
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError
from tbbn.nn import balance
from tbbn.registry import METHODS


def told(record: Record) -> dict[str, Any]:
    """All of a record but for how long it took."""
    tree = {key: value for key, value in asdict(record).items() if key not in ("seconds", "environment", "predictions")}
    return {**tree, "predictions": {key: value.tolist() for key, value in record.predictions.items()}}


def assert_same(one: Run, other: Run) -> None:
    assert told(one.record) == told(other.record)
    left, right = one.network.state_dict(), other.network.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# Randomness.

DIGEST = """
import hashlib, json, sys
from dataclasses import asdict
from tbbn.bench.config import resolve
from tbbn.bench.engine.loop import Run
job = Run(resolve(("test", json.loads(sys.argv[1]))))
for _ in job.events(): pass
record = job.record
digest = hashlib.sha256(json.dumps([record.accuracy, record.history, record.class_order, record.errors]).encode())
for name, tensor in sorted({**job.network.state_dict(), **record.predictions}.items()):
    digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
print(digest.hexdigest())
"""


def noise(*_: object) -> None:
    """Draw from every global generator there is."""
    torch.rand(3)
    random.random()
    np.random.rand()  # noqa: NPY002


def global_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002


@pytest.mark.parametrize("method", ["ft", "afc"])
def test_the_same_seed_gives_the_same_record_and_weights_whatever_was_drawn_before(method: str) -> None:
    settings = {"method__name": method, "norm__name": "tbbn", "batch__augment": "strong"}
    torch.manual_seed(1)
    one = finish(tiny(**settings))
    torch.manual_seed(99)
    noise()
    finish(tiny(seed=3))  # another run in between

    assert_same(one, finish(tiny(**settings), noise))


def test_the_same_seed_gives_the_same_bits_in_another_process(tmp_path: Path) -> None:
    settings = {**TINY, "method.name": "icarl", "norm.name": "tbbn", "batch.augment": "shift"}
    command = [sys.executable, "-c", DIGEST, json.dumps(settings)]
    other = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    here: list[str] = []
    code = DIGEST.replace("sys.argv[1]", repr(json.dumps(settings))).replace("print(", "here.append(")
    torch.rand(17)
    exec(code, {"here": here})
    assert other.stdout.split() == here


def test_another_seed_gives_another_run() -> None:
    one, other = finish(tiny(data__class_order="natural")), finish(tiny(data__class_order="natural", seed=1))
    assert one.record.history != other.record.history
    assert not torch.equal(next(one.network.parameters()), next(other.network.parameters()))


def test_class_order_and_seed_are_separate() -> None:
    def start(**settings: Any) -> tuple[list[int], Tensor]:
        job = Run(tiny(**settings))
        return job.record.class_order, next(job.network.parameters())

    order, weights = start(seed=0)
    same_order, other_weights = start(seed=1, data__class_order_seed=0)
    other_order, same_weights = start(seed=0, data__class_order_seed=1)
    assert order == same_order != other_order
    assert torch.equal(weights, same_weights) and not torch.equal(weights, other_weights)
    assert start(seed=1)[0] == start(seed=0, data__class_order_seed=1)[0]  # -1 is the run's seed


def test_the_order_of_the_classes_can_be_given() -> None:
    assert Run(tiny(data__class_order="3,1,0,2,5,4")).record.class_order == [3, 1, 0, 2, 5, 4]
    with pytest.raises(UserError, match=r"data\.class_order must be a name or whole numbers with commas, got '3,x'"):
        Run(tiny(data__class_order="3,x"))


def test_a_run_neither_reads_nor_moves_any_global_random_state() -> None:
    before = global_states()
    for method in ("podnet", "bic", "balaug"):
        finish(tiny(method__name=method, batch__augment="strong", memory__selection="random", **SHORT.get(method, {})))
    assert global_states() == before


SHORT: dict[str, dict[str, Any]] = {
    "eeil": {"method__balanced_epochs": 2},
    "bic": {"method__correction_epochs": 2},
    "podnet": {"method__finetune_epochs": 2},
    "afc": {"method__finetune_epochs": 2},
}


# What is trained on.


def test_batches_hold_the_new_task_first_and_then_past_classes(trained: list[Trained]) -> None:
    job = finish(tiny())
    labels = job.scenario.train_labels
    assert {step.spec.past_tasks for step in trained} == {0, 1, 2}
    for step in trained:
        task = step.spec.past_tasks
        new = {2 * task, 2 * task + 1}
        assert set(labels[step.current].tolist()) <= new
        assert set(labels[step.memory].tolist()) <= set(range(2 * task))
        whole = (8, 0) if task == 0 else (6, 2)
        assert step.spec.n_current <= whole[0] and step.spec.n_memory <= whole[1]
        assert (step.spec.n_memory > 0) == (task > 0)
    for task in range(3):
        assert any((s.spec.n_current, s.spec.n_memory) == ((6, 2) if task else (8, 0)) for s in trained)


def test_every_image_of_a_task_is_trained_on_in_every_epoch(trained: list[Trained]) -> None:
    job = finish(tiny(batch__length="current"))
    for task in job.scenario.tasks:
        mine = torch.cat([step.current for step in trained if step.spec.past_tasks == task.number])
        assert Counter(mine.tolist()) == Counter(task.train.tolist() * 2)


def test_memory_rows_are_the_exemplars_of_the_memory_before_the_task(trained: list[Trained]) -> None:
    kept: list[Tensor] = []

    def look(job: Run, event: Event) -> None:
        if isinstance(event, TaskEnded):
            kept.append(job.memory.index.clone())

    finish(tiny(), look)
    for task in (1, 2):
        used = torch.cat([step.memory for step in trained if step.spec.past_tasks == task]).unique()
        assert torch.equal(used, kept[task - 1].sort().values)


def test_validation_rows_are_never_trained_on_nor_remembered(trained: list[Trained]) -> None:
    job = finish(tiny(data__validation=0.25, train__keep="best", method__name="icarl"))
    held = torch.cat([task.validation for task in job.scenario.tasks])
    assert len(held) == 6 * 3
    used = torch.cat([step.index for step in trained])
    assert not torch.isin(held, used).any() and not torch.isin(held, job.memory.index).any()
    assert len(used.unique()) == 6 * 9


def test_current_rows_of_the_union_are_of_the_memory_too(trained: list[Trained]) -> None:
    job = finish(tiny(batch__current_from="union", batch__length="current"))
    labels = job.scenario.train_labels
    for task in (1, 2):
        current = torch.cat([step.current for step in trained if step.spec.past_tasks == task])
        old = labels[current] < 2 * task
        assert int(old.sum()) == 2 * 12  # every exemplar, in each of two epochs
        assert int((~old).sum()) == 2 * 24


def test_joint_training_sees_all_tasks_so_far_and_keeps_no_memory(trained: list[Trained]) -> None:
    job = finish(tiny(method__name="joint"))
    for task in range(3):
        mine = [step for step in trained if step.spec.past_tasks == task]
        seen = torch.cat([step.index for step in mine])
        assert Counter(job.scenario.train_labels[seen].tolist()) == dict.fromkeys(range(2 * task + 2), 24)
        assert all(step.spec.n_memory == 0 for step in mine)
    assert job.record.exemplars == [0, 0, 0]


def test_online_each_image_passes_once(trained: list[Trained]) -> None:
    kept: list[set[int]] = []

    def look(job: Run, event: Event) -> None:
        if isinstance(event, TaskEnded):
            kept.append(set(job.memory.index.tolist()))

    job = finish(tiny(data__online=True, train__epochs=1, method__name="afc", method__finetune_epochs=0), look)
    passed: set[int] = set()
    for task in job.scenario.tasks:
        mine = [step for step in trained if step.spec.past_tasks == task.number]
        current = torch.cat([step.current for step in mine]).tolist()
        assert Counter(current) == Counter(task.train.tolist())
        before = kept[task.number - 1] if task.number else set()
        assert set(torch.cat([step.memory for step in mine]).tolist()) <= before | set(current)
        passed |= set(current)
        assert kept[task.number] <= passed and len(kept[task.number]) == min(12, len(passed))
    assert {entry["epoch"] for entry in job.record.history} == {0}


def test_online_the_memory_holds_the_new_task_too_unless_only_past_ones_are_asked_for(trained: list[Trained]) -> None:
    for source in ("all", "past"):
        trained.clear()
        job = finish(tiny(data__online=True, batch__memory_from=source))
        replayed = [torch.cat([s.memory for s in trained if s.spec.past_tasks == t]) for t in range(3)]
        new = [torch.isin(rows, job.scenario.tasks[t].train).sum() for t, rows in enumerate(replayed)]
        assert all(len(rows) > 0 for rows in replayed[1:])
        assert (len(replayed[0]) == 0 and sum(new) == 0) if source == "past" else min(new) > 0


@pytest.mark.parametrize("method", ["eeil", "bic", "podnet", "afc"])
def test_online_a_second_phase_is_one_pass_over_what_was_stored_or_held_out(
    method: str, trained: list[Trained]
) -> None:
    kept: list[set[int]] = []

    def look(job: Run, event: Event) -> None:
        if isinstance(event, TaskEnded):
            kept.append(set(job.memory.index.tolist()))

    job = finish(tiny(data__online=True, method__name=method, memory__budget=24), look)
    assert {entry["epoch"] for entry in job.record.history} == {0}
    assert len({entry["phase"] for entry in job.record.history}) == 2
    for task in (1, 2):
        mine = [step for step in trained if step.spec.past_tasks == task]
        main = torch.cat([s.index for s in mine if s.loss == "loss"]).tolist()
        second = torch.cat([s.index for s in mine if s.loss != "loss"]).tolist()
        if method == "bic":
            assert not set(main) & set(second) and len(second) == len(set(second))
        else:
            assert set(second) <= kept[task], "the rest of the task has gone by"
        if method in ("podnet", "afc"):
            assert Counter(second) == Counter(kept[task])
    longer = tiny(data__online=True, method__name="eeil", method__balanced_epochs=3)
    assert longer.method.dict() == {"balanced_epochs": 3}


def test_online_a_phase_on_the_first_phase_s_batches_stores_nothing_twice(trained: list[Trained]) -> None:
    plain, again = (
        finish(tiny(data__online=True, method__name="eeil", **more))
        for more in ({"method__balanced_epochs": 0}, {"method__unbalanced_phase": True})
    )
    assert torch.equal(plain.memory.index, again.memory.index) and plain.memory.seen == again.memory.seen == 72


def test_held_out_rows_are_left_to_the_second_phase(trained: list[Trained]) -> None:
    job = finish(tiny(method__name="bic", method__correction_epochs=2, method__held_out=0.3))
    labels = job.scenario.train_labels
    for task in (1, 2):
        by_loss: dict[str, set[int]] = {"loss": set(), "correction_loss": set()}
        for step in trained:
            if step.spec.past_tasks == task:
                by_loss[step.loss] |= set(step.index.tolist())
        assert not by_loss["loss"] & by_loss["correction_loss"]
        counts = Counter(labels[list(by_loss["correction_loss"])].tolist())
        assert set(counts) == set(range(2 * task + 2)) and len(set(counts.values())) == 1  # balanced over classes


def test_the_balanced_phase_has_no_more_of_a_new_class_than_of_an_old_one(trained: list[Trained]) -> None:
    job = finish(tiny(method__name="eeil", method__balanced_epochs=2))
    labels = job.scenario.train_labels
    for task in (1, 2):
        mine = [s for s in trained if s.loss == "balanced_loss" and s.spec.past_tasks == task]
        new, old = torch.cat([s.current for s in mine]).unique(), torch.cat([s.memory for s in mine]).unique()
        assert set(Counter(labels[new].tolist()).values()) == {12 // (2 * task)}
        assert set(Counter(labels[old].tolist()).values()) == {12 // (2 * task)}


def test_a_phase_on_exemplars_has_new_classes_among_them(trained: list[Trained]) -> None:
    job = finish(tiny(method__name="podnet", method__finetune_epochs=2))
    for task in (1, 2):
        rows = torch.cat([s.index for s in trained if s.loss == "finetune_loss" and s.spec.past_tasks == task])
        counts = Counter(job.scenario.train_labels[rows.unique()].tolist())
        assert counts == dict.fromkeys(range(2 * task + 2), 12 // (2 * task + 2))


# The forward.


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
    job = finish(tiny(method__name="balaug", train__epochs=1))
    mean, std = (torch.tensor(v)[:, None, None] for v in (job.source.mean, job.source.std))
    for step, batch in batches:
        past, n, m = step.spec.past_tasks, step.spec.n_current, step.spec.n_memory
        views = 3 * past if past else 1
        assert batch.n_memory == m * views and len(batch.images) == n + m * views
        plain = (job.source.train.images[batch.index].float() / 255 - mean) / std
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

    def look(job: Run, event: Event) -> None:
        nonlocal teachers
        if isinstance(event, TaskEnded):
            at_end.clear()
            at_end.update({k: v.clone() for k, v in job.network.state_dict().items()})
        elif isinstance(event, EpochEnded) and event.position.task:
            assert job.previous is not None and not job.previous.training
            state = job.previous.state_dict()
            assert state.keys() == at_end.keys()
            assert all(torch.equal(state[key], at_end[key]) for key in state)
            assert all(p.grad is None and not p.requires_grad for p in job.previous.parameters())
            teachers += 1

    finish(tiny(method__name=method, **SHORT.get(method, {})), look)
    assert teachers >= 4


# Optimisation.


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

    def loss(job: Run) -> float:
        rows = job.scenario.tasks[0].validation
        mean, std = (torch.tensor(v)[:, None, None] for v in (job.source.mean, job.source.std))
        images = (job.source.train.images[rows].float() / 255 - mean) / std
        with torch.no_grad():
            return F.cross_entropy(job.network.eval()(images).logits, job.scenario.train_labels[rows]).item()

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


def test_a_loss_that_is_not_a_number_ends_the_run_and_is_recorded(tmp_path: Path) -> None:
    record = run_saved(tiny(train__lr=1e20), tmp_path)
    assert record.status == "diverged"
    assert "not finite" in record.message and "task 1" in record.message
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "diverged"


# Evaluation.


@pytest.mark.parametrize("method", ["ft", "icarl", "il2m"])
def test_evaluation_is_a_loop_over_every_test_image(method: str) -> None:
    job = finish(tiny(method__name=method))
    mean, std = (torch.tensor(v)[:, None, None] for v in (job.source.mean, job.source.std))
    arrival = {original: place for place, original in enumerate(job.record.class_order)}
    right: dict[int, list[bool]] = {task: [] for task in range(3)}
    known: dict[int, list[bool]] = {task: [] for task in range(3)}
    kinds: Counter[str] = Counter()
    predictions = iter(job.record.predictions["task2"].tolist())
    labels = [arrival[int(label)] for label in job.source.test.labels]
    order = [i for task in range(3) for i, label in enumerate(labels) if label // 2 == task]
    assert len(order) == 30  # the whole test set
    for i in order:
        image = (job.source.test.images[i].float() / 255 - mean) / std
        with torch.no_grad():
            scores = job.method.predict(job.network.eval()(image[None]))[0].tolist()
        best, task = scores.index(max(scores)), labels[i] // 2
        assert best == next(predictions)
        right[task].append(best == labels[i])
        known[task].append(max((2 * task, 2 * task + 1), key=lambda c: scores[c]) == labels[i])
        if best != labels[i]:
            kinds[f"{'C' if labels[i] >= 4 else 'P'}->{'C' if best >= 4 else 'P'}"] += 1
    assert job.record.accuracy[2] == pytest.approx([sum(r) / len(r) for r in right.values()])
    assert job.record.task_il[2] == pytest.approx([sum(r) / len(r) for r in known.values()])
    assert {kind: n for kind, n in job.record.errors[2].items() if n} == dict(kinds)


def test_the_size_of_evaluation_batches_changes_no_prediction() -> None:
    one, other = finish(tiny(batch__evaluation=7)), finish(tiny(batch__evaluation=500))
    assert told(one.record)["predictions"] == told(other.record)["predictions"]


def test_errors_sum_to_the_images_predicted_wrong_and_task_il_is_never_below() -> None:
    record = finish(tiny(train__epochs=1)).record
    for t in range(3):
        wrong = sum(round(5 * 2 * (1 - a)) for a in record.accuracy[t])
        assert sum(record.errors[t].values()) == wrong
        assert all(known >= free for free, known in zip(record.accuracy[t], record.task_il[t], strict=True))
    assert record.errors[0]["P->P"] == record.errors[0]["P->C"] == record.errors[0]["C->P"] == 0


def test_whole_test_batches_leave_out_the_rest_when_asked_for_by_name() -> None:
    job = finish(tiny(quirks=["whole-test-batches"], train__epochs=1))
    assert len(job.record.predictions["task2"]) == 3 * 8  # of 10 test images a task, in batches of 8


def test_accuracy_after_a_task_does_not_depend_on_tasks_to_come() -> None:
    whole, part = finish(tiny()), finish(tiny(data__stop_after=2))
    assert part.record.status == "finished" and len(part.record.accuracy) == 2
    assert part.record.accuracy == whole.record.accuracy[:2]
    assert part.record.history == [entry for entry in whole.record.history if entry["task"] < 2]


# Around the run.


def test_events_tell_every_step_epoch_and_task() -> None:
    events: list[Event] = []
    record = run(tiny(), on_event=events.append)
    assert sum(isinstance(event, TaskEnded) for event in events) == 3
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    assert [(e.position.task, e.position.epoch) for e in epochs] == [(t, e) for t in range(3) for e in range(2)]
    assert [e.losses["total"] for e in epochs] == [entry["total"] for entry in record.history]
    steps = [e for e in events if isinstance(e, Stepped) and (e.position.task, e.position.epoch) == (1, 1)]
    assert [e.step for e in steps] == list(range(1, steps[0].steps + 1))
    ended = [event for event in events if isinstance(event, TaskEnded)]
    assert [event.accuracy for event in ended] == record.accuracy
    assert [event.exemplars for event in ended] == record.exemplars == [12, 12, 12]


def test_the_loss_of_an_epoch_is_the_mean_over_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = Step.losses

    def watched(self: Step, batch: Any) -> Any:
        terms = real(self, batch)
        seen.append(sum(term.item() for term in terms.values()))
        return terms

    monkeypatch.setattr(Step, "losses", watched)
    record = finish(tiny(data__stop_after=1)).record
    half = len(seen) // 2
    assert record.history[0]["total"] == pytest.approx(sum(seen[:half]) / half, rel=1e-5)
    assert record.history[1]["total"] == pytest.approx(sum(seen[half:]) / half, rel=1e-5)


def test_the_number_of_threads_is_put_back(threads: list[int]) -> None:
    before = threads[-1]
    finish(tiny(threads=before + 1, data__stop_after=1, train__epochs=1))
    assert threads == [before, before + 1, before]


def test_a_run_goes_where_torch_has_locked_its_global_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.library.opcheck and all of torch.testing's own helpers lock them for the rest of the process.
    flags = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    assert finish(tiny(data__stop_after=1)).record.status == "finished"
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic) == before


def test_the_record_is_saved_after_every_task(tmp_path: Path) -> None:
    rows: list[int] = []

    def look(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 1 and event.position.epoch == 0:
            file = tmp_path / "record.json"
            rows.append(len(json.loads(file.read_text())["accuracy"]) if file.exists() else 0)

    run_saved(tiny(), tmp_path, on_event=look)
    assert rows == [0, 1, 2]
    tree = json.loads((tmp_path / "record.json").read_text())
    assert tree["status"] == "finished" and len(tree["accuracy"]) == 3


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"data__tasks": 4}, r"6 classes do not split into 4 equal tasks; use 1, 2, 3, 6"),
        ({"memory__budget": 5}, r"a budget of 5 gives none of the 6 classes an exemplar"),
        ({"data__name": "sythetic"}, r"unknown dataset 'sythetic'; .*Did you mean 'synthetic'"),
        ({"data__class_order": "icarl"}, r"class_order 'icarl' orders 100 classes, the source has 6"),
        ({"data__name": "synthetic:2"}, r"synthetic: needs CLASSESxTRAINxTESTxSIZE"),
    ],
)
def test_what_cannot_be_run_is_said_before_training(settings: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        run_saved(tiny(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bfloat16_runs_and_keeps_weights_and_statistics_in_float32() -> None:
    job = finish(tiny(precision="bf16", train__epochs=1, data__stop_after=2))
    assert job.record.status == "finished"
    assert {t.dtype for t in job.network.state_dict().values() if t.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quirks": ("whole-test-batches",), "batch__size": 64}, "has 10 test images, fewer than a batch of 64"),
        ({"train__keep": "best", "data__validation": 0.01}, "no validation images are left in task 1"),
    ],
)
def test_an_evaluation_of_nothing_is_refused_before_training(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Run(tiny(**settings))


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


def test_a_run_on_a_cpu_touches_the_number_of_threads_alone_and_puts_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        pytest.fail("a setting of CUDA's was looked at")

    for name in ("_cuda_settings", "_set_cuda"):
        monkeypatch.setattr(f"tbbn.bench.engine.torch_settings.{name}", touched)
    before = torch.get_num_threads()
    seen = [torch.get_num_threads() for _ in Run(tiny(threads=before + 1, train__epochs=1)).events()]
    assert set(seen) == {before + 1} and torch.get_num_threads() == before


def test_cudas_settings_are_put_back_though_a_run_on_a_cpu_began_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [("highest", False, False, True)]
    monkeypatch.setattr("tbbn.bench.engine.torch_settings._cuda_settings", lambda: now[0])
    monkeypatch.setattr("tbbn.bench.engine.torch_settings._set_cuda", lambda *values: now.__setitem__(0, values))
    with torch_settings(tiny(), torch.device("cpu")):
        with torch_settings(tiny(precision="tf32", autotune=True), torch.device("cuda")):
            assert now == [("high", True, True, True)]
        assert now == [("high", True, True, True)]  # the last one out puts them back
    assert now == [("highest", False, False, True)]
