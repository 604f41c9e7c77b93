"""Warnings of mistakes that raise no error: a forward outside ``tbbn.balance``, and blocks that never balance anything.

Each comes once. Compiled forwards are not watched: counting would be compiled in.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from tbbn.nn.plan import Layout
from tbbn.nn.sync import RankLayout

if TYPE_CHECKING:
    from tbbn.nn.modules import BalancedNorm

MANY = 1000  # training forwards without a block, or blocks that balance nothing, before the warning
SOME = 100  # blocks of a first task without memory rows, after which memory rows are taken for those of a second task

_CALL = nn.Module.__call__.__code__.co_filename  # the file of the code that calls a module's forward
_given: set[str] = set()  # the warnings of blocks that this process has given


@dataclass(eq=False)
class Used:
    """A model that has been inside a block; shared by its layers, any of which may be the one that forwards outside."""

    has_warned: bool = False  # of a forward outside


class Watched:
    """What a layer remembers of its training forwards. Copies of a layer start anew."""

    _used: Used | None = None  # None: never in a block yet
    _n_outside = 0  # training forwards before the first block
    # Past tasks, and blocks of that task without memory or current rows; -1: one had both, or in the first task memory rows.
    _one_sided = (0, 0)


def entering_block(layers: Sequence[BalancedNorm], layout: Layout) -> None:
    """Note that the layers of a model enter a block with this layout."""
    first = next((layer for layer in layers if layer.needs_layout), None)
    if first is None:
        return
    if first._used is None:
        used = Used()
        for layer in layers:
            if layer.needs_layout:
                layer._used = used
    task, blocks = first._one_sided
    if first.wants_task_ids or (blocks < 0 and task == layout.past_tasks):
        return
    if not layout.past_tasks:
        if not task:
            _in_first_task(first, layout, blocks)
        return
    if all(_rows(layout)):
        first._one_sided = layout.past_tasks, -1
        return
    blocks = blocks + 1 if task == layout.past_tasks else 1
    first._one_sided = layout.past_tasks, blocks
    if blocks == MANY and _is_first("one-sided"):
        warnings.warn(
            f"{MANY} tbbn.balance blocks with past_tasks={layout.past_tasks}, none with both current and memory rows (the last: "
            f"current={layout.current}, memory={layout.memory}): the layers have been plain batch norm. Forward current and "
            "memory rows as one batch; check the counts, the mask or the labels; to train without a memory, use past_tasks=0.",
            stacklevel=3,
        )


def _in_first_task(first: BalancedNorm, layout: Layout, blocks: int) -> None:
    """Note a block with ``past_tasks=0`` of a model that has had no others. A reservoir has memory rows from the start."""
    if not _rows(layout)[1]:
        if blocks < SOME:
            first._one_sided = 0, blocks + 1
        return
    first._one_sided = 0, -1
    if blocks == SOME and _is_first("first task"):
        warnings.warn(
            f"tbbn.balance blocks have memory rows now, after {SOME} or more without any, and still past_tasks=0: the layers are "
            "plain batch norm. past_tasks is the number of tasks learnt before this one: 1 in the second task.",
            stacklevel=4,
        )


def given_other_classes(n_rows: int) -> None:
    """Note that a block with ``past_tasks=0`` was given rows of other classes than the current ones."""
    if n_rows and _is_first("other classes"):
        warnings.warn(
            f"tbbn.balance: {n_rows} rows have labels outside of current_classes, but past_tasks=0 means the first task, so the "
            "layers are plain batch norm. past_tasks is the number of tasks learnt before this one: 1 in the second task.",
            stacklevel=3,
        )


def forward_outside(layer: BalancedNorm) -> None:
    """Note a training forward of the layer outside any block."""
    if layer._used is not None:
        if layer._used.has_warned:
            return
        layer._used.has_warned = True
        warnings.warn(
            "A training forward outside tbbn.balance took the statistics of plain batch norm. If that is meant, "
            "use tbbn.balance(model, current=rows, memory=0, past_tasks=0).",
            stacklevel=_level_of_model_call(),
        )
    elif layer.needs_layout:
        vars(layer)["_n_outside"] = layer._n_outside + 1  # five times as fast as through Module.__setattr__
        if layer._n_outside == MANY and _is_first("outside"):
            warnings.warn(
                f"{MANY} training forwards, none inside tbbn.balance: the layers have been plain batch norm. Put the forward "
                "inside tbbn.balance(model, current=..., memory=..., past_tasks=...); in the first task use memory=0, "
                "past_tasks=0.",
                stacklevel=_level_of_model_call(),
            )


def _level_of_model_call() -> int:
    """The ``stacklevel``, for a warning of the function that calls this, of the code that called the model."""
    frame, level, found = sys._getframe(1), 1, 2
    while frame is not None:
        if frame.f_code.co_filename == _CALL:
            found = level + 1
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return found


def _rows(layout: Layout) -> tuple[int, int]:
    """The current and memory rows of the batch, on all ranks if the layers take their statistics over them."""
    if not isinstance(layout, RankLayout):
        return layout.current, layout.memory
    counts = next(iter(layout.counts.values()))
    return sum(current for current, _ in counts), sum(memory for _, memory in counts)


def _is_first(warning: str) -> bool:
    if warning in _given:
        return False
    _given.add(warning)
    return True
