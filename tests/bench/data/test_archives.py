"""Archives, the published ones and malicious ones: what is unpacked, and that nothing gets out of its folder."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import stat
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tbbn.bench.cli.main import main
from tbbn.bench.data.loading import found, load
from tbbn.bench.data.sources import archives
from tbbn.bench.vision import torchvision
from tbbn.errors import UserError

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def cifar10_files() -> dict[str, bytes]:
    content = {"data": np.zeros((1, 3072), np.uint8), "labels": [7]}
    return {f"cifar-10-batches-py/{batch}": pickle.dumps(content) for batch in BATCHES}


def tar(file: Path, members: dict[str, bytes | tarfile.TarInfo], mode: str = "w:gz") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode) as opened:  # type: ignore[call-overload]
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                opened.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))


def zipped(file: Path, members: dict[str, bytes], modes: dict[str, int] | None = None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (modes or {}).get(name, stat.S_IFREG | 0o644) << 16
            opened.writestr(info, content)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def device(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.FIFOTYPE
    return info


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_the_published_archive_is_unpacked_where_it_lies(tmp_path: Path) -> None:
    tar(tmp_path / "data/cifar-10-python.tar.gz", {**cifar10_files(), "readme.html": b"<p>", "./x/y": b""})
    assert found(tmp_path / "data")["cifar10"]
    assert load("cifar10", tmp_path / "data", download=False).train.labels.tolist() == [7] * 5
    # The folder of the data set alone is unpacked, and nothing of the work remains.
    assert everything(tmp_path / "data") == sorted(["cifar-10-batches-py", "cifar-10-python.tar.gz", *cifar10_files()])


def test_a_half_unpacked_folder_is_completed(tmp_path: Path) -> None:
    tar(tmp_path / "cifar-10-python.tar.gz", cifar10_files())
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py/data_batch_1").write_bytes(b"half")
    assert load("cifar10", tmp_path, download=False).test.labels.tolist() == [7]


def test_tiny_imagenet_is_read_from_its_zip(tmp_path: Path) -> None:
    picture = io.BytesIO()
    PIL.Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(picture, "png")
    names = [f"tiny-imagenet-200/{part}/n0{k}/{k}.png" for part in ("train", "val") for k in (1, 2)]
    zipped(tmp_path / "tiny-imagenet-200.zip", dict.fromkeys(names, picture.getvalue()))
    assert found(tmp_path)["tiny-imagenet"]
    assert load("tiny-imagenet", tmp_path).classes == ("n01", "n02")


ESCAPES: dict[str, tuple[dict[str, Any], str]] = {
    "parent": ({"../escaped": b"x"}, "leads out of its folder"),
    "parent inside": ({"cifar-10-batches-py/../../escaped": b"x"}, "leads out of its folder"),
    "absolute": ({"/tmp/tbbn-escaped": b"x"}, "leads out of its folder"),
    "windows drive": ({"C:\\escaped": b"x"}, "leads out of its folder"),
    "windows parent": ({"cifar-10-batches-py\\..\\..\\escaped": b"x"}, "leads out of its folder"),
    "link": ({"l": link("cifar-10-batches-py/out", "/")}, "is a link or a device"),
    "link and file": (
        {"l": link("cifar-10-batches-py/out", ".."), "cifar-10-batches-py/out/escaped": b"x"},
        "is a link or a device",
    ),
    "hard link": ({"l": link("cifar-10-batches-py/passwd", "/etc/passwd", tarfile.LNKTYPE)}, "is a link or a device"),
    "pipe": ({"l": device("cifar-10-batches-py/pipe")}, "is a link or a device"),
}


@pytest.mark.parametrize("case", ESCAPES)
@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_a_malicious_tar_is_refused_before_a_byte_is_written(tmp_path: Path, case: str, mode: str) -> None:
    members, why = ESCAPES[case]
    tar(tmp_path / "data/cifar-10-python.tar.gz", {**cifar10_files(), **members}, mode)
    with pytest.raises(UserError, match=rf"cifar-10-python.tar.gz: refused: its member '.*' {why}"):
        load("cifar10", tmp_path / "data", download=False)
    assert everything(tmp_path) == ["data", "data/cifar-10-python.tar.gz"]
    assert not Path("/tmp/tbbn-escaped").exists()


@pytest.mark.parametrize("name", ["../escaped", "/tmp/tbbn-escaped", "tiny-imagenet-200/../../escaped", "C:/escaped"])
def test_a_malicious_zip_is_refused_before_a_byte_is_written(tmp_path: Path, name: str) -> None:
    zipped(tmp_path / "data/tiny-imagenet-200.zip", {"tiny-imagenet-200/train/a/0.png": b"", name: b"x"})
    with pytest.raises(UserError, match=r"tiny-imagenet-200.zip: refused: its member '.*' leads out of its folder"):
        load("tiny-imagenet", tmp_path / "data")
    assert everything(tmp_path) == ["data", "data/tiny-imagenet-200.zip"]
    assert not Path("/tmp/tbbn-escaped").exists()


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    members = {"tiny-imagenet-200/train": b"/etc", "tiny-imagenet-200/val/a/0.png": b""}
    zipped(tmp_path / "tiny-imagenet-200.zip", members, {"tiny-imagenet-200/train": stat.S_IFLNK | 0o777})
    with pytest.raises(UserError, match=r"refused: its member 'tiny-imagenet-200/train' is a link or a device"):
        load("tiny-imagenet", tmp_path)
    assert everything(tmp_path) == ["tiny-imagenet-200.zip"]


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    return {
        "truncated": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
        "empty": b"",
        "foreign": b"%PDF-1.7\n" * 50,
    }


@pytest.mark.parametrize("how", damaged(b"xx"))
@pytest.mark.parametrize("kind", ["w:gz", "w", "zip"])
def test_a_damaged_archive_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, how: str
) -> None:
    data = tmp_path / "data"
    noise = np.random.default_rng(0).bytes(20_000)
    if kind == "zip":
        name, file = "tiny-imagenet", data / "tiny-imagenet-200.zip"
        zipped(file, {f"tiny-imagenet-200/{part}/a/0.png": noise for part in ("train", "val")})
    else:
        name, file = "cifar10", data / "cifar-10-python.tar.gz"
        tar(file, dict.fromkeys(cifar10_files(), noise), kind)
    file.write_bytes(damaged(file.read_bytes())[how])
    words = [
        "run",
        "--data",
        name,
        "--data.root",
        str(data),
        "--data.download",
        "false",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("tbbn: ") and said.err.count("\n") == 1
    # A flipped byte of a plain tar is not noticed in the archive, which has no checksum, but in the pickle it holds.
    if (kind, how) != ("w", "flipped"):
        assert str(file) in said.err
        assert everything(tmp_path) == ["data", f"data/{file.name}"]
    assert not (tmp_path / "out").exists()


def test_an_archive_of_something_else_says_what_is_missing(tmp_path: Path) -> None:
    tar(tmp_path / "cifar-10-python.tar.gz", {"cifar-10-batches-py/data_batch_1": b"x"})
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz: does not contain cifar-10-batches-py/data_batch_2"):
        load("cifar10", tmp_path, download=False)
    tar(tmp_path / "cifar-10-python.tar.gz", {"other/file": b"x"})
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz: does not contain cifar-10-batches-py/;"):
        load("cifar10", tmp_path, download=False)
    assert everything(tmp_path) == ["cifar-10-python.tar.gz"]


def test_an_archive_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar(tmp_path / "cifar-10-python.tar.gz", cifar10_files())
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(UserError, match=r"needs \d+ bytes unpacked, more than are free under"):
        load("cifar10", tmp_path, download=False)
    for spare, fits in ((-1, False), (0, True)):
        tar(tmp_path / "a.tar", {"a/one": b"12345", "a/two": b"6"}, "w")
        monkeypatch.setattr(archives.shutil, "disk_usage", lambda path, n=6 + spare: type("Usage", (), {"free": n}))
        if fits:
            archives.unpack(tmp_path / "a.tar", tmp_path, "a")
        else:
            with pytest.raises(UserError, match="needs 6 bytes unpacked"):
                archives.unpack(tmp_path / "a.tar", tmp_path, "a")


# What torchvision downloads and unpacks.


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes every download give these bytes."""

    def serve(content: bytes) -> None:
        class Response(io.BytesIO):
            length, url = len(content), "https://nowhere/x.tar.gz"

        monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Response(content))

    return serve


def evil_tar(tmp_path: Path) -> bytes:
    tar(tmp_path / "evil.tar.gz", {**cifar10_files(), "../escaped": b"x"})
    return (tmp_path / "evil.tar.gz").read_bytes()


def test_a_download_of_other_content_is_refused_and_leaves_nothing(
    tmp_path: Path, served: Callable[[bytes], None]
) -> None:
    served(evil_tar(tmp_path / "made"))
    with pytest.raises(UserError, match=r"cifar10: no data under .* \(the download failed: .*corrupted"):
        load("cifar10", tmp_path / "there/data")
    assert not (tmp_path / "there/data").exists() and not (tmp_path / "there/escaped").exists()


def test_even_a_download_with_the_right_hash_cannot_write_outside(
    tmp_path: Path, served: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = evil_tar(tmp_path / "made")
    served(content)
    monkeypatch.setattr(torchvision().datasets.CIFAR10, "tgz_md5", hashlib.md5(content).hexdigest())
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz: refused: its member '../escaped'"):
        load("cifar10", tmp_path / "there/data")
    assert everything(tmp_path / "there") == ["data", "data/cifar-10-python.tar.gz"]


def test_torchvision_never_unpickles_what_was_downloaded(
    tmp_path: Path, served: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "mark"),)

    tar(tmp_path / "x.tar.gz", {**cifar10_files(), "cifar-10-batches-py/data_batch_1": pickle.dumps(Evil())})
    content = (tmp_path / "x.tar.gz").read_bytes()
    served(content)
    monkeypatch.setattr(torchvision().datasets.CIFAR10, "tgz_md5", hashlib.md5(content).hexdigest())
    with pytest.raises(UserError, match=r"data_batch_1: refused: it asks for \S+\.mkdir"):
        load("cifar10", tmp_path / "data")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_folders_of_an_archive_are_made_for_their_files_and_other_folders_left(kind: str, tmp_path: Path) -> None:
    archive = tmp_path / f"a.{kind}"
    contents = {
        "./": b"",
        "a/": b"",
        "a/one": b"1",
        "a/sub/": b"",
        "a/sub/two": b"22",
        "a/empty/": b"",
        "b/three": b"3",
    }
    if kind == "zip":
        modes = {name: stat.S_IFDIR | 0o755 for name in contents if name.endswith("/")}
        zipped(archive, contents, modes)
    else:
        members: dict[str, bytes | tarfile.TarInfo] = dict(contents)
        for name in (name for name in contents if name.endswith("/")):
            members[name] = tarfile.TarInfo(name.rstrip("/"))
            members[name].type = tarfile.DIRTYPE  # type: ignore[union-attr]
        tar(archive, members, "w" if kind == "tar" else "w:gz")
    archives.unpack(archive, tmp_path, "a", ["a/one", "a/sub/two"])
    unpacked = {
        str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p != archive
    }
    assert unpacked == {"a/one": b"1", "a/sub/two": b"22"} and sorted(p.name for p in tmp_path.iterdir()) == [
        "a",
        archive.name,
    ]


@pytest.mark.parametrize(
    "name", ["/a", "\\a", "C:a", "C:/a", "//server/a", "../a", "a/..", "a/../b", "a\\..\\b", "a\0b"]
)
def test_a_name_that_leads_elsewhere_on_any_system_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"x.zip: refused: its member .* leads out of its folder"):
        archives._inside(Path("x.zip"), name)


@pytest.mark.parametrize("name", ["a", "a/b", "./a", "a.b/c..d", "a b/..c", "a\\b"])
def test_a_name_inside_its_folder_is_taken(name: str) -> None:
    assert archives._inside(Path("x.zip"), name) == Path(name)


def test_trouble_with_another_file_is_not_the_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar(tmp_path / "a.tar.gz", {"a/one": b"1"})

    def failing(error: Exception) -> None:
        def copy(*_: Any) -> None:
            raise error

        monkeypatch.setattr(archives.shutil, "copyfileobj", copy)

    failing(OSError(28, "No space left on device", str(tmp_path / "a/one")))
    with pytest.raises(OSError, match="No space left on device"):
        archives.unpack(tmp_path / "a.tar.gz", tmp_path, "a")
    for error, reason in (
        (OSError(5, "Input/output error"), r"\[Errno 5\] Input/output error"),
        (OSError(5, "Input/output error", str(tmp_path / "a.tar.gz")), r"\[Errno 5\] Input/output error: .*"),
        (ValueError("first\nsecond"), "first"),
        (EOFError(), "EOFError"),
    ):
        failing(error)
        with pytest.raises(UserError, match=rf"a.tar.gz: cannot be unpacked \({reason}\); delete it and try again"):
            archives.unpack(tmp_path / "a.tar.gz", tmp_path, "a")
    assert everything(tmp_path) == ["a.tar.gz"]


def test_a_new_folder_appears_at_once_and_an_old_one_gets_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar(tmp_path / "a.tar", {"a/one": b"1", "a/sub/two": b"22"}, "w")
    moved: list[str] = []
    real = Path.replace

    def watched(source: Path, dest: Path) -> Path:
        moved.append(str(dest.relative_to(tmp_path)))
        return real(source, dest)

    monkeypatch.setattr(Path, "replace", watched)
    archives.unpack(tmp_path / "a.tar", tmp_path, "a")
    assert moved == ["a"]
    (tmp_path / "a/one").write_bytes(b"old")
    (tmp_path / "a/more").write_bytes(b"kept")
    archives.unpack(tmp_path / "a.tar", tmp_path, "a")
    assert moved == ["a", "a/one", "a/sub/two"]
    assert (tmp_path / "a/one").read_bytes() == b"1" and (tmp_path / "a/more").read_bytes() == b"kept"


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_file_without_a_name_is_left(kind: str, tmp_path: Path) -> None:
    archive, members = tmp_path / f"a.{kind}", {".": b"nameless", "a/one": b"1"}
    if kind == "zip":
        zipped(archive, members)
    else:
        tar(archive, {**members}, "w")
    archives.unpack(archive, tmp_path, "a")
    assert everything(tmp_path) == sorted(["a", "a/one", archive.name])
