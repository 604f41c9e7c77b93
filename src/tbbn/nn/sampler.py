"""``tbbn.ReplayBatchSampler``: batches with a fixed number of current and memory rows, from any two datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from tbbn.errors import UserError, unknown_name
from tbbn.nn.plan import whole_number

LENGTHS = ("longer", "current")


class ReplayBatchSampler(Sampler[list[int]]):
    """Batches ``[current ; memory]`` for a ``DataLoader`` over ``ConcatDataset([current_data, memory_data])``.

    Args:
        current_data, memory_data: the two datasets, or their lengths.
        current, memory: rows of each in a batch. Every batch is full: a dataset that ends is reshuffled and starts over.
        length: the batches of an epoch: "longer" (until both datasets have been seen), "current" (until the current one has
            been seen), or a number.
        seed: the seed of the order. The order differs from epoch to epoch; ``set_epoch`` chooses the epoch.

    Without memory rows (the first task) batches are made of ``current + memory`` current rows. The attributes ``current`` and
    ``memory`` are the counts of every batch, for :func:`tbbn.balance`.

    Example::

        >>> sampler = ReplayBatchSampler(100, 30, current=6, memory=2)
        >>> len(sampler), [len(batch) for batch in sampler][0]
        (17, 8)
    """

    def __init__(
        self,
        current_data: Sized | int,
        memory_data: Sized | int,
        *,
        current: int = 48,
        memory: int = 16,
        length: str | int = "longer",
        seed: int = 0,
    ) -> None:
        sizes = [data if not isinstance(data, Sized) else len(data) for data in (current_data, memory_data)]
        self.sizes = tuple(whole_number("ReplayBatchSampler: the length of a dataset", n) for n in sizes)
        self.current = whole_number("ReplayBatchSampler: current", current)
        self.memory = whole_number("ReplayBatchSampler: memory", memory)
        if not (self.sizes[0] and self.current):
            raise UserError("ReplayBatchSampler: there must be current rows, in the dataset and in a batch.")
        if not self.sizes[1]:
            self.current, self.memory = self.current + self.memory, 0
        self.seed = whole_number("ReplayBatchSampler: seed", seed)
        self.batches = self._epoch_length(length)
        self.set_epoch(0)

    def _epoch_length(self, length: str | int) -> int:
        if not isinstance(length, str):
            batches = whole_number("ReplayBatchSampler: length", length)
            if not batches:
                raise UserError("ReplayBatchSampler: length must be positive, got 0.")
            return batches
        if length not in LENGTHS:
            raise unknown_name("length of an epoch", length, LENGTHS)
        passes = [-(-n // k) for n, k in zip(self.sizes, (self.current, self.memory), strict=True) if k]
        return max(passes) if length == "longer" else passes[0]

    def __len__(self) -> int:
        return self.batches

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number ``epoch``. By default each iteration is the next epoch."""
        # The epoch of the latest iteration, or of the first one to come.
        self.epoch = whole_number("ReplayBatchSampler: epoch", epoch)
        self._following = self.epoch  # the epoch of the next iteration
        self._given = 0  # batches of ``epoch`` that have been yielded
        self._skipped = 0  # batches that the next iteration leaves out: they were trained before

    def __iter__(self) -> Iterator[list[int]]:
        # This runs at the first batch, not at iter(): a DataLoader with workers asks for two iterators and uses one.
        epoch = self.epoch = self._following
        first = self._given = self._skipped
        self._following, self._skipped = epoch + 1, 0
        current, memory = (
            _order(n, k * self.batches, self.seed, epoch, kind).view(self.batches, k)
            for kind, (n, k) in enumerate(zip(self.sizes, (self.current, self.memory), strict=True))
        )
        rows = torch.cat([current, memory + self.sizes[0]], 1).tolist()
        for i in range(first, self.batches):
            if self.epoch == epoch:
                self._given = i + 1
            yield rows[i]

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position in the latest epoch. Pass the number of trained batches if ``DataLoader`` workers prefetch."""
        done = self._given if batches is None else whole_number("ReplayBatchSampler: batches", batches)
        return {"epoch": self.epoch, "batches": done, **self._fixed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batch after the last one of ``state``."""
        changed = [f"{k} was {state.get(k)}, is {v}" for k, v in self._fixed().items() if state.get(k) != v]
        if changed:
            raise UserError(f"ReplayBatchSampler: the state belongs to another sampler: {'; '.join(changed)}.")
        done = whole_number("ReplayBatchSampler: batches", state["batches"])
        is_over = done >= self.batches
        self.set_epoch(state["epoch"] + is_over)
        self._skipped = self._given = 0 if is_over else done

    def _fixed(self) -> dict[str, Any]:
        return {
            "sizes": list(self.sizes), "counts": [self.current, self.memory], "length": self.batches, "seed": self.seed,
        }  # fmt: skip


def _order(n: int, wanted: int, seed: int, epoch: int, kind: int) -> Tensor:
    """``wanted`` rows of ``n``: as many shuffled passes as it takes."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) * 2 + kind)
    passes = -(-wanted // max(n, 1))  # 0 for an empty dataset, of which no rows are wanted
    rows = [torch.randperm(n, generator=generator) for _ in range(passes)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *rows])[:wanted]
