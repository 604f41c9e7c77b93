"""Packed data: what is stored, what a killed pack leaves, and one line for everything that is wrong."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tbbn.bench.cli.main import main
from tbbn.bench.data import device
from tbbn.bench.data.device import place_on_device
from tbbn.bench.data.loading import found, load
from tbbn.bench.data.packed import index as packed
from tbbn.bench.data.packed import shards, stream, workers, writer
from tbbn.bench.data.packed.index import check_packed, open_packed
from tbbn.bench.data.packed.pack import pack
from tbbn.bench.data.packed.shards import run_lengths
from tbbn.bench.data.packed.stream import StreamedImages
from tbbn.bench.data.packed.writer import images_per_shard
from tbbn.bench.files import temporary_path
from tbbn.bench.vision import torchvision
from tbbn.errors import UserError


def save(file: Path, seed: int, height: int = 8, width: int = 8, mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    PIL.Image.fromarray(pixels).convert(mode).save(file)


def write_set(root: Path, n: int = 4, sides: tuple[int, int] = (8, 8), test: str = "val") -> Path:
    for place, name in enumerate(("ant", "bee", "cat")):
        for number in range(n):
            save(root / "train" / name / f"{number}.png", 10 * place + number, *sides)
        save(root / test / name / "0.png", 100 + place, *sides)
    return root


def equal(folder: Path, source: Path, **options: Any) -> None:
    """The packed set gives the tensors that the folder gives, whole and row by row."""
    expected, got = load(f"folder:{source}", **options), load(f"packed:{folder}")
    assert got.classes == expected.classes and got.mean == expected.mean and got.groups == expected.groups
    for ours, theirs in ((got.train, expected.train), (got.test, expected.test)):
        assert torch.equal(ours.labels, theirs.labels) and ours.labels.dtype == torch.int64
        assert ours.images.shape == theirs.images.shape
        assert torch.equal(ours.images.to("cpu"), theirs.images)
        rows = torch.randperm(len(theirs.labels), generator=torch.Generator().manual_seed(0)).repeat(2)
        out = torch.empty(len(rows), *theirs.images.shape[1:], dtype=torch.uint8)
        ours.images.read(rows, out)
        assert torch.equal(out, theirs.images[rows])


@pytest.mark.parametrize("test", ["val", "test"])
def test_a_packed_set_is_the_folder_it_was_made_from(tmp_path: Path, test: str) -> None:
    source = write_set(tmp_path / "set", test=test)
    heard: list[tuple[int, int]] = []
    outcome = pack(
        source, tmp_path / "out", workers=1, shard_bytes=3 * 192, on_progress=lambda *done: heard.append(done)
    )
    assert outcome.decoded == 15 and outcome.packed.n_bytes == 15 * 192 and heard == [(i, 15) for i in range(1, 16)]
    assert [len(images.shards) for images in outcome.packed.images] == [4, 1]
    equal(tmp_path / "out", source)
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"index.json", "storage.json", ".lock", *(f"train-0000{i}.u8" for i in range(4)), "test-00000.u8"}


def test_a_folder_without_test_images_is_packed_with_a_split(tmp_path: Path) -> None:
    source = write_set(tmp_path / "set") / "train"
    pack(source, tmp_path / "out", workers=1, split=0.25)
    equal(tmp_path / "out", source, split=0.25)
    with pytest.raises(UserError, match=r"--split must be at least 0 and below 1, got 1\.0"):
        pack(source, tmp_path / "other", split=1.0)


def test_images_of_one_size_keep_it_and_others_become_centre_squares(tmp_path: Path) -> None:
    oblong = write_set(tmp_path / "oblong", sides=(6, 8))
    pack(oblong, tmp_path / "native", workers=1, size=8)
    equal(tmp_path / "native", oblong)
    assert open_packed(tmp_path / "native").images[0].shape == (12, 3, 6, 8)
    pack(oblong, tmp_path / "smaller", workers=1, size=7)  # one side is larger than that
    equal(tmp_path / "smaller", oblong, size=7)
    ragged = write_set(tmp_path / "ragged")
    save(ragged / "train/cat/9.png", 5, 11, 7)
    pack(ragged, tmp_path / "square", workers=1, size=16)
    equal(tmp_path / "square", ragged, size=16)


def test_a_stored_square_is_what_torchvision_would_show_in_evaluation(tmp_path: Path) -> None:
    source = write_set(tmp_path / "set")
    save(source / "val/ant/1.png", 77, 30, 23)
    pack(source, tmp_path / "out", workers=1, size=14)
    torchvision()
    from torchvision.transforms import v2

    with PIL.Image.open(source / "val/ant/1.png") as image:
        shown = v2.functional.pil_to_tensor(v2.Compose([v2.Resize(14), v2.CenterCrop(10)])(image))
    stored = open_packed(tmp_path / "out").images[1].to("cpu")[1]
    assert torch.equal(stored[:, 2:12, 2:12], shown)


def test_grey_transparent_and_palette_images_become_rgb(tmp_path: Path) -> None:
    source = write_set(tmp_path / "set")
    for number, mode in enumerate(("L", "RGBA", "P", "LA", "1")):
        save(source / f"train/ant/{mode}.png", number, mode=mode)
    pack(source, tmp_path / "out", workers=1)
    equal(tmp_path / "out", source)


def test_several_processes_write_the_same_bytes_as_one(tmp_path: Path) -> None:
    source = write_set(tmp_path / "set", n=9)
    heard: list[int] = []
    one = pack(source, tmp_path / "one", workers=1, shard_bytes=4 * 192)
    two = pack(source, tmp_path / "two", workers=2, shard_bytes=4 * 192, on_progress=lambda done, _: heard.append(done))
    assert one.packed.images[0].shards == two.packed.images[0].shards
    assert heard == sorted(heard) and heard[-1] == 30
    assert not check_packed(tmp_path / "two").problems


def test_processes_that_decode_begin_without_torch() -> None:
    code = "import sys, tbbn.bench.cli.main, tbbn.bench.data.packed.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("n", "side", "shards"),
    [(100, 8, 1), (16_000, 64, 47), (100_000, 64, 147), (1_281_167, 256, 939), (3, 20_000, 3)],
    ids=["a few", "some classes", "Tiny-ImageNet", "ImageNet", "huge ones"],
)
def test_a_set_has_shards_for_many_processes_and_no_more_than_it_needs(n: int, side: int, shards: int) -> None:
    assert -(-n // images_per_shard(n, 3 * side * side)) == shards


def test_a_shard_has_a_power_of_two_of_bytes() -> None:
    mib = 1 << 20
    assert images_per_shard(256 * 8, mib) == 8  # 8 MiB for each of 256 shards
    assert images_per_shard(256 * 8 + 1, mib) == 16 and images_per_shard(257 * 8, mib) == 16
    assert (
        images_per_shard((1 << 23) + 1, 256) == (1 << 24) // 256 and images_per_shard(1 << 23, 256) == (1 << 23) // 256
    )
    assert images_per_shard(1, 1) == 1 << 22 and images_per_shard(10**9, mib) == 256
    assert images_per_shard(1, 1 << 30) == 1


def test_a_set_is_repaired_in_the_shards_it_has(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set", n=9), tmp_path / "out"
    pack(source, out, workers=1, shard_bytes=4 * 192)
    before = {file.name: file.read_bytes() for file in out.glob("*.u8")}
    with pytest.raises(UserError, match="of other images or another size"):
        pack(source, out, workers=1, shard_bytes=5 * 192)
    (out / "train-00001.u8").unlink()
    assert pack(source, out, workers=1).decoded == 4
    assert {file.name: file.read_bytes() for file in out.glob("*.u8")} == before


DYING = """
import os, sys
from pathlib import Path
from tbbn.bench.data.packed import shards, workers
from tbbn.bench.data.packed.pack import pack
workers._FILES_PER_TASK = int(sys.argv[3])
if __name__ == "__main__":
    try:
        pack(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
else:
    shards.open_image = workers.image_sizes = lambda *args: os._exit(9)
"""


@pytest.mark.parametrize(
    "at_once", [pytest.param(4, marks=pytest.mark.nightly, id="at the sizes"), pytest.param(1000, id="at the images")]
)
def test_a_process_that_dies_is_told(tmp_path: Path, at_once: int) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    source = write_set(tmp_path / "set", n=9)
    program = [sys.executable, str(script), str(source), str(tmp_path / "out"), str(at_once)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and "UserError: pack: a worker process died" in done.stderr


def test_tiny_imagenet_as_published_is_packed_by_its_annotations(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    for place, name in enumerate(("n01", "n02")):
        save(root / f"train/{name}/images/{name}_0.JPEG", place)
        save(root / f"val/images/val_{place}.JPEG", 9 + place)
    save(root / "test/images/test_0.JPEG", 3)  # has no label
    (root / "val/val_annotations.txt").write_text("val_1.JPEG\tn01\t0 0 1 1\nval_0.JPEG\tn02\t0 0 1 1\n")
    expected = load("tiny-imagenet", tmp_path, size=8)
    pack(root, tmp_path / "tiny-imagenet-packed", workers=1)
    (tmp_path / "tiny-imagenet-200").rename(tmp_path / "away")
    assert found(tmp_path)["tiny-imagenet"]
    got = load("tiny-imagenet", tmp_path)  # under its own name, from tiny-imagenet-packed/
    assert got.classes == expected.classes and torch.equal(got.test.labels, torch.tensor([0, 1]))
    assert torch.equal(got.test.images.to("cpu"), expected.test.images)
    with pytest.raises(UserError, match=r"tiny-imagenet: packed at 8x8, but data.size is 32; pack it with --size 32"):
        load("tiny-imagenet", tmp_path, size=32)


def test_a_file_of_classes_picks_and_orders_them(tmp_path: Path) -> None:
    source = write_set(tmp_path / "set")
    (tmp_path / "classes.txt").write_text("cat\nant\n")
    outcome = pack(source, tmp_path / "out", workers=1, classes=tmp_path / "classes.txt")
    assert outcome.packed.classes == ("cat", "ant") and len(outcome.packed.labels[0]) == 8
    train = load(f"folder:{source}").train
    assert torch.equal(outcome.packed.images[0].to("cpu")[:4], train.images[8:])


# Interrupted packs. ----------------------------------------------------------------------------------------------------


def decoded(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[str]:
    """The files decoded from now on; the process "dies" at one more than `stop_after`."""
    seen: list[str] = []
    real = shards.open_image

    def watched(file: Path, channels: int, size: int | None) -> Any:
        if stop_after is not None and len(seen) == stop_after:
            raise KeyboardInterrupt
        seen.append(f"{file.parent.name}/{file.name}")
        return real(file, channels, size)

    monkeypatch.setattr(shards, "open_image", watched)
    return seen


def interrupt(source: Path, out: Path, after: int) -> None:
    """A pack in shards of three that is stopped after so many images."""
    with pytest.MonkeyPatch.context() as patch:
        decoded(patch, stop_after=after)
        with pytest.raises(KeyboardInterrupt):
            pack(source, out, workers=1, shard_bytes=3 * 192)


def test_an_interrupted_pack_goes_on_with_the_shard_it_was_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    interrupt(source, out, 7)
    with pytest.raises(UserError, match=r"out: not a complete packed set \(no index.json\); create one with"):
        load(f"packed:{out}")
    assert not list(out.glob(".train*"))
    seen, heard = decoded(monkeypatch), []
    outcome = pack(source, out, workers=1, shard_bytes=3 * 192, on_progress=lambda done, n: heard.append((done, n)))
    assert seen[0] == "bee/2.png" and len(seen) == outcome.decoded == 9 and heard[0] == (7, 15)
    equal(out, source)
    assert pack(source, out, workers=1, shard_bytes=3 * 192).decoded == 0


KILLED = """
import sys, time
from pathlib import Path
from tbbn.bench.data.packed import shards, stream, workers
from tbbn.bench.data.packed.pack import pack
def slow(file, channels, size, real=shards.open_image):
    if len(list(Path(sys.argv[2]).glob("train-*.json"))) >= 4:
        time.sleep(2)  # so that the kill comes in time
    return real(file, channels, size)
shards.open_image = slow
if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]), workers=2, shard_bytes=3 * 192)
"""


def test_a_pack_killed_at_any_moment_is_continued(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set", n=30), tmp_path / "out"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    process = subprocess.Popen([sys.executable, str(script), str(source), str(out)])
    until = time.monotonic() + 60
    while len(list(out.glob("train-*.json"))) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {file.stem: file.read_text() for file in out.glob("*.json") if file.stem != "storage"}
    assert len(kept) >= 4 and "index" not in kept, "killed too late"
    outcome = pack(source, out, workers=1, shard_bytes=3 * 192)
    assert outcome.decoded <= 93 - 3 * 4
    equal(out, source)
    assert not check_packed(out).problems


def test_a_changed_image_is_packed_again_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    interrupt(source, out, 14)
    save(source / "train/bee/1.png", 999)
    seen = decoded(monkeypatch)
    pack(source, out, workers=1, shard_bytes=3 * 192)
    assert seen[:3] == ["ant/3.png", "bee/0.png", "bee/1.png"] and len(seen) == 6
    equal(out, source)


def test_a_deleted_shard_is_restored_from_the_images(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    pack(source, out, workers=1, shard_bytes=3 * 192)
    (out / "train-00002.u8").unlink()
    with pytest.raises(
        UserError, match=r"train-00002.u8: cannot be read \(No such file or directory\); run the same tbbn"
    ):
        load(f"packed:{out}")
    assert pack(source, out, workers=1, shard_bytes=3 * 192).decoded == 3
    equal(out, source)


def test_a_pack_goes_on_with_the_shards_it_began_with(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        decoded(patch, stop_after=7)
        with pytest.raises(KeyboardInterrupt):
            pack(source, out, workers=1, shard_bytes=192)  # an image a shard
    assert pack(source, out, workers=1).decoded == 8
    assert len(list(out.glob("train-*.u8"))) == 12
    equal(out, source)


def test_what_a_killed_pack_leaves_does_not_stop_the_next(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    interrupt(source, out, 7)
    left = temporary_path(out / "train-00001.u8")
    left.write_bytes(b"half")
    pack(source, out, workers=1)
    assert not left.exists() and len(list(out.iterdir())) == 8


def test_the_index_of_a_set_goes_before_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has one is complete."""
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    pack(source, out, workers=1, shard_bytes=3 * 192)  # more shards than there will be
    gone: list[str] = []
    real = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda file, **more: gone.append(file.name) or real(file, **more))
    listed = Path.iterdir  # a file system may list the index last
    monkeypatch.setattr(
        Path, "iterdir", lambda path: iter(sorted(listed(path), key=lambda file: file.name == "index.json"))
    )
    pack(source, out, workers=1, size=4, overwrite=True)
    assert gone[0] == "index.json" and "train-00003.u8" in gone[1:]


def test_a_set_that_was_packed_without_its_unreadable_images_is_repaired(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    (source / "train/ant/2.png").write_bytes(b"no image")
    pack(source, out, workers=1, shard_bytes=192, unreadable="skip")
    equal(out, source, unreadable="skip")  # one of the shards holds nothing
    (out / "train-00000.u8").unlink()
    repaired = pack(source, out, workers=1, shard_bytes=192)
    assert repaired.decoded == 1 and repaired.packed.skipped == ("train/ant/2.png",)
    equal(out, source, unreadable="skip")


def test_a_name_that_is_no_text_is_packed(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    os.rename(source / "train/ant/0.png", os.fsencode(source / "train/ant") + b"/\xff.png")
    assert pack(source, out, workers=1).decoded == 15 and pack(source, out, workers=1).decoded == 0
    equal(out, source)


def test_a_set_that_another_process_has_finished_meanwhile_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    pack(source, out, workers=1)
    before = (out / "index.json").stat().st_ino
    monkeypatch.setattr(writer, "_up_to_date", lambda *_: None)  # as it was when this one asked
    assert pack(source, out, workers=1).decoded == 0
    assert (out / "index.json").stat().st_ino == before


def test_a_pack_that_was_killed_before_its_index_writes_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_index", killed)
        with pytest.raises(KeyboardInterrupt):
            pack(source, out, workers=1, shard_bytes=3 * 192)
    assert pack(source, out, workers=1, shard_bytes=3 * 192).decoded == 0
    equal(out, source)
    (out / "train-00001.u8").unlink()
    pack(source, out, workers=1, shard_bytes=3 * 192)
    assert {file.name for file in out.glob("*.json")} == {"index.json", "storage.json"}


def test_a_disk_that_is_just_large_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, n_bytes = write_set(tmp_path / "set"), 15 * 192
    for free in (n_bytes - 1, n_bytes):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        if free < n_bytes:
            with pytest.raises(UserError, match="lower --size, or use another disk"):
                pack(source, tmp_path / "out", workers=1)
        else:
            assert pack(source, tmp_path / "out", workers=1).decoded == 15


def test_an_index_is_text_that_may_be_read_and_sorted(tmp_path: Path) -> None:
    pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1)
    text = (tmp_path / "out/index.json").read_text()
    assert text.startswith('{\n "kind": "tbbn packed images",\n "schema": 1,\n "shape": [\n  3,')
    turned = dict(reversed(json.loads(text).items()))
    (tmp_path / "out/index.json").write_text(json.dumps(turned))
    assert open_packed(tmp_path / "out").classes == ("ant", "bee", "cat")
    assert packed._labels([]).dtype == torch.int64


def test_a_shard_is_mapped_once_and_never_written(tmp_path: Path) -> None:
    pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1)
    file = tmp_path / "out/train-00000.u8"
    before, images = file.read_bytes(), open_packed(tmp_path / "out").images[0]
    assert images._map(0) is images._map(0)
    images._map(0)[:] = 7
    assert file.read_bytes() == before


def test_no_worker_is_started_for_nothing() -> None:
    with workers.Workers(2, threads=True) as some:
        some.write([], None)
        assert some.pool is None


def test_a_set_of_other_images_is_replaced_only_when_asked(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    pack(source, out, workers=1, shard_bytes=3 * 192)
    with pytest.raises(UserError, match=r"out: holds a packed set of other images or another size; .*--overwrite"):
        pack(source, out, workers=1, size=4, shard_bytes=3 * 192)
    pack(source, out, workers=1, size=4, overwrite=True)
    equal(out, source, size=4)
    assert len(list(out.glob("*.u8"))) == 2


def test_two_packs_into_one_folder_do_not_meet(tmp_path: Path) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"

    def second(done: int, n: int) -> None:
        with pytest.raises(UserError, match=r"out: another process is working on it; wait for it"):
            pack(source, out, workers=1)

    pack(source, out, workers=1, on_progress=second)


# What is wrong is said in one line. ------------------------------------------------------------------------------------


def test_unreadable_images_are_named_and_counted_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    (source / "train/ant/2.png").write_bytes(b"no image")
    whole = (source / "train/cat/1.png").read_bytes()
    (source / "train/cat/1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        UserError, match=r"^train/ant/2.png: is not a readable image .*; 2 of 15 images are unreadable; repair"
    ):
        pack(source, out, workers=1)
    assert not (out / "index.json").exists()
    seen = decoded(monkeypatch)
    outcome = pack(source, out, workers=1, unreadable="skip")
    assert not seen  # all were tried the first time
    assert outcome.packed.skipped == ("train/ant/2.png", "train/cat/1.png")
    equal(out, source, unreadable="skip")
    assert load(f"packed:{out}").skipped == outcome.packed.skipped


def test_a_class_without_a_readable_image_is_an_error(tmp_path: Path) -> None:
    source = write_set(tmp_path / "set")
    (source / "val/bee/0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"class 'bee' has no readable image in test"):
        pack(source, tmp_path / "out", workers=1, unreadable="skip")


def test_a_damaged_shard_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    assert main(["data", "pack", str(source), str(out), "--workers", "1", "--quiet"]) == 0
    assert f"tbbn run --data packed:{out}" in capsys.readouterr().out
    assert main(["data", "check", str(out)]) == 0
    assert "2 shards, 0.00 GiB: OK" in capsys.readouterr().out
    content = bytearray((out / "train-00000.u8").read_bytes())
    content[100] ^= 1
    (out / "train-00000.u8").write_bytes(content)
    assert main(["data", "check", str(out)]) == 1
    assert "train-00000.u8: damaged: its content does not match its checksum; delete it" in capsys.readouterr().out
    # No image of a damaged shard is trained on, whether the set is held in memory or streamed.
    for streamed in ("no", "yes"):
        words = ["--data", f"packed:{out}", "--data.tasks", "1", "--memory.budget", "9", "--data.stream", streamed]
        assert main(["run", *words, "--device", "cpu", "--out", str(tmp_path / "runs"), "--quiet"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"tbbn: {out}/train-00000.u8: damaged: its content does not match its checksum; delete")
        assert said.count("\n") == 1 and not (tmp_path / "runs").exists()
    (out / "train-00000.u8").unlink()
    assert main(["data", "pack", str(source), str(out), "--workers", "1", "--quiet"]) == 0  # the way out
    assert main(["data", "check", str(out)]) == 0
    capsys.readouterr()
    (out / "train-00000.u8").write_bytes(content[:-1])
    assert main(["data", "check", str(out), "--json"]) == 1
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert problem == {"file": "train-00000.u8", "problem": "has 2303 bytes, must have 2304"}
    with pytest.raises(UserError, match=r"train-00000.u8: has 2303 bytes, must have 2304"):
        load(f"packed:{out}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "has schema 99; this version reads 1; pack the set again"),
        ({"kind": "others"}, "not the index of a packed set"),
        ({"classes": ["x", "y", "z"]}, "damaged: its content does not match its checksum"),
    ],
)
def test_an_index_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    out = tmp_path / "out"
    pack(write_set(tmp_path / "set"), out, workers=1)
    index = json.loads((out / "index.json").read_text())
    (out / "index.json").write_text(json.dumps({**index, **change}))
    with pytest.raises(UserError, match=message):
        load(f"packed:{out}")
    (out / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index.json: damaged, or not an index"):
        load(f"packed:{out}")


@pytest.mark.parametrize("content", ["[1]", '"text"', "3"])
def test_an_index_that_is_no_dictionary_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(UserError, match=r"index.json: not the index of a packed set; choose another folder"):
        open_packed(tmp_path)


def test_a_missing_shard_is_a_problem_that_a_check_tells(tmp_path: Path) -> None:
    pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1, shard_bytes=5 * 192)
    (tmp_path / "out/train-00001.u8").unlink()
    heard: list[tuple[int, int]] = []
    found = check_packed(tmp_path / "out", lambda *n: heard.append(n))
    assert found.problems == (("train-00001.u8", "cannot be read (No such file or directory)"),)
    assert (found.shards, found.n_bytes) == (4, 15 * 192)
    assert heard[-1] == (15 * 192, 15 * 192) and [n for n, _ in heard] == sorted(n for n, _ in heard)
    # Each shard that can be read by its bytes, and all at their end.
    assert [done // 192 for done, _ in heard] == [5, 5, 10, 12, 12, 15, 15]


def test_a_shard_is_done_if_it_is_whole_and_of_these_images(tmp_path: Path) -> None:
    save(tmp_path / "1.png", 0)
    images = (tmp_path / "1.png",)
    job = shards.ShardJob(tmp_path / "train-00000.u8", tmp_path, images, (4,), (3, 8, 8), False, "digest")
    assert not job.is_done()
    heard: list[int] = []
    shards.write_shard(job, heard.append, lambda: False)
    assert job.is_done() and heard == [1] and job.read_receipt().labels == [[4, 1]]
    assert not replace(job, digest="other").is_done() and not replace(job, shape=(3, 8, 7)).is_done()
    receipt, content = job.receipt.read_bytes(), job.file.read_bytes()
    job.file.write_bytes(content[:-1])
    assert not job.is_done()
    job.file.write_bytes(content)
    for damaged in (b"{", b"[]", b"{}", b"3"):
        job.receipt.write_bytes(damaged)
        assert not job.is_done()
    job.receipt.write_bytes(receipt)
    assert job.is_done()
    job.file.unlink()
    assert not job.is_done()


def test_an_old_receipt_does_not_vouch_for_a_new_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "1.png", 0)
    images = (tmp_path / "1.png",)
    job = shards.ShardJob(tmp_path / "train-00000.u8", tmp_path, images, (4,), (3, 8, 8), False, "digest")
    shards.write_shard(job, lambda n: None, lambda: False)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "write_atomic", full)
    with pytest.raises(UserError, match="cannot be written"):
        shards.write_shard(job, lambda n: None, lambda: False)
    assert job.file.exists() and not job.receipt.exists()


def test_a_set_of_half_the_free_memory_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1)
    stored, cpu = open_packed(tmp_path / "out").images[0], torch.device("cpu")
    for free, held in ((2 * 12 * 192, torch.Tensor), (2 * 12 * 192 - 1, StreamedImages)):
        monkeypatch.setattr(device, "_free_bytes", lambda _, free=free: free)
        assert isinstance(place_on_device(stored, cpu), held)


@pytest.mark.parametrize(
    "change",
    [{"images_per_shard": 0}, {"shape": [3, 0, 8]}, {"shape": [3, 8]}, {"shape": None}, {"made_from": "others"}, {}],
    ids=str,
)
def test_how_images_are_stored_is_decided_again_where_the_note_of_it_is_of_no_use(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    source, out = write_set(tmp_path / "set"), tmp_path / "out"
    interrupt(source, out, 7)
    saved = json.loads((out / "storage.json").read_text())
    assert saved["shape"] == [3, 8, 8] and saved["images_per_shard"] == 3 and saved["square"] is False
    (out / "storage.json").write_text(json.dumps({**saved, **change}) if change else "{")
    assert pack(source, out, workers=1, shard_bytes=3 * 192).decoded == 9
    assert json.loads((out / "storage.json").read_text()) == saved
    equal(out, source)


def test_a_packed_set_may_be_asked_for_in_its_own_size(tmp_path: Path) -> None:
    pack(write_set(tmp_path / "set", sides=(6, 8)), tmp_path / "oblong", workers=1)
    pack(write_set(tmp_path / "square"), tmp_path / "out", workers=1)
    assert load(f"packed:{tmp_path}/out", size=8).train.images.shape == (12, 3, 8, 8)
    for size in (6, 8):
        with pytest.raises(UserError, match=rf"packed at 6x8, but data.size is {size}; pack it with --size {size}"):
            load(f"packed:{tmp_path}/oblong", size=size)


def test_an_index_without_its_entries_is_refused(tmp_path: Path) -> None:
    index: dict[str, Any] = {"kind": packed.KIND, "schema": 1, "shape": [3, 8, 8]}
    (tmp_path / "index.json").write_text(json.dumps({**index, "sha256": packed.index_digest(index)}))
    with pytest.raises(UserError, match=r"index.json: damaged: KeyError 'shards'; pack the set again"):
        open_packed(tmp_path)


def test_places_that_will_not_do_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_set(tmp_path / "set")
    with pytest.raises(UserError, match=r"set: holds '\w+', which is not part of a packed set; choose an empty folder"):
        pack(source, source)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: is a file; choose a folder to pack into"):
        pack(source, tmp_path / "file")
    with pytest.raises(UserError, match=r"pack: .*train needs the folders train"):
        pack(source / "train", tmp_path / "out")
    with pytest.raises(UserError, match=r"nowhere: no such folder; create it with tbbn data pack"):
        load(f"packed:{tmp_path / 'nowhere'}")
    for options in ({"size": 0}, {"workers": -1}):
        with pytest.raises(UserError, match=r"pack: --\w+ must be at least 1, got"):
            pack(source, tmp_path / "out", **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"unknown way to treat unreadable images 'drop'"):
        pack(source, tmp_path / "out", unreadable="drop")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(UserError, match=r"out: needs 0.0 GiB, 0.0 GiB are free; lower --size, or use another disk"):
        pack(source, tmp_path / "out", workers=1)


def test_a_full_disk_is_said_and_leaves_no_half_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("tbbn.bench.data.packed.writer.write_atomic", lambda *_: None)
    with pytest.raises(UserError, match=r"train-00000.u8: cannot be written \(No space left on device\); run the same"):
        pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "pack", str(write_set(tmp_path / "set")), str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    outcome = json.loads(said.out)
    assert outcome["train"] == 12 and outcome["test"] == 3 and outcome["shape"] == [3, 8, 8] and outcome["shards"] == 2
    assert said.err.startswith("packing: 15 of 15 images, ")
    assert main(words) == 0
    assert "12 + 3 images of 3 classes at 8x8, 0.00 GiB (already packed)" in capsys.readouterr().out
    assert main(["data"]) == 2 and main(["data", "pack", str(tmp_path)]) == 2


# Streams. --------------------------------------------------------------------------------------------------------------


def test_a_stream_gives_what_indexing_gives(tmp_path: Path) -> None:
    source = write_set(tmp_path / "set", n=12)
    pack(source, tmp_path / "out", workers=1, shard_bytes=5 * 192)
    images = load(f"folder:{source}").train.images
    streamed = StreamedImages(open_packed(tmp_path / "out").images[0], torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, 36, (n,), generator=generator) for n in (7, 1, 0, 12, *range(1, 20))]
    n_read = 0
    for part, (batch,) in zip(parts, streamed.prefetch(parts), strict=True):
        assert torch.equal(batch, images[part])
        n_read += 1
    assert n_read == len(parts)
    assert list(streamed.prefetch([])) == []


class Slow:
    """Packed images (20, 1, 2, 2) that are read when they may be; image i consists of i."""

    shape = torch.Size((20, 1, 2, 2))

    def __init__(self) -> None:
        self.allowed, self.read_rows = threading.Event(), []

    def read(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        assert self.allowed.wait(20)
        self.read_rows.append(rows.tolist())
        out.copy_(rows.view(-1, 1, 1, 1).expand(out.shape))


def streamed_slowly(rows: list[list[int]]) -> tuple[Slow, Any]:
    slow = Slow()
    images = StreamedImages(slow, torch.device("cpu"))  # type: ignore[arg-type]
    return slow, images.prefetch([torch.tensor(some) for some in rows])


@pytest.mark.parametrize(
    ("n", "n_bytes", "slots"), [(20, 2**28, 8), (5, 2**28, 5), (20, 39, 3), (20, 36, 3), (20, 1, 2), (1, 1, 1)]
)
def test_no_more_is_read_ahead_than_fits(n: int, n_bytes: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_BYTES", n_bytes)
    rows = [[i, 0, 0] if i == 3 or n == 1 else [i] for i in range(n)]  # the longest has 3 images, of 4 bytes
    slow, ahead = streamed_slowly(rows)
    assert len(ahead.slots) == slots
    assert all(slot.host.shape == (3 if n > 3 or n == 1 else 1, 1, 2, 2) for slot in ahead.slots)
    slow.allowed.set()
    for i, (batch,) in enumerate(ahead):
        assert batch[:, 0, 0, 0].tolist() == rows[i]
        assert len(slow.read_rows) <= min(n, i + slots), "the slot of a batch in use was overwritten"
    assert sorted(slow.read_rows) == sorted(rows)


def test_a_stream_says_whether_the_next_batch_is_there() -> None:
    slow, ahead = streamed_slowly([[1], [2]])
    assert not ahead.ready()
    slow.allowed.set()
    for slot in ahead.slots:
        slot.reading.result(20)
    assert ahead.ready()
    next(ahead)
    assert ahead.ready()
    next(ahead)
    assert ahead.ready()  # nothing is left to wait for
    with pytest.raises(StopIteration):
        next(ahead)
    assert iter(ahead) is ahead
    empty = streamed_slowly([])[1]
    assert empty.ready() and list(empty) == []


@pytest.mark.parametrize(("cores", "threads"), [(16, 4), (4, 4), (2, 2), (None, 1)])
def test_images_are_read_by_a_few_threads(cores: int | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    pool = StreamedImages(Slow(), torch.device("cpu")).pool  # type: ignore[arg-type]
    assert pool._max_workers == threads
    assert pool.submit(lambda: threading.current_thread().name).result(20).startswith("tbbn-read")


def test_a_set_is_streamed_where_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1)
    stored, cpu = open_packed(tmp_path / "out").images[0], torch.device("cpu")
    assert isinstance(place_on_device(stored, cpu), torch.Tensor) and isinstance(
        place_on_device(stored, cpu, "yes"), StreamedImages
    )
    for free, held in ((5, torch.Tensor), (4, StreamedImages)):  # kB, for 12 images of 192 bytes and as much again
        meminfo = f"MemTotal: 9 kB\nMemAvailable: {free} kB\n"
        monkeypatch.setattr(device, "open", lambda _, text=meminfo: io.StringIO(text), raising=False)
        assert isinstance(place_on_device(stored, cpu), held)
    assert isinstance(place_on_device(stored, cpu, "no"), torch.Tensor)
    with pytest.raises(UserError, match=r"data.stream = 'yes' needs a packed data set"):
        place_on_device(torch.zeros(1), cpu, "yes")


def test_where_linux_does_not_say_how_much_memory_is_free_all_of_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 7, "SC_PHYS_PAGES": 11}.__getitem__)

    def missing(_: str) -> Any:
        raise FileNotFoundError

    for opened in (missing, lambda _: io.StringIO("MemTotal: 9 kB\n")):
        monkeypatch.setattr(device, "open", opened, raising=False)
        assert device._free_bytes(torch.device("cpu")) == 77


def test_a_part_knows_whether_it_is_streamed(tmp_path: Path) -> None:
    pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1)
    stored = open_packed(tmp_path / "out").images[0]
    for streamed, wanted in (("yes", True), ("no", False)):
        images = place_on_device(stored, torch.device("cpu"), streamed)
        part = device.DeviceDataset(images, torch.zeros(12), *[torch.zeros(3)] * 2, None, torch.contiguous_format)
        assert part.is_streamed == wanted
        rows = torch.tensor([3, 1])
        (read,) = part.prefetch([rows]) if wanted else [[]]
        assert torch.equal(part.gather(rows, read), stored.to("cpu")[rows])


def test_a_process_that_decodes_leaves_ctrl_c_to_its_parent_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *given: done.append(given))
    monkeypatch.setattr("warnings.simplefilter", lambda *given: done.append(given))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: done.append((thread._target, thread.daemon)))
    monkeypatch.setattr(workers, "_shared", None)
    workers._init_worker("count", "stop")
    assert workers._shared == ("count", "stop")
    assert done == [("ignore",), (signal.SIGINT, signal.SIG_IGN), (workers._exit_with_parent, True)]

    class Parent:
        def join(self) -> None:
            done.append("joined")

    done.clear()
    monkeypatch.setattr(os, "_exit", done.append)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    workers._exit_with_parent()
    assert done == []
    monkeypatch.setattr("multiprocessing.parent_process", Parent)
    workers._exit_with_parent()
    assert done == ["joined", 1]


def test_as_many_workers_as_cores_unless_a_number_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: {1, 5, 6}}.__getitem__, raising=False)
    assert (workers.Workers().n, workers.Workers(7).n, workers.Workers(1).n) == (3, 7, 1)
    monkeypatch.delattr(os, "sched_getaffinity")
    for cores, wanted in ((5, 5), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert workers.Workers().n == wanted


def test_workers_are_told_to_stop_and_waiting_work_is_dropped() -> None:
    held, begun = threading.Event(), threading.Event()
    with workers.Workers(1, threads=True) as some:
        pool = some._started()
        assert some._started() is pool and some.count.value == 0 and not some.stop.is_set()
        running = pool.submit(lambda: (begun.set(), held.wait(20)))
        assert begun.wait(20)
        waiting = [pool.submit(pytest.fail) for _ in range(3)]
        threading.Timer(0.05, held.set).start()
    assert some.stop.is_set() and running.done() and all(future.cancelled() for future in waiting)
    with workers.Workers(1, threads=True) as unused:
        pass
    assert unused.pool is None


def test_images_have_a_common_shape_if_all_have_one_size_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_FILES_PER_TASK", 2)
    files = [tmp_path / f"{i}.png" for i in range(5)]
    for i, file in enumerate(files):
        save(file, i, 6, 8)
    some = workers.Workers(1)
    assert some.common_shape(files, 8, 3) == (3, 6, 8) and some.common_shape(files, 9, 1) == (1, 6, 8)
    assert some.common_shape(files, 7, 3) is None and some.common_shape([], 9, 3) is None
    files[1].write_bytes(b"no image")
    assert some.common_shape(files, 8, 3) == (3, 6, 8)
    with workers.Workers(2, threads=True) as threads:
        assert threads.common_shape(files, 8, 3) == (3, 6, 8)
        assert threads.pool is not None
    with workers.Workers(2, threads=True) as threads:
        assert threads.common_shape(files[:2], 8, 3) == (3, 6, 8) and threads.pool is None  # one piece: no pool for it
    save(files[4], 0, 8, 6)
    assert some.common_shape(files, 8, 3) is None and some.pool is None


def test_two_sizes_are_enough_to_know(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.png" for i in range(4)]
    for i, file in enumerate(files):
        save(file, i, 6, 6 + i)
    files.insert(1, tmp_path / "missing.png")
    assert workers.image_sizes(files) == {(6, 6), (7, 6)} and workers.image_sizes(files[:2]) == {(6, 6)}


def test_an_error_of_a_reading_thread_reaches_the_one_who_asks(tmp_path: Path) -> None:
    pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1)
    streamed = StreamedImages(open_packed(tmp_path / "out").images[0], torch.device("cpu"))
    with pytest.raises(IndexError):
        next(streamed.prefetch([torch.tensor([999])]))


def test_a_shard_is_compared_once_in_a_process_unless_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(write_set(tmp_path / "set"), tmp_path / "out", workers=1)
    compared: list[tuple[int, ...]] = []

    class Counted:
        @staticmethod
        def sha256(content: Any) -> Any:
            compared.append(getattr(content, "shape", ()))
            return hashlib.sha256(content)

    monkeypatch.setattr(packed, "hashlib", Counted)
    shard = 12, 3 * 8 * 8
    images = open_packed(tmp_path / "out").images[0]
    assert compared.count(shard) == 0  # opening reads no shard
    images.read(torch.tensor([0]), torch.empty(1, 3, 8, 8, dtype=torch.uint8))
    images.to("cpu")
    open_packed(tmp_path / "out").images[0].to("cpu")
    assert compared.count(shard) == 1
    os.utime(tmp_path / "out/train-00000.u8", (1, 1))
    open_packed(tmp_path / "out").images[0].to("cpu")
    assert compared.count(shard) == 2


def test_labels_are_kept_as_runs() -> None:
    assert run_lengths([3, 3, 3, 0, 3]) == [[3, 3], [0, 1], [3, 1]] and run_lengths([]) == []
