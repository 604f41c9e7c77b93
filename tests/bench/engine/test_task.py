"""What a phase trains on: rows of the task, of the memory, of a stream."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tinyrun import Trained, finish, tiny
from torch import Tensor

from tbbn.bench.config import resolve
from tbbn.bench.engine import Event, TaskEnded
from tbbn.bench.engine.loop import Run
from tbbn.errors import UserError

PARTS = ("current", "memory")


def test_batches_hold_the_new_task_first_and_then_past_classes(trained: list[Trained]) -> None:
    run = finish(tiny())
    labels = run.scenario.train_labels
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
    run = finish(tiny(batch__length="current"))
    for task in run.scenario.tasks:
        mine = torch.cat([step.current for step in trained if step.spec.past_tasks == task.number])
        assert Counter(mine.tolist()) == Counter(task.train.tolist() * 2)


def test_memory_rows_are_the_exemplars_of_the_memory_before_the_task(trained: list[Trained]) -> None:
    kept: list[Tensor] = []

    def watch(run: Run, event: Event) -> None:
        if isinstance(event, TaskEnded):
            kept.append(run.memory.index.clone())

    finish(tiny(), watch)
    for task in (1, 2):
        used = torch.cat([step.memory for step in trained if step.spec.past_tasks == task]).unique()
        assert torch.equal(used, kept[task - 1].sort().values)


def test_validation_rows_are_never_trained_on_nor_remembered(trained: list[Trained]) -> None:
    run = finish(tiny(data__validation=0.25, train__keep="best", method__name="icarl"))
    held = torch.cat([task.validation for task in run.scenario.tasks])
    assert len(held) == 6 * 3
    used = torch.cat([step.index for step in trained])
    assert not torch.isin(held, used).any() and not torch.isin(held, run.memory.index).any()
    assert len(used.unique()) == 6 * 9


def test_current_rows_of_the_union_are_of_the_memory_too(trained: list[Trained]) -> None:
    run = finish(tiny(batch__current_from="union", batch__length="current"))
    labels = run.scenario.train_labels
    for task in (1, 2):
        current = torch.cat([step.current for step in trained if step.spec.past_tasks == task])
        old = labels[current] < 2 * task
        assert int(old.sum()) == 2 * 12  # every exemplar, in each of two epochs
        assert int((~old).sum()) == 2 * 24


def test_joint_training_sees_all_tasks_so_far_and_keeps_no_memory(trained: list[Trained]) -> None:
    run = finish(tiny(method__name="joint"))
    for task in range(3):
        mine = [step for step in trained if step.spec.past_tasks == task]
        seen = torch.cat([step.index for step in mine])
        assert Counter(run.scenario.train_labels[seen].tolist()) == dict.fromkeys(range(2 * task + 2), 24)
        assert all(step.spec.n_memory == 0 for step in mine)
    assert run.record.exemplars == [0, 0, 0]


def test_online_each_image_passes_once(trained: list[Trained]) -> None:
    kept: list[set[int]] = []

    def watch(run: Run, event: Event) -> None:
        if isinstance(event, TaskEnded):
            kept.append(set(run.memory.index.tolist()))

    run = finish(tiny(data__online=True, train__epochs=1, method__name="afc", method__finetune_epochs=0), watch)
    passed: set[int] = set()
    for task in run.scenario.tasks:
        mine = [step for step in trained if step.spec.past_tasks == task.number]
        current = torch.cat([step.current for step in mine]).tolist()
        assert Counter(current) == Counter(task.train.tolist())
        before = kept[task.number - 1] if task.number else set()
        assert set(torch.cat([step.memory for step in mine]).tolist()) <= before | set(current)
        passed |= set(current)
        assert kept[task.number] <= passed and len(kept[task.number]) == min(12, len(passed))
    assert {entry["epoch"] for entry in run.record.history} == {0}


def test_online_the_memory_holds_the_new_task_too_unless_only_past_ones_are_asked_for(trained: list[Trained]) -> None:
    for source in ("all", "past"):
        trained.clear()
        run = finish(tiny(data__online=True, batch__memory_from=source))
        replayed = [torch.cat([s.memory for s in trained if s.spec.past_tasks == t]) for t in range(3)]
        new = [torch.isin(rows, run.scenario.tasks[t].train).sum() for t, rows in enumerate(replayed)]
        assert all(len(rows) > 0 for rows in replayed[1:])
        assert (len(replayed[0]) == 0 and sum(new) == 0) if source == "past" else min(new) > 0


@pytest.mark.parametrize("method", ["eeil", "bic", "podnet", "afc"])
def test_online_a_second_phase_is_one_pass_over_what_was_stored_or_held_out(
    method: str, trained: list[Trained]
) -> None:
    kept: list[set[int]] = []

    def watch(run: Run, event: Event) -> None:
        if isinstance(event, TaskEnded):
            kept.append(set(run.memory.index.tolist()))

    run = finish(tiny(data__online=True, method__name=method, memory__budget=24), watch)
    assert {entry["epoch"] for entry in run.record.history} == {0}
    assert len({entry["phase"] for entry in run.record.history}) == 2
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
        if method == "eeil":
            current, memory = (torch.cat([getattr(s, part) for s in mine if s.loss != "loss"]) for part in PARTS)
            labels = run.scenario.train_labels
            assert labels[current].min() == 2 * task and labels[memory].max() < 2 * task
    longer = tiny(data__online=True, method__name="eeil", method__balanced_epochs=3)
    assert str(longer.method) == "eeil(balanced_epochs=3)"


def test_online_a_phase_on_the_first_phase_s_batches_stores_nothing_twice(trained: list[Trained]) -> None:
    plain, again = (
        finish(tiny(data__online=True, method__name="eeil", **more))
        for more in ({"method__balanced_epochs": 0}, {"method__unbalanced_phase": True})
    )
    assert torch.equal(plain.memory.index, again.memory.index) and plain.memory.seen == again.memory.seen == 72


def test_eeil_s_unbalanced_phase_draws_from_memory_task_and_memory(trained: list[Trained]) -> None:
    run = finish(tiny(method__name="eeil", method__unbalanced_phase=True, method__balanced_epochs=2))
    for task in (1, 2):
        second = [s for s in trained if s.loss == "balanced_loss" and s.spec.past_tasks == task]
        stored = torch.cat([s.memory for s in second]).unique().tolist()
        want = Counter(2 * run.scenario.tasks[task].train.tolist() + 4 * stored)  # in two epochs
        assert Counter(torch.cat([s.current for s in second]).tolist()) == want
        assert len(stored) == 12


def test_eeil_s_unbalanced_phase_has_the_steps_of_the_paper_s_code() -> None:
    """CIFAR-100, 10 tasks: 48 of 2000 + 4500 + 2000 rows, the short last batch dropped, 47 % of them memory."""
    data = {"data.name": "synthetic:20x500x1x8", "data.tasks": 2, "memory.budget": 2000, "method.balanced_epochs": 1}
    config = resolve(("test", {**data, "protocol": "paper", "quirks": ["unbalanced-phase"]}), method="eeil")
    run = Run(config)
    first, second = run.scenario.tasks
    run.network.grow(10)
    run.network.grow(10)
    kept = torch.cat([first.train[run.scenario.train_labels[first.train] == c][:200] for c in range(10)])
    run.memory.index, run.memory.labels = kept, run.scenario.train_labels[kept]
    context = run.context(second)
    assert run.method.phases(context)[1].rows == "oversampled"
    blocks = context.draw(context.phase_rows("oversampled"), "balanced", 0)
    assert sum(block.steps for block in blocks) == 177
    assert {(block.spec.n_current, block.spec.n_memory) for block in blocks} == {(48, 16)}
    current = torch.cat([block.index[:, :48].flatten() for block in blocks])
    assert round(torch.isin(current, kept).double().mean().item(), 2) == 0.47


def test_joint_training_validates_on_all_tasks_so_far() -> None:
    settings = {"data__validation": 0.25, "train__keep": "best"}
    for name, tasks in (("joint", (0, 1)), ("ft", (1,))):
        run = Run(tiny(method__name=name, **settings))
        run.network.grow(2)
        run.network.grow(2)
        context = run.context(run.scenario.tasks[1])
        rows = [row for t in tasks for row in run.scenario.tasks[t].validation.tolist()]
        assert context.validation_rows().tolist() == rows and len(rows) == 6 * len(tasks)
        logits = context.outputs(torch.tensor(rows)).logits.double().log_softmax(1)
        want = -sum(logits[i, run.scenario.train_labels[row]].item() for i, row in enumerate(rows)) / len(rows)
        assert context.validation_loss().item() == pytest.approx(want, rel=1e-5)


def test_whole_validation_batches_leave_the_last_class_out() -> None:
    """The paper's code on CIFAR-100: 50 images of each of ten classes in batches of 64 are 448 of 500."""
    data = {"data.name": "synthetic:20x500x1x8", "data.tasks": 2, "protocol": "paper"}
    run = Run(resolve(("test", {**data, "quirks": ["whole-validation-batches"]})))
    rows = run.context(run.scenario.tasks[1]).validation_rows()
    counts = Counter(run.scenario.train_labels[rows].tolist())
    assert len(rows) == 448 and [counts[c] for c in range(10, 20)] == [50] * 8 + [48, 0]
    with pytest.raises(UserError, match=r"6 validation images, fewer than a batch of 8, are left in task 1"):
        Run(tiny(data__validation=0.25, train__keep="best", data__validate="whole-batches"))


def test_held_out_rows_are_left_to_the_second_phase(trained: list[Trained]) -> None:
    run = finish(tiny(method__name="bic", method__correction_epochs=2, method__held_out=0.3))
    labels = run.scenario.train_labels
    for task in (1, 2):
        by_loss: dict[str, set[int]] = {"loss": set(), "correction_loss": set()}
        for step in trained:
            if step.spec.past_tasks == task:
                by_loss[step.loss] |= set(step.index.tolist())
        assert not by_loss["loss"] & by_loss["correction_loss"]
        counts = Counter(labels[list(by_loss["correction_loss"])].tolist())
        assert set(counts) == set(range(2 * task + 2)) and len(set(counts.values())) == 1  # balanced over classes


def test_the_balanced_phase_has_no_more_of_a_new_class_than_of_an_old_one(trained: list[Trained]) -> None:
    run = finish(tiny(method__name="eeil", method__balanced_epochs=2))
    labels = run.scenario.train_labels
    for task in (1, 2):
        mine = [s for s in trained if s.loss == "balanced_loss" and s.spec.past_tasks == task]
        new, old = torch.cat([s.current for s in mine]).unique(), torch.cat([s.memory for s in mine]).unique()
        assert set(Counter(labels[new].tolist()).values()) == {12 // (2 * task)}
        assert set(Counter(labels[old].tolist()).values()) == {12 // (2 * task)}


def test_one_exemplar_a_class_leaves_one_of_each_new_class_in_the_balanced_phase(trained: list[Trained]) -> None:
    short = {"method__balanced_epochs": 1, "train__epochs": 1, "data__stop_after": 2}
    run = finish(tiny(method__name="eeil", memory__budget=1, memory__per_class=True, **short))
    mine = [s for s in trained if s.loss == "balanced_loss"]
    rows = torch.cat([s.index for s in mine]).unique()
    assert Counter(run.scenario.train_labels[rows].tolist()) == dict.fromkeys(range(4), 1)


def test_a_small_share_still_holds_out_one_row_of_each_class(trained: list[Trained]) -> None:
    short = {"method__correction_epochs": 1, "train__epochs": 1, "data__stop_after": 2}
    run = finish(tiny(method__name="bic", method__held_out=0.01, **short))
    rows = torch.cat([s.index for s in trained if s.loss == "correction_loss"]).unique()
    assert Counter(run.scenario.train_labels[rows].tolist()) == dict.fromkeys(range(4), 1)


def test_a_phase_on_exemplars_has_new_classes_among_them(trained: list[Trained]) -> None:
    run = finish(tiny(method__name="podnet", method__finetune_epochs=2))
    for task in (1, 2):
        rows = torch.cat([s.index for s in trained if s.loss == "finetune_loss" and s.spec.past_tasks == task])
        counts = Counter(run.scenario.train_labels[rows.unique()].tolist())
        assert counts == dict.fromkeys(range(2 * task + 2), 12 // (2 * task + 2))


def test_afc_s_importance_pass_moves_only_running_statistics_and_only_where_asked() -> None:
    """After one task: the weights are the same, the running statistics have seen one more epoch of batches."""
    copied, moved = (
        finish(
            tiny(method__name="afc", method__importance_moves_statistics=moves, data__stop_after=1, norm__name="tbbn")
        )
        for moves in (False, True)
    )
    here, there = copied.network.state_dict(), moved.network.state_dict()
    statistics = {key for key in here if key.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    assert statistics and {key for key in here if not torch.equal(here[key], there[key])} == statistics
    steps = {int(there[key] - here[key]) for key in statistics if key.endswith("tracked")}
    assert steps == {3}  # 24 images in batches of 8


def test_the_mirror_image_of_a_row_is_forwarded_where_a_method_asks_for_it() -> None:
    run = finish(tiny(data__stop_after=1))
    context, rows = run.context(run.scenario.tasks[0]), run.scenario.tasks[0].train[:5]
    plain = context.outputs(rows, flip=True).features
    run.train_data.images[rows] = run.train_data.images[rows].flip(3)
    torch.testing.assert_close(context.outputs(rows).features, plain, rtol=0, atol=0)
