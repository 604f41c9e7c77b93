"""A data set without its images: labels and shapes, enough to plan a run. Downloads nothing, and decodes one image at most."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tbbn.bench.data import loading
from tbbn.bench.data.packed.index import is_packed
from tbbn.bench.data.sources.contents import IMAGENET_STATS
from tbbn.bench.data.sources.decoding import Unreadable, open_image, pil_silenced
from tbbn.bench.data.sources.facts import FACTS
from tbbn.bench.data.sources.folders import list_named
from tbbn.bench.data.sources.listing import FolderListing
from tbbn.bench.data.sources.official import OFFICIAL
from tbbn.bench.data.types import Part, Source
from tbbn.errors import UserError


class Outline(NamedTuple):
    """A source whose images may have a shape but no pixels. The note says which numbers are estimates, if any."""

    source: Source
    note: str = ""


def outline(
    name: str, root: str | Path = "data", *, size: int | None = None, unreadable: str = "fail", split: float = 0.0
) -> Outline:
    """The outline of a data set. Files of a folder are counted; the numbers of a published set are known.

    Any other data set is loaded, without downloading.
    """
    names, root = loading.members(name), Path(root).expanduser()
    if names == [name]:
        return _outline_one(name, root, size, unreadable, split)
    parts = [_outline_one(part, root, size or loading.SEQUENCE_SIZE, unreadable, split) for part in names]
    notes = dict.fromkeys(part.note for part in parts if part.note)
    return Outline(loading.sequence(name, [part.source for part in parts]), "; ".join(notes))


def _outline_one(name: str, root: Path, size: int | None, unreadable: str, split: float) -> Outline:
    is_folder = name.startswith("folder:") and name.removeprefix("folder:").strip()
    if (name not in FACTS and not is_folder) or is_packed(root / f"{name}-packed"):
        return Outline(loading.load(name, root, download=False, size=size, unreadable=unreadable, split=split))
    if name not in OFFICIAL or not OFFICIAL[name].files_present(root):
        listed = list_named(name, root, split)
        if listed is not None:
            return _of_listing(name, listed, size, unreadable)
    facts = FACTS[name]
    channels, height, width = facts.shape
    train, test = (torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in (facts.train, facts.test))
    classes = tuple(map(str, range(len(facts.train))))
    made = _source(name, train, test, classes, (channels, size or height, size or width))
    return Outline(made, facts.note and f"{name}: {facts.note}")


def _of_listing(name: str, listed: FolderListing, size: int | None, unreadable: str) -> Outline:
    train, test = (torch.tensor(listing.labels) for listing in listed.listings)
    channels = FACTS[name].shape[0] if name in OFFICIAL else 3
    if name in FACTS and name not in OFFICIAL:
        size = size or FACTS[name].shape[1]
    shape = (channels, size, size) if size else _shape_of_first(listed, channels)
    skips = f"{name}: images are counted, not read; unreadable ones would be skipped"
    made = _source(name, train, test, listed.classes, shape)
    return Outline(made, skips if unreadable == "skip" else "")


def _shape_of_first(listed: FolderListing, channels: int) -> tuple[int, int, int]:
    """The shape of the first readable training image."""
    problem = ""
    with pil_silenced():
        for file in listed.listings[0].files:
            try:
                width, height = open_image(file, channels, None).size
            except Unreadable as error:
                problem = problem or str(error)
            else:
                return channels, height, width
    raise UserError(problem)


def _source(name: str, train: Tensor, test: Tensor, classes: tuple[str, ...], shape: tuple[int, int, int]) -> Source:
    """A source of these labels; its images are on torch's meta device, which has shapes and no storage."""
    parts = [Part(torch.empty((len(y), *shape), dtype=torch.uint8, device="meta"), y) for y in (train, test)]
    mean, std = (stat[: shape[0]] for stat in IMAGENET_STATS)
    return Source(name, parts[0], parts[1], classes, mean, std)
