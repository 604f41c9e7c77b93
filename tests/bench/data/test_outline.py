"""Outlines of data sets: the same labels and shapes as the data, without reading, decoding or downloading it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tbbn.bench.data import loading
from tbbn.bench.data.outline import outline
from tbbn.bench.data.packed.pack import pack
from tbbn.bench.data.sources import images, official
from tbbn.bench.data.sources.facts import FACTS
from tbbn.bench.data.sources.official import OFFICIAL
from tbbn.errors import UserError
from tbbn.registry import DATASETS


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("an outline must not download")

    monkeypatch.setattr(official, "fetch", fetch)


def folder_of_images(folder: Path, classes: int = 3, side: int = 6) -> Path:
    """Class i has i + 2 training images and one test image."""
    for part, extra in (("train", 2), ("test", 1)):
        for i in range(classes):
            (folder / part / f"class {i}").mkdir(parents=True)
            for n in range(i * (part == "train") + extra):
                Image.new("RGB", (side, side)).save(folder / part / f"class {i}" / f"{n}.png")
    return folder


@pytest.mark.parametrize("name", list(FACTS))
def test_known_data_sets_have_the_sizes_of_their_description(name: str, tmp_path: Path) -> None:
    description = DATASETS.entry(name).description
    numbers = [int(n.replace(" ", "")) for n in re.findall(r"\d[\d ]*\d", description)]
    source = outline(name, tmp_path).source
    assert len(source.classes) == numbers[0] and source.train.images.shape[2:] == (numbers[-2], numbers[-1])
    assert ("grey" in description) == (source.train.images.shape[1] == 1)
    if name != "imagenet100":  # its sizes depend on the classes
        assert [len(source.train.labels), len(source.test.labels)] == numbers[1:3]
    assert torch.bincount(source.train.labels).tolist() == list(FACTS[name].train)
    assert not list(tmp_path.iterdir())


def test_an_outline_of_imagenet100_assumes_the_usual_number_of_images_and_says_so(tmp_path: Path) -> None:
    found, note = outline("imagenet100", tmp_path)
    assert torch.bincount(found.train.labels).tolist() == [1300] * 100
    assert torch.bincount(found.test.labels).tolist() == [50] * 100
    assert note.startswith("imagenet100: ") and "1300 training images" in note


@pytest.mark.parametrize("name", [name for name in FACTS if name not in ("mnist", "svhn", "imagenet100")])
def test_the_test_images_of_most_known_data_sets_are_the_same_number_of_each_class(name: str) -> None:
    assert len(set(FACTS[name].test)) == len(set(FACTS[name].train)) == 1


def test_what_an_outline_is_normalised_by_has_a_value_for_each_channel(tmp_path: Path) -> None:
    for name, channels in (("mnist", 1), ("cifar10", 3)):
        found = outline(name, tmp_path).source
        assert len(found.mean) == len(found.std) == channels
        assert found.classes == tuple("0123456789") and found.train.images.is_meta


@pytest.mark.parametrize("name", ["digits", "synthetic:3x4x2x8"])
def test_what_comes_with_the_package_is_as_loaded(name: str) -> None:
    real, found = loading.load(name), outline(name).source
    assert torch.equal(real.train.labels, found.train.labels) and real.train.images.shape == found.train.images.shape


def test_a_folder_is_counted_and_one_image_of_it_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of_images(tmp_path / "mine")
    real = loading.load(f"folder:{folder}")

    def decode(*_: object, **__: object) -> None:
        raise AssertionError("an outline must not decode")

    monkeypatch.setattr(images, "_fill", decode)
    found, note = outline(f"folder:{folder}")
    assert torch.equal(real.train.labels, found.train.labels) and torch.equal(real.test.labels, found.test.labels)
    assert found.train.images.shape == real.train.images.shape == (9, 3, 6, 6)
    assert found.classes == real.classes and note == ""
    assert outline(f"folder:{folder}", size=4).source.test.images.shape == (3, 3, 4, 4)
    assert outline(f"folder:{folder}", unreadable="skip").note.endswith("unreadable ones would be skipped")
    with pytest.raises(UserError, match=r"nowhere: no such folder$"):
        outline(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match="dataset 'folder' needs an argument after a colon"):
        outline("folder: ")


def test_the_users_own_version_of_a_known_set_is_counted(tmp_path: Path) -> None:
    folder_of_images(tmp_path / "mnist", classes=4)
    found = outline("mnist", tmp_path).source
    assert len(found.classes) == 4 and found.train.images.shape == (14, 1, 6, 6)
    folder_of_images(tmp_path / "tiny-imagenet", classes=2)
    assert outline("tiny-imagenet", tmp_path).source.train.images.shape == (5, 3, 64, 64)
    assert outline("tiny-imagenet", tmp_path, size=32).source.train.images.shape == (5, 3, 32, 32)


def published_tiny(root: Path) -> None:
    """As published: the test images in val/images, by a list; test/ has no labels."""
    for i, name in enumerate(("n01", "n02")):
        (root / "train" / name / "images").mkdir(parents=True)
        for n in range(i + 1):
            Image.new("RGB", (64, 64)).save(root / "train" / name / "images" / f"{n}.JPEG")
    for part in ("val", "test"):
        (root / part / "images").mkdir(parents=True)
        for n in range(3):
            Image.new("RGB", (64, 64)).save(root / part / "images" / f"{n}.JPEG")
    (root / "val/val_annotations.txt").write_text("0.JPEG\tn02\n1.JPEG\tn01\n2.JPEG\tn02\n")


def two_test_folders(root: Path) -> None:
    """Of test/ and val/ one holds other images than the other."""
    folder_of_images(root, classes=3)
    for i in range(3):
        (root / "val" / f"class {i}").mkdir(parents=True)
        for n in range(2 + i):
            Image.new("RGB", (6, 6)).save(root / "val" / f"class {i}" / f"{n}.png")


def chosen(root: Path) -> None:
    two_test_folders(root)
    for part in ("train", "test", "val"):
        for i in range(3):
            (root / part / f"class {i}").rename(root / part / f"c{i}")
    (root / "classes.txt").write_text("c2\nc0\n")


@pytest.mark.parametrize(
    ("name", "folder", "write"),
    [
        ("tiny-imagenet", "tiny-imagenet-200", published_tiny),
        ("tiny-imagenet", "tiny-imagenet", published_tiny),
        ("tiny-imagenet", "tiny-imagenet", two_test_folders),
        ("imagenet100", "imagenet100", chosen),
        ("cifar10", "cifar10", two_test_folders),
        ("mnist", "mnist", two_test_folders),
    ],
)
def test_an_outline_counts_the_very_folders_that_are_read(name: str, folder: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path / folder)
    size = None if name in ("cifar10", "mnist") else 8
    real, found = loading.load(name, tmp_path, download=False, size=size), outline(name, tmp_path, size=size).source
    assert found.classes == real.classes
    for ours, theirs in ((found.train, real.train), (found.test, real.test)):
        assert torch.equal(ours.labels, theirs.labels) and ours.images.shape == theirs.images.shape


def test_a_split_divides_the_outline_as_it_divides_the_data(tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path / "mine") / "train"
    real, found = (of(f"folder:{folder}", split=0.5) for of in (loading.load, lambda *a, **k: outline(*a, **k).source))
    assert torch.equal(real.test.labels, found.test.labels) and torch.equal(real.train.labels, found.train.labels)


def test_what_would_be_read_is_outlined_packed_or_official(tmp_path: Path) -> None:
    folder_of_images(tmp_path / "set", classes=2, side=7)
    pack(tmp_path / "set", tmp_path / "tiny-imagenet-packed", workers=1)
    folder_of_images(tmp_path / "tiny-imagenet", classes=3)
    found = outline("tiny-imagenet", tmp_path).source
    assert len(found.classes) == 2 and found.train.images.shape == (5, 3, 7, 7)
    folder_of_images(tmp_path / "mnist", classes=3)
    assert len(outline("mnist", tmp_path).source.train.labels) == 9
    for path in OFFICIAL["mnist"].paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert len(outline("mnist", tmp_path).source.train.labels) == 60_000  # the files come first


def test_the_first_readable_image_gives_the_shape(tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path / "mine")
    first, second = sorted((folder / "train/class 0").iterdir())
    first.write_bytes(b"no image")
    Image.new("RGB", (6, 4)).save(second)
    assert outline(f"folder:{folder}").source.train.images.shape[1:] == (3, 4, 6)
    for file in (folder / "train").rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(UserError, match=rf"^{first}: is not a readable image \(unknown format\)"):
        outline(f"folder:{folder}")


def test_a_sequence_joins_its_members(tmp_path: Path) -> None:
    found = outline("dissimilar", tmp_path).source
    assert len(found.classes) == 50 and len(found.train.labels) == 60_000 + 60_000 + 73_257 + 50_000 + 5_000
    assert found.groups == tuple(i for i in range(5) for _ in range(10)) and found.train.images.shape[1:] == (3, 32, 32)
    assert set(OFFICIAL) < set(FACTS)
    assert "estimates" in outline("imagenet100+svhn", tmp_path).note
