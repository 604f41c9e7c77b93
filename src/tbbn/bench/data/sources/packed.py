"""Packed sets as a source: `packed:PATH`, and the named data sets that were packed under the root."""

from __future__ import annotations

from pathlib import Path

from tbbn.bench.data.packed.index import open_packed
from tbbn.bench.data.sources.contents import IMAGENET_STATS
from tbbn.bench.data.types import Part, Source
from tbbn.errors import UserError


def packed(name: str, argument: str, size: int | None = None) -> Source:
    return packed_source(name, Path(argument).expanduser(), size)


def packed_source(name: str, folder: Path, size: int | None) -> Source:
    """The packed set in a folder. Its images stay on disk until the engine asks for them."""
    found = open_packed(folder)
    height, width = found.images[0].shape[2:]
    if size is not None and (height, width) != (size, size):
        raise UserError(
            f"{name}: packed at {height}x{width}, but data.size is {size}; pack it with --size {size}, or do not set data.size"
        )
    train, test = (Part(images, labels) for images, labels in zip(found.images, found.labels, strict=True))
    return Source(name, train, test, found.classes, *IMAGENET_STATS, skipped=found.skipped)
