"""Every way to say which rows are memory, the rule that follows from it, and the sampler of fixed counts."""

import numpy as np
import pytest
import torch
from literal import split_by_split
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import tbbn
from tbbn.errors import UserError
from tbbn.nn import wants_task_ids
from tbbn.nn.balancing import balanced_layers
from tbbn.nn.modules import BalancedNorm
from tbbn.nn.plan import make_layout

CLASSES = [12, 3, 15, 19, 7, 11, 1, 14, 17, 16, 13, 18]  # of 12 rows; the current task has 10 to 19
IS_MEMORY = [c < 10 for c in CLASSES]
TASKS = [1 if c >= 10 else 0 for c in CLASSES]


def output(layer=None, **layout):
    layer = tbbn.TaskBalancedBatchNorm1d(3).double() if layer is None else layer
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
    with tbbn.balance(layer, **layout):
        return layer(x), x


MASK = output(is_memory=torch.tensor(IS_MEMORY), past_tasks=1)[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"is_memory": IS_MEMORY, "past_tasks": 1},
        {"is_memory": np.array(IS_MEMORY), "past_tasks": np.int32(1)},
        {"labels": torch.tensor(CLASSES), "current_classes": range(10, 20), "past_tasks": 1},
        {
            "labels": np.array(CLASSES, dtype=np.int16),
            "current_classes": np.arange(10, 20),
            "past_tasks": torch.tensor(1),
        },
        {"labels": CLASSES, "current_classes": set(range(10, 20)), "past_tasks": 1},
        {"labels": torch.tensor(CLASSES, dtype=torch.uint8), "current_classes": torch.arange(10, 20), "past_tasks": 1},
        {"task_ids": torch.tensor(TASKS), "current_task": 1},
        {"task_ids": TASKS, "current_task": np.int64(1), "past_tasks": 1},
        {"task_ids": np.array(TASKS), "current_task": torch.tensor(1)},
    ],
    ids=lambda layout: "-".join(f"{k}:{type(v).__name__}" for k, v in layout.items()),
)
def test_every_form_and_type_gives_the_same_layout(layout):
    got, x = output(**layout)
    assert torch.equal(got, MASK)
    assert torch.allclose(got, split_by_split(x, None, None, None, None, torch.tensor(IS_MEMORY), 3))  # 9 / 3 * 1


def test_counts_of_any_integer_type():
    wanted = output(current=9, memory=3, past_tasks=1)[0]
    assert torch.equal(output(current=np.int64(9), memory=torch.tensor(3), past_tasks=np.uint8(1))[0], wanted)
    assert tbbn.splits(np.int32(48), torch.tensor(16), np.int64(3)) == 8


def test_task_ids_reach_the_layers_that_want_them():
    layer = tbbn.convert(nn.BatchNorm1d(3), "adab2n").double()
    assert wants_task_ids(layer)
    other = tbbn.convert(nn.BatchNorm1d(3), "adab2n").double()
    first = output(layer, task_ids=TASKS, current_task=1)[0]
    second = output(other, is_memory=IS_MEMORY, past_tasks=1, task_ids=torch.tensor(TASKS))[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("layout", "kind", "message"),
    [
        ({"labels": CLASSES, "past_tasks": 1}, UserError, "give both labels .* and current_classes"),
        ({"current_classes": range(3), "past_tasks": 1}, UserError, "give both labels .* and current_classes"),
        ({"current_task": 1}, UserError, "give task_ids .* with current_task"),
        ({"labels": CLASSES, "current_classes": [1]}, UserError, "give past_tasks, the number of tasks learnt before"),
        ({"current": 9, "memory": 3}, UserError, "give past_tasks"),
        ({"current": 9, "memory": 3, "task_ids": TASKS, "current_task": 1}, UserError, "which rows are memory in only one way"),
        ({"labels": CLASSES, "current_classes": [1], "task_ids": TASKS, "current_task": 1}, UserError, "not both"),
        ({"task_ids": [0, 3], "current_task": 1}, UserError, r"task_ids must lie in 0..1 for current_task=1, got 0..3"),
        ({"labels": torch.rand(12), "current_classes": [1], "past_tasks": 1}, TypeError, "labels must be 1-d with one integer"),
        ({"labels": CLASSES, "current_classes": 4, "past_tasks": 1}, TypeError, "current_classes must be a range or a list"),
        ({"labels": CLASSES, "current_classes": [1.5], "past_tasks": 1}, TypeError, "current_classes must be a whole number"),
        ({"current": np.bool_(True), "memory": 3, "past_tasks": 1}, TypeError, "current must be a whole number"),
        ({"current": torch.tensor(True), "memory": 3, "past_tasks": 1}, TypeError, "current must be a whole number"),
        ({"current": 9, "memory": 3, "past_tasks": 1, "rule": "evn"}, UserError, "split rule"),
        ({"labels": CLASSES, "current_classes": "12", "past_tasks": 1}, TypeError, "current_classes must be a range or a list"),
        ({"labels": CLASSES, "current_classes": np.array([[1, 2]]), "past_tasks": 1}, TypeError, "must be a range or a list"),
        ({"labels": CLASSES, "current_classes": np.array(3), "past_tasks": 1}, TypeError, "must be a range or a list"),
        ({"labels": CLASSES, "current_classes": torch.tensor(3), "past_tasks": 1}, TypeError, "must be a range or a list"),
        ({"labels": [True] * 12, "current_classes": [1], "past_tasks": 1}, TypeError, "labels must be 1-d with one integer"),
        ({"labels": torch.zeros(12, dtype=torch.complex64), "current_classes": [1], "past_tasks": 1}, TypeError, "one integer"),
        ({"task_ids": [-1, 1], "current_task": 1}, UserError, r"task_ids must lie in 0..1 for current_task=1, got -1..1"),
        ({"labels": CLASSES, "task_ids": TASKS, "current_task": 1}, UserError, "not both"),
        ({"current_classes": [1], "task_ids": TASKS, "current_task": 1}, UserError, "not both"),
        ({"current": 9, "is_memory": IS_MEMORY, "past_tasks": 1}, UserError, "either current and memory, or is_memory"),
        ({"memory": 3, "is_memory": IS_MEMORY, "past_tasks": 1}, UserError, "either current and memory, or is_memory"),
        ({"memory": 3, "past_tasks": 1}, UserError, "give both current and memory"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_clear_line(layout, kind, message):
    with pytest.raises(kind, match=message) as raised:
        tbbn.balance(tbbn.TaskBalancedBatchNorm1d(3), **layout)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", ["all", 0, -1, 1.5, True, None, np.array([1, 2])], ids=str)
def test_rows_per_sample_are_a_number_from_1_or_any(given):
    with pytest.raises(UserError, match=r"rows_per_sample must be a whole number from 1, or 'any', got ") as raised:
        tbbn.balance(tbbn.TaskBalancedBatchNorm1d(3), current=9, memory=3, past_tasks=1, rows_per_sample=given)
    assert str(raised.value).endswith(f"got {given!r}.")


@pytest.mark.parametrize("second", [{"current": 9}, {"memory": 3}, {"is_memory": IS_MEMORY}], ids=str)
@pytest.mark.parametrize(
    "first",
    [{"labels": CLASSES}, {"current_classes": [1]}, {"task_ids": TASKS, "current_task": 1}],
    ids=["labels", "classes", "task"],
)
def test_two_ways_to_say_which_rows_are_memory_are_refused(first, second):
    with pytest.raises(UserError, match="say which rows are memory in only one way"):
        tbbn.balance(tbbn.TaskBalancedBatchNorm1d(3), **first, **second, past_tasks=1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.uint32, np.int64])
def test_labels_of_any_width_are_compared_as_numbers(dtype):
    labels, layer = np.array([10, 1], dtype=dtype), tbbn.TaskBalancedBatchNorm1d(3)
    for classes, memory in (([266], 2), ([10], 1), ([], 2), (torch.tensor([10, 1]), 0)):
        layout = tbbn.balance(layer, labels=labels, current_classes=classes, past_tasks=1).layout
        assert (layout.current, layout.memory) == (2 - memory, memory)


def test_a_layout_is_on_the_cpu_whatever_the_default_device_is():
    labels, layer = torch.tensor([10, 1]), tbbn.TaskBalancedBatchNorm1d(3)
    with torch.device("meta"):
        layout = tbbn.balance(layer, labels=labels, current_classes=[10], past_tasks=1).layout
    assert layout.is_memory.tolist() == [False, True]


def test_the_number_of_past_tasks_is_that_of_the_current_one_unless_it_is_given():
    layer, ids = tbbn.TaskBalancedBatchNorm1d(3), [2, 2, 0, 1]
    for given, wanted in (({}, 2), ({"past_tasks": 1}, 1), ({"past_tasks": 0}, 0), ({"past_tasks": 5}, 5)):
        layout = tbbn.balance(layer, task_ids=ids, current_task=2, **given).layout
        assert (layout.current, layout.memory, layout.past_tasks) == (2, 2, wanted)


def test_a_batch_without_rows_is_taken():
    for layout in (
        {"task_ids": [], "current_task": 1},
        {"is_memory": [], "past_tasks": 1},
        {"current": 0, "memory": 0, "past_tasks": 1},
        {"current": 0, "memory": 0, "past_tasks": 1, "task_ids": torch.zeros(0, dtype=torch.int64)},
    ):
        if "task_ids" in layout and not torch.is_tensor(layout["task_ids"]):
            layout["task_ids"] = np.array([], dtype=np.int64)
        if "is_memory" in layout:
            layout["is_memory"] = np.array([], dtype=bool)
        for layer in (tbbn.TaskBalancedBatchNorm1d(3), tbbn.convert(nn.BatchNorm1d(3), "adab2n")):
            with tbbn.balance(layer, **layout) as entered:
                assert entered is None


def test_the_layers_of_a_model_are_found_once_wherever_they_are():
    shared = tbbn.TaskBalancedBatchNorm1d(3)
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), shared), tbbn.convert(nn.BatchNorm1d(3), "adab2n"), shared)
    model.nothing = None
    model.register_module("absent", None)
    assert list(balanced_layers(model)) == [m for m in model.modules() if isinstance(m, BalancedNorm)]
    assert len(list(balanced_layers(model))) == 2
    block = tbbn.balance(model, current=9, memory=3, past_tasks=1)
    assert block.groups == {} and block.layers == [shared, model[1]]


@pytest.mark.parametrize("form", ["mask", "task ids", "both"])
def test_a_layout_with_values_of_rows_is_of_one_batch_alone(form):
    mask = None if form == "task ids" else torch.tensor(IS_MEMORY)
    ids = None if form == "mask" else torch.tensor(TASKS)
    counts = (None, None) if mask is not None else (9, 3)
    first, second = (make_layout(*counts, mask, 1, ids) for _ in range(2))
    assert first is not second


# -- the rule


def splits_used(**layout):
    layer = tbbn.TaskBalancedBatchNorm1d(2, rule=layout.pop("layer_rule", "paper"))
    rows = layout.pop("rows")
    with tbbn.balance(layer, **layout):
        plan = layer.plan_of(torch.randn(rows, 2))
    return 1 if plan is None else len(plan.sizes)


def test_a_shuffled_loader_keeps_the_number_of_splits_near_the_wanted_one():
    for memory in range(33, 41):  # batch 128, nine past tasks
        is_memory = torch.arange(128) % 128 < memory
        r = splits_used(rows=128, is_memory=is_memory, past_tasks=9)
        assert abs(r / ((128 - memory) / memory * 9) - 1) <= 0.1
    assert {splits_used(rows=128, is_memory=torch.arange(128) < m, past_tasks=9, rule="paper") for m in (34, 36)} == {
        2,
        4,
    }


def test_the_rule_by_form_and_the_explicit_one():
    mask, counts = (
        {"is_memory": torch.arange(64) >= 48, "past_tasks": 4},
        {"current": 48, "memory": 16, "past_tasks": 4},
    )
    assert splits_used(rows=64, **counts) == 8 and splits_used(rows=64, **mask) == 12
    assert splits_used(rows=64, **counts, rule="uneven") == 12 and splits_used(rows=64, **mask, rule="paper") == 8
    for layout in (mask, counts):
        assert splits_used(rows=64, **layout, layer_rule="current") == 12
        assert splits_used(rows=64, **layout, layer_rule="uneven", rule="paper") == 8


def test_the_label_form_avoids_the_reservoir_trap():
    """A reservoir replays rows of the current task too: by label they are current, by counts they would be memory."""
    fresh, replayed = torch.arange(10, 22) % 10 + 10, torch.tensor([3, 12, 7, 18])
    labels = torch.cat([fresh, replayed])
    truth = labels < 10
    layer, x = tbbn.TaskBalancedBatchNorm1d(3).double(), torch.randn(16, 3).double()
    x[truth] += 5  # the past looks different
    with tbbn.balance(layer, labels=labels, current_classes=range(10, 20), past_tasks=1):
        by_label = layer(x)
    r = tbbn.splits(14, 2, 1, rule="uneven")
    torch.testing.assert_close(by_label, split_by_split(x, None, None, layer.weight, layer.bias, truth, r))
    with tbbn.balance(layer, current=12, memory=4, past_tasks=1):
        assert (layer(x) - by_label).abs().max() > 0.1


# -- the sampler


def rows_of(sampler):
    return [list(batch) for batch in sampler]


@pytest.mark.parametrize(
    ("sizes", "length", "batches"),
    [((100, 30), "longer", 17), ((100, 30), "current", 17), ((20, 30), "longer", 15), ((20, 30), "current", 4),
     ((20, 30), 7, 7), ((3, 1), "longer", 1)],
)  # fmt: skip
def test_every_batch_has_the_counts_and_an_epoch_sees_every_row(sizes, length, batches):
    sampler = tbbn.ReplayBatchSampler(*sizes, current=6, memory=2, length=length)
    epoch = rows_of(sampler)
    assert len(sampler) == len(epoch) == batches
    for batch in epoch:
        assert all(row < sizes[0] for row in batch[:6]) and len(batch) == 8
        assert all(sizes[0] <= row < sum(sizes) for row in batch[6:])
    current, memory = [r for b in epoch for r in b[:6]], [r for b in epoch for r in b[6:]]
    for seen, n in ((current, sizes[0]), (memory, sizes[1])):
        times = [seen.count(row) for row in set(seen)]
        assert max(times) - min(times) <= 1  # a dataset begins again only when all of it has been seen
        assert length != "longer" or len(set(seen)) == n


def test_seed_and_epoch_choose_the_order():
    first, again, other = (tbbn.ReplayBatchSampler(50, 20, current=6, memory=2, seed=s) for s in (1, 1, 2))
    epoch = rows_of(first)
    assert epoch == rows_of(again) != rows_of(other)
    following = rows_of(first)
    assert following != epoch
    again.set_epoch(0)
    assert rows_of(again) == epoch and rows_of(again) == following


@pytest.mark.parametrize("done", [0, 3, 10])
def test_it_resumes_in_the_middle_of_an_epoch(done):
    whole = tbbn.ReplayBatchSampler(50, 20, current=6, memory=2)
    wanted = [*rows_of(whole), *rows_of(whole)]
    first = tbbn.ReplayBatchSampler(50, 20, current=6, memory=2)
    batches = iter(first)
    seen = [next(batches) for _ in range(done)]
    second = tbbn.ReplayBatchSampler(50, 20, current=6, memory=2)
    second.load_state_dict(first.state_dict())
    assert [*seen, *rows_of(second), *([] if done == len(whole) else rows_of(second))] == wanted
    ahead = tbbn.ReplayBatchSampler(50, 20, current=6, memory=2)
    batches = iter(ahead)
    for _ in range(done):
        next(batches)
    second.load_state_dict(ahead.state_dict(batches=max(0, done - 2)))  # workers had fetched two more
    assert rows_of(second) == wanted[max(0, done - 2) : len(whole)]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (3, 2)])
def test_the_order_of_a_seed_and_an_epoch_stays_what_it_is(seed, epoch):
    """A trained batch must be found again with a later version."""
    sampler = tbbn.ReplayBatchSampler(7, 5, current=3, memory=2, seed=seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    number = 2 * (1_000_003 * seed + epoch)  # even numbers seed the current rows, odd ones the memory's
    for kind, (rows, first, wanted) in enumerate(((7, 0, 3), (5, 7, 2))):
        generator = torch.Generator().manual_seed(number + kind)
        passes = torch.cat([torch.randperm(rows, generator=generator) for _ in range(3)]) + first
        drawn = [row for batch in batches for row in (batch[3:] if kind else batch[:3])]
        assert drawn == passes[: wanted * len(batches)].tolist()


def test_datasets_of_any_kind_through_a_loader():
    task, memory = TensorDataset(torch.arange(40)), TensorDataset(torch.arange(1000, 1010))
    sampler = tbbn.ReplayBatchSampler(task, memory, current=6, memory=2, length="current")
    for (rows,) in DataLoader(ConcatDataset([task, memory]), batch_sampler=sampler):
        assert rows.shape == (8,) and (rows[:6] < 40).all() and (rows[6:] >= 1000).all()


def test_a_sampler_has_the_papers_batches_until_both_datasets_are_seen_unless_it_is_told_otherwise():
    sampler = tbbn.ReplayBatchSampler(100, 70)
    assert (sampler.current, sampler.memory, sampler.seed, sampler.epoch) == (48, 16, 0, 0)
    assert len(sampler) == 5  # 70 rows in batches of 16


def test_batches_without_memory_rows_leave_the_memory_alone():
    sampler = tbbn.ReplayBatchSampler(5, 20, current=4, memory=0, seed=2**31 - 1)
    sampler.set_epoch(2**31 - 1)  # the largest numbers
    batches = rows_of(sampler)
    assert [len(batch) for batch in batches] == [4, 4] and {row for batch in batches for row in batch} == set(range(5))


def test_the_first_task_has_no_memory():
    sampler = tbbn.ReplayBatchSampler(50, [], current=6, memory=2)
    assert (sampler.current, sampler.memory) == (8, 0)
    assert {len(batch) for batch in sampler} == {8} and len(sampler) == 7


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"current": 0}, UserError, "there must be current rows"),
        ({"length": "shorter"}, UserError, "length of an epoch"),
        ({"length": 0}, UserError, "length must be positive, got 0"),
        ({"memory": 1.5}, TypeError, "ReplayBatchSampler: memory must be a whole number, got 1.5"),
        ({"seed": -1}, UserError, "seed must not be negative, got -1"),
    ],
)
def test_wrong_settings_of_the_sampler(arguments, kind, message):
    with pytest.raises(UserError, match="there must be current rows, in the dataset and in a batch"):
        tbbn.ReplayBatchSampler([], 20)
    with pytest.raises(kind, match=message):
        tbbn.ReplayBatchSampler(50, 20, **arguments)
    state = tbbn.ReplayBatchSampler(50, 20).state_dict()
    with pytest.raises(UserError, match=r"the state belongs to another sampler: sizes was \[50, 20\], is \[50, 21\]"):
        tbbn.ReplayBatchSampler(50, 21).load_state_dict(state)
