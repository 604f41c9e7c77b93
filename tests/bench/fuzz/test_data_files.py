"""Changed data files and archives are read or refused in one line; nothing is executed."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from functools import cache
from typing import Any

import numpy as np
from fuzzing import cases, folder
from hypothesis import strategies as st

from tbbn.bench.data.loading import load
from tbbn.errors import UserError

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def packed(kind: str, files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return out.getvalue()
    with tarfile.open(fileobj=out, mode=f"w:{kind}") as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


@cache
def sets() -> dict[str, dict[str, bytes]]:
    """The files of each data set, as small as possible; the first one is changed."""
    from scipy.io import savemat

    labels = np.arange(10, dtype=np.uint8)
    batch = pickle.dumps({"data": np.zeros((10, 3072), np.uint8), "labels": list(range(10))}, 2)
    cifar = {f"cifar-10-batches-py/{name}": batch for name in BATCHES}
    images = idx(np.zeros((10, 4, 4), np.uint8))
    mnist = {f"MNIST/raw/{part}-images-idx3-ubyte": images for part in ("train", "t10k")}
    mnist |= {f"MNIST/raw/{part}-labels-idx1-ubyte": idx(labels) for part in ("train", "t10k")}
    mat = io.BytesIO()
    savemat(mat, {"X": np.zeros((32, 32, 3, 10), np.uint8), "y": labels[:, None] + 1}, do_compression=True)
    stl = {f"stl10_binary/{part}_y.bin": bytes(labels + 1) for part in ("train", "test")}
    stl |= {f"stl10_binary/{part}_X.bin": bytes(10 * 3 * 96 * 96) for part in ("train", "test")}
    png = bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
    )
    tiny = {f"tiny-imagenet-200/{part}/{name}/0.png": png for part in ("train", "val") for name in "ab"}
    return {
        "cifar10": cifar,
        "mnist": mnist,
        "mnist gz": {f"{name}.gz": gzip.compress(content) for name, content in mnist.items()},
        "svhn": {f"{part}_32x32.mat": mat.getvalue() for part in ("train", "test")},
        "stl10": stl,
        "cifar10 gz": {"cifar-10-python.tar.gz": packed("gz", cifar)},
        "cifar10 tar": {"cifar-10-python.tar.gz": packed("", cifar)},
        "tiny-imagenet zip": {"tiny-imagenet-200.zip": packed("zip", tiny)},
    }


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(sets())))
    content = next(iter(sets()[name].values()))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        if draw(st.booleans()):
            place = min(place, 600)
        how = draw(st.sampled_from(["flip", "flip", "flip", "truncate", "insert", "cut"]))
        tail = content[place:]
        if how == "flip" and tail:
            tail = bytes([tail[0] ^ draw(st.integers(1, 255))]) + tail[1:]
        elif how == "truncate":
            tail = b""
        elif how == "insert":
            tail = draw(st.binary(min_size=1, max_size=12)) + tail
        elif how == "cut":
            tail = tail[draw(st.integers(1, 40)) :]
        content = content[:place] + tail
    return name, content


@cases(30, 500, changes())
def test_a_changed_file_is_read_or_refused(case: tuple[str, bytes]) -> None:
    name, content = case
    files: dict[str, Any] = dict(sets()[name])
    files[next(iter(files))] = content
    with folder() as place:
        for path, own in files.items():
            (place / "data" / path).parent.mkdir(parents=True, exist_ok=True)
            (place / "data" / path).write_bytes(own)
        said = ""
        try:
            load(name.split()[0], place / "data", download=False)
        except UserError as error:
            said = str(error)
        assert not said or str(place) in said or name.split()[0] in said, said
        assert [path.name for path in place.iterdir()] == ["data"]
        assert not list((place / "data").glob(".*"))
