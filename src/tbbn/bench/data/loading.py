"""Load a data set by name: `cifar100`, `folder:PATH`, or several in sequence, `mnist+svhn`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tbbn.bench.data.sources import arrays, bundled, folders, official, packed
from tbbn.bench.data.sources.contents import Stats, make_source
from tbbn.bench.data.types import UNREADABLE, Part, Progress, Source
from tbbn.errors import UserError, unknown_name
from tbbn.registry import BUILT_IN, DATASETS

_DISSIMILAR = ("mnist", "fashion-mnist", "svhn", "cifar10", "stl10")
_SEQUENCE_STATS: Stats = ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))  # those of the paper's code for its five data sets
SEQUENCE_SIZE = 32


def load(
    name: str,
    root: str | Path = "data",
    *,
    download: bool = True,
    size: int | None = None,
    unreadable: str = "fail",
    split: float = 0.0,
    on_progress: Progress | None = None,
) -> Source:
    """The data set of that name, read from `root` or downloaded into it.

    `size` resizes the images to size x size; by default they keep their size. An image file that cannot be read is an
    error (`unreadable="fail"`) or left out ("skip"). `split` divides a folder without test images: the fraction of each
    class to test on. `on_progress` is called with the images decoded so far and in all.
    """
    if unreadable not in UNREADABLE:
        raise unknown_name("way to treat unreadable images", unreadable, UNREADABLE)
    if size is not None and size < 1:
        raise UserError(f"{name}: size must be a positive number of pixels, got {size}")
    if "\0" in f"{name}{root}":
        raise UserError(f"{name!r} under {str(root)!r}: a path cannot contain NUL")
    arguments = {"root": Path(root).expanduser(), "download": download, "unreadable": unreadable}
    arguments |= {"size": size, "on_progress": on_progress, "split": split}
    names = members(name)
    return _load_one(name, arguments) if names == [name] else _load_sequence(name, names, arguments)


def members(name: str) -> list[str]:
    """The data sets of a sequence in order; a list of the name itself if it is no sequence."""
    # The name of a folder may contain a plus sign.
    if name.startswith(("folder:", "packed:")) and Path(name.partition(":")[2]).expanduser().is_dir():
        return [name]
    return [member for part in name.split("+") for member in (_DISSIMILAR if part == "dissimilar" else (part,))]


def found(root: str | Path = "data") -> dict[str, bool]:
    """Whether each built-in data set is present under `root`. Only looks for the files; reads none."""
    root = Path(root).expanduser()
    present = {**bundled.present(), **official.present(root), **folders.present(root)}
    return present | {"dissimilar": all(present[name] for name in _DISSIMILAR)}


def base_names(name: str) -> list[str]:
    """The registered names in a data set's name.

    >>> base_names("synthetic:4x20x5x8+svhn"), base_names("folder:/my+images")
    (['synthetic', 'svhn'], ['folder'])
    """
    if name.startswith(("folder:", "packed:")):
        return [name.partition(":")[0]]
    return [part.partition(":")[0] for part in name.split("+")]


def _load_one(name: str, arguments: dict[str, Any]) -> Source:
    base, colon, argument = name.partition(":")
    parameter = inspect.signature(DATASETS.get(base)).parameters.get("argument")
    if colon and parameter is None:
        raise UserError(f"dataset {base!r} takes no argument after a colon, got {name!r}")
    if not argument.strip() and parameter is not None and parameter.default is parameter.empty:
        raise UserError(f"dataset {base!r} needs an argument after a colon: {DATASETS.entry(base).description}")
    result = DATASETS.make(base, name=name, **arguments, **({"argument": argument} if colon else {}))
    if isinstance(result, Source):
        return result
    # What a plugin returns wrongly is reported with its file and line.
    shown = name if DATASETS.entry(base).origin == BUILT_IN else DATASETS.place(base)
    contents, stats = arrays.read_arrays(shown, result)
    return make_source(name, contents, stats, arguments["size"])


def _load_sequence(name: str, names: Sequence[str], arguments: dict[str, Any]) -> Source:
    arguments = {**arguments, "size": arguments["size"] or SEQUENCE_SIZE}
    return sequence(name, [_load_one(part, arguments) for part in names])


def sequence(name: str, sources: Sequence[Source]) -> Source:
    """Several data sets as one, of one size and in RGB; the class ids of each follow those of the one before."""
    parts = []
    for kind in ("train", "test"):
        images, labels, offset = [], [], 0
        for source in sources:
            part: Part = getattr(source, kind)
            stored = part.images if isinstance(part.images, torch.Tensor) else part.images.to("cpu")
            images.append(stored.expand(-1, 3, -1, -1))
            labels.append(part.labels + offset)
            offset += len(source.classes)
        parts.append(Part(torch.cat(images), torch.cat(labels)))
    classes = tuple(f"{source.name}/{label}" for source in sources for label in source.classes)
    groups = tuple(i for i, source in enumerate(sources) for _ in source.classes)
    skipped = tuple(file for source in sources for file in source.skipped)
    return Source(name, parts[0], parts[1], classes, *_SEQUENCE_STATS, groups, skipped)


def _dissimilar(
    name: str, root: Path, size: int | None, download: bool, unreadable: str, on_progress: Progress | None
) -> Source:
    arguments = {"root": root, "download": download, "unreadable": unreadable}
    return _load_sequence(name, _DISSIMILAR, arguments | {"size": size, "on_progress": on_progress})


# A function may take any of name, root, size, download, unreadable, split, on_progress and argument (what follows a colon).
_BUILT_IN: tuple[tuple[str, Callable[..., Source], str], ...] = (
    (
        "digits",
        bundled.digits,
        "10 handwritten digits from scikit-learn, 1 442 + 355 grey images of 8x8; no download",
    ),
    (
        "synthetic",
        bundled.synthetic,
        "20 generated classes, 40 + 10 images of 16x16 each; synthetic:CLASSESxTRAINxTESTxSIZE for others",
    ),
    *((name, official.read_official, entry.description) for name, entry in official.OFFICIAL.items()),
    (
        "tiny-imagenet",
        folders.tiny_imagenet,
        "200 classes, 100 000 + 10 000 images of 64x64; a folder, or its zip",
    ),
    (
        "imagenet100",
        folders.imagenet100,
        "100 classes of ImageNet, stored at 256x256; a folder",
    ),
    (
        "dissimilar",
        _dissimilar,
        f"the paper's sequence of five dissimilar data sets at 32x32: {'+'.join(_DISSIMILAR)}",
    ),
    (
        "packed",
        packed.packed,
        "packed:PATH, made by tbbn data pack; read during training if it does not fit in memory",
    ),
    (
        "folder",
        folders.folder,
        "folder:PATH, your own images in PATH/train/<class>/ and PATH/test/<class>/ (or val); data.split divides PATH/<class>/",
    ),
    (
        "arrays",
        arrays.arrays,
        "arrays:DIGEST, the data passed to tbbn.run(data=...) in this process",
    ),
)
for _name, _read, _description in _BUILT_IN:
    DATASETS.register(_name, _read, _description)
