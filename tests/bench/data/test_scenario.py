from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tbbn.bench.data.scenario import make_scenario
from tbbn.errors import UserError

ICARL_START = (68, 56, 78, 8, 23, 84, 90, 65, 74, 76)


def make_source(n_classes=100, per_class=20, test_per_class=3, groups=None, device="cpu"):
    """A source without images; labels cycle through the classes so that rows of a class are scattered."""

    def part(n):
        return SimpleNamespace(images=None, labels=torch.arange(n_classes * n, device=device) % n_classes)

    return SimpleNamespace(
        name="toy",
        train=part(per_class),
        test=part(test_per_class),
        classes=tuple(f"c{i}" for i in range(n_classes)),
        groups=tuple(groups or [0] * n_classes),
    )


def check_partition(source, scenario):
    """Every image in exactly one task, under the label its class has by arrival; checked row by row."""
    train = [row for task in scenario.tasks for row in [*task.train.tolist(), *task.validation.tolist()]]
    test = [row for task in scenario.tasks for row in task.test.tolist()]
    assert sorted(train) == list(range(len(source.train.labels)))
    assert sorted(test) == list(range(len(source.test.labels)))
    assert sorted(scenario.class_order) == list(range(len(source.classes)))
    arrival = {original: i for i, original in enumerate(scenario.class_order)}
    assert scenario.train_labels.tolist() == [arrival[y] for y in source.train.labels.tolist()]
    assert scenario.test_labels.tolist() == [arrival[y] for y in source.test.labels.tolist()]
    assert [c for task in scenario.tasks for c in task.classes] == list(range(scenario.n_classes))
    for number, task in enumerate(scenario.tasks):
        assert task.number == number
        for rows, labels in (
            (task.train, scenario.train_labels),
            (task.validation, scenario.train_labels),
            (task.test, scenario.test_labels),
        ):
            assert rows.dtype == torch.int64
            assert rows.tolist() == sorted(rows.tolist())
            assert set(labels[rows].tolist()) <= set(task.classes)


@pytest.mark.parametrize(
    ("n_tasks", "base", "sizes"),
    [
        (10, 0, (10,) * 10),
        (20, 0, (5,) * 20),
        (1, 0, (100,)),
        (6, 50, (50,) + (10,) * 5),
        (2, 90, (90, 10)),
        (7, 0, (15, 15, 14, 14, 14, 14, 14)),
        (5, 90, (90, 3, 3, 2, 2)),
    ],
)
def test_tasks_are_as_equal_as_possible_or_follow_a_base_task(n_tasks, base, sizes):
    source = make_source()
    scenario = make_scenario(source, n_tasks=n_tasks, base_classes=base, validation=0.1)
    assert scenario.task_sizes == sizes
    assert scenario.n_classes == 100
    check_partition(source, scenario)


def test_seed_order_is_the_published_cifar_order():
    def first_task(seed):
        return make_scenario(make_source(), n_tasks=10, class_order_seed=seed).class_order[:10]

    assert first_task(0) == (26, 86, 2, 55, 75, 93, 16, 73, 54, 95)
    assert first_task(1) == (80, 84, 33, 81, 93, 17, 36, 82, 69, 65)
    assert first_task(2) == (83, 30, 56, 24, 16, 23, 2, 27, 28, 13)


def test_named_and_explicit_orders():
    source = make_source()
    icarl = make_scenario(source, n_tasks=10, class_order="icarl", class_order_seed=5)
    assert icarl.class_order[:10] == ICARL_START
    assert icarl.class_order == tuple(np.random.RandomState(1993).permutation(100).tolist())
    assert make_scenario(source, n_tasks=10, class_order="natural").class_order == tuple(range(100))
    backwards = make_scenario(source, n_tasks=10, class_order=list(range(99, -1, -1)))
    assert backwards.class_order[:3] == (99, 98, 97)
    check_partition(source, backwards)


def test_validation_holds_out_a_rounded_share_of_each_class():
    source = make_source(n_classes=4, per_class=25)
    scenario = make_scenario(source, n_tasks=2, validation=0.1, seed=3)
    check_partition(source, scenario)
    for task in scenario.tasks:
        counts = torch.bincount(scenario.train_labels[task.validation], minlength=4)
        assert counts[list(task.classes)].tolist() == [3, 3]  # 2.5 rounds up
        assert len(task.train) == 44


def test_cifar_validation_is_50_of_500_per_class():
    scenario = make_scenario(make_source(per_class=500), n_tasks=10, validation=0.1)
    assert {len(task.train) for task in scenario.tasks} == {4500}
    assert torch.bincount(scenario.train_labels[scenario.tasks[3].validation])[30:40].tolist() == [50] * 10


def test_validation_depends_on_its_seed_alone():
    def held_out(**options):
        scenario = make_scenario(make_source(), n_tasks=10, validation=0.2, **options)
        return sorted(torch.cat([task.validation for task in scenario.tasks]).tolist())

    assert held_out(seed=1) == held_out(seed=1, class_order_seed=7) == held_out(seed=1, class_order="natural")
    assert held_out(seed=1) != held_out(seed=2)


def test_a_tiny_class_keeps_a_training_row():
    source = make_source(n_classes=2, per_class=1)
    assert [len(task.train) for task in make_scenario(source, n_tasks=2, validation=0.9).tasks] == [1, 1]


GROUPS = [g for g in range(5) for _ in range(10)]


def test_several_data_sets_keep_tasks_whole_and_shuffle_their_places():
    source = make_source(n_classes=50, groups=GROUPS)
    scenario = make_scenario(source, n_tasks=10, class_order_seed=4)
    check_partition(source, scenario)
    assert scenario.task_sizes == (5,) * 10
    sets = [{GROUPS[scenario.class_order[c]] for c in task.classes} for task in scenario.tasks]
    assert all(len(found) == 1 for found in sets)
    order = [found.pop() for found in sets]
    assert sorted(order) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert order != sorted(order)

    state = np.random.RandomState(4)
    members = [list(range(10 * g, 10 * g + 10)) for g in range(5)]
    for classes in members:
        state.shuffle(classes)
    tasks = [classes[half : half + 5] for classes in members for half in (0, 5)]
    places = list(range(10))
    state.shuffle(places)
    assert list(scenario.class_order) == [c for place in places for c in tasks[place]]
    assert make_scenario(source, n_tasks=10, class_order_seed=5).class_order != scenario.class_order


def test_several_data_sets_in_natural_order_are_unshuffled():
    scenario = make_scenario(make_source(n_classes=50, groups=GROUPS), n_tasks=10, class_order="natural")
    assert scenario.class_order == tuple(range(50))


def test_data_sets_of_unequal_size_give_equally_many_tasks():
    groups = [0] * 4 + [1] * 6
    scenario = make_scenario(make_source(n_classes=10, groups=groups), n_tasks=4, class_order="natural")
    assert scenario.task_sizes == (2, 2, 3, 3)


@pytest.mark.parametrize("order", ["natural", "seed"])
def test_several_data_sets_may_have_unequal_tasks(order):
    source = make_source(n_classes=50, groups=GROUPS)
    scenario = make_scenario(source, n_tasks=15, class_order=order)
    assert sorted(scenario.task_sizes) == [3] * 10 + [4] * 5
    check_partition(source, scenario)
    for task in scenario.tasks:
        assert len({GROUPS[scenario.class_order[c]] for c in task.classes}) == 1


def test_the_order_of_icarl_overrides_the_grouping():
    source = make_source(groups=[0] * 40 + [1] * 60)
    scenario = make_scenario(source, n_tasks=10, class_order="icarl", base_classes=10)
    assert scenario.class_order[:10] == ICARL_START


def test_a_single_data_set_may_have_a_number():
    source = make_source(n_classes=10, groups=[3] * 10)
    assert make_scenario(source, n_tasks=3, base_classes=4).task_sizes == (4, 3, 3)


def test_an_explicit_order_overrides_the_grouping():
    order = [i * 7 % 50 for i in range(50)]
    scenario = make_scenario(make_source(n_classes=50, groups=GROUPS), n_tasks=10, class_order=order)
    assert list(scenario.class_order) == order


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_tasks": 101}, "100 classes cannot fill 101 tasks; use at most 100 tasks"),
        ({"n_tasks": 0}, "n_tasks must be at least 1, got 0"),
        ({"n_tasks": 3, "base_classes": -1}, "base_classes must not be negative, got -1"),
        ({"n_tasks": 2, "base_classes": 100}, "must leave classes for later tasks: 100 of 100"),
        (
            {"n_tasks": 12, "base_classes": 90},
            "10 classes after a base of 90 cannot fill 11 tasks; use at most 10 tasks",
        ),
        ({"n_tasks": 1, "base_classes": 90}, "must leave classes for later tasks: 90 of 100 in 1 tasks"),
        ({"n_tasks": 2, "class_order_seed": -1}, r"class_order_seed must be in \[0, 2\*\*32\), got -1"),
        ({"n_tasks": 2, "validation": 1.0}, r"validation is a fraction in \[0, 1\), got 1.0"),
        ({"n_tasks": 2, "class_order": "icral"}, "unknown class order 'icral'.*Did you mean 'icarl'"),
        ({"n_tasks": 2, "class_order": [0, 1, 1]}, "each of 0..99 once, got 3 ids, 2 of them distinct"),
    ],
)
def test_impossible_scenarios_say_what_would_work(options, message):
    with pytest.raises(UserError, match=message):
        make_scenario(make_source(), **options)


def test_icarl_order_needs_100_classes():
    with pytest.raises(UserError, match="'icarl' orders 100 classes, the source has 10; use 'seed'"):
        make_scenario(make_source(n_classes=10), n_tasks=5, class_order="icarl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_tasks": 12}, "12 tasks cannot be shared equally by 5 data sets; use a multiple of 5"),
        ({"n_tasks": 55}, "10 classes of data set 0 cannot fill 11 tasks; use at most 10 tasks"),
        ({"n_tasks": 10, "base_classes": 10}, "base_classes does not apply to a sequence of data sets"),
        ({"n_tasks": 10, "class_order": "sed"}, "unknown class order 'sed'"),
    ],
)
def test_impossible_scenarios_of_several_data_sets_say_what_would_work(options, message):
    with pytest.raises(UserError, match=message):
        make_scenario(make_source(n_classes=50, groups=GROUPS), **options)


def test_bad_sources_are_refused():
    source = make_source(n_classes=4)
    source.train.labels[0] = 4
    with pytest.raises(UserError, match=r"toy train labels must be in 0\.\.3, got 0\.\.4"):
        make_scenario(source, n_tasks=2)
    source = make_source(n_classes=4)
    source.test.labels[0] = -1
    with pytest.raises(UserError, match=r"toy test labels must be in 0\.\.3, got -1\.\.3"):
        make_scenario(source, n_tasks=2)
    source = make_source(n_classes=4)
    source.train.labels[source.train.labels == 2] = 1
    with pytest.raises(UserError, match="class 'c2' of toy has no training images"):
        make_scenario(source, n_tasks=2)
    source = make_source(n_classes=4)
    source.test.labels.clamp_(max=1)
    with pytest.raises(UserError, match="task 1 of toy has no test images"):
        make_scenario(source, n_tasks=2, class_order="natural")


@pytest.mark.parametrize(
    ("per_class", "validation", "held_out"), [(450, 0.13, 59), (150, 0.21, 32), (50, 0.29, 14), (90, 0.35, 31)]
)
def test_a_share_is_rounded_as_the_fraction_is_written(per_class, validation, held_out):
    """Halves are rounded up, in double precision."""
    scenario = make_scenario(make_source(n_classes=2, per_class=per_class), n_tasks=2, validation=validation)
    assert [len(task.validation) for task in scenario.tasks] == [held_out, held_out]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_may_have_any_width(dtype):
    source, wanted = make_source(n_classes=10), make_scenario(make_source(n_classes=10), n_tasks=5, validation=0.1)
    source.train.labels, source.test.labels = source.train.labels.to(dtype), source.test.labels.to(dtype)
    scenario = make_scenario(source, n_tasks=5, validation=0.1)
    assert torch.equal(scenario.train_labels, wanted.train_labels) and scenario.train_labels.dtype == torch.int64
    assert all(torch.equal(a.train, b.train) for a, b in zip(scenario.tasks, wanted.tasks, strict=True))


def test_a_source_without_any_images_is_refused():
    source = make_source(n_classes=4)
    source.test.labels = source.test.labels[:0]
    with pytest.raises(UserError, match="task 0 of toy has no test images"):
        make_scenario(source, n_tasks=2)
    source.train.labels = source.train.labels[:0]
    with pytest.raises(UserError, match=r"class 'c\d' of toy has no training images"):
        make_scenario(source, n_tasks=2)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_seeds_of_a_class_order_are_those_of_numpy(seed):
    order = make_scenario(make_source(), n_tasks=10, class_order_seed=seed).class_order
    assert list(order) == np.random.RandomState(seed).permutation(100).tolist()
    with pytest.raises(UserError, match=r"class_order_seed must be in \[0, 2\*\*32\), got 4294967296"):
        make_scenario(make_source(), n_tasks=10, class_order_seed=2**32)
