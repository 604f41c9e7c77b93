"""Data sets in folders of images: train/<class>/* and test/<class>/* or val/<class>/*."""

from __future__ import annotations

import os
from pathlib import Path

from tbbn.bench.data.packed.index import PackedSet, is_packed
from tbbn.bench.data.packed.workers import Workers
from tbbn.bench.data.packed.writer import NoRoom, PackRequest, write_packed
from tbbn.bench.data.sources import archives
from tbbn.bench.data.sources.contents import IMAGENET_STATS, Contents, make_source
from tbbn.bench.data.sources.decoding import unreadable_error
from tbbn.bench.data.sources.images import SKIP_OPTION, decode
from tbbn.bench.data.sources.listing import FolderListing, chosen_classes, class_names, is_image_folder, list_folder
from tbbn.bench.data.sources.packed import packed_source
from tbbn.bench.data.types import Part, Progress, Source
from tbbn.errors import UserError, printable

TINY_ZIP = "tiny-imagenet-200.zip"
_TINY_FOLDERS = ("tiny-imagenet-200", "tiny-imagenet")
_CACHED_FROM = 1 << 30  # bytes of decoded images from which ImageNet-100 is kept decoded on disk


def present(root: Path) -> dict[str, bool]:
    tiny = tiny_imagenet_folder(root) is not None or (root / TINY_ZIP).exists()
    found = {"tiny-imagenet": tiny, "imagenet100": is_image_folder(root / "imagenet100")}
    return {name: there or is_packed(root / f"{name}-packed") for name, there in found.items()}


def folder(
    name: str, argument: str, size: int | None, unreadable: str, split: float, on_progress: Progress | None
) -> Source:
    path = Path(argument).expanduser()
    contents = read_folder(name, path, size, unreadable=unreadable, split=split, on_progress=on_progress)
    return make_source(name, contents, IMAGENET_STATS)


def tiny_imagenet(name: str, root: Path, size: int | None, unreadable: str, on_progress: Progress | None) -> Source:
    """Tiny-ImageNet packed, as published with val/val_annotations.txt, or with one folder per class in val/."""
    if is_packed(root / f"{name}-packed"):
        return packed_source(name, root / f"{name}-packed", size)
    path = tiny_imagenet_folder(root)
    if path is None and (root / TINY_ZIP).exists():
        archives.unpack(root / TINY_ZIP, root, _TINY_FOLDERS[0])
        path = tiny_imagenet_folder(root)
    if path is None:
        raise UserError(
            f"{name}: no data under {root}; place tiny-imagenet-200/ or tiny-imagenet-200.zip there, from "
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
        )
    # The published test/ has no labels.
    contents = read_folder(
        name, path, size or 64, test_names=("val", "test"), unreadable=unreadable, on_progress=on_progress
    )
    return make_source(name, contents, IMAGENET_STATS)


def tiny_imagenet_folder(root: Path) -> Path | None:
    """The folder of Tiny-ImageNet under `root`."""
    return next((root / name for name in _TINY_FOLDERS if is_image_folder(root / name)), None)


def imagenet100(name: str, root: Path, size: int | None, unreadable: str, on_progress: Progress | None) -> Source:
    """ImageNet-100 packed, or the classes listed in imagenet100/classes.txt, or the first hundred by name."""
    if is_packed(root / f"{name}-packed"):
        return packed_source(name, root / f"{name}-packed", size)
    path = root / "imagenet100"
    if not is_image_folder(path):
        raise UserError(
            f"{name}: no data under {root}; place imagenet100/train/<wnid>/ and imagenet100/val/<wnid>/ there, "
            "and imagenet100/classes.txt to select and order the classes"
        )
    contents = read_folder(
        name,
        path,
        size or 256,
        classes=_imagenet100_classes(path),
        test_names=("val", "test"),
        cache=True,
        unreadable=unreadable,
        on_progress=on_progress,
    )
    return make_source(name, contents, IMAGENET_STATS)


def _imagenet100_classes(path: Path) -> list[str]:
    chosen = path / "classes.txt"
    if chosen.exists():
        return chosen_classes(chosen)
    classes = class_names(path / "train")[:100]
    if len(classes) < 100:
        raise UserError(
            f"{path / 'train'}: needs 100 class folders, has {len(classes)}; or list the classes in {chosen}"
        )
    return classes


def list_named(name: str, root: Path, split: float = 0.0) -> FolderListing | None:
    """The files of a data set that is a folder of images: `folder:PATH`, or a folder of its name under the root."""
    base, _, argument = name.partition(":")
    if base == "folder":
        return list_folder(name, Path(argument).expanduser(), split=split)
    if base == "tiny-imagenet":
        path = tiny_imagenet_folder(root)
        return None if path is None else list_folder(name, path, None, ("val", "test"))
    if not is_image_folder(root / name):
        return None
    if base == "imagenet100":
        return list_folder(name, root / name, _imagenet100_classes(root / name), ("val", "test"))
    return list_folder(name, root / name)


def read_folder(
    owner: str,
    path: Path,
    size: int | None = None,
    *,
    channels: int = 3,
    classes: list[str] | None = None,
    test_names: tuple[str, str] = ("test", "val"),
    cache: bool = False,
    split: float = 0.0,
    unreadable: str = "fail",
    on_progress: Progress | None = None,
) -> Contents:
    """Read a folder; `classes` selects and orders class folders, `split` divides one without train/ and test/.

    An unreadable image is an error, or left out if `unreadable` is "skip". `cache` keeps a large set decoded on disk, as a
    packed set inside the folder.
    """
    listed = list_folder(owner, path, classes, test_names, split)
    if cache and size is not None and listed.n_images * channels * size**2 >= _CACHED_FROM:
        request = PackRequest(listed, size, keep_common_size=False, skip_option=SKIP_OPTION)
        packed = _packed_cache(request, unreadable, on_progress)
        if packed is not None:
            train, test = (Part(*pair) for pair in zip(packed.images, packed.labels, strict=True))
            return Contents(train, test, packed.classes, packed.skipped)
    return _decode_folder(owner, listed, size, channels, unreadable, on_progress)


def _packed_cache(request: PackRequest, unreadable: str, on_progress: Progress | None) -> PackedSet | None:
    """The folder as a packed set inside it, brought up to date; None if it cannot be written there."""
    dest = request.listed.folder / f"packed-{request.size}"
    # Threads: a user's script may lack the main guard that worker processes need.
    workers = Workers(min(16, os.cpu_count() or 1), threads=True)
    try:
        packed = write_packed(
            request, dest, workers=workers, unreadable=unreadable, overwrite=True, wait=True, on_progress=on_progress
        ).packed
    except (NoRoom, OSError):
        return None
    if packed.unreadable and unreadable == "fail":  # they were skipped when the cache was written
        first = printable(": ".join(packed.unreadable[0]))
        raise unreadable_error(first, len(packed.unreadable), request.listed.n_images, SKIP_OPTION)
    return packed


def _decode_folder(
    owner: str, listed: FolderListing, size: int | None, channels: int, unreadable: str, on_progress: Progress | None
) -> Contents:
    """Decode both parts into memory."""
    parts: list[Part] = []
    skipped: list[str] = []
    n_done = 0
    for folder, listing in zip(listed.parts, listed.listings, strict=True):
        report = None if on_progress is None else _shifted(on_progress, n_done, listed.n_images)
        part, left_out = decode(listing, owner, size=size, channels=channels, unreadable=unreadable, on_progress=report)
        missing = set(range(len(listed.classes))) - set(part.labels.tolist())
        if missing and left_out:
            raise UserError(f"{folder / listed.classes[min(missing)]}: holds no readable image; add some or remove it")
        parts.append(part)
        skipped += [str(file.relative_to(listed.folder)) for file in left_out]
        n_done += len(listing.files)
    return Contents(parts[0], parts[1], listed.classes, tuple(skipped))


def _shifted(on_progress: Progress, n_before: int, n_all: int) -> Progress:
    return lambda done, _: on_progress(n_before + done, n_all)
