"""Decode one image file to 8-bit RGB (or grey): 16-bit values are scaled, palettes looked up, transparency becomes black.

No torch import here: worker processes start fast.
"""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tbbn.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image


# The formats of the suffixes that a listing accepts. PIL knows more and goes by a file's first bytes: PostScript under any name
# would start Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 2**26  # per image; a file of a few bytes can claim billions


class Unreadable(UserError):
    """A file is not a readable image."""


def unreadable_error(first: str, n: int, n_all: int, skip_option: str) -> UserError:
    """The error about `n` unreadable images of `n_all`; `first` is the message about the first."""
    count = f"; {n} of {n_all} images are unreadable" if n > 1 else ""
    return UserError(f"{first}{count}; repair or remove, or leave out with {skip_option}")


def open_image(file: Path, channels: int, size: int | None) -> Image:
    """The decoded image in 8 bits a channel, cut to `size` if given; raises `Unreadable`."""
    import PIL.Image

    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would block
            raise ValueError("not a file")
        with PIL.Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS}")
            return _fitted(_plain(image, "L" if channels == 1 else "RGB"), size)
    except FileNotFoundError as error:
        raise Unreadable(f"{file}: does not exist") from error
    except Exception as error:  # PIL's parsers raise all kinds of exceptions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, PIL.UnidentifiedImageError):
            reason = "unknown format"
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise Unreadable(f"{file}: is not a readable image ({reason})") from error


@contextmanager
def pil_silenced() -> Iterator[None]:
    """Hide PIL's warnings about images that it can read: damaged EXIF data, very large images. Not thread-safe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _plain(image: Image, mode: str) -> Image:
    import numpy
    import PIL.Image

    if image.mode.startswith("I"):  # 16 bits, which PIL may hold in 32
        values = numpy.asarray(image).astype(numpy.float64) / 257
        if not 0 <= values.min() <= values.max() <= 255:
            raise ValueError("values beyond 16 bits have no known range")
        image = PIL.Image.fromarray(values.round().astype(numpy.uint8))
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

    if size is None:
        return image
    width, height = image.size
    shorter = min(width, height)
    width, height = int(size * width / shorter), int(size * height / shorter)
    image = image.resize((width, height), PIL.Image.Resampling.BILINEAR)  # a copy if the size is the same
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
