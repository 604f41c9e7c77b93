"""Find the task of each row of a batch from its label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import tbbn
from tbbn.errors import UserError

_NAMES = ("labels", "label", "targets", "target", "y")


class Tasks:
    """The classes of every task, in the order in which the tasks are learnt; ``task`` is the 0-based current one."""

    def __init__(self, tasks: Iterable[Iterable[int]], task: int = 0) -> None:
        self.classes = [sorted({int(c) for c in classes}) for classes in tasks]
        if not self.classes or not all(self.classes):
            raise UserError(
                f"tasks: expected the classes of every task, such as [range(0, 10), range(10, 20)], got {tasks!r}."
            )
        seen: set[int] = set()
        for classes in self.classes:
            if common := seen & set(classes):
                raise UserError(f"tasks: class {min(common)} is in two tasks, so labels do not tell its rows apart.")
            seen |= set(classes)
        self.task = task

    @property
    def task(self) -> int:
        return self._task

    @task.setter
    def task(self, task: int) -> None:
        if not 0 <= task < len(self.classes):
            raise UserError(f"task: must be from 0 to {len(self.classes) - 1}, got {task}; it counts from 0.")
        self._task = task

    def of(self, labels: Tensor) -> Tensor:
        """The 0-based task of each row."""
        known = torch.full((max(map(max, self.classes)) + 1,), -1)
        for number, classes in enumerate(self.classes[: self.task + 1]):
            known[classes] = number
        labels = labels.detach().cpu()
        inside = (labels >= 0) & (labels < len(known))
        found = torch.where(inside, known[labels * inside], -1)
        if (found < 0).any():
            raise UserError(
                f"class {int(labels[found < 0][0])} belongs to no task up to task {self.task}; the tasks are {self.classes}."
            )
        return found

    def balance(self, model: nn.Module, task_ids: Tensor) -> tbbn.balance:
        return tbbn.balance(model, task_ids=task_ids, current_task=self.task)


def labels_of(batch: Any) -> Tensor:
    """The labels of a batch: the second entry of a tuple or list, or the first of ``_NAMES`` in a dictionary."""
    found = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in _NAMES if name in batch), None)
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        found = batch[1]
    if not isinstance(found, Tensor) or found.dim() != 1:
        raise UserError(
            f"the labels were not found in a batch of type {type(batch).__name__}; override task_ids(batch), which returns "
            "the task of each row."
        )
    return found
