"""Every decoder: what a file may start, and how much memory or disk it may take."""

from __future__ import annotations

import gzip
import io
import lzma  # noqa: F401  zipfile needs it to write the archive that must be refused
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import PIL.EpsImagePlugin
import PIL.Image
import pytest

from tbbn.bench.config import read_toml
from tbbn.bench.data import selection
from tbbn.bench.data.loading import load
from tbbn.bench.data.packed import index, stream, workers
from tbbn.bench.data.packed.index import read_index
from tbbn.bench.data.packed.workers import image_sizes
from tbbn.bench.data.sources import archives, bundled, decoding, folders, formats, images, listing, unpickling
from tbbn.bench.data.sources.decoding import MAX_PIXELS, Unreadable, open_image
from tbbn.bench.data.sources.listing import chosen_classes
from tbbn.bench.data.sources.unpickling import unpickle
from tbbn.bench.files import NO_SEAL, seal
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import load_predictions, load_record
from tbbn.bench.runs.verify import verify
from tbbn.errors import UserError

LIMITS = {
    (archives, "_MAX_MEMBERS"): 1_048_576,
    (archives, "_MAX_BYTES"): 34_359_738_368,  # 32 GiB
    (archives, "_MAX_READ"): 16_777_216,  # 16 MiB
    (bundled, "_MAX_BYTES"): 4_294_967_296,  # 4 GiB
    (decoding, "MAX_PIXELS"): 67_108_864,
    (folders, "_CACHED_FROM"): 1_073_741_824,  # 1 GiB
    (formats, "LARGEST"): 1_073_741_824,
    (images, "_IMAGES_PER_TASK"): 64,
    (index, "_LARGEST"): 268_435_456,  # 256 MiB
    (listing, "_LARGEST_LIST"): 67_108_864,
    (selection, "_GRAM_SIDE"): 2048,
    (selection, "_GRAM_ELEMENTS"): 16_777_216,
    (stream, "_THREADS"): 4,
    (stream, "_MAX_DEPTH"): 8,
    (stream, "_MAX_BYTES"): 268_435_456,
    (unpickling, "_MAX_ARRAYS"): 16,
    (unpickling, "_MAX_COPIED"): 4,
    (workers, "_FILES_PER_TASK"): 1024,
    (workers, "_POLL_SECONDS"): 0.1,
}


@pytest.mark.parametrize(("where", "name"), LIMITS, ids=lambda part: getattr(part, "__name__", part))
def test_every_limit_has_its_number(where: Any, name: str) -> None:
    assert getattr(where, name) == LIMITS[where, name]


# Images.


def test_an_image_may_have_as_many_pixels_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PIL.Image.new("RGB", (5, 4)).save(tmp_path / "1.png")
    monkeypatch.setattr(decoding, "MAX_PIXELS", 20)
    assert open_image(tmp_path / "1.png", 3, None).size == (5, 4)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 19)
    with pytest.raises(Unreadable, match="5x4 pixels, more than 19"):
        open_image(tmp_path / "1.png", 3, None)


def test_generated_images_may_take_as_much_memory_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * (3 + 1) * 3 * 5 * 5
    monkeypatch.setattr(bundled, "_MAX_BYTES", size)
    assert load("synthetic:2x3x1x5").train.images.shape == (6, 3, 5, 5)
    monkeypatch.setattr(bundled, "_MAX_BYTES", size - 1)
    with pytest.raises(UserError, match=f"2x3x1x5 is {size} bytes of images; the limit is {size - 1}"):
        load("synthetic:2x3x1x5")


def test_postscript_under_another_name_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def ghostscript(*arguments: Any, **more: Any) -> Any:
        started.append(arguments)
        return PIL.Image.new("RGB", (8, 8)).im

    monkeypatch.setattr(PIL.EpsImagePlugin, "Ghostscript", ghostscript)
    file = tmp_path / "1.png"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    with PIL.Image.open(file) as image:  # as PIL reads it by default
        image.load()
    assert len(started) == 1
    with pytest.raises(Unreadable, match="unknown format"):
        open_image(file, 3, None)
    assert image_sizes([file]) == set() and len(started) == 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP"])
def test_the_formats_of_data_sets_are_read(kind: str, tmp_path: Path) -> None:
    PIL.Image.new("RGB", (5, 4)).save(tmp_path / "image", kind)
    assert open_image(tmp_path / "image", 3, None).size == (5, 4)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def test_an_image_that_claims_many_pixels_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = int(MAX_PIXELS**0.5) + 1
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (tmp_path / "1.png").write_bytes(png)
    monkeypatch.setattr(PIL.Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(Unreadable, match=rf"{side}x{side} pixels, more than {MAX_PIXELS}"):
        open_image(tmp_path / "1.png", 3, None)


# CIFAR's pickles.


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def memo_far_away() -> bytes:
    return b"\x80\x02]r\xff\xff\xff\x7f."


def copies() -> bytes:
    """A text of 100 kB, encoded a thousand times: 100 MB from 110 kB."""
    text = b"X" + struct.pack("<I", 10**5) + b"a" * 10**5 + b"q\x00"
    again = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    return b"\x80\x02](" + text + again * 1000 + b"e."


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (pickle.dumps({"data": Calls(bytearray, 2**31)}, 2), "memoryview"),
        (pickle.dumps({"data": Calls(bytes, 2**31)}, 2), "argument"),
        (pickle.dumps({"data": Calls(np.ndarray, (2**31,))}, 2), "not callable"),
        (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".", "bytearray8"),
        (b"\x80\x02T" + struct.pack("<i", 2**30) + b".", "string4"),
        (memo_far_away(), "memo entry 2147483647 after 2 opcodes"),
        (copies(), "copies more than 4 times its size"),
        (pickle.dumps([np.zeros(i) for i in range(17)], 2), "more than 16 arrays"),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "asks for os.system"),
    ],
)
def test_a_pickle_takes_memory_in_proportion_to_its_file(content: bytes, line: str) -> None:
    with pytest.raises(Exception, match=line):
        unpickle(content)


def test_a_pickle_may_hold_what_the_limits_allow() -> None:
    assert len(unpickle(pickle.dumps([np.zeros(i) for i in range(16)], 2))) == 16
    memo = b"\x80\x02]r\x02\x00\x00\x00."  # an entry 2 after two opcodes
    assert unpickle(memo) == []
    with pytest.raises(UserError, match="memo entry 3 after 2 opcodes"):
        unpickle(memo.replace(b"\x02\x00\x00\x00", b"\x03\x00\x00\x00"))


def test_what_a_pickle_makes_is_counted_with_eight_bytes_for_each_call() -> None:
    content = b"\x80\x02]."
    reader = unpickling._ArrayUnpickler(content)
    assert reader.n_left == 4 * len(content) + 65_536
    encode = reader.find_class("_codecs", "encode")
    left = reader.n_left - 2 * 8 - 2 * len("latin1")
    assert encode("a" * (left - 1), "latin1") == b"a" * (left - 1) and encode("b", "latin1") == b"b"
    assert reader.n_left == 0
    with pytest.raises(UserError, match="copies more than 4 times its size"):
        encode("", "")


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_what_pickles_of_arrays_hold_is_read(protocol: int) -> None:
    value = {
        "data": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "labels": [np.int64(3), 7],
        "names": {b"a", b""},
        "extra": bytearray(b"xyz"),
        "ordered": OrderedDict(b=1, a=2),
        "list": Calls(list, (1, 2)),
        "empty": [Calls(list), Calls(set), Calls(bytearray), Calls(bytes)],
    }
    columns = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    found = unpickle(pickle.dumps({**value, "columns": columns}, protocol))
    assert np.array_equal(found.pop("data"), value["data"]) and np.array_equal(found.pop("columns"), columns)
    assert list(found.pop("ordered").items()) == [("b", 1), ("a", 2)]
    assert found.pop("list") == [1, 2] and found.pop("empty") == [[], set(), bytearray(), b""]
    assert found == {key: value[key] for key in ("labels", "names", "extra")}


# MNIST's idx, SVHN's mat, STL-10's binaries.


def test_an_idx_file_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train-images-idx3-ubyte.gz"
    head = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**16, 2**10, 2**10)
    file.write_bytes(gzip.compress(head + bytes(1000)))
    with pytest.raises(UserError, match="holds 68719476736 values, more than 1073741824"):
        formats.read_idx(tmp_path, "train", 10)
    read: list[int] = []
    real = gzip.GzipFile.read

    def counted(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        read.append(-1 if size is None else size)
        return real(self, size)

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    file.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 2, 2) + bytes(10**6)))
    with pytest.raises(UserError, match="not a complete idx file"):
        formats.read_idx(tmp_path, "train", 10)
    assert read == [16, 9]  # the header, and one byte more than it announces


def test_data_files_may_be_as_large_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in (("train-images-idx3-ubyte.gz", (10, 40, 25)), ("train-labels-idx1-ubyte.gz", (10,))):
        head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
        (tmp_path / name).write_bytes(gzip.compress(head + bytes(int(np.prod(shape)))))
    monkeypatch.setattr(formats, "LARGEST", 10_000)
    assert formats.read_idx(tmp_path, "train", 10).images.shape == (10, 1, 40, 25)
    monkeypatch.setattr(formats, "LARGEST", 9_999)
    with pytest.raises(UserError, match="holds 10000 values, more than 9999"):
        formats.read_idx(tmp_path, "train", 10)
    scipy_io = pytest.importorskip("scipy.io")
    pixels, labels = np.zeros((32, 32, 3, 2), np.uint8), np.ones((2, 1), np.uint8)
    scipy_io.savemat(tmp_path / "a.mat", {"X": pixels, "y": labels}, do_compression=True)
    n_bytes = 8 * (pixels.size + labels.size)
    monkeypatch.setattr(formats, "LARGEST", n_bytes)
    assert len(formats.read_svhn(tmp_path / "a.mat").labels) == 2
    monkeypatch.setattr(formats, "LARGEST", n_bytes - 1)
    with pytest.raises(UserError, match="unpacks to more than"):
        formats.read_svhn(tmp_path / "a.mat")


def test_a_mat_file_with_a_variable_twice_is_refused() -> None:
    arrays = [("X", (32, 32, 3, 1), "uint8"), ("y", (1, 1), "uint8")]
    formats._check_mat(Path("a.mat"), [*arrays, ("note", (10**9,), "char")])  # what is not read does not matter
    for listed in ([*arrays, arrays[1]], [("X", (1,), "cell")], [("y", (1,), "char")]):
        with pytest.raises(UserError, match=r"a.mat: needs X of \(32, 32, 3, N\) uint8 and y of N integers"):
            formats._check_mat(Path("a.mat"), listed)


def test_of_a_mat_file_only_the_two_variables_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    arrays = {"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.ones((1, 1), np.uint8), "more": np.zeros(9)}
    scipy_io.savemat(tmp_path / "a.mat", arrays)
    real, read = scipy_io.loadmat, []
    monkeypatch.setattr(scipy_io, "loadmat", lambda *given, **named: read.append(real(*given, **named)) or read[-1])
    formats.read_svhn(tmp_path / "a.mat")
    assert {name for name in read[0] if not name.startswith("__")} == {"X", "y"}


def test_a_mat_file_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    file = tmp_path / "train.mat"
    pixels, labels = np.zeros((32, 32, 3, 50), np.uint8), np.ones((50, 1), np.uint8)
    scipy_io.savemat(file, {"X": pixels, "y": labels}, do_compression=True)
    assert file.stat().st_size < 1000
    assert len(formats.read_svhn(file).labels) == 50
    monkeypatch.setattr(formats, "LARGEST", 10**6)
    monkeypatch.setattr(scipy_io, "loadmat", lambda *_, **__: pytest.fail("unpacked"))
    with pytest.raises(UserError, match="unpacks to more than 1000000 bytes"):
        formats.read_svhn(file)
    scipy_io.savemat(file, {"X": {"a": pixels}, "y": labels})
    with pytest.raises(UserError, match=r"needs X of \(32, 32, 3, N\) uint8"):
        formats.read_svhn(file)


def test_a_data_file_larger_than_any_published_one(tmp_path: Path) -> None:
    for name in ("train_X.bin", "train_y.bin", "train-images-idx3-ubyte", "batch"):
        with (tmp_path / name).open("wb") as file:
            os.truncate(file.fileno(), 2**40)  # sparse: it takes no space
    for read in (
        lambda: formats.read_stl10(tmp_path, "train"),
        lambda: formats.read_idx(tmp_path, "train", 10),
        lambda: formats.read_cifar(tmp_path, ("batch",), "labels", 10),
    ):
        with pytest.raises(UserError, match="has 1099511627776 bytes; the limit for this file is 1073741824"):
            read()


# Archives.


def zip_of(file: Path, n: int, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for number in range(n):
            archive.writestr(f"set/{number}", bytes(1000))
    return file


def tar_of(file: Path, n: int) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for number in range(n):
            info = tarfile.TarInfo(f"set/{number}")
            info.size = 1000
            archive.addfile(info, io.BytesIO(bytes(1000)))
    return file


@pytest.mark.parametrize("make", [zip_of, tar_of])
@pytest.mark.parametrize(("limit", "value"), [("_MAX_MEMBERS", 9), ("_MAX_BYTES", 9_999)])
def test_an_archive_has_a_limit(
    make: Any, limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make(tmp_path / "archive", 10)
    monkeypatch.setattr(archives, limit, value + 1)
    archives.unpack(archive, tmp_path, "set")
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(archives, limit, value)
    with pytest.raises(UserError, match=r"archive: refused: more than .* replace it with the published file"):
        archives.unpack(archive, tmp_path / "root", "set")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_zip_member_whose_decoder_takes_memory_as_it_likes(tmp_path: Path) -> None:
    for kind in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        archive = zip_of(tmp_path / "archive", 1, kind)
        with pytest.raises(UserError, match="its member 'set/0' is not compressed by deflate"):
            archives.unpack(archive, tmp_path, "set")


def test_a_tar_header_of_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "archive", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("set/1")
        info.pax_headers = {"comment": "x" * 10**6}
        archive.addfile(info)
    archives.unpack(tmp_path / "archive", tmp_path, "set")
    monkeypatch.setattr(archives, "_MAX_READ", 2**16)
    with pytest.raises(UserError, match=r"archive: cannot be unpacked \(a header of \d+ bytes\)"):
        archives.unpack(tmp_path / "archive", tmp_path, "set")


def test_a_read_of_a_tar_file_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MAX_READ", 5)
    limited = archives._Limited(io.BytesIO(b"0123456789"))
    assert [limited.read(n) for n in (5, 0, 1)] == [b"01234", b"", b"5"]
    for n in (6, -1):
        with pytest.raises(ValueError, match=f"a header of {n} bytes"):
            limited.read(n)
    with pytest.raises(ValueError, match="a header of -1 bytes"):
        limited.read()  # all of it


def test_a_list_of_names_may_be_as_long_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    monkeypatch.setattr(listing, "_LARGEST_LIST", 8)
    assert chosen_classes(tmp_path / "classes.txt") == ["ant", "bee"]
    monkeypatch.setattr(listing, "_LARGEST_LIST", 7)
    with pytest.raises(UserError, match="has 8 bytes; the limit for this file is 7"):
        chosen_classes(tmp_path / "classes.txt")


# Files that never end, and files of a run.


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("record.json", load_record),
        ("record.json", verify),
        ("predictions.safetensors", load_predictions),
        ("checkpoint.safetensors", lambda folder: checkpoint.read(folder / "checkpoint.safetensors")),
        ("index.json", read_index),
        ("classes.txt", lambda folder: chosen_classes(folder / "classes.txt")),
        ("a.toml", lambda folder: read_toml(folder / "a.toml")),
    ],
)
def test_a_link_to_a_device_is_refused(name: str, read: Any, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=rf"{name}: (not a file|larger than)|not a complete packed set"):
        read(tmp_path)


def test_a_checkpoint_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    file = tmp_path / checkpoint.NEWEST
    claim = {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    header = str({**claim, "__metadata__": {"sha256": NO_SEAL, "state": "{}"}}).replace("'", '"').encode()
    for length in (len(header), 2**62):
        file.write_bytes(seal(struct.pack("<Q", length) + header))
        with pytest.raises(UserError, match="damaged, or not a checkpoint"):
            checkpoint.read(file)
