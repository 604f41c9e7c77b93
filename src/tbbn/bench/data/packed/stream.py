"""Images read from disk during training, for sets that fit neither on the device nor in memory.

All rows of an epoch are known before it starts, so threads prefetch the next batches from the mapped shards while the device
works on the current one. On a GPU a batch is read into pinned memory and copied on a separate stream. The result equals
indexing the whole set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tbbn.bench.data.packed.index import PackedImages

_THREADS = 4
_MAX_DEPTH = 8  # most batches prefetched
_MAX_BYTES = 1 << 28  # most bytes prefetched


class Prefetch(Protocol):
    """Iterates over the batches of an epoch: for each a list with its images, empty if none had to be read."""

    def __iter__(self) -> Iterator[list[Tensor]]: ...

    def __next__(self) -> list[Tensor]: ...

    def ready(self) -> bool:
        """Whether the next batch is available without waiting."""
        ...


class NoPrefetch:
    """The images are on the device: nothing is read."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        return []

    def ready(self) -> bool:
        return True


class StreamedImages:
    """Images (N, C, H, W) uint8 on disk, and the device for their batches."""

    def __init__(self, packed: PackedImages, device: torch.device) -> None:
        self.packed, self.device, self.shape = packed, device, packed.shape
        self.pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "tbbn-read")

    def prefetch(self, batches: Sequence[Tensor]) -> Prefetcher:
        """Start reading; `batches` holds the rows (n,) of each batch, on the CPU."""
        return Prefetcher(self, batches)


@dataclass(eq=False)
class _Slot:
    """Space for one batch: pinned memory and its copy on the device. On a CPU both are the same tensor."""

    host: Tensor
    device: Tensor
    copied: torch.cuda.Event | None = None  # the copy is done: `host` may be overwritten
    released: torch.cuda.Event | None = None  # the step is done: `device` may be overwritten
    reading: Future[None] | None = None


class Prefetcher:
    """Reads batches into a ring of slots. A batch is valid until the next one is requested.

    The threads touch host memory only: a CUDA call in a thread would break a graph capture in another.
    """

    def __init__(self, images: StreamedImages, batches: Sequence[Tensor]) -> None:
        self.images, self.batches, self.position = images, batches, 0
        longest = max((len(rows) for rows in batches), default=0)
        shape = (longest, *images.shape[1:])
        depth = max(2, min(_MAX_DEPTH, _MAX_BYTES // max(1, torch.Size(shape).numel())))
        cuda = images.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(images.device) if cuda else None
        self.slots: list[_Slot] = []
        for i in range(min(depth, len(batches))):
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=cuda)
            slot = _Slot(host, torch.empty(shape, dtype=torch.uint8, device=images.device) if cuda else host)
            if cuda:
                slot.copied, slot.released = torch.cuda.Event(), torch.cuda.Event()
                # The allocator may reuse memory that work already queued on this stream still reads.
                slot.released.record(torch.cuda.current_stream(images.device))
            self.slots.append(slot)
            self._read(i)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        if self.position:
            self._release(self.position - 1)
        if self.position >= len(self.batches):
            raise StopIteration
        slot, n = self._slot(self.position), len(self.batches[self.position])
        assert slot.reading is not None
        slot.reading.result()
        if self.copy_stream is not None:
            assert slot.copied is not None and slot.released is not None
            self.copy_stream.wait_event(slot.released)
            with torch.cuda.stream(self.copy_stream):
                slot.device[:n].copy_(slot.host[:n], non_blocking=True)
                slot.copied.record(self.copy_stream)
            torch.cuda.current_stream(self.images.device).wait_event(slot.copied)
        self.position += 1
        return [slot.device[:n]]

    def ready(self) -> bool:
        if self.position >= len(self.batches):
            return True
        reading, previous = self._slot(self.position).reading, self._slot(self.position - 1)
        assert reading is not None
        copied = not self.position or previous.copied is None or previous.copied.query()
        return reading.done() and copied

    def _slot(self, position: int) -> _Slot:
        return self.slots[position % len(self.slots)]

    def _read(self, position: int) -> None:
        rows, slot = self.batches[position], self._slot(position)
        slot.reading = self.images.pool.submit(self.images.packed.read, rows, slot.host[: len(rows)])

    def _release(self, position: int) -> None:
        """The step has used this batch: start reading the next one for its slot."""
        slot = self._slot(position)
        if slot.released is not None and slot.copied is not None:
            slot.released.record(torch.cuda.current_stream(self.images.device))
            slot.copied.synchronize()
        if position + len(self.slots) < len(self.batches):
            self._read(position + len(self.slots))
