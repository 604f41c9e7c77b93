"""Read the file formats of the published data sets: CIFAR's pickles, MNIST's idx, SVHN's mat, STL-10's binaries.

No hash is checked here, so repacked copies load. A pickle may build numpy arrays and plain values and nothing else.
"""

from __future__ import annotations

import gzip
import importlib
import io
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tbbn.bench.data.types import Part
from tbbn.errors import UserError

# What pickles of arrays and plain values refer to, whichever numpy and Python wrote them.
_ALLOWED = {
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    *((builtins, name) for builtins in ("builtins", "__builtin__") for name in ("bytes", "bytearray", "set", "list")),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(f"it asks for {module}.{name}; only numpy arrays and plain values are allowed")
        return super().find_class(module, name)


def read_cifar(folder: Path, batches: tuple[str, ...], label_key: str, n_classes: int) -> Part:
    """The training or test part of CIFAR-10 or CIFAR-100 from its pickled batches (N, 3072)."""
    images, labels = [], []
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
    return Part(torch.cat(images), torch.cat(labels))


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


def read_svhn(file: Path) -> Part:
    """One part of SVHN's cropped digits; the file calls the digit 0 class 10."""
    try:
        scipy_io = importlib.import_module("scipy.io")
    except ImportError as error:
        raise UserError(f"{file}: scipy is required to read it; pip install scipy") from error
    try:
        content = scipy_io.loadmat(str(file))
    except Exception as error:  # loadmat raises all kinds
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
        pixels, stored = (torch.from_numpy(numpy.fromfile(f, dtype=numpy.uint8)) for f in (file, labels_file))
    except OSError as error:
        raise _unreadable(Path(error.filename or file), error) from error
    if pixels.numel() == 0 or pixels.numel() % (3 * 96 * 96):
        raise UserError(f"{file}: {pixels.numel()} bytes are not a multiple of 3x96x96; delete it and try again")
    images = pixels.view(-1, 3, 96, 96).transpose(2, 3).contiguous()
    return _checked(file, images, stored.long() - 1, 10, labels_file)


def _unpickle(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            content = _ArrayUnpickler(stream, encoding="latin1").load()
    except UserError as error:
        raise UserError(f"{file}: refused: {error}") from None
    except Exception as error:  # a broken pickle raises anything
        raise _unreadable(file, error) from error
    if not isinstance(content, Mapping):
        raise UserError(f"{file}: must contain a dictionary, contains a {type(content).__name__}")
    return {_text(key): value for key, value in content.items()}


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _read_idx_file(file: Path, n_dimensions: int) -> Tensor:
    """A uint8 tensor from an idx file: two zero bytes, 8 for uint8, the number of dimensions, the sizes, the values."""
    try:
        content = file.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, error) from error
    start = 4 + 4 * n_dimensions
    sizes = [int.from_bytes(content[place : place + 4], "big") for place in range(4, start, 4)]
    n_values = 1
    for size in sizes:
        n_values *= size
    if content[:4] != bytes([0, 0, 8, n_dimensions]) or len(content) != start + n_values:
        raise UserError(f"{file}: is not a complete idx file of {n_dimensions} dimensions; delete it and try again")
    if not n_values:
        raise UserError(f"{file}: is empty: its sizes are {'x'.join(map(str, sizes))}; delete it and try again")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(sizes)


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
