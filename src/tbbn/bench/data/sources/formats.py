"""Read the file formats of the published data sets: CIFAR's pickles, MNIST's idx, SVHN's mat, STL-10's binaries.

No hash is checked here, so that repacked copies load. Every reader limits how much it loads into memory.
"""

from __future__ import annotations

import gzip
import importlib
import io
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from tbbn.bench.data.sources.unpickling import unpickle
from tbbn.bench.data.types import Part
from tbbn.bench.files import read_limited
from tbbn.errors import UserError

LARGEST = 2**30  # bytes of a file, and of its unpacked values; the published files have at most a quarter of that


def read_cifar(folder: Path, batches: tuple[str, ...], label_key: str, n_classes: int) -> Part:
    """The training or test part of CIFAR-10 or CIFAR-100 from its pickled batches (N, 3072).

    Images are sorted by class and then by file name, whatever their order in the files. A run thus has the same rows whether the
    batches come from the published archive or from a copy made from single images.
    """
    images, labels = [], []
    names: list[str] = []
    for batch in batches:
        content = _unpickle(folder / batch)
        data, ids = content.get("data"), content.get(label_key)
        if data is None or ids is None:
            raise UserError(f"{folder / batch}: needs the entries 'data' and {label_key!r}, has: {', '.join(content)}")
        try:
            own_labels = _whole(ids)
            pixels = torch.as_tensor(data).reshape(len(own_labels), 3, 32, 32)
        except Exception as error:
            raise UserError(
                f"{folder / batch}: 'data' must be (N, 3072) uint8 and {label_key!r} a list of N integers"
            ) from error
        _checked(folder / batch, pixels, own_labels, n_classes)
        images.append(pixels)
        labels.append(own_labels)
        listed = content.get("filenames")
        known = isinstance(listed, list) and len(listed) == len(own_labels)
        names += [_text(name) for name in listed] if known and listed else [""] * len(own_labels)
    all_labels = torch.cat(labels)
    keys = [(label, _file_order(name)) for label, name in zip(all_labels.tolist(), names, strict=True)]
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64)
    return Part(torch.cat(images)[order], all_labels[order])


def _file_order(name: str) -> tuple[int, str]:
    """A key that sorts file names alphabetically, and those that are numbers by value.

    >>> sorted(["10.png", "9.png"], key=_file_order), sorted(["cat_2.png", "cat_10.png"], key=_file_order)
    (['9.png', '10.png'], ['cat_10.png', 'cat_2.png'])
    """
    stem = name.partition(".")[0]
    return (int(stem), "") if stem.isdecimal() and len(stem) < 19 else (0, name)


def _whole(values: Any) -> Tensor:
    """A list of integers as int64; fractions are refused, not truncated."""
    row = torch.as_tensor(values) if len(values) else torch.empty(0, dtype=torch.int64)
    if row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise ValueError(f"needs a list of integers, got {tuple(row.shape)} {row.dtype}")
    return row.long()


def read_cifar_names(file: Path, key: str, n_classes: int) -> tuple[str, ...]:
    """The class names of CIFAR's meta file; the class ids if it is missing."""
    if not file.exists():
        return tuple(str(label) for label in range(n_classes))
    names = _unpickle(file).get(key)
    if not isinstance(names, list) or len(names) != n_classes:
        raise UserError(f"{file}: needs a list {key!r} of {n_classes} names")
    return tuple(_text(name) for name in names)


def read_idx(folder: Path, part: str, n_classes: int) -> Part:
    """One part in MNIST's format: `{part}-images-idx3-ubyte` and `{part}-labels-idx1-ubyte`, plain or gzipped."""
    file = idx_file(folder, f"{part}-images-idx3-ubyte")
    images = _read_idx_file(file, 3)
    labels_file = idx_file(folder, f"{part}-labels-idx1-ubyte")
    labels = _read_idx_file(labels_file, 1)
    return _checked(file, images.unsqueeze(1), labels.long(), n_classes, labels_file)


def idx_file(folder: Path, name: str) -> Path:
    """The file of that name, or its gzipped form if only that exists."""
    return folder / name if (folder / name).exists() else folder / f"{name}.gz"


_MAT_NAMES = ("X", "y")
_MAT_KINDS = ("double", "single", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def _check_mat(file: Path, listed: list[tuple[str, tuple[int, ...], str]]) -> None:
    """Refuse a mat file whose headers show its two variables twice, as anything but arrays, or too large."""
    wanted = [(shape, kind) for name, shape, kind in listed if name in _MAT_NAMES]
    if len(wanted) > len(_MAT_NAMES) or any(kind not in _MAT_KINDS for _, kind in wanted):
        raise UserError(f"{file}: needs X of (32, 32, 3, N) uint8 and y of N integers, from 1 to 10")
    if sum(math.prod(shape) for shape, _ in wanted) > LARGEST // 8:  # eight bytes a value at most
        raise UserError(f"{file}: unpacks to more than {LARGEST} bytes, so it is not the published file")


def read_svhn(file: Path) -> Part:
    """One part of SVHN's cropped digits; the file calls the digit 0 class 10."""
    try:
        scipy_io = importlib.import_module("scipy.io")
    except ImportError as error:
        raise UserError(f"{file}: scipy is required to read it; pip install scipy") from error
    try:
        _check_mat(file, scipy_io.whosmat(str(file)))
        content = scipy_io.loadmat(str(file), variable_names=_MAT_NAMES)
    except UserError:
        raise
    except Exception as error:  # loadmat raises all kinds of exceptions
        raise _unreadable(file, error) from error
    try:
        images = torch.as_tensor(content["X"]).permute(3, 2, 0, 1).contiguous()
        labels = torch.as_tensor(content["y"].astype("int64")).flatten()
    except Exception as error:
        raise UserError(f"{file}: needs X of (32, 32, 3, N) uint8 and y of N integers, from 1 to 10") from error
    labels = torch.where(labels == 10, 0, torch.where(labels == 0, 10, labels))  # a stored 0 is invalid
    return _checked(file, images, labels, 10)


def read_stl10(folder: Path, part: str) -> Part:
    """One labelled part of STL-10: 96x96 RGB images in column-major order, labels from 1."""
    import numpy

    file, labels_file = folder / f"{part}_X.bin", folder / f"{part}_y.bin"
    try:
        pixels, stored = (
            torch.from_numpy(numpy.frombuffer(bytearray(read_limited(f, LARGEST)), dtype=numpy.uint8))
            for f in (file, labels_file)
        )
    except OSError as error:
        raise _unreadable(Path(error.filename or file), error) from error
    if pixels.numel() == 0 or pixels.numel() % (3 * 96 * 96):
        raise UserError(f"{file}: {pixels.numel()} bytes are not a multiple of 3x96x96; delete it and try again")
    images = pixels.view(-1, 3, 96, 96).transpose(2, 3).contiguous()
    return _checked(file, images, stored.long() - 1, 10, labels_file)


def _unpickle(file: Path) -> dict[str, Any]:
    try:
        packed = read_limited(file, LARGEST)
        try:
            content = unpickle(packed)
        except UserError as error:
            raise UserError(f"{file}: refused: {error}") from None
    except UserError:
        raise
    except Exception as error:  # a broken pickle raises all kinds of exceptions
        raise _unreadable(file, error) from error
    if not isinstance(content, Mapping):
        raise UserError(f"{file}: must contain a dictionary, contains a {type(content).__name__}")
    return {_text(key): value for key, value in content.items()}


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _read_idx_file(file: Path, n_dimensions: int) -> Tensor:
    """A uint8 tensor from an idx file: two zero bytes, 8 for uint8, the number of dimensions, the sizes, the values."""
    start = 4 + 4 * n_dimensions
    try:
        stored = read_limited(file, LARGEST)
        stream: IO[bytes] = io.BytesIO(stored)
        if stored[:2] == b"\x1f\x8b":
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=stream))
        head = stream.read(start)
        sizes = [int.from_bytes(head[place : place + 4], "big") for place in range(4, start, 4)]
        n_values = math.prod(sizes)
        if n_values > LARGEST:
            raise UserError(f"{file}: holds {n_values} values, more than {LARGEST}, so it is not the published file")
        content = stream.read(n_values + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, error) from error
    if head[:4] != bytes([0, 0, 8, n_dimensions]) or len(content) != n_values:
        raise UserError(f"{file}: is not a complete idx file of {n_dimensions} dimensions; delete it and try again")
    if not n_values:
        raise UserError(f"{file}: is empty: its sizes are {'x'.join(map(str, sizes))}; delete it and try again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(sizes)


def _checked(file: Path, images: Tensor, labels: Tensor, n_classes: int, labels_file: Path | None = None) -> Part:
    if images.dtype != torch.uint8:
        raise UserError(f"{file}: images must be uint8, got {str(images.dtype).removeprefix('torch.')}")
    if len(images) != len(labels):
        raise UserError(f"{file}: {len(images)} images but {len(labels)} labels")
    if len(labels) == 0:
        raise UserError(f"{file}: holds no images")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= n_classes:
        raise UserError(f"{labels_file or file}: labels must be in 0..{n_classes - 1}, got {low} to {high}")
    return Part(images, labels)


def _unreadable(file: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(",")
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror  # without the path, which the message has already
    return UserError(f"{file}: cannot be read ({reason}); delete it and try again")
