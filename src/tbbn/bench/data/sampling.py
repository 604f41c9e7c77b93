"""Sample the rows of every batch [current ; memory] of an epoch, before the epoch begins."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from tbbn.bench.data.memory import Reservoir
from tbbn.bench.data.selection import select
from tbbn.errors import UserError, unknown_name

EPOCH_LENGTHS = ("longer", "current", "memory")
LAST_BATCHES = ("short", "drop")


@dataclass(frozen=True, eq=False)
class IndexBlock:
    """Consecutive steps of one layout; each row of `index` is a batch [current ; memory]."""

    index: Tensor  # (steps, n_current + n_memory) int64 rows of source.train
    n_current: int
    n_memory: int

    def __post_init__(self) -> None:
        assert self.index.shape[1] == self.n_current + self.n_memory, "a block is as wide as its layout"

    @property
    def steps(self) -> int:
        return len(self.index)


def batch_layout(batch_size: int, ratio: tuple[int, int] = (3, 1)) -> tuple[int, int]:
    """The rows (n_current, n_memory) of a full batch with memory.

    >>> batch_layout(64)
    (48, 16)
    """
    current, memory = ratio
    if current < 1 or memory < 1:
        raise UserError(f"batches: both parts of the ratio must be at least 1, got {current}:{memory}")
    n_current = batch_size * current // (current + memory)
    if n_current < 1:
        fitting = -(-(current + memory) // current)
        raise UserError(
            f"batches: batch_size {batch_size} at ratio {current}:{memory} leaves no current rows; "
            f"use a batch_size of at least {max(fitting, 2)}"
        )
    return n_current, batch_size - n_current


def epoch_blocks(
    current: Tensor,
    memory: Tensor,
    *,
    batch_size: int,
    ratio: tuple[int, int] = (3, 1),
    length: str = "longer",
    last: str = "short",
    generator: torch.Generator,
) -> list[IndexBlock]:
    """An epoch over the rows `current` and `memory`: its steps in order, in blocks of equal layout.

    Each step takes the next rows of a random permutation of either set. At the end of a permutation fewer rows than the
    set's share of a batch may be left; such a step is short. `last="drop"` leaves out steps in which either set is short,
    as the paper's code does; "short" keeps them. The epoch is one pass over the set that `length` names: "current",
    "memory", or the "longer" of the two. The other set is cut off, or permuted anew for each further pass.

    Without memory, a batch holds batch_size current rows. Fewer current rows than their share make smaller batches;
    fewer memory rows than their share repeat within a batch.
    """
    shape = _epoch_shape(len(current), len(memory), batch_size, ratio, length, last)
    sets = [(current, _random_passes(len(current), shape.n_current, shape.steps, generator))]
    if shape.n_memory:
        sets.append((memory.to(current.device), _random_passes(len(memory), shape.n_memory, shape.steps, generator)))
    widths = torch.stack([(positions >= 0).sum(1) for _, positions in sets])  # (1 or 2, steps)
    keep = torch.ones(shape.steps, dtype=torch.bool)
    if last == "drop":
        keep = (widths == widths[:, :1]).all(0)  # the first step is always full
    layouts, counts = torch.unique_consecutive(widths[:, keep], dim=1, return_counts=True)
    ends = counts.cumsum(0).tolist()
    blocks = []
    for layout, count, end in zip(layouts.T.tolist(), counts.tolist(), ends, strict=True):
        pieces = [positions[keep][end - count : end, :n] for (_, positions), n in zip(sets, layout, strict=True)]
        index = [rows[piece.to(rows.device)] for (rows, _), piece in zip(sets, pieces, strict=True)]
        blocks.append(IndexBlock(torch.cat(index, dim=1), layout[0], sum(layout[1:])))
    return blocks


def online_blocks(
    current: Tensor,
    reservoir: Reservoir,
    *,
    batch_size: int,
    ratio: tuple[int, int] = (3, 1),
    last: str = "short",
    past_only: bool = False,
    without: Tensor | None = None,
    generator: torch.Generator,
) -> tuple[list[IndexBlock], Reservoir]:
    """A single pass over `current`, and the reservoir after the pass. Each batch is offered to the reservoir after its step.

    The content of a reservoir depends on the stream and the generator, never on the network, so the whole pass is
    sampled in advance. A step draws its memory rows without replacement (fewer rows than their share repeat), and none
    while the reservoir is empty. `past_only` draws only rows stored before this pass. Rows in `without` are stored but
    never drawn.
    """
    n_current, n_memory = batch_layout(batch_size, ratio)
    steps = steps_per_epoch(len(current), 0, batch_size=batch_size, ratio=ratio, last=last, online=True)
    # On the CPU, because on a GPU each of hundreds of tiny operations would be a host sync.
    order = current.cpu()[torch.randperm(len(current), generator=generator)]
    before = reservoir.index.cpu()
    state = Reservoir(reservoir.budget, before, reservoir.seen)
    batches = []
    for batch in order.split(min(n_current, len(order)))[:steps]:
        # A row keeps its slot until it is replaced: slots that have not changed since the start hold past rows.
        stored = before[state.index[: len(before)] == before] if past_only else state.index
        stored = stored if without is None else stored[~torch.isin(stored, without)]
        replayed = stored[_random_passes(len(stored), n_memory, 1, generator)[0]] if len(stored) else stored
        batches.append((torch.cat([batch, replayed]), len(batch), len(replayed)))
        state = state.update(batch, generator)
    blocks = [
        IndexBlock(torch.stack([rows for rows, _, _ in same]).to(current.device), *layout)
        for layout, same in groupby(batches, key=lambda item: item[1:])
    ]
    return blocks, Reservoir(state.budget, state.index.to(current.device), state.seen)


def steps_per_epoch(
    n_current_rows: int,
    n_memory_rows: int,
    *,
    batch_size: int,
    ratio: tuple[int, int] = (3, 1),
    length: str = "longer",
    last: str = "short",
    online: bool = False,
) -> int:
    """The number of steps of `epoch_blocks`, or `online_blocks`, for sets of these sizes; samples nothing."""
    if online:
        batch_size, n_memory_rows = batch_layout(batch_size, ratio)[0], 0
    shape = _epoch_shape(n_current_rows, n_memory_rows, batch_size, ratio, length, last)
    if last == "short":
        return shape.steps
    step = torch.arange(shape.steps)
    full = torch.ones(shape.steps, dtype=torch.bool)
    for n_rows, share in ((n_current_rows, shape.n_current), (n_memory_rows, shape.n_memory)):
        if share and n_rows > share and n_rows % share:
            steps_of_pass = -(-n_rows // share)
            full &= step % steps_of_pass != steps_of_pass - 1
    return int(full.sum())


def balanced_rows(rows: Tensor, labels: Tensor, n_per_class: int, generator: torch.Generator) -> Tensor:
    """A random subset of `rows` with at most `n_per_class` of each class, grouped by class.

    With the memory's quota, every class of the current task gets as many rows as one in memory (EEIL's balanced phase).
    """
    return rows[select("random", None, labels, n_per_class, generator)]


@dataclass(frozen=True)
class _EpochShape:
    n_current: int  # rows of a full batch
    n_memory: int
    steps: int  # before any are dropped


def _epoch_shape(
    n_current_rows: int, n_memory_rows: int, batch_size: int, ratio: tuple[int, int], length: str, last: str
) -> _EpochShape:
    if length not in EPOCH_LENGTHS:
        raise unknown_name("epoch length", length, EPOCH_LENGTHS)
    if last not in LAST_BATCHES:
        raise unknown_name("last batch", last, LAST_BATCHES)
    if batch_size < 1:
        raise UserError(f"batches: batch_size must be at least 1, got {batch_size}")
    if n_current_rows < 1:
        raise UserError("batches: an epoch needs current rows, got none; give the task training images")
    n_current, n_memory = batch_layout(batch_size, ratio) if n_memory_rows else (batch_size, 0)
    n_current = min(n_current, n_current_rows)
    steps = {"current": -(-n_current_rows // n_current)}
    steps["memory"] = -(-n_memory_rows // n_memory) if n_memory else 0
    steps["longer"] = max(steps.values())
    return _EpochShape(n_current, n_memory, steps[length if n_memory else "current"])


def _random_passes(n_rows: int, share: int, steps: int, generator: torch.Generator) -> Tensor:
    """Positions (steps, share) of random passes over n_rows rows; -1 fills the short last batch of a pass.

    If there are fewer rows than the share, passes continue within a batch and no batch is short.
    """
    steps_of_pass = -(-n_rows // share)
    passes = -(-steps // steps_of_pass) if n_rows >= share else -(-steps * share // n_rows)
    positions = torch.stack([torch.randperm(n_rows, generator=generator) for _ in range(passes)])
    if n_rows >= share:
        positions = F.pad(positions, (0, steps_of_pass * share - n_rows), value=-1)
    return positions.flatten()[: steps * share].view(steps, share)
