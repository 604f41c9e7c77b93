"""``tbbn.balance``: tell the layers of a model what the batch being forwarded is made of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn

from tbbn.errors import UserError
from tbbn.nn.active import Block, enter, leave
from tbbn.nn.convert import is_norm
from tbbn.nn.modules import BalancedNorm, PlannedNorm
from tbbn.nn.plan import make_layout
from tbbn.nn.sync import Counts, share_counts


class balance:
    """Give the task-balanced layers of a model the layout of a batch, around its training forward.

    ``with tbbn.balance(model, current=48, memory=16, past_tasks=t): loss = criterion(model(images), labels)``

    Args:
        module: a model with layers made by :func:`tbbn.convert`.
        current, memory: the number of rows of the task being learnt, and of replayed rows; current rows come first.
        is_memory: instead of the counts, for a shuffled batch: a bool per row (on the CPU, to avoid a device sync).
        past_tasks: the number of tasks learnt before this one; 0 in the first task.
        task_ids: the task of each row, 0-based; used by layers with ``wants_task_ids`` (AdaB2N), ignored by the others.
        rank_counts: for layers with ``sync=True``: the current and memory rows of every rank, ``[(48, 16), (40, 16)]``. Without
            it the ranks tell each other when they enter the block.
        rows_per_sample: for models in which batch norms get several rows a sample, one after another: tokens, boxes or frames. A
            layer whose input has that many times as many rows as the batch treats the rows of a sample as its pixels. "any":
            each layer takes the number from its input.

    The layout holds inside the block only. Blocks may be nested, and each model has its own. Teachers in eval mode are
    not affected.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        current: int | None = None,
        memory: int | None = None,
        is_memory: Tensor | None = None,
        past_tasks: int,
        task_ids: Tensor | None = None,
        rank_counts: Counts | None = None,
        rows_per_sample: int | Literal["any"] = 1,
    ) -> None:
        if rows_per_sample != "any" and (type(rows_per_sample) is not int or rows_per_sample < 1):
            raise UserError(
                f"balance: rows_per_sample must be a whole number from 1, or 'any', got {rows_per_sample!r}."
            )
        self.rows_per_sample = rows_per_sample
        self.layout = make_layout(current, memory, is_memory, past_tasks, task_ids)
        layers = list(balanced_layers(module))
        if not layers:
            raise _nothing_to_balance(module)
        self.layers, self.rank_counts = layers, rank_counts
        synced = [layer for layer in layers if isinstance(layer, PlannedNorm) and layer.sync]
        self.groups = {layer.process_group: _device(layer) for layer in synced}

    def __enter__(self) -> None:
        layout = share_counts(self.layout, self.groups, self.rank_counts)
        # All layers prepare first: one that cannot take the layout raises before the block is entered.
        enter(Block(self, layout, {layer: layer.prepare(layout) for layer in self.layers}, self.rows_per_sample))
        if not torch.compiler.is_compiling():
            self.layers[0].warn_outside()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self)


def _device(layer: nn.Module) -> torch.device:
    tensor = next(chain(layer.parameters(), layer.buffers()), None)
    if tensor is not None:
        return tensor.device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _nothing_to_balance(module: nn.Module) -> UserError:
    name = type(module).__name__
    if not any(is_norm(m) for m in module.modules()):
        return UserError(
            f"balance: {name} has no batch norm, so there is nothing to balance; leave tbbn out for this model."
        )
    if any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        return UserError(
            f"balance: {name} has no task-balanced layer; convert_sync_batchnorm puts SyncBatchNorm in their place: "
            "call tbbn.convert(model, sync=True) instead of it, or after it."
        )
    return UserError(f"balance: {name} has no task-balanced layer; call tbbn.convert(model) once, before training.")


def balanced_layers(module: nn.Module) -> Iterator[BalancedNorm]:
    """The layers of ``module`` to which :func:`balance` gives a layout."""
    return (m for m in module.modules() if isinstance(m, BalancedNorm))


def is_balanced(module: nn.Module) -> bool:
    """Whether any layer of ``module`` takes a layout from :func:`balance`."""
    return any(True for _ in balanced_layers(module))


def wants_task_ids(module: nn.Module) -> bool:
    """Whether any layer of ``module`` uses ``balance(..., task_ids=...)``."""
    return any(layer.wants_task_ids for layer in balanced_layers(module))
