"""One part of the data, train or test, on the run's device: all of it, or batches prefetched from disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tbbn.bench.data.augment import evaluation_view, normalise
from tbbn.bench.data.packed.index import PackedImages
from tbbn.bench.data.packed.stream import NoPrefetch, Prefetch, StreamedImages
from tbbn.errors import UserError

STREAMING = ("auto", "yes", "no")
_MAX_SHARE = 0.5  # "auto" streams a set that would take more than this share of the free memory


@dataclass(frozen=True, eq=False)
class DeviceDataset:
    """One part of the data on the run's device, and how it becomes network input.

    The last tensor of a `prefetched` argument holds the images that `prefetch` read; if nothing is streamed it is ignored.
    """

    images: Tensor | StreamedImages  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64, arrival order
    mean: Tensor  # (C,)
    std: Tensor  # (C,)
    crop: int | None
    memory_format: torch.memory_format

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.images, StreamedImages)

    def prefetch(self, batches: Iterable[Tensor]) -> Prefetch:
        """Read the images of these batches ahead of time; does nothing if all images are on the device."""
        if isinstance(self.images, StreamedImages):
            return self.images.prefetch([rows.cpu() for rows in batches])
        return NoPrefetch()

    def locate(self, rows: Tensor, prefetched: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """A tensor with the images of `rows`, and their positions in it; None if it holds only these, in order."""
        return (prefetched[-1], None) if isinstance(self.images, StreamedImages) else (self.images, rows)

    def gather(self, rows: Tensor, prefetched: Sequence[Tensor]) -> Tensor:
        """The images (n, C, H, W) uint8 of `rows`."""
        images, chosen = self.locate(rows, prefetched)
        if chosen is None:
            return images
        # On a CPU, indexing copies byte by byte and index_select image by image.
        return images.index_select(0, chosen) if chosen.device.type == "cpu" else images[chosen]

    def evaluation_images(self, rows: Tensor, prefetched: Sequence[Tensor]) -> Tensor:
        """The network input of `rows` without augmentation."""
        return self.normalised(evaluation_view(self.gather(rows, prefetched), crop=self.crop))

    def normalised(self, images: Tensor) -> Tensor:
        return normalise(images, self.mean, self.std).contiguous(memory_format=self.memory_format)


def place_on_device(
    images: Tensor | PackedImages, device: torch.device, stream: str = "auto"
) -> Tensor | StreamedImages:
    """The images on the device, or streamed from disk.

    `stream` is "yes", "no" or "auto": stream packed images that would take more than half of the free memory.
    """
    assert stream in STREAMING
    if isinstance(images, Tensor):
        if stream == "yes":
            raise UserError("data.stream = 'yes' needs a packed data set: see tbbn data pack --help, or use 'auto'")
        return images.to(device)
    if stream == "yes" or (stream == "auto" and images.shape.numel() > _MAX_SHARE * _free_bytes(device)):
        return StreamedImages(images, device)
    return images.to(device)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device, copied from pinned memory, so that the host does not wait for the copy.

    While the host waits in one lane, no other lane can enqueue work.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
