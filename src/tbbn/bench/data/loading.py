"""Data sets by name: what lies under the root is read, what is missing is downloaded, and all of it becomes tensors."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tbbn.bench.data.packed.index import PackedImages, is_packed, open_packed
from tbbn.bench.data.sources import bundled, folders
from tbbn.bench.data.sources.arrays import read_arrays, recall
from tbbn.bench.data.sources.listing import is_image_folder
from tbbn.bench.data.sources.official import OFFICIAL, Stats, fetch
from tbbn.bench.data.types import UNREADABLE, Contents, Progress, Source, Split
from tbbn.errors import UserError, unknown_name
from tbbn.registry import DATASETS, register_dataset

# Channel mean and standard deviation: ImageNet's usual ones, and those of the training images of digits and synthetic.
_IMAGENET: Stats = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_DIGITS: Stats = ((0.3052,), (0.3760,))
_SYNTHETIC: Stats = ((0.5, 0.5, 0.5), (0.16, 0.16, 0.16))
_SEQUENCE: Stats = ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))  # the paper's code on its five unlike data sets
_SEQUENCE_SIZE = 32
_PACKABLE = ("tiny-imagenet", "imagenet100")  # taken from NAME-packed under the root where that is there
_ALIASES = {"dissimilar": "mnist+fashion-mnist+svhn+cifar10+stl10"}


def found(root: str | Path = "data") -> dict[str, bool]:
    """Which of the named data sets lie under `root`; looks at paths only."""
    root = Path(root).expanduser()
    there = {"digits": importlib.util.find_spec("sklearn") is not None, "synthetic": True}
    for name, official in OFFICIAL.items():
        lies = official.lies_under(root) or official.lies_packed_under(root)
        there[name] = lies or is_image_folder(root / name)
    there["tiny-imagenet"] = folders.tiny_imagenet_folder(root) is not None or (root / folders.TINY_ZIP).exists()
    there["imagenet100"] = is_image_folder(root / "imagenet100")
    there |= {name: True for name in _PACKABLE if is_packed(root / f"{name}-packed")}
    there |= {alias: all(there[name] for name in names.split("+")) for alias, names in _ALIASES.items()}
    return there


def load(
    name: str,
    root: str | Path = "data",
    *,
    download: bool = True,
    size: int | None = None,
    unreadable: str = "fail",
    on_progress: Progress | None = None,
) -> Source:
    """The data set of that name, from what lies under `root` or by a download into it.

    `size` is the side to which the images are resized; without it they keep theirs. `unreadable` says whether an image
    file that cannot be read is an error ("fail") or left out ("skip"). `on_progress` hears of the images decoded so far
    and in all. Both concern data sets that lie in folders.
    """
    if unreadable not in UNREADABLE:
        raise unknown_name("way to treat unreadable images", unreadable, UNREADABLE)
    if size is not None and size < 1:
        raise UserError(f"{name}: size must be a positive number of pixels, got {size}")
    if "\0" in f"{name}{root}":
        raise UserError(f"{name!r} under {str(root)!r}: no path has a NUL in it")
    offered = {"root": Path(root).expanduser(), "download": download, "unreadable": unreadable}
    offered |= {"size": size, "on_progress": on_progress}
    # A plus sign may also stand in a folder's name.
    if name.startswith(("folder:", "packed:")) and _is_folder(name):
        return _one(name, offered)
    names = "+".join(_ALIASES.get(part, part) for part in name.split("+")).split("+")
    if len(names) == 1:
        return _one(name, offered)
    offered["size"] = size or _SEQUENCE_SIZE
    return _sequence(name, [_one(part, offered) for part in names])


def base_names(name: str) -> list[str]:
    """The registered names in a data set's name.

    >>> base_names("synthetic:4x20x5x8+svhn"), base_names("folder:/my+images")
    (['synthetic', 'svhn'], ['folder'])
    """
    if name.startswith(("folder:", "packed:")):
        return [name.partition(":")[0]]
    return [part.partition(":")[0] for part in name.split("+")]


def _is_folder(name: str) -> bool:
    return Path(name.partition(":")[2]).expanduser().is_dir()


def _one(name: str, offered: dict[str, Any]) -> Source:
    base, colon, argument = name.partition(":")
    own = inspect.signature(DATASETS.get(base)).parameters.get("argument")
    if colon and own is None:
        raise UserError(f"dataset {base!r} takes nothing after a colon, got {name!r}")
    if not colon and own is not None and own.default is own.empty:
        raise UserError(f"dataset {base!r} needs more after a colon: {DATASETS.entry(base).description}")
    made = DATASETS.make(base, name=name, **offered, **({"argument": argument} if colon else {}))
    if isinstance(made, Source):
        return made
    contents, stats = read_arrays(name, made)
    return _source(name, contents, stats, offered["size"])


@register_dataset("digits", "10 handwritten digits of scikit-learn, 1 442 + 355 grey images of 8x8; no download")
def _digits(name: str, size: int | None) -> Source:
    return _source(name, bundled.digits(), _DIGITS, size)


@register_dataset(
    "synthetic", "20 made-up classes, 40 + 10 images of 16x16 each; synthetic:CLASSESxTRAINxTESTxSIZE for others"
)
def _synthetic(name: str, size: int | None, argument: str = "20x40x10x16") -> Source:
    return _source(name, bundled.synthetic(argument), _SYNTHETIC, size)


def _official(
    name: str, root: Path, size: int | None, download: bool, unreadable: str, on_progress: Progress | None
) -> Source:
    official = OFFICIAL[name]
    if not official.lies_under(root) and is_image_folder(root / name):
        options: folders.ReadOptions = {"unreadable": unreadable, "on_progress": on_progress}
        contents = folders.read_folder(name, root / name, size, channels=len(official.stats[0]), **options)
        return _source(name, contents, official.stats)
    if not official.lies_under(root):
        fetch(name, root, download=download)
    return _source(name, official.read(root), official.stats, size)


for _name in OFFICIAL:
    DATASETS.register(_name, _official, OFFICIAL[_name].line)


@register_dataset("tiny-imagenet", "200 classes, 100 000 + 10 000 images of 64x64; a folder, or its zip")
def _tiny_imagenet(name: str, root: Path, size: int | None, unreadable: str, on_progress: Progress | None) -> Source:
    if is_packed(root / f"{name}-packed"):
        return _packed(name, root / f"{name}-packed", size)
    contents = folders.read_tiny_imagenet(root, size or 64, unreadable=unreadable, on_progress=on_progress)
    return _source(name, contents, _IMAGENET)


@register_dataset("imagenet100", "100 classes of ImageNet, stored at 256x256; a folder")
def _imagenet100(name: str, root: Path, size: int | None, unreadable: str, on_progress: Progress | None) -> Source:
    if is_packed(root / f"{name}-packed"):
        return _packed(name, root / f"{name}-packed", size)
    contents = folders.read_imagenet100(root, size or 256, unreadable=unreadable, on_progress=on_progress)
    return _source(name, contents, _IMAGENET)


@register_dataset("dissimilar", f"the paper's sequence of five unlike data sets at 32x32: {_ALIASES['dissimilar']}")
def _dissimilar() -> Source:
    raise AssertionError("load replaces the name by those of its parts")


@register_dataset("packed", "packed:PATH, made by tbbn data pack; read during training if it does not fit in memory")
def _packed_folder(name: str, argument: str, size: int | None) -> Source:
    return _packed(name, Path(argument).expanduser(), size)


@register_dataset(
    "folder", "folder:PATH, your own images in PATH/train/<class>/ and PATH/test/<class>/ or PATH/val/<class>/"
)
def _folder(name: str, argument: str, size: int | None, unreadable: str, on_progress: Progress | None) -> Source:
    options: folders.ReadOptions = {"unreadable": unreadable, "on_progress": on_progress}
    contents = folders.read_folder(name, Path(argument).expanduser(), size, **options)
    return _source(name, contents, _IMAGENET)


@register_dataset("arrays", "arrays:DIGEST, what was given to tbbn.run(data=...) in this process")
def _arrays(argument: str, size: int | None) -> Source:
    source = recall(argument)
    contents = Contents(source.train, source.test, source.classes)
    return _source(source.name, contents, (source.mean, source.std), size)


def _source(name: str, contents: Contents, stats: Stats, size: int | None = None) -> Source:
    train, test = (Split(_resized(split.images, size), split.labels) for split in (contents.train, contents.test))
    shapes = ["x".join(map(str, split.images.shape[1:])) for split in (train, test)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{name}: images of train ({shapes[0]}) and test ({shapes[1]}) differ in size; set data.size to resize them"
        )
    return Source(name, train, test, contents.classes, (0,) * len(contents.classes), *stats, contents.skipped)


def _packed(name: str, folder: Path, size: int | None) -> Source:
    """A packed set, which stays on the disk until the engine asks for its images."""
    packed = open_packed(folder)
    height, width = packed.images[0].shape[2:]
    if size is not None and (height, width) != (size, size):
        raise UserError(
            f"{name}: packed at {height}x{width}, {size}x{size} asked for; pack it with --size {size}, or leave data.size"
        )
    train, test = (Split(images, labels) for images, labels in zip(packed.images, packed.labels, strict=True))
    return Source(name, train, test, packed.classes, (0,) * len(packed.classes), *_IMAGENET, packed.skipped)


def _sequence(name: str, sources: list[Source]) -> Source:
    """Several data sets as one: grey repeated to RGB, class ids counted on."""
    splits = []
    for part in ("train", "test"):
        images, labels, offset = [], [], 0
        for source in sources:
            split: Split = getattr(source, part)
            images.append(split.images.to("cpu").expand(-1, 3, -1, -1))
            labels.append(split.labels + offset)
            offset += len(source.classes)
        splits.append(Split(torch.cat(images), torch.cat(labels)))
    classes = tuple(f"{source.name}/{label}" for source in sources for label in source.classes)
    groups = tuple(place for place, source in enumerate(sources) for _ in source.classes)
    skipped = tuple(file for source in sources for file in source.skipped)
    return Source(name, splits[0], splits[1], classes, groups, *_SEQUENCE, skipped)


def _resized(images: Tensor | PackedImages, size: int | None) -> Tensor | PackedImages:
    """Images (N, C, H, W) uint8 resized to size x size by PIL's bilinear rule, in pieces to save memory."""
    if size is None or images.shape[2:] == (size, size):
        return images
    assert isinstance(images, Tensor), "packed images are resized when they are packed"
    pieces = (F.interpolate(piece, (size, size), mode="bilinear", antialias=True) for piece in images.split(1024))
    return torch.cat(list(pieces))
