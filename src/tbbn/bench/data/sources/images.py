"""Image files decoded once into a uint8 tensor.

Where asked, a large set is kept decoded in a packed file, which later runs map instead of decoding.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tbbn.bench.data.sources.decoding import Unreadable, open_image, pil_silenced
from tbbn.bench.data.types import Split
from tbbn.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Progress = Callable[[int, int], None]  # images decoded so far, images in all

UNREADABLE = ("fail", "skip")  # what to do with an image file that cannot be read
_PACKED_FROM = 1 << 30  # bytes of decoded images above which they are kept on disk
_AT_ONCE = 64  # images a thread decodes before it reports: small ones cost less than the report


@dataclass(frozen=True)
class Listing:
    """The files of one split and the class of each."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]


def decode(
    listing: Listing,
    owner: str,
    *,
    size: int | None = None,
    channels: int = 3,
    pack: Path | None = None,
    unreadable: str = "fail",
    on_progress: Progress | None = None,
) -> tuple[Split, tuple[Path, ...]]:
    """The images of a listing as one tensor, and the files left out of it.

    With `size`, the shorter side of an image of another size becomes `size` and the centre square is kept. Without it,
    all images must be of one size. `pack` is the stem of the packed file, kept above 1 GiB of images. Files that cannot
    be read are named and counted in one error, or left out if `unreadable` is "skip".
    """
    with pil_silenced():
        try:
            return _decode(listing, owner, size, channels, pack, on_progress), ()
        except _SomeUnreadable as error:
            broken = error.broken
            if unreadable == "fail" or len(broken) == len(listing.files):
                raise UserError(_complaint(owner, listing, broken)) from None
    good = [i for i in range(len(listing.files)) if i not in broken]
    rest = Listing(tuple(listing.files[i] for i in good), tuple(listing.labels[i] for i in good))
    split, _ = decode(rest, owner, size=size, channels=channels, pack=pack, on_progress=on_progress)
    return split, tuple(listing.files[i] for i in sorted(broken))


class _SomeUnreadable(Exception):
    """Files of a listing that cannot be read: for the place of each, what is said about it."""

    def __init__(self, broken: dict[int, str]) -> None:
        super().__init__(broken)
        self.broken = broken


def _complaint(owner: str, listing: Listing, broken: dict[int, str]) -> str:
    first = broken[min(broken)]
    if len(broken) == len(listing.files):
        return f"{first}; nor is any other image of this part of {owner}" if len(broken) > 1 else first
    count = f"; {len(broken)} of {len(listing.files)} are not" if len(broken) > 1 else ""
    return f"{first}{count}; mend or remove, or leave out with data.unreadable = 'skip'"


def _decode(
    listing: Listing, owner: str, size: int | None, channels: int, pack: Path | None, on_progress: Progress | None
) -> Split:
    first = _first(listing, channels, size)
    shape = torch.Size((len(listing.files), channels, first.size[1], first.size[0]))
    labels = torch.tensor(listing.labels)
    if pack is None or shape.numel() < _PACKED_FROM:
        images = torch.empty(shape, dtype=torch.uint8)
        _fill(images, listing, owner, size, on_progress)
        return Split(images, labels)
    file = _packed_file(pack, listing, shape)
    if not file.exists() and not _has_room(file.parent, shape.numel()):
        return _decode(listing, owner, size, channels, None, on_progress)
    if not file.exists():
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            _fill(_mapped(partial, shape, shared=True), listing, owner, size, on_progress)
            for stale in file.parent.glob(f"{pack.name}-{first.size[0]}-*.u8"):
                stale.unlink()
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    return Split(_mapped(file, shape, shared=False), labels)


def _first(listing: Listing, channels: int, size: int | None) -> Image:
    """The first image that can be read: it says how large all of them must be."""
    broken = {}
    for place, file in enumerate(listing.files):
        try:
            return open_image(file, channels, size)
        except Unreadable as error:
            broken[place] = str(error)
    raise _SomeUnreadable(broken)


def _fill(images: Tensor, listing: Listing, owner: str, size: int | None, on_progress: Progress | None) -> None:
    """Decode every file of the listing into its row of `images` (N, C, H, W); goes on after one that cannot be read."""
    n, channels, height, width = images.shape
    broken: dict[int, str] = {}

    def put(index: int) -> None:
        try:
            image = open_image(listing.files[index], channels, size)
        except Unreadable as error:
            broken[index] = str(error)
            return
        if image.size != (width, height):
            raise UserError(
                f"{owner}: images differ in size ({width}x{height} and {image.size[0]}x{image.size[1]}: "
                f"{listing.files[index]}); give a size to resize them to"
            )
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        images[index] = pixels.view(height, width, channels).permute(2, 0, 1)

    def put_some(start: int) -> int:
        end = min(start + _AT_ONCE, n)
        for index in range(start, end):
            put(index)
        return end

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for done in pool.map(put_some, range(0, n, _AT_ONCE)):
            if on_progress is not None:
                on_progress(done, n)
    if broken:
        raise _SomeUnreadable(broken)


def _packed_file(pack: Path, listing: Listing, shape: torch.Size) -> Path:
    """The packed file of exactly these images: its name holds a digest of paths, lengths, times and shape."""
    digest = hashlib.sha256(repr(tuple(shape)).encode())
    for file in listing.files:
        state = file.stat() if file.exists() else os.lstat(file)  # a link to nowhere is found unreadable later
        digest.update(f"{file.relative_to(pack.parent)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return pack.with_name(f"{pack.name}-{shape[3]}-{digest.hexdigest()[:16]}.u8")


def _has_room(folder: Path, n_bytes: int) -> bool:
    """Whether a file of that length can be written there; a full disk would end the process while it writes the map."""
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 1.1 * n_bytes


def _mapped(file: Path, shape: torch.Size, *, shared: bool) -> Tensor:
    return torch.from_file(str(file), shared=shared, size=shape.numel(), dtype=torch.uint8).view(shape)
