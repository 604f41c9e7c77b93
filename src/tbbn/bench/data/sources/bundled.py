"""Data sets that need no download: scikit-learn's digits, and generated images."""

from __future__ import annotations

import importlib.util
import re

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tbbn.bench.data.sources.contents import Contents, Stats, is_held_out, make_source
from tbbn.bench.data.types import Part, Source
from tbbn.errors import UserError

_DIGITS_STATS: Stats = ((0.3052,), (0.3760,))
_SYNTHETIC_STATS: Stats = ((0.5, 0.5, 0.5), (0.16, 0.16, 0.16))
_SEED = 2023
_MAX_BYTES = 2**32  # generating takes some dozen times as much memory


def present() -> dict[str, bool]:
    return {"digits": importlib.util.find_spec("sklearn") is not None, "synthetic": True}


def digits(name: str = "digits", size: int | None = None) -> Source:
    """The 1797 handwritten digits, 8x8 and grey; every 5th image of each class is a test image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "digits: scikit-learn is required, because it contains the images; pip install scikit-learn"
        ) from error
    bunch = load_digits()
    images = torch.as_tensor(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    labels = torch.as_tensor(bunch.target).long()
    test = is_held_out(labels)
    train_part, test_part = (Part(images[rows], labels[rows]) for rows in (~test, test))
    return make_source(name, Contents(train_part, test_part, tuple("0123456789")), _DIGITS_STATS, size)


def synthetic(name: str = "synthetic", size: int | None = None, argument: str = "20x40x10x16") -> Source:
    """Generated RGB images: `argument` is CLASSESxTRAINxTESTxSIZE, with numbers of images per class. Always the same.

    A class is a smooth colour pattern. An image is its class's pattern shifted by up to an eighth, plus its own smooth pattern
    and pixel noise.
    """
    positive = r"(0*[1-9]\d{0,8})"
    match = re.fullmatch("x".join([positive] * 4), argument, re.ASCII)
    if match is None or int(match[4]) < 4:
        raise UserError(
            "synthetic: needs CLASSESxTRAINxTESTxSIZE with a size of at least 4, such as synthetic:10x20x5x8, "
            f"got {argument!r}"
        )
    n_classes, n_train, n_test, side = map(int, match.groups())
    n_bytes = n_classes * (n_train + n_test) * 3 * side**2
    if n_bytes > _MAX_BYTES:
        raise UserError(f"synthetic: {argument} is {n_bytes} bytes of images; the limit is {_MAX_BYTES}")
    generator = Generator().manual_seed(_SEED)
    patterns = _smooth(n_classes, side, generator)
    train, test = (_draw(patterns, n, generator) for n in (n_train, n_test))
    classes = tuple(str(label) for label in range(n_classes))
    return make_source(name, Contents(train, test, classes), _SYNTHETIC_STATS, size)


def _draw(patterns: Tensor, n_each: int, generator: Generator) -> Part:
    n_classes, _, side, _ = patterns.shape
    labels = torch.arange(n_classes).repeat_interleave(n_each)
    n, reach = len(labels), max(1, side // 8)
    moves = torch.randint(-reach, reach + 1, (n, 2, 1), generator=generator)
    rows, columns = ((torch.arange(side) + moves) % side).unbind(1)  # each (n, S)
    images = patterns[labels[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    images = 0.12 * images + 0.12 * _smooth(n, side, generator) + 0.1 * torch.randn(images.shape, generator=generator)
    return Part((images + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8), labels)


def _smooth(n: int, side: int, generator: Generator) -> Tensor:
    """Random smooth patterns (n, 3, S, S) of unit scale."""
    return F.interpolate(torch.randn(n, 3, 4, 4, generator=generator), (side, side), mode="bilinear")
