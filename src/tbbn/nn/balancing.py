"""``tbbn.balance``: tell the layers of a model which rows of the batch are current and which are memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn

from tbbn.errors import UserError
from tbbn.nn.active import Block, enter, leave
from tbbn.nn.convert import check_module, is_norm, needs_no_layout
from tbbn.nn.mistakes import entering_block, given_other_classes
from tbbn.nn.modules import BalancedNorm, PlannedNorm
from tbbn.nn.plan import make_layout, row_values, whole_number
from tbbn.nn.sync import Counts, share_counts

Rows = Tensor | Sequence[Any]  # one value per row; numpy arrays too


class balance:
    """Context manager that gives the task-balanced layers of a model the layout of a batch for its training forward.

    ``with tbbn.balance(model, current=48, memory=16, past_tasks=t): loss = criterion(model(images), labels)``

    Say in one of four ways which rows are memory:

    - ``current=48, memory=16, past_tasks=t``: counts; current rows come first;
    - ``is_memory=mask, past_tasks=t``: a bool per row, for a shuffled batch;
    - ``labels=y, current_classes=range(40, 50), past_tasks=t``: rows of other classes are memory. Use it with a reservoir, which
      also holds rows of the current task;
    - ``task_ids=ids, current_task=t``: rows of other tasks are memory.

    Args:
        module: a model with layers made by :func:`tbbn.convert`.
        current, memory: the number of rows of the task being learnt, and of replayed rows.
        is_memory, labels, task_ids: one value per row: a tensor, an array or a list. Reading a GPU tensor is a host sync.
        current_classes: the labels of the task being learnt.
        current_task: the 0-based number of the task being learnt.
        past_tasks: the number of tasks learnt before this one; 0 in the first task. Defaults to ``current_task``.
        task_ids: may also be given with the counts or the mask, for layers with ``wants_task_ids`` (AdaB2N).
        rule: how to round the number of splits (:func:`tbbn.splits`). By default each layer uses its own rule. In the last three
            forms, whose counts vary, a layer with the rule "paper" uses "uneven".
        rank_counts: for layers with ``sync=True``: the current and memory rows of every rank, ``[(48, 16), (40, 16)]``. Without
            it the ranks exchange their counts when they enter the block.
        rows_per_sample: for models whose batch norms get several consecutive rows per sample: tokens, boxes or frames. A layer
            whose input has that many times the rows of the batch treats the rows of a sample as its pixels. "any": each layer
            takes the number from its input.

    If :func:`convert` gave the model norms that need no layout, such as "bn" or "gn", the block does nothing, so that one loop
    serves all norms.

    The layout applies only inside the block, in the thread or asyncio task that entered it. Blocks may be nested, and each model
    has its own. Teachers in eval mode are not affected.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        current: SupportsIndex | None = None,
        memory: SupportsIndex | None = None,
        is_memory: Rows | None = None,
        labels: Rows | None = None,
        current_classes: Iterable[SupportsIndex] | Tensor | None = None,
        task_ids: Rows | None = None,
        current_task: SupportsIndex | None = None,
        past_tasks: SupportsIndex | None = None,
        rule: str | None = None,
        rank_counts: Counts | None = None,
        rows_per_sample: int | Literal["any"] = 1,
    ) -> None:
        check_module("balance", module)
        self.rows_per_sample = _rows_per_sample(rows_per_sample)
        # Copy: a loader may reuse the tensor. int64 holds every task number.
        ids = None if task_ids is None else row_values("task_ids", task_ids, "integer").to(torch.int64, copy=True)
        if labels is not None or current_classes is not None or current_task is not None:
            if current is not None or memory is not None or is_memory is not None:
                raise UserError(
                    "balance: say which rows are memory in only one way: counts, is_memory, labels or current_task."
                )
            if current_task is None:
                is_memory = _of_other_classes(labels, current_classes)
            elif labels is not None or current_classes is not None:
                raise UserError(
                    "balance: give either labels and current_classes, or task_ids and current_task, not both."
                )
            else:
                current_task = whole_number("balance: current_task", current_task)
                is_memory = _of_other_tasks(ids, current_task)
                past_tasks = current_task if past_tasks is None else past_tasks
        elif ids is not None and current is None and memory is None and is_memory is None:
            raise UserError("balance: give current_task with task_ids: the number of the task being learnt, from 0.")
        if past_tasks is None:
            raise UserError(
                "balance: give past_tasks, the number of tasks learnt before this one; 0 in the first task."
            )
        self.layout = make_layout(current, memory, is_memory, past_tasks, ids, rule)
        if labels is not None and not self.layout.past_tasks:
            given_other_classes(self.layout.memory)
        layers = list(balanced_layers(module))
        if not layers and not needs_no_layout(module):
            raise _nothing_to_balance(module)
        self.layers, self.rank_counts = layers, rank_counts
        synced = [layer for layer in layers if isinstance(layer, PlannedNorm) and layer.sync]
        self.groups = {layer.process_group: _device(layer) for layer in synced}

    def __enter__(self) -> None:
        if not self.layers:
            return
        layout = share_counts(self.layout, self.groups, self.rank_counts)
        # What may raise comes before the block is entered, because nobody would leave the block after an error here: a layer that
        # cannot take the layout, and a warning where warnings are errors.
        prepared = {layer: layer.prepare(layout) for layer in self.layers}
        if not torch.compiler.is_compiling():
            entering_block(self.layers, layout)
        enter(Block(self, layout, prepared, self.rows_per_sample))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.layers:
            leave(self)


def _rows_per_sample(given: Any) -> int | str:
    if isinstance(given, str) and given == "any":
        return given
    try:
        number = whole_number("rows_per_sample", given)
    except (TypeError, UserError):
        number = 0
    if number < 1:
        raise UserError(f"balance: rows_per_sample must be a whole number from 1, or 'any', got {given!r}.")
    return number


def _device(layer: nn.Module) -> torch.device:
    tensor = next(chain(layer.parameters(), layer.buffers()), None)
    if tensor is not None:
        return tensor.device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _of_other_classes(labels: Rows | None, current_classes: Iterable[SupportsIndex] | Tensor | None) -> Tensor:
    if labels is None or current_classes is None:
        raise UserError("balance: give both labels (one per row) and current_classes (the labels of the current task).")
    classes = current_classes.tolist() if isinstance(current_classes, Tensor) else current_classes
    if not isinstance(classes, Iterable) or isinstance(classes, str) or getattr(classes, "ndim", 1) != 1:
        raise TypeError(f"balance: current_classes must be a range or a list of labels, got {current_classes!r}.")
    known = [whole_number("balance: a label of current_classes", c) for c in classes]
    rows = row_values("labels", labels, "integer").cpu().long()
    return ~torch.isin(rows, torch.tensor(known, device="cpu"))


def _of_other_tasks(task_ids: Tensor | None, current_task: int) -> Tensor:
    if task_ids is None:
        raise UserError("balance: give task_ids (one per row) with current_task.")
    rows = task_ids.cpu()
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) <= current_task:
        raise UserError(
            f"balance: task_ids must lie in 0..{current_task} for current_task={current_task}, "
            f"got {int(rows.min())}..{int(rows.max())}."
        )
    return rows != current_task


def _nothing_to_balance(module: nn.Module) -> UserError:
    name = type(module).__name__
    if not any(is_norm(m) for m in module.modules()):
        return UserError(
            f"balance: {name} has no batch norm, so there is nothing to balance; leave tbbn out for this model."
        )
    if any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        return UserError(
            f"balance: {name} has no task-balanced layer; convert_sync_batchnorm replaces them by SyncBatchNorm: "
            "call tbbn.convert(model, sync=True) instead of it, or after it."
        )
    return UserError(
        f"balance: {name} has no task-balanced layer; call tbbn.convert(model) once, before training. "
        "tbbn.revert(model) undoes it in place: to train on, revert a copy."
    )


def balanced_layers(module: nn.Module) -> Iterator[BalancedNorm]:
    """The layers of ``module`` to which :func:`balance` gives a layout, in the order of ``module.modules()``.

    Four times as fast as ``module.modules()``, because every step calls it.
    """
    left, seen = [module], set()
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.add(one)
            left += reversed(one._modules.values())  # type: ignore[arg-type]
            if isinstance(one, BalancedNorm):
                yield one


def is_balanced(module: nn.Module) -> bool:
    """Whether any layer of ``module`` takes a layout from :func:`balance`."""
    return any(True for _ in balanced_layers(module))


def wants_task_ids(module: nn.Module) -> bool:
    """Whether any layer of ``module`` uses ``balance(..., task_ids=...)``."""
    return any(layer.wants_task_ids for layer in balanced_layers(module))
