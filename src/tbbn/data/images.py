"""Image files decoded once into a uint8 tensor.

Whatever the file holds becomes 8-bit RGB (or grey): 16-bit values are scaled, palettes looked up, and transparency is
laid on black. Where asked, a large set is kept decoded in a packed file, which later runs map instead of decoding.
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

from tbbn.data.files import Split
from tbbn.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Progress = Callable[[int, int], None]  # images decoded so far, images in all

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
    on_progress: Progress | None = None,
) -> Split:
    """The images of a listing as one tensor.

    With `size`, the shorter side of an image of another size becomes `size` and the centre square is kept. Without it,
    all images must be of one size. `pack` is the stem of the packed file, kept above 1 GiB of images.
    """
    first = _open(listing.files[0], channels, size)
    shape = torch.Size((len(listing.files), channels, first.size[1], first.size[0]))
    labels = torch.tensor(listing.labels)
    if pack is None or shape.numel() < _PACKED_FROM:
        images = torch.empty(shape, dtype=torch.uint8)
        _fill(images, listing, owner, size, on_progress)
        return Split(images, labels)
    file = _packed_file(pack, listing, shape)
    if not file.exists() and not _has_room(file.parent, shape.numel()):
        return decode(listing, owner, size=size, channels=channels, on_progress=on_progress)
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


def _fill(images: Tensor, listing: Listing, owner: str, size: int | None, on_progress: Progress | None) -> None:
    """Decode every file of the listing into its row of `images` (N, C, H, W)."""
    n, channels, height, width = images.shape

    def put(index: int) -> None:
        image = _open(listing.files[index], channels, size)
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


def _packed_file(pack: Path, listing: Listing, shape: torch.Size) -> Path:
    """The packed file of exactly these images: its name holds a digest of paths, lengths, times and shape."""
    digest = hashlib.sha256(repr(tuple(shape)).encode())
    for file in listing.files:
        state = file.stat()
        digest.update(f"{file.relative_to(pack.parent)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return pack.with_name(f"{pack.name}-{shape[3]}-{digest.hexdigest()[:16]}.u8")


def _has_room(folder: Path, n_bytes: int) -> bool:
    """Whether a file of that length can be written there; a full disk would end the process while it writes the map."""
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 1.1 * n_bytes


def _mapped(file: Path, shape: torch.Size, *, shared: bool) -> Tensor:
    return torch.from_file(str(file), shared=shared, size=shape.numel(), dtype=torch.uint8).view(shape)


def _open(file: Path, channels: int, size: int | None) -> Image:
    """The decoded image in 8 bits a channel, cut to `size` if given."""
    import PIL.Image

    try:
        with PIL.Image.open(file) as image:
            return _fitted(_plain(image, "L" if channels == 1 else "RGB"), size)
    except FileNotFoundError as error:
        raise UserError(f"{file}: does not exist") from error
    except (OSError, ValueError, SyntaxError, EOFError, PIL.Image.DecompressionBombError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file}: is not a readable image ({reason})") from error


def _plain(image: Image, mode: str) -> Image:
    import numpy
    import PIL.Image

    if image.mode.startswith("I"):  # 16 bits, also where PIL holds them in 32
        values = numpy.asarray(image).astype(numpy.float64) / 257
        image = PIL.Image.fromarray(numpy.clip(values.round(), 0, 255).astype(numpy.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point images have no known range")
    elif "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        black = PIL.Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = PIL.Image.alpha_composite(black, image)
    return image.convert(mode)


def _fitted(image: Image, size: int | None) -> Image:
    """The image resized so that its shorter side is `size`, then cut to the centre square, as torchvision does."""
    import PIL.Image

    if size is None or image.size == (size, size):
        return image
    width, height = image.size
    shorter = min(width, height)
    if shorter != size:
        width, height = int(size * width / shorter), int(size * height / shorter)
        image = image.resize((width, height), PIL.Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
