"""What one part of the data package hands to the next: every argument, under its own name."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tbbn.bench.data import loading, outline
from tbbn.bench.data.packed import pack, writer
from tbbn.bench.data.sources import contents, folders, images, listing, official
from tbbn.bench.data.sources.contents import IMAGENET_STATS, Contents
from tbbn.bench.data.types import Listing, Part
from tbbn.errors import UserError
from tbbn.plugins import temporary
from tbbn.registry import register_dataset


def write_images(root: Path, *names: str, side: int = 6) -> Path:
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3)).astype(np.uint8)
        PIL.Image.fromarray(pixels).save(root / name)
    return root


def watched(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, result: Any = None) -> list[dict[str, Any]]:
    """The arguments of every call from now on, with those that were left out; a call gives the result."""
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(getattr(module, name))

    def spy(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        calls.append(bound.arguments)
        return result

    monkeypatch.setattr(module, name, spy)
    return calls


def small() -> Contents:
    part = Part(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    return Contents(part, part, ("a", "b"), ("left out",))


def on_progress(done: int, n: int) -> None:
    """Nobody listens."""


WANTED = {"size": 12, "unreadable": "skip", "on_progress": on_progress}


@pytest.mark.parametrize("name", ["folder", "tiny-imagenet", "imagenet100", "cifar10", "mnist"])
def test_what_load_is_told_reaches_the_reader_of_folders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / name, "train/a/0.png", "val/a/0.png")
    (tmp_path / name / "classes.txt").write_text("a\n")
    module = official if name in official.OFFICIAL else folders
    calls = watched(monkeypatch, module, "read_folder", small())
    path = tmp_path / name
    full = f"folder:{path}" if name == "folder" else name
    source = loading.load(full, tmp_path, **WANTED, split=0.25, download=False)
    own: dict[str, dict[str, Any]] = {
        "folder": {"split": 0.25},
        "tiny-imagenet": {"test_names": ("val", "test")},
        "imagenet100": {"test_names": ("val", "test"), "classes": ["a"], "cache": True},
        "mnist": {"channels": 1},
    }
    usual = {"channels": 3, "classes": None, "test_names": ("test", "val"), "cache": False, "split": 0.0}
    assert calls == [{"owner": full, "path": path, **WANTED, **usual, **own.get(name, {})}]
    stats = official.OFFICIAL[name].stats if name in official.OFFICIAL else IMAGENET_STATS
    assert (source.name, source.mean, source.std, source.skipped) == (full, *stats, ("left out",))


@pytest.mark.parametrize(("name", "side"), [("tiny-imagenet", 64), ("imagenet100", 256)])
def test_sets_of_one_size_have_it_unless_told_otherwise(
    name: str, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / name, "train/a/0.png", "val/a/0.png", side=5)
    (tmp_path / name / "classes.txt").write_text("a\n")
    assert loading.load(name, tmp_path).train.images.shape == (1, 3, side, side)
    assert loading.load(name, tmp_path, size=7).train.images.shape == (1, 3, 7, 7)


def test_what_a_folder_is_read_with_reaches_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, "train/a/0.png", "train/b/0.png", "test/a/0.png", "test/b/0.png")
    calls = watched(monkeypatch, folders, "decode", (small().train, ()))
    heard: list[tuple[int, int]] = []
    folders.read_folder("mine", tmp_path, 9, channels=1, unreadable="skip", on_progress=lambda *n: heard.append(n))
    assert [call["listing"].files[0].parts[-3] for call in calls] == ["train", "test"]
    for call in calls:
        call["on_progress"](1, 2)
        assert {key: call[key] for key in ("owner", "size", "channels", "unreadable")} == {
            "owner": "mine", "size": 9, "channels": 1, "unreadable": "skip",
        }  # fmt: skip
    assert heard == [(1, 4), (3, 4)]
    folders.read_folder("mine", tmp_path)
    assert calls[-1]["on_progress"] is None and calls[-1]["size"] is None


def test_what_is_decoded_again_without_unreadable_images_is_decoded_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, *(f"{i}.png" for i in range(5)))
    (tmp_path / "1.png").write_bytes(b"no image")
    listed = Listing(tuple(tmp_path / f"{i}.png" for i in range(5)), (0, 1, 2, 3, 4))
    monkeypatch.setattr(images, "_IMAGES_PER_TASK", 2)
    heard: list[tuple[int, int]] = []
    part, left_out = images.decode(
        listed, "mine", size=3, channels=1, unreadable="skip", on_progress=lambda *n: heard.append(n)
    )
    assert part.images.shape == (4, 1, 3, 3) and part.labels.tolist() == [0, 2, 3, 4]
    assert left_out == (tmp_path / "1.png",) and heard == [(2, 5), (4, 5), (5, 5), (2, 4), (4, 4)]
    whole, none = images.decode(Listing(listed.files[2:], listed.labels[2:]), "mine", size=3, channels=1)
    assert none == () and torch.equal(whole.images, part.images[1:])


@pytest.mark.parametrize(("cores", "n"), [(40, 16), (16, 16), (3, 3), (None, 1)])
def test_a_cache_is_written_by_threads_and_waited_for(
    cores: int | None, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, "train/a/0.png", "test/a/0.png")
    listed = listing.list_folder("mine", tmp_path)
    request = writer.PackRequest(listed, 6, keep_common_size=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    written = writer.write_packed(request, tmp_path / "out", workers=folders.Workers(1))
    calls = watched(monkeypatch, folders, "write_packed", written)
    assert folders._packed_cache(request, "skip", on_progress) is written.packed
    workers = calls[0].pop("workers")
    assert (workers.n, workers.threads) == (n, True)
    told = {"unreadable": "skip", "overwrite": True, "wait": True, "on_progress": on_progress}
    assert calls == [{"request": request, "dest": tmp_path / "packed-6", **told}]


def test_a_folder_is_asked_to_be_packed_as_squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, "train/a/0.png", "test/a/0.png")
    monkeypatch.setattr(folders, "_CACHED_FROM", 1)
    calls = watched(monkeypatch, folders, "_packed_cache")
    folders.read_folder("mine", tmp_path, 5, cache=True, unreadable="skip", on_progress=on_progress)
    (call,) = calls
    request = call["request"]
    assert (request.size, request.keep_common_size, request.skip_option) == (5, False, "data.unreadable = 'skip'")
    assert request.listed.folder == tmp_path and (call["unreadable"], call["on_progress"]) == ("skip", on_progress)


def test_what_pack_is_told_reaches_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "set", "a/0.png", "a/1.png", "b/0.png", "b/1.png")
    (tmp_path / "classes.txt").write_text("b\na\n")
    calls = watched(monkeypatch, pack, "write_packed", "result")
    told = {"unreadable": "skip", "overwrite": True, "on_progress": on_progress}
    given = {"size": 9, "workers": 3, "split": 0.5, "classes": tmp_path / "classes.txt", "shard_bytes": 77}
    assert pack.pack(tmp_path / "set", tmp_path / "out", **given, **told) == "result"  # type: ignore[arg-type]
    (call,) = calls
    request, workers = call.pop("request"), call.pop("workers")
    assert (request.size, request.shard_bytes, request.listed.classes) == (9, 77, ("b", "a"))
    assert request.keep_common_size and [len(part.files) for part in request.listed.listings] == [2, 2]
    assert (workers.n, workers.threads) == (3, False)
    assert call == {"dest": tmp_path / "out", "wait": False, **told}


def test_a_folder_that_is_divided_is_checked_as_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "set", *(f"{name}/{i}.png" for name in ("bee", "Bee") for i in (0, 1)))
    with pytest.raises(UserError, match="'Bee' and 'bee' differ only in case"):
        listing.list_folder("mine", tmp_path / "set", split=0.5)
    with pytest.raises(UserError, match="lacks the folders of 1 classes: wasp"):
        listing.list_folder("mine", tmp_path / "set", ["bee", "wasp"], split=0.5)
    assert listing.list_folder("mine", tmp_path / "set", ["bee"], split=0.5).classes == ("bee",)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"mine: \S+empty holds no class folders; needs \S+empty/<class>/"):
        listing.list_folder("mine", tmp_path / "empty", split=0.5)


def test_of_classes_that_look_the_same_two_are_named(tmp_path: Path) -> None:
    for name in ("bee", "Bee", "BEE"):
        write_images(tmp_path, f"train/{name}/0.png", f"test/{name}/0.png")
    with pytest.raises(UserError, match="the class folders 'BEE' and 'Bee' differ only in case"):
        loading.load(f"folder:{tmp_path}")


def test_a_class_folder_that_may_not_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, "train/a/0.png", "test/a/0.png")

    def refused(_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(listing.os, "listdir", refused)
    with pytest.raises(PermissionError):
        listing.list_folder("mine", tmp_path)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path / "a+b", "train/a/0.png", "test/a/0.png")
    pack.pack(tmp_path / "a+b", tmp_path / "c+d", workers=1)
    write_images(tmp_path / "data/mnist", "train/a/0.png", "test/a/0.png")
    for name in ("folder:~/a+b", "packed:~/c+d"):
        assert loading.load(name).train.images.shape == outline.outline(name).source.train.images.shape == (1, 3, 6, 6)
    assert loading.load("mnist", "~/data", download=False).train.images.shape == (1, 1, 6, 6)
    assert outline.outline("mnist", "~/data").source.train.images.shape == (1, 1, 6, 6)
    assert loading.found("~/data")["mnist"]


def test_an_unpacked_folder_is_not_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "tiny-imagenet", "train/a/0.png", "val/a/0.png")
    (tmp_path / "tiny-imagenet-200.zip").touch()
    calls = watched(monkeypatch, folders.archives, "unpack")
    assert loading.load("tiny-imagenet", tmp_path, size=4).classes == ("a",) and calls == []
    (tmp_path / "tiny-imagenet").rename(tmp_path / "away")
    with pytest.raises(UserError, match="tiny-imagenet: no data under"):
        loading.load("tiny-imagenet", tmp_path)
    zipped = tmp_path / "tiny-imagenet-200.zip"
    assert calls == [{"archive": zipped, "root": tmp_path, "folder": "tiny-imagenet-200", "wanted": ()}]


@temporary()
def test_an_outline_of_any_other_data_set_is_what_load_gives_without_a_download() -> None:
    seen: dict[str, Any] = {}

    @register_dataset("mine", "some images")
    def mine(root: Any, size: Any, download: Any, unreadable: Any, split: Any) -> Any:
        seen.update(root=str(root), size=size, download=download, unreadable=unreadable, split=split)
        return loading.load("synthetic:2x2x1x8")

    outline.outline("mine", "here", size=5, unreadable="skip", split=0.5)
    assert seen == {"root": "here", "size": 5, "download": False, "unreadable": "skip", "split": 0.5}
    loading.load("mine", "there", size=6)
    assert seen == {"root": "there", "size": 6, "download": True, "unreadable": "fail", "split": 0.0}


def test_an_outline_has_the_size_it_is_asked_for(tmp_path: Path) -> None:
    for size, wanted in ((None, 32), (16, 16)):
        assert outline.outline("cifar10", tmp_path, size=size).source.train.images.shape[1:] == (3, wanted, wanted)
        both = outline.outline("mnist+svhn", tmp_path, size=size).source
        assert both.train.images.shape[1:] == (3, wanted, wanted)
    assert outline.outline("mnist", tmp_path).source.test.images.shape == (10_000, 1, 28, 28)
    assert loading.load("digits", size=1).train.images.shape[1:] == (1, 1, 1)
    assert loading.load("digits+synthetic:2x1x1x4", size=9).train.images.shape[1:] == (3, 9, 9)


# Downloads.


class Failing:
    """A data set whose download leaves something and fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, archive: str = "") -> None:
        def download(_: Any, root: str) -> None:
            (Path(root) / "MNIST/raw").mkdir(parents=True)
            if archive:
                (Path(root) / archive).write_bytes(b"half")
            warnings.warn("slow", stacklevel=1)
            raise error

        entry = official.OFFICIAL["mnist"]
        changed = official.Official(
            entry.description, entry.stats, entry.paths, entry.place, entry.read, download, archive
        )
        monkeypatch.setitem(official.OFFICIAL, "mnist", changed)


@pytest.mark.parametrize("archive", ["", "mnist.tar"])
@pytest.mark.parametrize("existed", [False, True])
def test_a_download_that_is_stopped_leaves_nothing(
    existed: bool, archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    root = tmp_path / "there/data"
    if existed:
        root.mkdir(parents=True)
    Failing(monkeypatch, KeyboardInterrupt(), archive)
    with pytest.raises(KeyboardInterrupt):
        loading.load("mnist", root)
    assert root.exists() == existed and not (root / "mnist.tar").exists() and not recwarn.list


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("\n no route\nand more"), "the download failed: no route"),
        (ValueError(), "the download failed: ValueError"),
        (ValueError("x" * 200), f"the download failed: {'x' * 160}"),
    ],
)
def test_the_reason_of_a_failed_download_is_its_first_line(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(monkeypatch, error)
    with pytest.raises(UserError) as caught:
        loading.load("mnist", tmp_path / "data")
    assert f"({reason}); place MNIST/raw/" in str(caught.value)
    assert str(caught.value).endswith("plain or .gz) there")  # it has no archive
    assert not (tmp_path / "data").exists()


def test_a_download_that_brings_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = official.OFFICIAL["svhn"]
    asked: list[tuple[Any, Any]] = []

    class Datasets:
        @staticmethod
        def SVHN(root: str, split: str, download: bool) -> None:
            asked.append((split, download))

    monkeypatch.setattr(official, "torchvision", lambda: type("Vision", (), {"datasets": Datasets}))
    with pytest.raises(
        UserError, match=r"svhn: no data under .* \(the download did not contain it\); place train_32x32.mat"
    ):
        loading.load("svhn", tmp_path / "new/data")
    assert asked == [("train", True), ("test", True)] and entry.paths == ("train_32x32.mat", "test_32x32.mat")


def test_statistics_and_size_reach_the_source() -> None:
    made = contents.make_source("mine", small(), ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), 2)
    assert (made.name, made.mean, made.std, made.skipped) == ("mine", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), ("left out",))
    assert made.train.images.shape == made.test.images.shape == (2, 3, 2, 2) and made.classes == ("a", "b")
