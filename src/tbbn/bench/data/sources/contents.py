"""The contents of a data set's files, and how they become a `Source`; for all readers of this folder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tbbn.bench.data.packed.index import PackedImages
from tbbn.bench.data.selection import rank_in_class
from tbbn.bench.data.types import Part, Source
from tbbn.errors import UserError

Stats = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel, in [0, 1]
IMAGENET_STATS: Stats = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a data set's files: both parts, and the class names in the order of their ids."""

    train: Part
    test: Part
    classes: tuple[str, ...]
    skipped: tuple[str, ...] = ()  # unreadable image files that were left out


def make_source(name: str, contents: Contents, stats: Stats, size: int | None = None) -> Source:
    """The source of one data set; its images are resized to `size` x `size` if given."""
    train, test = (Part(_resized(part.images, size), part.labels) for part in (contents.train, contents.test))
    shapes = ["x".join(map(str, part.images.shape[1:])) for part in (train, test)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{name}: images of train ({shapes[0]}) and test ({shapes[1]}) differ in size; set data.size to resize them"
        )
    return Source(name, train, test, contents.classes, *stats, skipped=contents.skipped)


def is_held_out(labels: Tensor) -> Tensor:
    """True for every 5th image of each class, in order: the test images of a set without a test part."""
    order, rank = rank_in_class(torch.arange(len(labels)), labels)
    held_out = torch.empty(len(labels), dtype=torch.bool)
    held_out[order] = rank % 5 == 4
    return held_out


def _resized(images: Tensor | PackedImages, size: int | None) -> Tensor | PackedImages:
    """Images (N, C, H, W) uint8 resized by PIL's bilinear rule, in pieces to save memory."""
    if size is None or images.shape[2:] == (size, size):
        return images
    assert isinstance(images, Tensor), "packed images are resized when they are packed"
    pieces = (F.interpolate(piece, (size, size), mode="bilinear", antialias=True) for piece in images.split(1024))
    return torch.cat(list(pieces))
