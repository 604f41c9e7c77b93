"""List the image files of a folder and check its structure; decodes nothing."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tbbn.bench.data.types import Listing
from tbbn.bench.files import read_limited
from tbbn.errors import UserError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
_LARGEST_LIST = 2**26  # bytes of a text file that lists names


@dataclass(frozen=True)
class FolderListing:
    """A folder of images: its classes, and the folder and files of train and test."""

    folder: Path
    classes: tuple[str, ...]
    parts: tuple[Path, Path]
    listings: tuple[Listing, Listing]

    @property
    def n_images(self) -> int:
        return sum(len(listing.files) for listing in self.listings)


def is_image_folder(folder: Path) -> bool:
    """Whether `folder` holds train/ and one of test/ and val/."""
    return (folder / "train").is_dir() and any((folder / name).is_dir() for name in ("test", "val"))


def list_folder(
    owner: str,
    folder: Path,
    classes: list[str] | None = None,
    test_names: tuple[str, str] = ("test", "val"),
    split: float = 0.0,
) -> FolderListing:
    """List a folder; `classes` selects and orders its classes, `test_names` are tried in order.

    `split` is for a folder without test images: the fraction of each class's images that become test images.
    """
    if not folder.is_dir():
        raise UserError(f"{owner}: {folder}: no such folder")
    if split:
        return _list_divided(owner, folder, classes, split)
    if not is_image_folder(folder):
        raise UserError(
            f"{owner}: {folder} needs the folders train/<class>/ and test/<class>/ (or val/<class>/); "
            "if it has no test images, set --data.split 0.2 (of tbbn data pack: --split 0.2)"
        )
    train = folder / "train"
    test = next(folder / name for name in test_names if (folder / name).is_dir())
    names = class_names(train) if classes is None else classes
    if not names:
        raise UserError(f"{owner}: {train} holds no class folders; needs {train}/<class>/*.png or similar")
    annotations = test / "val_annotations.txt"
    flat = annotations.exists() and (test / "images").is_dir()
    if classes is not None:
        _check_present(owner, classes, [train, test])
    elif not flat:
        _check_same_classes(owner, names, test)
    _check_distinct(owner, train, names)
    listings = (
        _list_images(train, names),
        _list_annotated(test / "images", annotations, names) if flat else _list_images(test, names),
    )
    return FolderListing(folder, tuple(names), (train, test), listings)


def _list_divided(owner: str, folder: Path, classes: list[str] | None, split: float) -> FolderListing:
    """List `folder/<class>/`, or `folder/train/<class>/` without a test folder, and divide each class by `split`.

    Test images are spread evenly over the sorted files of a class, always the same ones.
    """
    if is_image_folder(folder):
        raise UserError(f"{owner}: {folder} already has test images; leave --data.split (--split) out")
    whole = folder / "train" if (folder / "train").is_dir() else folder
    names = class_names(whole) if classes is None else classes
    if not names:
        raise UserError(f"{owner}: {whole} holds no class folders; needs {whole}/<class>/*.png or similar")
    _check_present(owner, names, [whole])
    _check_distinct(owner, whole, names)
    listed = _list_images(whole, names)
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    position: Counter[int] = Counter()
    for file, label in zip(listed.files, listed.labels, strict=True):
        i = position[label]
        position[label] += 1
        is_test = int((i + 1) * split + 1e-9) > int(i * split + 1e-9)  # 1e-9 absorbs the error of the product
        (test if is_test else train).append((file, label))
    for part, rows in (("training", train), ("test", test)):
        empty = set(range(len(names))) - {label for _, label in rows}
        if empty:
            raise UserError(
                f"{owner}: a split of {split} leaves class {names[min(empty)]!r} without {part} images; change it, or add images"
            )
    parts = [Listing(tuple(f for f, _ in rows), tuple(label for _, label in rows)) for rows in (train, test)]
    return FolderListing(folder, tuple(names), (whole, whole), (parts[0], parts[1]))


def class_names(folder: Path) -> list[str]:
    """The names of the class folders, in numerical order if all are numbers, otherwise in alphabetical order."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def chosen_classes(file: Path) -> list[str]:
    """The classes listed in a text file, one per line, in its order."""
    classes = [line.split()[0] for line in _lines(file) if line.strip()]
    if not classes or len(set(classes)) < len(classes):
        raise UserError(f"{file}: must name each class once, one per line")
    for name in classes:
        _check_plain(file, name)
    return classes


def _check_plain(file: Path, name: str) -> None:
    """Refuse a listed name that is a path: it could lead out of the folder."""
    if name in (".", "..") or "/" in name or "\\" in name:
        raise UserError(f"{file}: {name[:60]!r} is a path; only plain names are allowed")


def _lines(file: Path) -> list[str]:
    try:
        return read_limited(file, _LARGEST_LIST).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _check_same_classes(owner: str, names: Sequence[str], test: Path) -> None:
    others = class_names(test)
    only_train, only_test = sorted({*names} - {*others}), sorted({*others} - {*names})
    if only_train or only_test:
        lists = [
            f"only in {part}: {', '.join(only[:5])}{' ...' if len(only) > 5 else ''}"
            for part, only in (("train", only_train), (test.name, only_test))
            if only
        ]
        raise UserError(f"{owner}: train and {test.name} must hold the same classes; {'; '.join(lists)}")


def _check_present(owner: str, names: Sequence[str], parts: Sequence[Path]) -> None:
    for part in parts:
        missing = [name for name in names if not (part / name).is_dir()]
        if missing:
            raise UserError(f"{owner}: {part} lacks the folders of {len(missing)} classes: {', '.join(missing[:5])}")


def _check_distinct(owner: str, part: Path, names: Sequence[str]) -> None:
    """Refuse a class that exists twice: through a link, or under names that look the same to a person."""
    alike: dict[str, list[str]] = defaultdict(list)
    same: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        number = str(int(name)) if name.isdecimal() else name
        alike[unicodedata.normalize("NFKC", number).strip().casefold()].append(name)
        same[(part / name).resolve()].append(name)
    for how, groups in (("differ only in case, spaces or zeros", alike), ("are the same folder", same)):
        for twice in groups.values():
            if len(twice) > 1:
                listed = " and ".join(map(repr, twice[:2]))
                raise UserError(f"{owner}: {part}: the class folders {listed} {how}; rename or remove one")


def _list_images(folder: Path, classes: Sequence[str]) -> Listing:
    """Every image below `folder/<class>`, class by class, each class sorted by path."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        os.listdir(folder / name)  # raises if it may not be read; a search would find nothing there
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


def _list_annotated(folder: Path, annotations: Path, classes: Sequence[str]) -> Listing:
    """Images of one flat folder, whose classes are given in lines `file <tab> class ...`, as in Tiny-ImageNet's val."""
    label_of = {name: label for label, name in enumerate(classes)}
    files, labels = [], []
    for number, line in enumerate(_lines(annotations), 1):
        words = line.split()
        if not words:
            continue
        if len(words) < 2 or words[1] not in label_of:
            raise UserError(f"{annotations}, line {number}: needs a file and a class of train, got {line[:60]!r}")
        _check_plain(annotations, words[0])
        files.append(folder / words[0])
        labels.append(label_of[words[1]])
    if not files:
        raise UserError(f"{annotations}: names no images")
    return Listing(tuple(files), tuple(labels))
