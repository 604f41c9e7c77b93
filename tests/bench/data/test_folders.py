"""Image folders: layouts, conversion to 8-bit RGB, resizing, packing, and one line for each mistake."""

from __future__ import annotations

import math
import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor

from tbbn.bench.data.loading import load
from tbbn.bench.data.outline import outline
from tbbn.bench.data.packed.index import PackedImages, check_packed
from tbbn.bench.data.packed.pack import pack
from tbbn.bench.data.sources import folders, images
from tbbn.bench.data.sources.decoding import Unreadable, open_image, unreadable_error
from tbbn.bench.data.sources.listing import chosen_classes, list_folder
from tbbn.bench.data.types import Source
from tbbn.bench.files import locked
from tbbn.bench.vision import torchvision
from tbbn.errors import UserError


def picture(seed: int, height: int = 6, width: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def save(file: Path, pixels: Any, mode: str | None = None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, PIL.Image.Image) else PIL.Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(file)


def write_set(root: Path, classes: tuple[str, ...] = ("ant", "bee"), test: str = "test", side: int = 6) -> None:
    for place, name in enumerate(classes):
        for number in range(2):
            save(root / "train" / name / f"{number}.png", picture(10 * place + number, side, side))
        save(root / test / name / "0.png", picture(100 + place, side, side))


def folder(path: Path, **options: Any) -> Source:
    return load(f"folder:{path}", **options)


def chw(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


@pytest.mark.parametrize("test", ["test", "val"])
def test_a_folder_is_read_class_by_class(tmp_path: Path, test: str) -> None:
    write_set(tmp_path, test=test)
    save(tmp_path / "train/ant/.hidden.png", picture(0))
    (tmp_path / "train/ant/notes.txt").touch()
    heard: list[tuple[int, int]] = []
    source = folder(tmp_path, on_progress=lambda done, n: heard.append((done, n)))
    assert source.classes == ("ant", "bee")
    assert source.train.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(source.train.images, torch.stack([chw(picture(seed)) for seed in (0, 1, 10, 11)]))
    assert torch.equal(source.test.images[1], chw(picture(101)))
    assert source.mean == (0.485, 0.456, 0.406)
    assert heard == [(4, 6), (6, 6)]


@pytest.mark.parametrize("inside", ["", "train"])
def test_a_folder_without_test_images_is_divided_by_a_split(tmp_path: Path, inside: str) -> None:
    for place, (name, count) in enumerate((("ant", 5), ("bee", 10))):
        for number in range(count):
            save(tmp_path / inside / name / f"{number}.png", picture(100 * place + number))
    source = folder(tmp_path, split=0.2)
    # Every fifth file of a class, in order of their names.
    assert torch.equal(source.test.images, torch.stack([chw(picture(seed)) for seed in (4, 104, 109)]))
    assert source.test.labels.tolist() == [0, 1, 1] and source.train.labels.tolist() == [0] * 4 + [1] * 8
    assert len(folder(tmp_path, split=0.5).test.labels) == 2 + 5
    with pytest.raises(
        UserError, match=r"needs the folders train/<class>/ .*; if it has no test images, set --data\.split 0\.2"
    ):
        folder(tmp_path)
    with pytest.raises(UserError, match=r"a split of 0\.1 leaves class 'ant' without test images"):
        folder(tmp_path, split=0.1)
    with pytest.raises(UserError, match=r"nowhere: no such folder"):
        folder(tmp_path / "nowhere", split=0.1)
    (tmp_path / "train").mkdir(exist_ok=True)
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match=r"already has test images; leave --data\.split \(--split\) out"):
        folder(tmp_path, split=0.2)


@pytest.mark.parametrize("split", [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 1 / 3, 0.5, 0.6, 0.7, 0.9])
def test_a_split_takes_its_share_of_every_class_spread_evenly(tmp_path: Path, split: float) -> None:
    counts = {"ant": 60, "bee": 33, "cat": 20}
    for name, count in counts.items():
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number:02}.png").touch()
    train, test = list_folder("mine", tmp_path, split=split).listings
    for label, count in enumerate(counts.values()):
        chosen = [int(f.stem) for f, own in zip(test.files, test.labels, strict=True) if own == label]
        share = Fraction(split).limit_denominator(100)
        # Of the first n files, the share of n rounded down.
        assert [sum(c < n for c in chosen) for n in range(count + 1)] == [
            math.floor(n * share) for n in range(count + 1)
        ]
        rest = [int(f.stem) for f, own in zip(train.files, train.labels, strict=True) if own == label]
        assert sorted(chosen + rest) == list(range(count))


def test_numbered_classes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_set(tmp_path, ("10", "9", "2"))
    assert folder(tmp_path).classes == ("2", "9", "10")


def test_a_tree_of_pngs_stands_for_the_official_files(tmp_path: Path) -> None:
    write_set(tmp_path / "cifar10", side=32)
    source = load("cifar10", tmp_path, download=False)
    assert source.train.images.shape == (4, 3, 32, 32)
    assert source.mean == (0.4914, 0.4822, 0.4465)
    write_set(tmp_path / "mnist", tuple("01"), side=28)
    assert load("mnist", tmp_path, download=False).train.images.shape == (4, 1, 28, 28)


def png_48(pixels: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, by hand: PIL writes none."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_every_kind_of_image_becomes_8_bit_rgb(tmp_path: Path) -> None:
    rgb = picture(0)
    image = PIL.Image.fromarray(rgb)
    alpha = np.arange(36, dtype=np.uint8).reshape(6, 6) * 7
    grey16 = np.arange(36, dtype=np.uint16).reshape(6, 6) * 1820
    grey = np.asarray(image.convert("L"))
    palette = image.quantize(8)
    see_through = image.quantize(8)
    see_through.info["transparency"] = 0
    looked_up = np.asarray(palette.convert("RGB"))
    hole = np.asarray(see_through) == 0
    cases: dict[str, tuple[Any, np.ndarray]] = {
        "a-grey.png": (image.convert("L"), np.repeat(grey[:, :, None], 3, 2)),
        "b-bits.png": (image.convert("1"), np.asarray(image.convert("1").convert("RGB"))),
        "c-16.png": (PIL.Image.fromarray(grey16), np.repeat(np.round(grey16 / 257)[:, :, None], 3, 2)),
        "d-16.tif": (PIL.Image.fromarray(grey16), np.repeat(np.round(grey16 / 257)[:, :, None], 3, 2)),
        "e-alpha.png": (np.dstack([rgb, alpha]), np.round(rgb * (alpha[:, :, None] / 255.0))),
        "f-la.png": (PIL.Image.fromarray(np.dstack([rgb, alpha])).convert("LA"), None),  # type: ignore[dict-item]
        "g-palette.png": (palette, looked_up),
        "h-hole.png": (see_through, np.where(hole[:, :, None], 0, looked_up)),
        "i-plain.bmp": (image, rgb),
        "j-cmyk.tif": (image.convert("CMYK"), rgb),
        "k-48bit.png": (None, None),  # type: ignore[dict-item]
    }
    wide = np.arange(108, dtype=np.uint16).reshape(6, 6, 3) * 600
    cases["k-48bit.png"] = (png_48(wide), wide // 256)
    cases["f-la.png"] = (cases["f-la.png"][0], np.repeat(np.round(grey * (alpha / 255.0))[:, :, None], 3, 2))
    for name, (pixels, _) in cases.items():
        if isinstance(pixels, bytes):
            (tmp_path / "train/a" / name).write_bytes(pixels)
        else:
            save(tmp_path / "train/a" / name, pixels)
    save(tmp_path / "test/a/0.png", rgb)
    images = folder(tmp_path).train.images
    assert images.dtype == torch.uint8
    for (name, (_, expected)), got in zip(sorted(cases.items()), images, strict=True):
        difference = (got.float() - chw(np.ascontiguousarray(expected.astype(np.float32)))).abs().max()
        assert difference <= (1 if name[0] in "ef" else 0), name  # the compositing rounds by its own rule


@pytest.mark.parametrize(("height", "width"), [(40, 30), (21, 64), (16, 16), (9, 5)])
def test_size_resizes_the_shorter_side_and_cuts_the_centre(tmp_path: Path, height: int, width: int) -> None:
    pixels = picture(3, height, width)
    for part in ("train", "test"):
        save(tmp_path / part / "a/0.png", pixels)
    transforms = torchvision().transforms
    expected = transforms.CenterCrop(16)(transforms.Resize(16)(PIL.Image.fromarray(pixels)))
    assert torch.equal(folder(tmp_path, size=16).train.images[0], chw(np.asarray(expected).copy()))


def write_tiny(root: Path, flat: bool) -> None:
    for place, name in enumerate(("n02", "n01")):
        save(root / "train" / name / "images" / f"{name}_0.JPEG", picture(place, 64, 64))
        save(root / ("val/images" if flat else f"val/{name}") / f"val_{place}.JPEG", picture(place, 64, 64))
    (root / "test/images").mkdir(parents=True)
    if flat:
        lines = ["val_1.JPEG\tn01\t0\t0\t1\t1", "val_0.JPEG\tn02\t0\t0\t1\t1", ""]
        (root / "val/val_annotations.txt").write_text("\n".join(lines))


@pytest.mark.parametrize("flat", [True, False])
def test_tiny_imagenet_is_read_as_published_or_by_classes(tmp_path: Path, flat: bool) -> None:
    write_tiny(tmp_path / ("tiny-imagenet-200" if flat else "tiny-imagenet"), flat)
    source = load("tiny-imagenet", tmp_path)
    assert source.classes == ("n01", "n02")
    assert source.test.labels.tolist() == [0, 1]
    assert source.train.images.shape == (2, 3, 64, 64)
    assert torch.equal(source.train.images, source.test.images)


def test_a_wrong_annotation_names_its_line(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    write_tiny(root, True)
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn01\nval_1.JPEG\tn99\n")
    with pytest.raises(UserError, match=r"val_annotations.txt, line 2: needs a file and a class of train"):
        load("tiny-imagenet", tmp_path)
    (root / "val/val_annotations.txt").write_text("gone.JPEG\tn01\n")
    with pytest.raises(UserError, match=r"gone.JPEG: does not exist"):
        load("tiny-imagenet", tmp_path)
    (root / "val/val_annotations.txt").write_text("\n")
    with pytest.raises(UserError, match=r"val_annotations.txt: names no images"):
        load("tiny-imagenet", tmp_path)


def test_imagenet100_follows_its_class_list_and_is_stored_at_256(tmp_path: Path) -> None:
    write_set(tmp_path / "imagenet100", ("n1", "n2", "n3"), "val", 300)
    (tmp_path / "imagenet100/classes.txt").write_text("n3 crane\nn1\n")
    source = load("imagenet100", tmp_path)
    assert source.classes == ("n3", "n1")
    assert source.train.images.shape == (4, 3, 256, 256)
    (tmp_path / "imagenet100/classes.txt").write_text("n1\nn7\n")
    with pytest.raises(UserError, match=r"imagenet100: .*train lacks the folders of 1 classes: n7"):
        load("imagenet100", tmp_path)
    (tmp_path / "imagenet100/classes.txt").write_text("n1\nn1\n")
    with pytest.raises(UserError, match=r"classes.txt: must name each class once"):
        load("imagenet100", tmp_path)


def test_imagenet100_without_a_list_takes_the_first_hundred(tmp_path: Path) -> None:
    write_set(tmp_path / "imagenet100", tuple(f"n{number:03}" for number in range(102)), "val", 2)
    assert load("imagenet100", tmp_path, size=2).classes == tuple(f"n{number:03}" for number in range(100))


def test_imagenet100_of_fewer_classes_asks_for_a_list(tmp_path: Path) -> None:
    write_set(tmp_path / "imagenet100", test="val")
    with pytest.raises(UserError, match=r"needs 100 class folders, has 2; or list the classes in .*classes.txt"):
        load("imagenet100", tmp_path)


def write_imagenet(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ImageNet-100 of two classes that is large enough to be kept decoded."""
    write_set(root / "imagenet100", test="val")
    (root / "imagenet100/classes.txt").write_text("bee\nant\n")
    monkeypatch.setattr(folders, "_CACHED_FROM", 1)
    return root / "imagenet100"


def tensors(source: Source) -> list[torch.Tensor]:
    return [part.images.to("cpu") for part in (source.train, source.test)]


def test_a_large_set_is_decoded_once_into_a_packed_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_imagenet(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "_CACHED_FROM", 1 << 30)
        plain = load("imagenet100", tmp_path, size=8)  # larger than the images: they are enlarged
        assert isinstance(plain.train.images, torch.Tensor) and not (root / "packed-8").exists()
    heard: list[int] = []
    first = load("imagenet100", tmp_path, size=8, on_progress=lambda done, n: heard.append(done))
    assert heard == sorted(heard) and heard[-1] == 6
    again = load("imagenet100", tmp_path, size=8, on_progress=lambda done, n: heard.append(-done))
    assert heard[-1] == 6, "decoded twice"
    for source in (first, again):
        assert source.classes == plain.classes and source.mean == plain.mean
        assert torch.equal(source.train.labels, plain.train.labels)
        assert all(map(torch.equal, tensors(source), tensors(plain)))
    assert not check_packed(root / "packed-8").problems
    save(root / "train/bee/1.png", picture(50))
    changed = load("imagenet100", tmp_path, size=6)
    assert torch.equal(tensors(changed)[0][1], chw(picture(50)))
    assert torch.equal(tensors(load("imagenet100", tmp_path, size=8))[1], tensors(plain)[1])
    assert sorted(path.name for path in root.glob("packed-*")) == ["packed-6", "packed-8"]


def test_a_cache_of_changed_images_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_imagenet(tmp_path, monkeypatch)
    load("imagenet100", tmp_path, size=6)
    save(root / "train/ant/1.png", picture(50))
    assert torch.equal(tensors(load("imagenet100", tmp_path, size=6))[0][3], chw(picture(50)))
    (root / "classes.txt").write_text("ant\n")
    assert len(load("imagenet100", tmp_path, size=6).train.labels) == 2


def test_a_cache_is_read_where_nothing_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_imagenet(tmp_path, monkeypatch)
    expected = tensors(load("imagenet100", tmp_path, size=6))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tbbn.bench.data.packed.writer.locked", refused)
    again = load("imagenet100", tmp_path, size=6)
    assert isinstance(again.train.images, PackedImages) and all(map(torch.equal, tensors(again), expected))
    save(root / "train/ant/1.png", picture(50))  # the cache is out of date and cannot be replaced
    source = load("imagenet100", tmp_path, size=6)
    assert isinstance(source.train.images, torch.Tensor) and torch.equal(source.train.images[3], chw(picture(50)))


def test_without_room_a_large_set_is_decoded_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_imagenet(tmp_path, monkeypatch)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    assert torch.equal(load("imagenet100", tmp_path, size=6).test.images[1], chw(picture(100)))
    assert not list(root.glob("packed-*"))


def test_a_second_process_waits_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_imagenet(tmp_path, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        with locked(root / "packed-6"):
            loading = pool.submit(load, "imagenet100", tmp_path, size=6)
            assert not wait([loading], 0.3).done
        assert torch.equal(tensors(loading.result(60))[1][1], chw(picture(100)))


def test_a_set_is_kept_decoded_from_a_size_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_imagenet(tmp_path, monkeypatch)
    n_bytes = 6 * 3 * 7 * 7
    for limit, kept in ((n_bytes + 1, False), (n_bytes, True)):
        monkeypatch.setattr(folders, "_CACHED_FROM", limit)
        source = load("imagenet100", tmp_path, size=7)
        assert isinstance(source.train.images, PackedImages) == kept == (root / "packed-7").exists()
    monkeypatch.setattr(folders, "_CACHED_FROM", 1)
    plain = folders.read_folder("mine", root, 7)  # not asked for
    assert isinstance(plain.train.images, torch.Tensor)
    assert isinstance(folders.read_folder("mine", root, None, cache=True).train.images, torch.Tensor)  # of any size


def test_a_class_may_have_no_test_images_in_a_list_of_them(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    write_tiny(root, True)
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn02\n")
    source = load("tiny-imagenet", tmp_path)
    assert source.classes == ("n01", "n02") and source.test.labels.tolist() == [1]


def test_class_folders_come_before_a_list_without_its_folder(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny-imagenet-200", False)
    (tmp_path / "tiny-imagenet-200/val/val_annotations.txt").write_text("x.JPEG\tn01\n")
    assert load("tiny-imagenet", tmp_path).test.labels.tolist() == [0, 1]
    write_set(tmp_path / "mine", ("ant", "images"))  # a class of that name
    assert folder(tmp_path / "mine").classes == ("ant", "images")


def test_what_is_hidden_and_stray_files_are_no_classes(tmp_path: Path) -> None:
    write_set(tmp_path)
    for part in ("train", "test"):
        (tmp_path / part / ".cache").mkdir()
        (tmp_path / part / "readme.txt").touch()
    assert folder(tmp_path).classes == ("ant", "bee")


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_class_in_one_part_alone_is_named(tmp_path: Path, part: str) -> None:
    write_set(tmp_path)
    for number in range(6):
        (tmp_path / part / f"more {number}").mkdir()
    names = ", ".join(f"more {number}" for number in range(5))
    with pytest.raises(UserError, match=rf"must hold the same classes; only in {part}: {names} \.\.\.$"):
        folder(tmp_path)
    (tmp_path / part / "more 5").rmdir()
    with pytest.raises(UserError, match=rf"must hold the same classes; only in {part}: {names}$"):
        folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must name each class once"),
        ("\n  \n", "must name each class once"),
        ("ant\nbee\nant\n", "must name each class once"),
        (".\n", "'.' is a path"),
        ("..\n", "'..' is a path"),
        ("a/b\n", "'a/b' is a path"),
        ("a\\b\n", ".* is a path"),
    ],
)
def test_a_list_of_classes_names_each_once(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(UserError, match=f"classes.txt: {message}"):
        chosen_classes(tmp_path / "classes.txt")


def test_a_line_of_a_list_needs_two_words(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    write_tiny(root, True)
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn01\n\nn01\n")
    with pytest.raises(UserError, match=r"val_annotations.txt, line 3: needs a file and a class of train, got 'n01'"):
        load("tiny-imagenet", tmp_path)


def test_each_mistake_in_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such folder$"):
        folder(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="bare needs the folders train/<class>/ and test/<class>/"):
        folder(tmp_path / "bare")
    for part in ("train", "test"):
        (tmp_path / "empty" / part).mkdir(parents=True)
    with pytest.raises(UserError, match="empty/train holds no class folders"):
        folder(tmp_path / "empty")
    write_set(tmp_path / "a")
    (tmp_path / "a/train/bee/0.png").unlink()
    (tmp_path / "a/train/bee/1.png").unlink()
    with pytest.raises(UserError, match="a/train/bee: holds no images"):
        folder(tmp_path / "a")
    write_set(tmp_path / "b")
    (tmp_path / "b/train/cat").mkdir()
    (tmp_path / "b/test/dog").mkdir()
    with pytest.raises(UserError, match="must hold the same classes; only in train: cat; only in test: dog"):
        folder(tmp_path / "b")


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    broken = tmp_path / "train/bee/0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(UserError, match=r"train/bee/0.png: is not a readable image"):
        folder(tmp_path)
    broken.write_bytes(b"text")
    with pytest.raises(UserError, match=r"train/bee/0.png: is not a readable image \(unknown format\)"):
        folder(tmp_path)
    broken.unlink()
    save(tmp_path / "train/bee/0.tif", np.zeros((6, 6), np.float32))
    with pytest.raises(UserError, match=r"0.tif: .*floating-point images have no known range"):
        folder(tmp_path)


def test_the_reason_is_said_why_an_image_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "1.png"

    def reason() -> str:
        with pytest.raises(Unreadable) as caught:
            open_image(file, 3, None)
        return str(caught.value).removeprefix(f"{file}: ")

    assert reason() == "does not exist"
    save(file, picture(0, 40, 40))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert reason().startswith("is not a readable image (image file is truncated")  # PIL's error has no number
    file.write_bytes(b"text")
    assert reason() == "is not a readable image (unknown format)"
    file.unlink()
    file.mkdir()
    assert reason() == "is not a readable image (not a file)"
    for error, said in (
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (ValueError("one\ntwo"), "one"),
        (ValueError(" "), "ValueError"),
        (OSError("broken"), "broken"),
        (OSError(), "OSError"),
    ):
        file.rmdir() if file.is_dir() else file.unlink()
        save(file, picture(0))

        def failing(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(PIL.Image, "open", failing)
            assert reason() == f"is not a readable image ({said})"


def test_one_unreadable_image_is_not_counted() -> None:
    said = [str(unreadable_error("1.png: broken", n, 9, "--skip")) for n in (1, 2)]
    assert said == [
        "1.png: broken; repair or remove, or leave out with --skip",
        "1.png: broken; 2 of 9 images are unreadable; repair or remove, or leave out with --skip",
    ]


def test_a_part_of_one_unreadable_image_names_it_alone(tmp_path: Path) -> None:
    write_set(tmp_path, ("ant",))
    (tmp_path / "test/ant/0.png").write_bytes(b"text")
    for unreadable in ("fail", "skip"):
        with pytest.raises(UserError, match=r"test/ant/0.png: is not a readable image \(unknown format\)$"):
            folder(tmp_path, unreadable=unreadable)


def test_warnings_about_images_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    write_set(tmp_path)
    real = PIL.Image.open

    def warning(*given: Any, **named: Any) -> Any:
        warnings.warn("damaged EXIF data", stacklevel=1)
        return real(*given, **named)

    monkeypatch.setattr(PIL.Image, "open", warning)
    folder(tmp_path)
    outline(f"folder:{tmp_path}")
    pack(tmp_path, tmp_path / "out", workers=1)
    assert not recwarn.list
    warnings.warn("after", stacklevel=1)
    assert len(recwarn.list) == 1


@pytest.mark.parametrize(("cores", "threads"), [(40, 16), (16, 16), (3, 3), (None, 1)])
def test_images_are_decoded_by_as_many_threads_as_cores(
    cores: int | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path)
    asked: list[int] = []
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(images, "ThreadPoolExecutor", lambda n: asked.append(n) or ThreadPoolExecutor(1))
    folder(tmp_path)
    assert asked == [threads] * 2


def test_values_beyond_16_bits_are_refused_not_clipped(tmp_path: Path) -> None:
    write_set(tmp_path)
    save(tmp_path / "train/ant/0.tif", np.full((6, 6), 65_535, np.int32))
    assert folder(tmp_path).train.images[1].eq(255).all()
    for value in (65_536, 65_600, -1):
        save(tmp_path / "train/ant/0.tif", np.full((6, 6), value, np.int32))
        with pytest.raises(UserError, match=r"0.tif: .*values beyond 16 bits have no known range"):
            folder(tmp_path)
    (tmp_path / "train/ant/0.tif").unlink()
    save(tmp_path / "train/bee/2.tif", np.full((6, 6), 70_000, np.int32))
    with pytest.raises(UserError, match=r"2.tif: .*values beyond 16 bits have no known range"):
        folder(tmp_path)


def break_some(root: Path) -> None:
    write_set(root)
    for name in ("train/ant/0.png", "train/bee/x.png", "test/bee/y.png"):
        (root / name).write_bytes(b"no image")
    (root / "train/bee/lost.png").symlink_to(root / "nowhere")
    os.mkfifo(root / "train/bee/pipe.png")
    (root / "train/bee/folder.png").mkdir()  # not a file: not looked at


def test_unreadable_images_are_named_and_counted(tmp_path: Path) -> None:
    break_some(tmp_path)
    with pytest.raises(UserError) as caught:
        folder(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/train/ant/0.png: is not a readable image (unknown format); 4 of 7 images are unreadable; "
        "repair or remove, or leave out with data.unreadable = 'skip'"
    )
    with pytest.raises(UserError, match="unknown way to treat unreadable images 'ignore'; choose one of: fail, skip"):
        folder(tmp_path, unreadable="ignore")


def test_unreadable_images_are_left_out_and_listed_where_asked(tmp_path: Path) -> None:
    break_some(tmp_path)
    source = folder(tmp_path, unreadable="skip")
    assert source.skipped == (
        "train/ant/0.png",
        *("train/bee/lost.png", "train/bee/pipe.png", "train/bee/x.png"),
        "test/bee/y.png",
    )
    assert source.train.labels.tolist() == [0, 1, 1]
    assert torch.equal(source.train.images, torch.stack([chw(picture(seed)) for seed in (1, 10, 11)]))
    assert source.test.labels.tolist() == [0, 1]
    again = load(f"synthetic:2x2x2x6+folder:{tmp_path}", unreadable="skip")
    assert again.skipped == source.skipped


def test_a_class_of_unreadable_images_alone_is_an_error_even_where_they_are_left_out(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "test/bee/0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"test/bee: holds no readable image"):
        folder(tmp_path, unreadable="skip")
    (tmp_path / "test/ant/0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"test/ant/0.png: .*; no image of this part"):
        folder(tmp_path, unreadable="skip")


def test_a_cache_leaves_unreadable_images_out_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_some(tmp_path / "imagenet100")
    (tmp_path / "imagenet100/classes.txt").write_text("ant\nbee\n")
    monkeypatch.setattr(folders, "_CACHED_FROM", 1)
    complaint = (
        r"^train/ant/0.png: .* \(unknown format\); 5 of 10 images are unreadable; .* with data.unreadable = 'skip'"
    )
    with pytest.raises(UserError, match=complaint):
        load("imagenet100", tmp_path, size=6)
    source = load("imagenet100", tmp_path, size=6, unreadable="skip")
    assert len(source.skipped) == 5
    assert torch.equal(tensors(source)[0], torch.stack([chw(picture(seed)) for seed in (1, 10, 11)]))
    with pytest.raises(UserError, match=complaint):  # from the cache that lacks them
        load("imagenet100", tmp_path, size=6)
    (tmp_path / "imagenet100/test/bee/0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"imagenet100: class 'bee' has no readable image in test"):
        load("imagenet100", tmp_path, size=6, unreadable="skip")


@pytest.mark.parametrize(
    ("name", "twin", "how"),
    [
        ("bee", "Bee", "differ only in case, spaces or zeros"),
        ("bee", "bee ", "differ only in case, spaces or zeros"),
        ("1", "01", "differ only in case, spaces or zeros"),
        ("caf\u00e9", "cafe\u0301", "differ only in case, spaces or zeros"),
        ("bee", "wasp", "are the same folder"),
    ],
)
def test_a_class_that_is_there_twice_is_refused(tmp_path: Path, name: str, twin: str, how: str) -> None:
    write_set(tmp_path, (name, "2"))
    for part in ("train", "test"):
        if twin == "wasp":
            (tmp_path / part / twin).symlink_to(tmp_path / part / name)
        else:
            save(tmp_path / part / twin / "0.png", picture(0))
    with pytest.raises(UserError, match=rf"train: the class folders '.*' and '.*' {how}; rename or remove one"):
        folder(tmp_path)


def test_lists_of_names_lead_nowhere_else(tmp_path: Path) -> None:
    write_set(tmp_path / "imagenet100", test="val")
    for name in ("..", "../imagenet100", "/etc", "a\\b"):
        (tmp_path / "imagenet100/classes.txt").write_text(f"ant\n{name}\n")
        with pytest.raises(UserError, match=r"classes.txt: '.*' is a path; only plain names are allowed"):
            load("imagenet100", tmp_path)
    (tmp_path / "imagenet100/classes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"classes.txt: not UTF-8 text"):
        load("imagenet100", tmp_path)
    root = tmp_path / "tiny-imagenet-200"
    write_tiny(root, True)
    (root / "val/val_annotations.txt").write_text("../../x.JPEG\tn01\n")
    with pytest.raises(UserError, match=r"val_annotations.txt: '../../x.JPEG' is a path"):
        load("tiny-imagenet", tmp_path)


def test_images_of_several_sizes_ask_for_one(tmp_path: Path) -> None:
    write_set(tmp_path)
    save(tmp_path / "train/bee/2.png", picture(0, 5, 7))
    with pytest.raises(UserError, match=r"differ in size \(6x6 and 7x5: .*bee/2.png\); set data.size"):
        folder(tmp_path)
    assert folder(tmp_path, size=4).train.images.shape == (5, 3, 4, 4)
    (tmp_path / "train/bee/2.png").unlink()
    for name in ("ant", "bee"):
        save(tmp_path / f"test/{name}/0.png", picture(0, 8, 8))
    with pytest.raises(UserError, match=r"images of train \(3x6x6\) and test \(3x8x8\) differ in size; set data.size"):
        folder(tmp_path)
