"""A scenario divides a source into tasks: which classes arrive when, and which rows train, validate and test each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tbbn.bench import seeds
from tbbn.bench.data.selection import rank_in_class
from tbbn.errors import UserError, unknown_name

if TYPE_CHECKING:
    from tbbn.bench.data.types import Source

CLASS_ORDERS = ("seed", "natural", "icarl")
_ICARL_SEED = 1993


@dataclass(frozen=True, eq=False)
class Task:
    """A task: its classes in arrival order, and its rows of the source, ascending."""

    number: int  # 0-based
    classes: range  # arrival-order ids
    train: Tensor  # int64 rows of source.train
    validation: Tensor  # int64 rows of source.train, none of them in `train`
    test: Tensor  # int64 rows of source.test


@dataclass(frozen=True, eq=False)
class Scenario:
    """The tasks in order, and every label of the source mapped to arrival order."""

    class_order: tuple[int, ...]  # original class ids in order of arrival
    tasks: tuple[Task, ...]
    train_labels: Tensor  # (N_train,) int64, arrival order
    test_labels: Tensor  # (N_test,) int64, arrival order

    @property
    def n_classes(self) -> int:
        return len(self.class_order)

    @property
    def task_sizes(self) -> tuple[int, ...]:
        """The number of classes of each task."""
        return tuple(len(task.classes) for task in self.tasks)


def make_scenario(
    source: Source,
    *,
    n_tasks: int,
    base_classes: int = 0,
    class_order: str | Sequence[int] = "seed",
    class_order_seed: int = 0,
    validation: float = 0.0,
    seed: int = 0,
) -> Scenario:
    """Divide `source` into `n_tasks` tasks of disjoint classes; every image belongs to exactly one task.

    All tasks have the same number of classes; if that is impossible, the first ones have one more. With `base_classes`, the
    first task has that many and the others share the rest. `class_order` is "seed" (a permutation by `class_order_seed`),
    "natural", "icarl" (the order of iCaRL, for 100 classes), or a list of original ids. In a sequence of data sets each set
    becomes the same number of tasks; classes are permuted within each set, then the tasks are shuffled. A given list of ids, or
    "icarl", ignores the sets.

    `validation` is the fraction of each class's training rows that is held out. The draw depends on `seed` only, not on the
    class order.
    """
    n_classes = len(source.classes)
    _check_arguments(n_tasks, base_classes, class_order_seed, validation)
    groups = [int(group) for group in source.groups]
    if len(set(groups)) > 1 and isinstance(class_order, str) and class_order != "icarl":
        if base_classes:
            raise UserError("scenario: base_classes does not apply to a sequence of data sets; set it to 0")
        tasks = _tasks_of_groups(groups, n_tasks, class_order, class_order_seed)
    else:
        order = _class_order(class_order, n_classes, class_order_seed)
        tasks = _cut(order, _task_sizes(n_classes, n_tasks, base_classes))
    return _assemble(source, tasks, validation, seed)


def _check_arguments(n_tasks: int, base_classes: int, class_order_seed: int, validation: float) -> None:
    if n_tasks < 1:
        raise UserError(f"scenario: n_tasks must be at least 1, got {n_tasks}")
    if base_classes < 0:
        raise UserError(f"scenario: base_classes must not be negative, got {base_classes}; 0 makes all tasks equal")
    if not 0 <= class_order_seed < 2**32:
        raise UserError(f"scenario: class_order_seed must be in [0, 2**32), got {class_order_seed}")
    if not 0.0 <= validation < 1.0:
        raise UserError(f"scenario: validation is a fraction in [0, 1), got {validation}")


def _task_sizes(n_classes: int, n_tasks: int, base_classes: int) -> list[int]:
    """The number of classes of each task."""
    if not base_classes:
        return _shares(n_classes, n_tasks, "classes")
    rest = n_classes - base_classes
    if rest <= 0 or n_tasks == 1:
        raise UserError(
            f"scenario: base_classes must leave classes for later tasks: {base_classes} of {n_classes} in {n_tasks} tasks"
        )
    return [base_classes, *_shares(rest, n_tasks - 1, f"classes after a base of {base_classes}")]


def _shares(n_classes: int, n_tasks: int, what: str) -> list[int]:
    """Sizes that differ by one at most, the larger ones first."""
    if n_tasks > n_classes:
        raise UserError(f"scenario: {n_classes} {what} cannot fill {n_tasks} tasks; use at most {n_classes} tasks")
    size, more = divmod(n_classes, n_tasks)
    return [size + 1] * more + [size] * (n_tasks - more)


def _class_order(class_order: str | Sequence[int], n_classes: int, class_order_seed: int) -> list[int]:
    """Original class ids in order of arrival."""
    natural = list(range(n_classes))
    if not isinstance(class_order, str):
        given = [int(original) for original in class_order]
        if sorted(given) != natural:
            raise UserError(
                f"scenario: class_order must hold each of 0..{n_classes - 1} once, got {len(given)} ids, "
                f"{len(set(given) & set(natural))} of them distinct and in range"
            )
        return given
    if class_order == "natural":
        return natural
    if class_order == "seed":
        return _shuffled([natural], class_order_seed)[0]
    if class_order == "icarl":
        if n_classes != 100:
            raise UserError(f"scenario: class_order 'icarl' orders 100 classes, the source has {n_classes}; use 'seed'")
        return _shuffled([natural], _ICARL_SEED)[0]
    raise unknown_name("class order", class_order, CLASS_ORDERS)


def _tasks_of_groups(groups: list[int], n_tasks: int, class_order: str, class_order_seed: int) -> list[list[int]]:
    """The original classes of each task of a sequence of data sets, each of which becomes the same number of tasks."""
    if class_order not in CLASS_ORDERS:
        raise unknown_name("class order", class_order, CLASS_ORDERS)
    names = sorted(set(groups))
    if n_tasks % len(names):
        raise UserError(
            f"scenario: {n_tasks} tasks cannot be shared equally by {len(names)} data sets; "
            f"use a multiple of {len(names)}"
        )
    members = [[original for original, group in enumerate(groups) if group == name] for name in names]
    per_group = n_tasks // len(names)
    sizes = [_shares(len(own), per_group, f"classes of data set {i}") for i, own in enumerate(members)]
    if class_order == "natural":
        return [task for own, size in zip(members, sizes, strict=True) for task in _cut(own, size)]
    # The order of the tasks is shuffled last, from the same stream, so it does not affect the order of the classes.
    *members, order = _shuffled([*members, list(range(n_tasks))], class_order_seed)
    tasks = [task for own, size in zip(members, sizes, strict=True) for task in _cut(own, size)]
    return [tasks[i] for i in order]


def _shuffled(lists: list[list[int]], seed: int) -> list[list[int]]:
    """The lists, shuffled one after the other by numpy's legacy generator.

    Published class orders were made with it, and numpy guarantees that it never changes.
    """
    from numpy.random import RandomState

    state = RandomState(seed)
    lists = [list(items) for items in lists]
    for items in lists:
        state.shuffle(items)
    return lists


def _cut(order: list[int], sizes: list[int]) -> list[list[int]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _assemble(source: Source, tasks: list[list[int]], validation: float, seed: int) -> Scenario:
    """Map labels to arrival order and find the rows of each task."""
    class_order = tuple(original for classes in tasks for original in classes)
    train_labels = _arrival_labels(source.train.labels, class_order, f"{source.name} train")
    test_labels = _arrival_labels(source.test.labels, class_order, f"{source.name} test")
    counts = torch.bincount(train_labels, minlength=len(class_order))
    if not bool((counts > 0).all()):
        empty = source.classes[class_order[int(counts.argmin())]]
        raise UserError(f"scenario: class {empty!r} of {source.name} has no training images; add some or leave it out")
    held_out = _held_out(source.train.labels, validation, seed)

    made, first = [], 0
    for number, classes in enumerate(tasks):
        ids = range(first, first + len(classes))
        first = ids.stop
        mine = (train_labels >= ids.start) & (train_labels < ids.stop)
        test = ((test_labels >= ids.start) & (test_labels < ids.stop)).nonzero()[:, 0]
        if not len(test):
            raise UserError(f"scenario: task {number} of {source.name} has no test images; its accuracy is undefined")
        made.append(Task(number, ids, (mine & ~held_out).nonzero()[:, 0], (mine & held_out).nonzero()[:, 0], test))
    return Scenario(class_order, tuple(made), train_labels, test_labels)


def _arrival_labels(labels: Tensor, class_order: tuple[int, ...], owner: str) -> Tensor:
    n_classes = len(class_order)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        raise UserError(
            f"scenario: {owner} labels must be in 0..{n_classes - 1}, got {int(labels.min())}..{int(labels.max())}"
        )
    arrival = torch.empty(n_classes, dtype=torch.int64)
    arrival[list(class_order)] = torch.arange(n_classes)
    return arrival.to(labels.device)[labels.long()]


def _held_out(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """True for the validation rows: the rounded fraction of each class, drawn independently of the class order."""
    draw = torch.rand(len(labels), generator=seeds.generator(seed, "validation"), dtype=torch.float64)
    original = labels.long().cpu()
    order, rank = rank_in_class(draw, original)
    counts = torch.bincount(original)
    # Every class keeps at least one training row.
    n_validation = (counts.double() * fraction + 0.5).floor().long().minimum(counts - 1)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[order] = rank < n_validation[original[order]]
    return mask.to(labels.device)


def task_of_class(scenario: Scenario) -> Tensor:
    """(classes,): the task in which each class arrives."""
    sizes = torch.tensor(scenario.task_sizes)
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)
