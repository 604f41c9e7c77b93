"""The official files of each data set, in tiny: what is read, and what is refused."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tbbn.bench.data.loading import load
from tbbn.bench.data.sources import formats, official
from tbbn.errors import UserError


def random(shape: tuple[int, ...], seed: int = 0, below: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape).astype(np.uint8)


def write_pickle(file: Path, content: Any, protocol: int = 2) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(content, protocol))


def write_cifar100(root: Path, *, as_bytes: bool = False, protocol: int = 2) -> dict[str, np.ndarray]:
    data = {}
    for seed, part in enumerate(("train", "test")):
        data[part] = random((4, 3072), seed)
        content = {"data": data[part], "fine_labels": [3, 0, 99, 1], "coarse_labels": [0, 0, 1, 1]}
        if as_bytes:
            content = {key.encode(): value for key, value in content.items()}
        write_pickle(root / "cifar-100-python" / part, content, protocol)
    names = [f"class {label}" for label in range(100)]
    write_pickle(root / "cifar-100-python/meta", {"fine_label_names": names}, protocol)
    return data


def write_idx(file: Path, values: np.ndarray, *, zipped: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    if zipped:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(content))
    else:
        file.write_bytes(content)


def write_mnist(raw: Path, *, zipped: bool = False) -> np.ndarray:
    images = random((3, 28, 28))
    for part in ("train", "t10k"):
        write_idx(raw / f"{part}-images-idx3-ubyte", images, zipped=zipped)
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.array([7, 0, 9], dtype=np.uint8), zipped=zipped)
    return images


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 and an old numpy pickled it: strings are bytes, and the array's module has another name."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = (
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    shape = b"".join(number(side) for side in pixels.shape) + b"\x86"
    array += b"(K\x01" + shape + dtype + b"\x89" + text(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"fine_labels") + numbers + b"u."


@pytest.mark.parametrize(("as_bytes", "protocol"), [(False, 2), (True, 2), (False, 5)])
def test_cifar100_is_read_from_any_repacked_pickle(tmp_path: Path, as_bytes: bool, protocol: int) -> None:
    data = write_cifar100(tmp_path, as_bytes=as_bytes, protocol=protocol)
    source = load("cifar100", tmp_path, download=False)
    assert source.train.images.shape == (4, 3, 32, 32)
    assert source.train.images.dtype == torch.uint8
    assert source.train.images[3, 1, 5, 7] == data["train"][2, 1024 + 5 * 32 + 7]  # rows are sorted by class
    assert source.test.images[2, 2, 31, 0] == data["test"][0, 2048 + 31 * 32]
    assert source.train.labels.tolist() == [0, 1, 3, 99]
    assert source.train.labels.dtype == torch.int64
    assert source.classes[99] == "class 99"
    assert (source.mean, source.std) == ((0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023))


def test_cifar100_is_read_as_python_2_pickled_it(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    pixels = random((2, 3072), seed=8)
    (tmp_path / "cifar-100-python/train").write_bytes(python2_batch(pixels, [5, 98]))
    train = load("cifar100", tmp_path, download=False).train
    assert np.array_equal(train.images.flatten(1).numpy(), pixels)
    assert train.labels.tolist() == [5, 98]


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["b_s_10.png", "c_2.png", "b_s_9.png", "a_1.png"], [0, 2, 3, 1]),  # by alphabet, as a folder is listed
        (["10.png", "7.png", "9.png", "8.png"], [2, 0, 1, 3]),  # numbers by value
        ([b"b.png", b"y.png", b"a.png", b"x.png"], [2, 0, 3, 1]),
        (None, [0, 2, 1, 3]),  # without names as they come
        (["only one"], [0, 2, 1, 3]),
        (5, [0, 2, 1, 3]),
        (["9" * 5000, "b", "8" * 5000, "a"], [2, 0, 3, 1]),
        ([b"10.png", b"7.png", b"9.png", b"8.png"], [2, 0, 1, 3]),
        (["10", "7", "9", "8"], [2, 0, 1, 3]),
        (["a.z.png", "b.z.png", "a.y.png", "b.y.png"], [2, 0, 3, 1]),
    ],
)
def test_the_rows_of_cifar_do_not_depend_on_how_its_files_are_ordered(tmp_path: Path, names: Any, order: Any) -> None:
    write_cifar100(tmp_path)
    pixels = random((4, 3072), seed=3)
    content = {"data": pixels, "fine_labels": [1, 5, 1, 5]} | ({} if names is None else {"filenames": names})
    write_pickle(tmp_path / "cifar-100-python/train", content)
    train = load("cifar100", tmp_path, download=False).train
    assert train.labels.tolist() == [1, 1, 5, 5]
    assert np.array_equal(train.images.flatten(1).numpy(), pixels[order])


def test_cifar10_joins_its_five_batches_and_needs_no_names(tmp_path: Path) -> None:
    for number, batch in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        content = {"data": random((2, 3072), number), "labels": [number, 9]}
        write_pickle(tmp_path / "cifar-10-batches-py" / batch, content)
    source = load("cifar10", tmp_path, download=False)
    assert source.train.labels.tolist() == [0, 1, 2, 3, 4, 9, 9, 9, 9, 9]
    nines = np.stack([random((2, 3072), number)[1] for number in range(5)])
    assert np.array_equal(source.train.images[5:].flatten(1).numpy(), nines)
    assert source.test.labels.tolist() == [5, 9]
    assert source.classes == tuple("0123456789")
    names = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "lorry"]
    write_pickle(tmp_path / "cifar-10-batches-py/batches.meta", {"label_names": names})
    assert load("cifar10", tmp_path, download=False).classes == tuple(names)


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_builds_anything_else_is_refused_before_it_acts(tmp_path: Path, protocol: int) -> None:
    write_cifar100(tmp_path)
    mark = tmp_path / "mark"
    for evil in (Evil(os.mkdir, str(mark)), Evil(eval, f"open({str(mark)!r}, 'w')"), Evil(np.fromfile, "x")):
        write_pickle(tmp_path / "cifar-100-python/train", {"data": evil, "fine_labels": []}, protocol)
        with pytest.raises(UserError, match=r"cifar-100-python/train: refused: it asks for \S+\.(mkdir|eval|fromfile)"):
            load("cifar100", tmp_path, download=False)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": random((2, 3072))}, "needs the entries 'data' and 'fine_labels', has: data"),
        ({"data": random((2, 3071)), "fine_labels": [0, 1]}, r"'data' must be \(N, 3072\) uint8"),
        ({"data": random((2, 3072)), "fine_labels": [0.5, 1]}, "'fine_labels' a list of N integers"),
        ({"data": random((2, 3072)), "fine_labels": [[0], [1]]}, "'fine_labels' a list of N integers"),
        ({"data": random((2, 3072)), "fine_labels": ["a", "b"]}, "'fine_labels' a list of N integers"),
        ({"data": random((2, 3072)), "fine_labels": 3}, "'fine_labels' a list of N integers"),
        ({"fine_labels": [0, 1]}, "needs the entries 'data' and 'fine_labels', has: fine_labels"),
        ({"data": random((2, 3072)), "fine_labels": np.array([True, False])}, "'fine_labels' a list of N integers"),
        ({"data": random((2, 3072)), "fine_labels": [1, -1]}, "labels must be in 0..99, got -1 to 1"),
        ({"data": "pixels", "fine_labels": [0, 1]}, r"'data' must be \(N, 3072\) uint8"),
        ({"data": random((2, 3072)), "fine_labels": [0, 100]}, "labels must be in 0..99, got 0 to 100"),
        ({"data": random((2, 3072)) / 255, "fine_labels": [0, 1]}, "must be uint8, got float64"),
        ({"data": random((0, 3072)), "fine_labels": []}, "holds no images"),
        ([1, 2], "must contain a dictionary, contains a list"),
    ],
)
def test_a_pickle_of_other_content_is_named(tmp_path: Path, content: Any, message: str) -> None:
    write_cifar100(tmp_path)
    write_pickle(tmp_path / "cifar-100-python/train", content)
    with pytest.raises(UserError, match=f"cifar-100-python/train: .*{message}"):
        load("cifar100", tmp_path, download=False)


def test_a_broken_pickle_is_named(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    file = tmp_path / "cifar-100-python/test"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"test: cannot be read \(.*\); delete it and try again"):
        load("cifar100", tmp_path, download=False)
    write_cifar100(tmp_path)
    write_pickle(tmp_path / "cifar-100-python/meta", {"fine_label_names": ["one"]})
    with pytest.raises(UserError, match="meta: needs a list 'fine_label_names' of 100 names"):
        load("cifar100", tmp_path, download=False)
    write_pickle(tmp_path / "cifar-100-python/meta", {"fine_label_names": "x" * 100})
    with pytest.raises(UserError, match="meta: needs a list 'fine_label_names' of 100 names"):
        load("cifar100", tmp_path, download=False)


@pytest.mark.parametrize("zipped", [False, True])
def test_what_is_there_is_neither_downloaded_nor_unpacked(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar100(tmp_path)
    write_mnist(tmp_path / "MNIST/raw", zipped=zipped)
    (tmp_path / "cifar-100-python.tar.gz").touch()
    monkeypatch.setattr(official, "fetch", lambda *_, **__: pytest.fail("fetched"))
    assert len(load("cifar100", tmp_path).train.labels) == 4
    assert len(load("mnist", tmp_path).train.labels) == 3


def test_official_files_come_before_a_folder_of_images(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST/raw")
    for part in ("train", "test"):
        (tmp_path / "mnist" / part / "a").mkdir(parents=True)
    assert load("mnist", tmp_path, download=False).train.labels.tolist() == [7, 0, 9]


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_are_read_plain_or_zipped(tmp_path: Path, name: str, folder: str, zipped: bool) -> None:
    images = write_mnist(tmp_path / folder, zipped=zipped)
    source = load(name, tmp_path, download=False)
    assert source.test.images.shape == (3, 1, 28, 28)
    assert np.array_equal(source.train.images[:, 0].numpy(), images)
    assert source.train.labels.tolist() == [7, 0, 9]
    assert len(source.classes) == 10
    assert len(source.mean) == len(source.std) == 1


def test_broken_idx_files_are_named(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST/raw"
    write_mnist(raw)
    file = raw / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="train-images-idx3-ubyte: is not a complete idx file of 3 dimensions"):
        load("mnist", tmp_path, download=False)
    write_mnist(raw)
    file.write_bytes(gzip.compress(file.read_bytes())[:-9])
    with pytest.raises(UserError, match="train-images-idx3-ubyte: cannot be read"):
        load("mnist", tmp_path, download=False)
    write_idx(file, random((2, 28, 28)))
    with pytest.raises(UserError, match="2 images but 3 labels"):
        load("mnist", tmp_path, download=False)
    write_idx(file, random((0, 28, 28)))
    with pytest.raises(UserError, match="train-images-idx3-ubyte: is empty: its sizes are 0x28x28"):
        load("mnist", tmp_path, download=False)
    write_mnist(raw)
    zipped = bytearray(gzip.compress(file.read_bytes()))
    zipped[60] ^= 255  # a flipped byte in the deflated stream
    file.write_bytes(zipped)
    with pytest.raises(UserError, match="train-images-idx3-ubyte: cannot be read"):
        load("mnist", tmp_path, download=False)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte: cannot be read \(Is a directory\)"):
        load("mnist", tmp_path, download=False)


def test_a_label_out_of_range_names_the_file_of_the_labels(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST/raw"
    write_mnist(raw)
    write_idx(raw / "t10k-labels-idx1-ubyte", np.array([0, 10, 3], dtype=np.uint8))
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte: labels must be in 0\.\.9, got 0 to 10"):
        load("mnist", tmp_path, download=False)
    for number, batch in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        content = {"data": random((1, 3072), number), "labels": [10 if batch == "data_batch_4" else 0]}
        write_pickle(tmp_path / "cifar-10-batches-py" / batch, content)
    with pytest.raises(UserError, match=r"data_batch_4: labels must be in 0\.\.9, got 10 to 10"):
        load("cifar10", tmp_path, download=False)


def test_images_of_train_and_test_are_of_one_size(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST/raw"
    write_mnist(raw)
    write_idx(raw / "t10k-images-idx3-ubyte", random((3, 20, 20)))
    with pytest.raises(UserError, match=r"mnist: images of train \(1x28x28\) and test \(1x20x20\) differ in size"):
        load("mnist", tmp_path, download=False)
    assert load("mnist", tmp_path, download=False, size=10).test.images.shape == (3, 1, 10, 10)


def test_svhn_calls_class_10_the_digit_0(tmp_path: Path) -> None:
    from scipy.io import savemat

    images = random((32, 32, 3, 3))
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": np.array([[10], [1], [9]], dtype=np.uint8)})
    source = load("svhn", tmp_path, download=False)
    assert source.train.labels.tolist() == [0, 1, 9]
    assert source.train.images[1, 2, 30, 4] == images[30, 4, 2, 1]
    (tmp_path / "test_32x32.mat").write_bytes(b"not a mat file")
    with pytest.raises(UserError, match=r"test_32x32.mat: cannot be read"):
        load("svhn", tmp_path, download=False)
    whole = (tmp_path / "train_32x32.mat").read_bytes()
    (tmp_path / "test_32x32.mat").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"test_32x32.mat: cannot be read"):
        load("svhn", tmp_path, download=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"Z": 1}, r"needs X of \(32, 32, 3, N\) uint8 and y of N integers, from 1 to 10"),
        ({"X": random((32, 32, 3)), "y": np.array([[1]])}, r"needs X of \(32, 32, 3, N\) uint8"),
        ({"X": random((32, 32, 3, 2)), "y": np.array([[300], [1]])}, "labels must be in 0..9, got 1 to 300"),
        ({"X": random((32, 32, 3, 2)), "y": np.array([[0], [1]])}, "labels must be in 0..9, got 1 to 10"),
        ({"X": random((32, 32, 3, 2)) / 2, "y": np.array([[1], [1]])}, "must be uint8, got float64"),
    ],
)
def test_a_mat_file_of_other_content_is_named(tmp_path: Path, content: Any, message: str) -> None:
    from scipy.io import savemat

    savemat(tmp_path / "train_32x32.mat", content)
    (tmp_path / "test_32x32.mat").touch()
    with pytest.raises(UserError, match=f"train_32x32.mat: .*{message}"):
        load("svhn", tmp_path, download=False)


def test_svhn_without_scipy_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}_32x32.mat").touch()
    monkeypatch.setitem(__import__("sys").modules, "scipy.io", None)
    with pytest.raises(UserError, match="pip install scipy"):
        load("svhn", tmp_path, download=False)


def test_stl10_is_stored_by_columns_with_labels_from_1(tmp_path: Path) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    stored = random((2, 3, 96, 96))
    for part in ("train", "test"):
        stored.tofile(folder / f"{part}_X.bin")
        np.array([1, 10], dtype=np.uint8).tofile(folder / f"{part}_y.bin")
    source = load("stl10", tmp_path, download=False)
    assert source.train.images[1, 0, 3, 80] == stored[1, 0, 80, 3]
    assert source.test.labels.tolist() == [0, 9]
    (folder / "test_X.bin").write_bytes(bytes(100))
    with pytest.raises(UserError, match="100 bytes are not a multiple of 3x96x96"):
        load("stl10", tmp_path, download=False)
    stored.tofile(folder / "test_X.bin")
    np.array([0, 11], dtype=np.uint8).tofile(folder / "test_y.bin")
    with pytest.raises(UserError, match=r"test_y.bin: labels must be in 0\.\.9, got -1 to 10"):
        load("stl10", tmp_path, download=False)
    (folder / "test_y.bin").unlink()
    (folder / "test_y.bin").mkdir()
    with pytest.raises(UserError, match=r"test_y.bin: cannot be read \(Is a directory\)"):
        load("stl10", tmp_path, download=False)


def test_an_empty_file_is_named_whatever_its_format(tmp_path: Path) -> None:
    from scipy.io import savemat

    images = random((2, 3, 96, 96))
    (tmp_path / "stl10_binary").mkdir()
    for part in ("train", "test"):
        images.tofile(tmp_path / f"stl10_binary/{part}_X.bin")
        np.array([1, 2], dtype=np.uint8).tofile(tmp_path / f"stl10_binary/{part}_y.bin")
        savemat(tmp_path / f"{part}_32x32.mat", {"X": random((32, 32, 3, 1)), "y": np.array([[1]])})
    write_cifar100(tmp_path)
    write_mnist(tmp_path / "MNIST/raw")
    for name, file, message in (
        ("stl10", "stl10_binary/test_X.bin", "0 bytes are not a multiple of 3x96x96"),
        ("stl10", "stl10_binary/train_y.bin", "2 images but 0 labels"),
        ("svhn", "test_32x32.mat", "cannot be read"),
        ("cifar100", "cifar-100-python/test", "cannot be read"),
        ("cifar100", "cifar-100-python/meta", "cannot be read"),
        ("mnist", "MNIST/raw/t10k-images-idx3-ubyte", "is not a complete idx file of 3 dimensions"),
        ("mnist", "MNIST/raw/train-labels-idx1-ubyte", "is not a complete idx file of 1 dimensions"),
    ):
        whole = (tmp_path / file).read_bytes()
        assert len(load(name, tmp_path, download=False).test.labels)
        (tmp_path / file).write_bytes(b"")
        named = file.replace("_y", "_X")  # the numbers of images and labels are compared
        with pytest.raises(UserError, match=f"{named}: {message}"):
            load(name, tmp_path, download=False)
        (tmp_path / file).write_bytes(whole)


@pytest.mark.parametrize("place", range(4))
def test_an_idx_file_begins_with_its_kind(tmp_path: Path, place: int) -> None:
    write_mnist(tmp_path / "MNIST/raw")
    file = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    content = bytearray(file.read_bytes())
    content[place] += 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="is not a complete idx file of 3 dimensions"):
        load("mnist", tmp_path, download=False)


def test_a_single_image_is_read_from_every_format(tmp_path: Path) -> None:
    from scipy.io import savemat

    (tmp_path / "stl10_binary").mkdir()
    pixels = {"stl10": random((1, 3, 96, 96)), "svhn": random((32, 32, 3, 1)), "cifar100": random((1, 3072))}
    pixels["mnist"] = random((1, 28, 28))
    for part in ("train", "test"):
        pixels["stl10"].tofile(tmp_path / f"stl10_binary/{part}_X.bin")
        np.array([7], dtype=np.uint8).tofile(tmp_path / f"stl10_binary/{part}_y.bin")
        savemat(tmp_path / f"{part}_32x32.mat", {"X": pixels["svhn"], "y": np.array([[6]])})
        write_pickle(tmp_path / "cifar-100-python" / part, {"data": pixels["cifar100"], "fine_labels": [6]})
        idx = "train" if part == "train" else "t10k"
        write_idx(tmp_path / f"MNIST/raw/{idx}-images-idx3-ubyte", pixels["mnist"])
        write_idx(tmp_path / f"MNIST/raw/{idx}-labels-idx1-ubyte", np.array([6], dtype=np.uint8))
    wanted = {
        "stl10": pixels["stl10"].transpose(0, 1, 3, 2),
        "svhn": pixels["svhn"].transpose(3, 2, 0, 1),
        "cifar100": pixels["cifar100"].reshape(1, 3, 32, 32),
        "mnist": pixels["mnist"][:, None],
    }
    for name, images in wanted.items():
        source = load(name, tmp_path, download=False)
        for part in (source.train, source.test):
            assert np.array_equal(part.images.numpy(), images) and part.labels.tolist() == [6]
            assert part.labels.dtype == torch.int64 and part.images.is_contiguous()


def test_labels_are_whole_numbers_in_one_row() -> None:
    for wrong in (torch.tensor([1j]), torch.tensor([True]), torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor(1)):
        with pytest.raises((ValueError, TypeError)):
            formats._whole(wrong)
    for right in ([1, 2], torch.tensor([1, 2], dtype=torch.int16), np.array([1, 2])):
        assert formats._whole(right).tolist() == [1, 2] and formats._whole(right).dtype == torch.int64
    assert formats._whole([]).tolist() == []
