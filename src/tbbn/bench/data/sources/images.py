"""Image files decoded into one uint8 tensor in memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tbbn.bench.data.sources.decoding import Unreadable, open_image, pil_silenced, unreadable_error
from tbbn.bench.data.types import Listing, Part, Progress
from tbbn.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

SKIP_OPTION = "data.unreadable = 'skip'"
_IMAGES_PER_TASK = 64  # decoded by a thread between two progress reports, which cost more than a small image


def decode(
    listing: Listing,
    owner: str,
    *,
    size: int | None = None,
    channels: int = 3,
    unreadable: str = "fail",
    on_progress: Progress | None = None,
) -> tuple[Part, tuple[Path, ...]]:
    """The images of a listing as one tensor, and the files that were left out.

    With `size`, images of another size are resized so that the shorter side is `size`, and cut to the centre square.
    Without it, all images must have the same size. A single error names the first unreadable file and counts them all; with
    `unreadable="skip"` they are left out.
    """
    with pil_silenced():
        try:
            return _decode(listing, owner, size, channels, on_progress), ()
        except _SomeUnreadable as error:
            broken = error.broken
    if len(broken) == len(listing.files):
        rest_too = f"; no image of this part of {owner} is readable" if len(broken) > 1 else ""
        raise UserError(broken[min(broken)] + rest_too)
    if unreadable == "fail":
        raise unreadable_error(broken[min(broken)], len(broken), len(listing.files), SKIP_OPTION)
    good = [i for i in range(len(listing.files)) if i not in broken]
    rest = Listing(tuple(listing.files[i] for i in good), tuple(listing.labels[i] for i in good))
    part, _ = decode(rest, owner, size=size, channels=channels, on_progress=on_progress)
    return part, tuple(listing.files[i] for i in sorted(broken))


class _SomeUnreadable(Exception):
    """Some files of a listing cannot be read: `broken` holds the message for each, by position."""

    def __init__(self, broken: dict[int, str]) -> None:
        self.broken = broken


def _decode(listing: Listing, owner: str, size: int | None, channels: int, on_progress: Progress | None) -> Part:
    first = _first_readable(listing, channels, size)
    images = torch.empty((len(listing.files), channels, first.size[1], first.size[0]), dtype=torch.uint8)
    _fill(images, listing, owner, size, on_progress)
    return Part(images, torch.tensor(listing.labels))


def _first_readable(listing: Listing, channels: int, size: int | None) -> Image:
    """The first readable image; all others must have its size."""
    broken = {}
    for i, file in enumerate(listing.files):
        try:
            return open_image(file, channels, size)
        except Unreadable as error:
            broken[i] = str(error)
    raise _SomeUnreadable(broken)


def _fill(images: Tensor, listing: Listing, owner: str, size: int | None, on_progress: Progress | None) -> None:
    """Decode every file of the listing into its row of `images` (N, C, H, W); continues after unreadable ones."""
    n, channels, height, width = images.shape
    broken: dict[int, str] = {}

    def decode_one(i: int) -> None:
        try:
            image = open_image(listing.files[i], channels, size)
        except Unreadable as error:
            broken[i] = str(error)
            return
        if image.size != (width, height):
            raise UserError(
                f"{owner}: images differ in size ({width}x{height} and {image.size[0]}x{image.size[1]}: "
                f"{listing.files[i]}); set data.size to resize them"
            )
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        images[i] = pixels.view(height, width, channels).permute(2, 0, 1)

    def decode_some(start: int) -> int:
        end = min(start + _IMAGES_PER_TASK, n)
        for i in range(start, end):
            decode_one(i)
        return end

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for done in pool.map(decode_some, range(0, n, _IMAGES_PER_TASK)):
            if on_progress is not None:
                on_progress(done, n)
    if broken:
        raise _SomeUnreadable(broken)
