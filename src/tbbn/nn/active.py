"""The active ``tbbn.balance`` blocks. A layer looks up the layout of its batch here.

Every thread and every asyncio task has its own blocks, so none sees the layout of another. Blocks may be left in any order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tbbn.errors import UserError
from tbbn.nn.plan import Layout
from tbbn.nn.private import dispatch_modes, functorch_active, graph_task, saved_tensors_hooks


@dataclass(frozen=True, eq=False)
class Block:
    """An active ``balance`` block: the layout, and what each layer's ``prepare`` made of it."""

    owner: object
    layout: Layout
    prepared: Mapping[Any, Any]  # by layer
    rows_per_sample: int | str  # for layers whose input has several rows per sample; "any": take it from the input

    def folds(self, rows: int) -> int:
        """How many of an input's ``rows`` rows belong to each sample; 1 also if they do not fit the layout."""
        samples, per_sample = self.layout.rows, self.rows_per_sample
        if not samples or rows % samples:
            return 1
        return rows // samples if per_sample in ("any", rows // samples) else 1


_entered: ContextVar[tuple[Block, ...]] = ContextVar("tbbn.balance", default=())


class _Thread(threading.local):
    """The blocks of this thread, for ``torch.compile``, which can read thread-local attributes but no context variable."""

    def __init__(self) -> None:
        self.entered: tuple[Block, ...] = ()


class _Compiled:
    """The blocks entered in compiled code. Unlike writes to thread-local attributes, writes here survive a graph break."""

    def __init__(self) -> None:
        self.entered: tuple[Block, ...] = ()


_thread = _Thread()
_compiled = _Compiled()


def enter(block: Block) -> None:
    _thread.entered = (*_thread.entered, block)
    if torch.compiler.is_compiling():
        _compiled.entered = (*_compiled.entered, block)
    else:
        _entered.set((*_entered.get(), block))


def leave(owner: object) -> None:
    """Leave the block that ``owner`` entered last."""
    _thread.entered = _without(_thread.entered, owner)
    if _compiled.entered:
        _compiled.entered = _without(_compiled.entered, owner)
    if not torch.compiler.is_compiling():
        _entered.set(_without(_entered.get(), owner))


def _without(blocks: tuple[Block, ...], owner: object) -> tuple[Block, ...]:
    for i in range(len(blocks) - 1, -1, -1):
        if blocks[i].owner is owner:
            return blocks[:i] + blocks[i + 1 :]
    return blocks


def find(layer: nn.Module) -> Block | None:
    """The innermost block that gives ``layer`` a layout."""
    blocks = _thread.entered if torch.compiler.is_compiling() else _entered.get()
    for block in reversed((*_compiled.entered, *blocks)):
        if layer in block.prepared:
            return block
    return None


# Activation checkpointing repeats a forward during backward, usually after its block has ended.


def recomputing() -> bool:
    """Whether activation checkpointing is repeating this forward: it runs inside a backward pass."""
    return not torch.compiler.is_compiling() and graph_task() != -1


def may_be_repeated() -> bool:
    """Whether checkpointing may repeat this forward: it first runs one without gradients or with saved-tensor hooks."""
    return not torch.is_grad_enabled() or saved_tensors_hooks(False) is not None


@dataclass(eq=False)
class Forward:
    """A training forward of a layer: its layout, and a pixel of its last row to recognise a repetition by."""

    layout: Layout | None
    pixel: Tensor | None  # (C,)
    folded: bool  # whether its input may have had several rows per sample
    repeated: bool = False

    def key(self) -> Any:
        """Equal for forwards that a repetition need not tell apart."""
        return None if self.layout is None else (self.layout.key(), self.folded)

    @classmethod
    def of(cls, block: Block | None, x: Tensor) -> Forward:
        layout = None if block is None else block.layout
        folded = block is not None and block.rows_per_sample != 1
        if (
            functorch_active()
            or dispatch_modes()
            or torch.jit.is_tracing()
            or not x.shape[0]
            or (x.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return cls(layout, None, folded)
        return cls(layout, _pixel(x).clone(), folded)


def _pixel(x: Tensor) -> Tensor:
    row = x.detach()[-1]
    while row.dim() > 1:
        row = row[..., row.shape[-1] // 2]
    return row


class Forwards:
    """A layer's latest training forwards, those that checkpointing may repeat."""

    KEPT = 32

    def __init__(self) -> None:
        self.last: deque[Forward] = deque()
        self.older: set[Any] = set()  # keys of dropped forwards; more than two would not change any decision

    def append(self, forward: Forward) -> None:
        self.last.append(forward)
        if len(self.last) > self.KEPT:
            dropped = self.last.popleft()
            if len(self.older) < 2:
                self.older.add(dropped.key())

    def repeated(self, layer: str, x: Tensor) -> Forward | None:
        """The forward that is being repeated with input ``x``."""
        found = list(self.last)
        if len(self.older | {f.key() for f in found}) > 1:
            found = [f for f in found if f.pixel is not None and _is_close(f.pixel, _pixel(x))]
            if _layouts(found) > 1:  # the same input with several layouts: leave out those already repeated
                found = [f for f in found if not f.repeated]
            if _layouts(found) != 1:
                raise UserError(
                    f"{layer}: activation checkpointing repeats a forward, and several layouts were used since; "
                    "call backward after each block of tbbn.balance."
                )
        for forward in found:
            forward.repeated = True
        return found[-1] if found else None


def _layouts(forwards: list[Forward]) -> int:
    return len({f.key() for f in forwards})


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two pixels are equal up to rounding: on a GPU, a repetition may choose another algorithm."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool((a - b).float().norm() <= 0.02 * b.float().norm())
