"""Batches [current ; memory]: an epoch's plan as index tensors, drawn before the epoch begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from tbbn.bench.data import crop
from tbbn.bench.data.augment import Augment
from tbbn.bench.data.device import DeviceDataset, to_device
from tbbn.bench.data.memory import Reservoir, select
from tbbn.bench.data.types import Batch
from tbbn.errors import UserError, unknown_name

LENGTHS = ("longer", "current", "memory")
LASTS = ("short", "drop")


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive steps of one layout; each row of `index` is a batch [current ; memory]."""

    index: Tensor  # (steps, n_current + n_memory) int64 rows of source.train
    n_current: int
    n_memory: int

    def __post_init__(self) -> None:
        assert self.index.shape[1] == self.n_current + self.n_memory, "a block's width is its layout"

    @property
    def steps(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class BatchSpec:
    """What all batches of a block have in common: their layout, and how many tasks and classes came before."""

    n_current: int
    n_memory: int  # stored rows; each is seen in `views` views
    views: int  # the first view is augmented like any row, the others strongly
    past_tasks: int
    n_old_classes: int
    n_classes: int
    has_layout: bool  # rows are [current ; memory]; False for mixed batches

    @property
    def base_rows(self) -> int:
        """Rows without the further views."""
        return self.n_current + self.n_memory

    @property
    def extra_rows(self) -> int:
        """Rows of the further views; they follow the base rows."""
        return self.n_memory * (self.views - 1)


@dataclass(frozen=True, eq=False)
class EpochBlock:
    """Consecutive steps of one spec, with everything random about them drawn, on the device."""

    spec: BatchSpec
    index: Tensor  # (steps, base_rows + extra_rows) int64 rows of source.train
    parameters: list[
        Tensor
    ]  # of the augmentation, (steps, base_rows, k); then of the strong one, (steps, extra_rows, k)

    @property
    def steps(self) -> int:
        return len(self.index)


@dataclass(frozen=True, eq=False)
class BatchMaker:
    """Turns rows of a training split into batches. Everything random is in `draw`; nothing in `make_batch` is, or waits."""

    data: DeviceDataset
    augment: Augment
    strong: Augment  # of the further views of memory rows

    def draw(self, block: Block, spec: BatchSpec, generator: torch.Generator) -> EpochBlock:
        """Draw the augmentation parameters of a block on the CPU, and send all of it to the device at once."""
        index, steps, device = block.index, block.steps, self.data.labels.device
        size = (self.data.images.shape[2], self.data.images.shape[3])
        drawn = [self.augment.draw(steps * spec.base_rows, generator, size)]
        if spec.extra_rows:
            index = torch.cat([index, index[:, spec.n_current :].repeat(1, spec.views - 1)], dim=1)
            drawn.append(self.strong.draw(steps * spec.extra_rows, generator, size))
        parameters = [to_device(values.unflatten(0, (steps, -1)), device) for values in drawn]
        return EpochBlock(spec, to_device(index, device), parameters)

    def make_batch(self, spec: BatchSpec, index: Tensor, inputs: Sequence[Tensor]) -> Batch:
        """Gather, augment and normalise the rows `index` on the device.

        `inputs` are the step's parameters as in `EpochBlock`, followed by the prefetched images if the data is streamed.
        """
        return Batch(
            images=self._images(spec, index, inputs),
            labels=self.data.labels[index],
            index=index,
            n_current=spec.n_current if spec.has_layout else spec.base_rows,
            n_memory=spec.n_memory * spec.views if spec.has_layout else 0,
            n_old_classes=spec.n_old_classes,
            n_classes=spec.n_classes,
        )

    def _images(self, spec: BatchSpec, index: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        data = self.data
        stored, rows = data.locate(index, inputs)
        if not spec.extra_rows and crop.suits(self.augment, stored):
            return crop.cropped(self.augment, stored, rows, inputs[0], data.mean, data.std, data.memory_format)
        raw, n = data.gather(index, inputs), spec.base_rows
        if not spec.extra_rows:
            return data.normalised(self.augment.apply(raw, inputs[0]))
        views = [self.augment.apply(raw[:n], inputs[0]), self.strong.apply(raw[n:], inputs[1])]
        return data.normalised(torch.cat(views))


def parts(batch_size: int, ratio: tuple[int, int] = (3, 1)) -> tuple[int, int]:
    """The rows (n_current, n_memory) of a batch with memory.

    >>> parts(64)
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
) -> list[Block]:
    """An epoch over the rows `current` and `memory`, in blocks of equal layout in the order of the steps.

    Each set is walked in random order in batches of its part, the last of a pass being short where the part does not
    divide the set. The epoch is as long as the longer set's pass, or `length` says whose; the other set is cycled,
    each pass with a fresh permutation, or cut. `last="drop"` skips every step in which one of the two is short (the
    paper's code), "short" keeps them. Without memory a batch is batch_size current rows. Current rows fewer than
    their part make smaller batches; memory rows fewer than their part repeat within a batch.
    """
    plan = _plan(len(current), len(memory), batch_size, ratio, length, last)
    sets = [(current, _walk(len(current), plan.n_current, plan.steps, generator))]
    if plan.n_memory:
        sets.append((memory.to(current.device), _walk(len(memory), plan.n_memory, plan.steps, generator)))
    widths = torch.stack([(walk >= 0).sum(1) for _, walk in sets])  # (1 or 2, steps)
    keep = torch.ones(plan.steps, dtype=torch.bool)
    if last == "drop":
        keep = (widths == widths[:, :1]).all(0)  # the first step always is whole
    layouts, runs = torch.unique_consecutive(widths[:, keep], dim=1, return_counts=True)
    ends = runs.cumsum(0).tolist()
    blocks = []
    for layout, run, end in zip(layouts.T.tolist(), runs.tolist(), ends, strict=True):
        places = [walk[keep][end - run : end, :n] for (_, walk), n in zip(sets, layout, strict=True)]
        index = [rows[place.to(rows.device)] for (rows, _), place in zip(sets, places, strict=True)]
        blocks.append(Block(torch.cat(index, dim=1), layout[0], sum(layout[1:])))
    return blocks


def stream_blocks(
    current: Tensor,
    reservoir: Reservoir,
    *,
    batch_size: int,
    ratio: tuple[int, int] = (3, 1),
    last: str = "short",
    past_only: bool = False,
    without: Tensor | None = None,
    generator: torch.Generator,
) -> tuple[list[Block], Reservoir]:
    """A single pass over `current` with a memory that takes in each batch after its step, and that memory afterwards.

    What a reservoir holds depends on the stream and the generator alone, never on the network, so that the whole pass
    can be planned. A step draws its memory rows without replacement (with fewer rows than their part they repeat); it
    has none while the reservoir is empty. `past_only` draws only rows stored before this pass; rows in `without` are stored
    but not drawn.
    """
    n_current, n_memory = parts(batch_size, ratio)
    steps = n_steps(len(current), 0, batch_size=batch_size, ratio=ratio, last=last, stream=True)
    # Planned on the CPU whatever the device: hundreds of tiny steps would each wait for a GPU.
    order = current.cpu()[torch.randperm(len(current), generator=generator)]
    before = reservoir.index.cpu()
    state = Reservoir(reservoir.budget, before, reservoir.seen)
    batches = []
    for batch in order.split(min(n_current, len(order)))[:steps]:
        # A row keeps its slot until it is replaced: what has not changed since the start is of the past.
        stored = before[state.index[: len(before)] == before] if past_only else state.index
        stored = stored if without is None else stored[~torch.isin(stored, without)]
        replayed = stored[_walk(len(stored), n_memory, 1, generator)[0]] if len(stored) else stored
        batches.append((torch.cat([batch, replayed]), len(batch), len(replayed)))
        state = state.update(batch, generator)
    blocks = [
        Block(torch.stack([rows for rows, _, _ in run]).to(current.device), *layout)
        for layout, run in groupby(batches, key=lambda item: item[1:])
    ]
    return blocks, Reservoir(state.budget, state.index.to(current.device), state.seen)


def n_steps(
    n_current_rows: int,
    n_memory_rows: int,
    *,
    batch_size: int,
    ratio: tuple[int, int] = (3, 1),
    length: str = "longer",
    last: str = "short",
    stream: bool = False,
) -> int:
    """The steps `epoch_blocks` (with `stream`, `stream_blocks`) yields for sets of these sizes; draws nothing."""
    if stream:
        batch_size, n_memory_rows = parts(batch_size, ratio)[0], 0
    plan = _plan(n_current_rows, n_memory_rows, batch_size, ratio, length, last)
    if last == "short":
        return plan.steps
    step = torch.arange(plan.steps)
    whole = torch.ones(plan.steps, dtype=torch.bool)
    for n_rows, part in ((n_current_rows, plan.n_current), (n_memory_rows, plan.n_memory)):
        if part and n_rows > part and n_rows % part:
            passes = -(-n_rows // part)
            whole &= step % passes != passes - 1
    return int(whole.sum())


def balanced_rows(rows: Tensor, labels: Tensor, n_per_class: int, generator: torch.Generator) -> Tensor:
    """A random subset of `rows` with at most `n_per_class` of each class, grouped by class.

    With the memory's quota it makes the current task as large per class as the memory (the balanced phase of EEIL).
    """
    return rows[select("random", None, labels, n_per_class, generator)]


@dataclass(frozen=True)
class _Plan:
    n_current: int  # rows of a whole batch
    n_memory: int
    steps: int  # before steps are skipped


def _plan(
    n_current_rows: int, n_memory_rows: int, batch_size: int, ratio: tuple[int, int], length: str, last: str
) -> _Plan:
    if length not in LENGTHS:
        raise unknown_name("epoch length", length, LENGTHS)
    if last not in LASTS:
        raise unknown_name("last batch", last, LASTS)
    if batch_size < 1:
        raise UserError(f"batches: batch_size must be at least 1, got {batch_size}")
    if n_current_rows < 1:
        raise UserError("batches: an epoch needs current rows, got none; give the task training images")
    n_current, n_memory = parts(batch_size, ratio) if n_memory_rows else (batch_size, 0)
    n_current = min(n_current, n_current_rows)
    passes = {"current": -(-n_current_rows // n_current)}
    passes["memory"] = -(-n_memory_rows // n_memory) if n_memory else 0
    passes["longer"] = max(passes.values())
    return _Plan(n_current, n_memory, passes[length if n_memory else "current"])


def _walk(n_rows: int, part: int, steps: int, generator: torch.Generator) -> Tensor:
    """Positions (steps, part) of random passes over n_rows rows; -1 fills up the short last batch of a pass.

    Fewer rows than the part run through the batches without a break, so that no batch is short.
    """
    batches = -(-n_rows // part)
    passes = -(-steps // batches) if n_rows >= part else -(-steps * part // n_rows)
    walk = torch.stack([torch.randperm(n_rows, generator=generator) for _ in range(passes)])
    if n_rows >= part:
        walk = F.pad(walk, (0, batches * part - n_rows), value=-1)
    return walk.flatten()[: steps * part].view(steps, part)
