"""Data sets that lie in folders: train/<class>/* beside test/<class>/* or val/<class>/*."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from tbbn.bench.data.sources import archives
from tbbn.bench.data.sources.images import Listing, Progress, decode
from tbbn.bench.data.types import Contents, Split
from tbbn.errors import UserError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
_TINY = ("tiny-imagenet-200", "tiny-imagenet")
TINY_ZIP = "tiny-imagenet-200.zip"


class Options(TypedDict):
    """How image files are read: what to do with an unreadable one, and who hears of the progress."""

    unreadable: str
    on_progress: Progress | None


def is_folder_set(folder: Path) -> bool:
    """Whether `folder` holds train/ and one of test/, val/."""
    return (folder / "train").is_dir() and any((folder / name).is_dir() for name in ("test", "val"))


def tiny_imagenet_folder(root: Path) -> Path | None:
    """Where Tiny-ImageNet lies under `root`."""
    return next((root / name for name in _TINY if is_folder_set(root / name)), None)


def read_tiny_imagenet(
    root: Path, size: int, unreadable: str = "fail", on_progress: Progress | None = None
) -> Contents:
    """Tiny-ImageNet as published, with val/val_annotations.txt, or with one folder per class in val/."""
    folder = tiny_imagenet_folder(root)
    if folder is None and (root / TINY_ZIP).exists():
        archives.unpack(root / TINY_ZIP, root, _TINY[0])
        folder = tiny_imagenet_folder(root)
    if folder is None:
        raise UserError(
            f"tiny-imagenet: no data under {root}; place tiny-imagenet-200/ or tiny-imagenet-200.zip there, from "
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
        )
    # The published test/ has no labels.
    options: Options = {"unreadable": unreadable, "on_progress": on_progress}
    return read_folder("tiny-imagenet", folder, size, test_names=("val", "test"), **options)


def read_imagenet100(root: Path, size: int, unreadable: str = "fail", on_progress: Progress | None = None) -> Contents:
    """ImageNet-100: the classes of imagenet100/classes.txt, in its order, or the first hundred by name."""
    folder = root / "imagenet100"
    if not is_folder_set(folder):
        raise UserError(
            f"imagenet100: no data under {root}; place imagenet100/train/<wnid>/ and imagenet100/val/<wnid>/ there, "
            "and imagenet100/classes.txt to pick and order the classes"
        )
    chosen = folder / "classes.txt"
    if chosen.exists():
        classes = chosen_classes(chosen)
    else:
        classes = class_names(folder / "train")[:100]
        if len(classes) < 100:
            raise UserError(
                f"{folder / 'train'}: needs 100 class folders, has {len(classes)}; or list them in {chosen}"
            )
    options: Options = {"unreadable": unreadable, "on_progress": on_progress}
    return read_folder("imagenet100", folder, size, classes=classes, test_names=("val", "test"), pack=True, **options)


def chosen_classes(file: Path) -> list[str]:
    """The classes that a text file names, one a line, in its order."""
    classes = [line.split()[0] for line in _lines(file) if line.strip()]
    if not classes or len(set(classes)) < len(classes):
        raise UserError(f"{file}: must name each class once, one a line")
    for name in classes:
        _check_plain(file, name)
    return classes


def read_folder(
    owner: str,
    folder: Path,
    size: int | None = None,
    *,
    channels: int = 3,
    classes: list[str] | None = None,
    test_names: tuple[str, str] = ("test", "val"),
    pack: bool = False,
    unreadable: str = "fail",
    on_progress: Progress | None = None,
) -> Contents:
    """Train, test and class names; of the folders in `classes` alone and in that order, where given.

    An image that cannot be read is an error, or left out if `unreadable` is "skip".
    """
    names, (train, test), listings = list_folder(owner, folder, classes, test_names)
    splits: list[Split] = []
    skipped: list[str] = []
    n_done, n_all = 0, sum(len(listing.files) for listing in listings)
    for part, listing in zip((train, test), listings, strict=True):
        heard = None if on_progress is None else _counting_on(on_progress, n_done, n_all)
        stem = folder / f"packed-{part.name}" if pack else None
        split, left_out = decode(
            listing, owner, size=size, channels=channels, pack=stem, unreadable=unreadable, on_progress=heard
        )
        missing = set(range(len(names))) - set(split.labels.tolist())
        if missing and left_out:
            raise UserError(f"{part / names[min(missing)]}: holds no readable image; mend or replace them")
        splits.append(split)
        skipped += [str(file.relative_to(folder)) for file in left_out]
        n_done += len(listing.files)
    if splits[0].images.shape[1:] != splits[1].images.shape[1:]:
        raise UserError(f"{owner}: images of train and {test.name} differ in size; give a size to resize them to")
    return Contents(splits[0], splits[1], tuple(names), tuple(skipped))


def list_folder(
    owner: str, folder: Path, classes: list[str] | None = None, test_names: tuple[str, str] = ("test", "val")
) -> tuple[list[str], tuple[Path, Path], tuple[Listing, Listing]]:
    """The class names, and of train and test the folder and the files; nothing is decoded."""
    if not is_folder_set(folder):
        raise UserError(f"{owner}: {folder} needs the folders train/<class>/ and test/<class>/ (or val/<class>/)")
    train = folder / "train"
    test = next(folder / name for name in test_names if (folder / name).is_dir())
    names = class_names(train) if classes is None else classes
    if not names:
        raise UserError(f"{owner}: {train} holds no class folders; needs {train}/<class>/*.png or the like")
    annotations = test / "val_annotations.txt"
    flat = annotations.exists() and (test / "images").is_dir()
    if classes is not None:
        _check_chosen(owner, classes, [train, test])
    elif not flat:
        _check_same(owner, names, test)
    _check_distinct(owner, train, names)
    listings = (
        list_images(train, names),
        list_annotated(test / "images", annotations, names) if flat else list_images(test, names),
    )
    return names, (train, test), listings


def _counting_on(on_progress: Progress, n_before: int, n_all: int) -> Progress:
    return lambda done, _: on_progress(n_before + done, n_all)


def _check_same(owner: str, names: Sequence[str], test: Path) -> None:
    others = class_names(test)
    only_train, only_test = sorted({*names} - {*others}), sorted({*others} - {*names})
    if only_train or only_test:
        lists = [
            f"only in {part}: {', '.join(only[:5])}{' ...' if len(only) > 5 else ''}"
            for part, only in (("train", only_train), (test.name, only_test))
            if only
        ]
        raise UserError(f"{owner}: train and {test.name} must hold the same classes; {'; '.join(lists)}")


def _check_chosen(owner: str, names: Sequence[str], parts: Sequence[Path]) -> None:
    for part in parts:
        missing = [name for name in names if not (part / name).is_dir()]
        if missing:
            raise UserError(f"{owner}: {part} lacks the folders of {len(missing)} classes: {', '.join(missing[:5])}")


def _check_distinct(owner: str, part: Path, names: Sequence[str]) -> None:
    """Refuse a class that is there twice: by a link, or under names that only a computer tells apart."""
    alike: dict[str, list[str]] = defaultdict(list)
    same: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        number = str(int(name)) if name.isdecimal() else name
        alike[unicodedata.normalize("NFKC", number).strip().casefold()].append(name)
        same[(part / name).resolve()].append(name)
    for how, groups in (("differ in case, spaces or zeros only", alike), ("are one folder", same)):
        for twice in groups.values():
            if len(twice) > 1:
                listed = " and ".join(map(repr, twice[:2]))
                raise UserError(f"{owner}: {part}: the class folders {listed} {how}; rename or remove one")


def _check_plain(file: Path, name: str) -> None:
    """A name in a list must be that of an entry of the folder the list belongs to, not a path to elsewhere."""
    if name in (".", "..") or "/" in name or "\\" in name:
        raise UserError(f"{file}: {name[:60]!r} is a path; only plain names are read")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not a text in UTF-8 ({error.reason} at byte {error.start})") from None


def class_names(folder: Path) -> list[str]:
    """The sub-folders' names in class order: by number if all are numbers, else by letters."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def list_images(folder: Path, classes: Sequence[str]) -> Listing:
    """Every image below `folder/<class>`, class by class, each class sorted by path."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        own = sorted(
            path
            for path in (folder / name).rglob("*")
            if path.suffix.lower() in _SUFFIXES and path.name[0] != "." and not path.is_dir()
        )
        if not own:
            raise UserError(f"{folder / name}: holds no images ({', '.join(sorted(_SUFFIXES))}); add some or remove it")
        files += own
        labels += [label] * len(own)
    return Listing(tuple(files), tuple(labels))


def list_annotated(folder: Path, annotations: Path, classes: Sequence[str]) -> Listing:
    """Images of one flat folder whose classes stand in lines `file <tab> class ...`, as in Tiny-ImageNet's val."""
    place = {name: label for label, name in enumerate(classes)}
    files, labels = [], []
    for number, line in enumerate(_lines(annotations), 1):
        words = line.split()
        if not words:
            continue
        if len(words) < 2 or words[1] not in place:
            raise UserError(f"{annotations}, line {number}: needs a file and a class that train has, got {line[:60]!r}")
        _check_plain(annotations, words[0])
        files.append(folder / words[0])
        labels.append(place[words[1]])
    if not files:
        raise UserError(f"{annotations}: names no images")
    return Listing(tuple(files), tuple(labels))
