"""Lightning: a callback that tells the layers which rows of each training batch are current and which are memory.

>>> callback = BalanceCallback(tasks=[range(0, 10), range(10, 20)], task=1)    # doctest: +SKIP
>>> trainer = Trainer(callbacks=[callback], ...)                               # doctest: +SKIP

Convert the model in the constructor of the LightningModule: ``self.model = tbbn.convert(resnet18())``. AMP, gradient accumulation
and DDP need nothing else; with DDP every rank balances its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

import tbbn
from tbbn.integrations.rows import Tasks, labels_of


class BalanceCallback(Callback):
    """Runs every training step inside :func:`tbbn.balance`.

    Args:
        tasks: the classes of every task, in the order in which the tasks are learnt.
        task: the 0-based number of the task that the next ``fit`` learns; set ``callback.task`` before each ``fit``. None: the
            task of the checkpoint that ``fit(ckpt_path=...)`` resumes, or 0 without one.

    The labels are the second entry of a batch, or its entry ``labels``. For other batches, override :meth:`task_ids`.
    """

    def __init__(self, tasks: Iterable[Iterable[int]], task: int | None = None) -> None:
        self._given = task is not None
        self._tasks = Tasks(tasks, task or 0)
        self._block: tbbn.balance | None = None

    @property
    def task(self) -> int:
        return self._tasks.task

    @task.setter
    def task(self, task: int) -> None:
        self._tasks.task, self._given = task, True

    def task_ids(self, batch: Any) -> Tensor:
        """The 0-based task of each row of a batch."""
        return self._tasks.of(labels_of(batch))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._leave()
        block = self._tasks.balance(pl_module, self.task_ids(batch))
        block.__enter__()
        self._block = block

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)

    def state_dict(self) -> dict[str, Any]:
        return {"task": self.task}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._given:  # an explicit task may start from the checkpoint of the previous task
            self._tasks.task = state_dict["task"]
