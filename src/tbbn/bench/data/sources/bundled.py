"""The data sets that need no download: scikit-learn's digits, and synthetic images made on the fly."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tbbn.bench.data.types import Contents, Split
from tbbn.errors import UserError

_SEED = 2023
_MOST_BYTES = 2**32  # some dozens of times as much is needed while they are made


def digits() -> Contents:
    """The 1797 handwritten digits, 8x8 and grey; every 5th image of each class is for test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("digits: scikit-learn is required, it brings the images; pip install scikit-learn") from error
    bunch = load_digits()
    images = torch.as_tensor(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    labels = torch.as_tensor(bunch.target).long()
    same = F.one_hot(labels)  # (N, 10)
    place = (same.cumsum(0) * same).sum(1)  # 1, 2, 3 ... within the class
    test = place % 5 == 0
    return Contents(Split(images[~test], labels[~test]), Split(images[test], labels[test]), tuple("0123456789"))


def synthetic(spec: str = "20x40x10x16") -> Contents:
    """Images (N, 3, S, S) of the CLASSESxTRAINxTESTxSIZE in `spec`, the same ones each time.

    A class is a smooth colour pattern. An image of it is the pattern moved by up to an eighth, under a smooth pattern
    of its own and pixel noise.
    """
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})x(\d{1,9})", spec, re.ASCII)
    n_classes, n_train, n_test, size = (int(number) for number in match.groups()) if match else (0, 0, 0, 0)
    if min(n_classes, n_train, n_test) < 1 or size < 4:
        raise UserError(
            "synthetic: needs CLASSESxTRAINxTESTxSIZE with a size of at least 4, such as synthetic:10x20x5x8, "
            f"got {spec!r}"
        )
    n_bytes = n_classes * (n_train + n_test) * 3 * size**2
    if n_bytes > _MOST_BYTES:
        raise UserError(f"synthetic: {spec} is {n_bytes} bytes of images; at most {_MOST_BYTES} are made")
    generator = Generator().manual_seed(_SEED)
    patterns = _smooth(n_classes, size, generator)
    train, test = (_draw(patterns, n, generator) for n in (n_train, n_test))
    return Contents(train, test, tuple(str(label) for label in range(n_classes)))


def _draw(patterns: Tensor, n_each: int, generator: Generator) -> Split:
    n_classes, _, size, _ = patterns.shape
    labels = torch.arange(n_classes).repeat_interleave(n_each)
    n, reach = len(labels), max(1, size // 8)
    moves = torch.randint(-reach, reach + 1, (n, 2, 1), generator=generator)
    rows, columns = ((torch.arange(size) + moves) % size).unbind(1)  # each (n, S)
    images = patterns[labels[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    images = 0.12 * images + 0.12 * _smooth(n, size, generator) + 0.1 * torch.randn(images.shape, generator=generator)
    return Split((images + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8), labels)


def _smooth(n: int, size: int, generator: Generator) -> Tensor:
    """Random smooth patterns (n, 3, S, S) of unit scale."""
    return F.interpolate(torch.randn(n, 3, 4, 4, generator=generator), (size, size), mode="bilinear")
