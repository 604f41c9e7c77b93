"""Hugging Face: a Trainer that tells the layers which rows of each training batch are current and which are memory.

>>> model = tbbn.convert(ResNetForImageClassification(config))                         # doctest: +SKIP
>>> trainer = BalancedTrainer(model, arguments, tasks=[range(0, 10), range(10, 20)], task=1, ...)    # doctest: +SKIP

In your own Trainer, put the mixin first: ``class MyTrainer(BalanceMixin, Trainer)``. It is not a callback, because callbacks do
not see the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from tbbn.errors import UserError
from tbbn.integrations.rows import Tasks, labels_of


class BalanceMixin:
    """Computes the training loss inside :func:`tbbn.balance`; evaluation is unchanged.

    Args:
        tasks: the classes of every task, in the order in which the tasks are learnt.
        task: the 0-based number of the task that the next ``train()`` learns; set ``trainer.task`` before each ``train()``.

    The labels are the entry ``labels`` of a batch. For other batches, override :meth:`task_ids`.
    """

    def __init__(self, *args: Any, tasks: Iterable[Iterable[int]], task: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tasks = Tasks(tasks, task)

    @property
    def task(self) -> int:
        return self._tasks.task

    @task.setter
    def task(self, task: int) -> None:
        self._tasks.task = task

    def task_ids(self, inputs: Any) -> Tensor:
        """The 0-based task of each row of a batch."""
        return self._tasks.of(labels_of(inputs))

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if isinstance(model, nn.DataParallel):
            raise UserError(
                "BalancedTrainer: nn.DataParallel divides the batch; start one process per GPU with torchrun."
            )
        with self._tasks.balance(model, self.task_ids(inputs)):
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]


class BalancedTrainer(BalanceMixin, Trainer):
    """``transformers.Trainer`` with :class:`BalanceMixin`."""
