"""Images read while they are trained on: for sets that fit neither on the device nor in memory.

All rows of an epoch are known before it begins, so threads read the next batches from the mapped shards while the
device works on this one. On a GPU a batch is read into pinned memory and copied by a stream of its own. What comes out
is what indexing the whole set would give.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tbbn.bench.data.packed.index import Stored
from tbbn.errors import UserError

STREAMING = ("auto", "yes", "no")
_SHARE = 0.5  # of the free memory that a set may take before it is streamed
_THREADS = 4
_DEPTH = 8  # batches read ahead at most,
_AHEAD = 1 << 28  # and bytes of them


class Ahead(Protocol):
    """What has to be read of each batch, in their order: a list that is empty or holds the batch's images."""

    def __iter__(self) -> Iterator[list[Tensor]]: ...

    def __next__(self) -> list[Tensor]: ...

    def ready(self) -> bool:
        """Whether the next one comes without waiting."""
        ...


class Nothing:
    """Nothing to be read: the images lie on the device."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        return []

    def ready(self) -> bool:
        return True


def placed(images: Tensor | Stored, device: torch.device, stream: str = "auto") -> Tensor | Streamed:
    """The images on the device, or a stream of them: "yes", "no", or "auto" where they take over half of what is free."""
    if isinstance(images, Tensor):
        if stream == "yes":
            raise UserError("data.stream = 'yes' needs a packed data set: see tbbn data pack --help, or use 'auto'")
        return images.to(device)
    if stream == "yes" or (stream == "auto" and images.shape.numel() > _SHARE * _free_bytes(device)):
        return Streamed(images, device)
    return images.to(device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Streamed:
    """Images (N, C, H, W) uint8 on the disk that are asked for as if they lay on the device."""

    def __init__(self, stored: Stored, device: torch.device, n_threads: int | None = None) -> None:
        self.stored, self.device, self.shape = stored, device, stored.shape
        self.pool = ThreadPoolExecutor(n_threads or min(_THREADS, os.cpu_count() or 1), "tbbn-read")

    def ahead(self, parts: Sequence[Tensor]) -> Reader:
        """The images of each part (n,) of rows on the CPU, one part after the other."""
        return Reader(self, parts)


@dataclass(eq=False)
class _Slot:
    """Room for one batch: pinned memory and its copy on the device; on a CPU both are the same."""

    host: Tensor
    there: Tensor
    copied: torch.cuda.Event | None = None  # the copy is on the device, its source may be overwritten
    released: torch.cuda.Event | None = None  # the step has been computed, the copy may be overwritten
    reading: Future[None] | None = None


class Reader:
    """Batches read ahead into a ring of slots. What was given out is valid until the next one is asked for.

    Threads touch the host's memory only: a call of CUDA in one of them would break a graph being captured in another.
    """

    def __init__(self, images: Streamed, parts: Sequence[Tensor]) -> None:
        self.images, self.parts, self.place = images, parts, 0
        longest = max((len(part) for part in parts), default=0)
        shape = (longest, *images.shape[1:])
        depth = max(2, min(_DEPTH, _AHEAD // max(1, torch.Size(shape).numel())))
        cuda = images.device.type == "cuda"
        self.side = torch.cuda.Stream(images.device) if cuda else None
        self.slots: list[_Slot] = []
        for i in range(min(depth, len(parts))):
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=cuda)
            slot = _Slot(host, torch.empty(shape, dtype=torch.uint8, device=images.device) if cuda else host)
            if cuda:
                slot.copied, slot.released = torch.cuda.Event(), torch.cuda.Event()
                slot.released.record(
                    torch.cuda.current_stream(images.device)
                )  # whoever had this memory before is done by then
            self.slots.append(slot)
            self._read(i)

    def _slot(self, place: int) -> _Slot:
        return self.slots[place % len(self.slots)]

    def _read(self, place: int) -> None:
        part, slot = self.parts[place], self._slot(place)
        slot.reading = self.images.pool.submit(self.images.stored.read, part, slot.host[: len(part)])

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def ready(self) -> bool:
        if self.place >= len(self.parts):
            return True
        reading, before = self._slot(self.place).reading, self._slot(self.place - 1)
        assert reading is not None
        copied = not self.place or before.copied is None or before.copied.query()
        return reading.done() and copied

    def __next__(self) -> list[Tensor]:
        if self.place:
            self._free(self.place - 1)
        if self.place >= len(self.parts):
            raise StopIteration
        slot, n = self._slot(self.place), len(self.parts[self.place])
        assert slot.reading is not None
        slot.reading.result()
        if self.side is not None:
            assert slot.copied is not None and slot.released is not None
            self.side.wait_event(slot.released)
            with torch.cuda.stream(self.side):
                slot.there[:n].copy_(slot.host[:n], non_blocking=True)
                slot.copied.record(self.side)
            torch.cuda.current_stream(self.images.device).wait_event(slot.copied)
        self.place += 1
        return [slot.there[:n]]

    def _free(self, place: int) -> None:
        """The batch given out last is used up: the next one for its slot may be read."""
        slot = self._slot(place)
        if slot.released is not None and slot.copied is not None:
            slot.released.record(torch.cuda.current_stream(self.images.device))
            slot.copied.synchronize()
        if place + len(self.slots) < len(self.parts):
            self._read(place + len(self.slots))
