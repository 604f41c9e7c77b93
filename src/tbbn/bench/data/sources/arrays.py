"""Data sets in memory: arrays, tensors or torch Datasets.

Images are (N, H, W), (N, C, H, W) or (N, H, W, C); if both of the latter fit, channels come second. They are uint8, or floats
in [0, 1], which are rounded to uint8: the bench stores bytes. Labels are integers or text, one per image. Without a test
part, every 5th image of each class becomes a test image.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import torch
from torch import Tensor

from tbbn.bench.data.sources.contents import Contents, Stats, is_held_out, make_source
from tbbn.bench.data.types import Part, Source
from tbbn.errors import UserError

_CHANNELS = (1, 3)  # a last axis of such a length holds the channels, unless the second axis does

# The data passed to tbbn.run in this process, by digest. An entry lives as long as a result that uses it.
_given: weakref.WeakValueDictionary[str, Source] = weakref.WeakValueDictionary()


def remember(data: Any) -> Source:
    """The data as a source named ``arrays:DIGEST``, which a config can hold. `recall` finds it while it is in use."""
    contents, stats = read_arrays("data", data)
    found = hashlib.sha256(repr(contents.classes).encode())
    for part in (contents.train, contents.test):
        assert isinstance(part.images, Tensor)
        found.update(f"{tuple(part.images.shape)}".encode())
        found.update(part.images.contiguous().numpy().data)
        found.update(part.labels.contiguous().numpy().data)
    digest = found.hexdigest()[:16]
    source = Source(f"arrays:{digest}", contents.train, contents.test, contents.classes, *stats)
    return _given.setdefault(digest, source)


def arrays(argument: str, size: int | None) -> Source:
    """The data set ``arrays:DIGEST``."""
    source = recall(argument)
    contents = Contents(source.train, source.test, source.classes)
    return make_source(source.name, contents, (source.mean, source.std), size)


def is_remembered(digest: str) -> bool:
    return digest in _given


def recall(digest: str) -> Source:
    """The source that `remember` made."""
    if not is_remembered(digest):
        raise UserError(
            f"dataset 'arrays:{digest}' was passed in memory and is no longer available; pass the same data to tbbn.run(data=...)"
        )
    return _given[digest]


def read_arrays(name: str, data: Any) -> tuple[Contents, Stats]:
    """Both parts, and the mean and standard deviation of each channel.

    The data is (train, test) or train alone; each is a pair (images, labels) or a torch Dataset of such pairs.
    """
    train, test = _parts(name, data)
    images, labels = _pair(f"{name}, train", train)
    classes = sorted(set(labels), key=lambda label: (isinstance(label, str), label))
    ids = {label: i for i, label in enumerate(classes)}
    train_ids = torch.tensor([ids[label] for label in labels])
    if test is None:
        held_out = is_held_out(train_ids)
        parts = [Part(images[rows], train_ids[rows]) for rows in (~held_out, held_out)]
    else:
        test_images, test_labels = _pair(f"{name}, test", test)
        unknown = sorted(map(str, set(test_labels) - set(classes)))
        if unknown:
            raise UserError(f"{name}: test images of class {unknown[0]!r}, which has no training images")
        test_ids = torch.tensor([ids[label] for label in test_labels])
        parts = [Part(images, train_ids), Part(test_images, test_ids)]
    for kind, part in zip(("train", "test"), parts, strict=True):
        if not len(part.labels):
            raise UserError(f"{name}: no {kind} images")
    train_images = parts[0].images
    assert isinstance(train_images, Tensor)
    return Contents(parts[0], parts[1], tuple(map(str, classes))), _statistics(train_images)


def _parts(name: str, data: Any) -> tuple[Any, Any]:
    """The training part and the test part, or None if there is only one part."""
    if _is_dataset(data):
        return data, None
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise UserError(
            f"{name}: must be (images, labels), ((images, labels), (images, labels)), a torch Dataset or two of them, "
            f"got {_shown(data)}"
        )
    first, second = data
    whole = all(_is_dataset(part) or (isinstance(part, tuple | list) and len(part) == 2) for part in (first, second))
    return (first, second) if whole and not hasattr(first, "shape") else (data, None)


def _is_dataset(data: Any) -> bool:
    has = all(hasattr(data, name) for name in ("__getitem__", "__len__"))
    return has and not isinstance(data, tuple | list | str | dict) and not hasattr(data, "shape")


def _pair(name: str, data: Any) -> tuple[Tensor, list[Any]]:
    """Images (N, C, H, W) uint8, and as many labels."""
    if _is_dataset(data):
        images, labels = _rows_of(name, data)
    else:
        images, labels = _tensor(f"{name} images", data[0]), data[1]
    images = _bytes(name, _channels_second(name, images))
    labels = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(labels) != len(images):
        raise UserError(f"{name}: {len(images)} images but {len(labels)} labels")
    for label in labels:
        if not isinstance(label, int | str) or isinstance(label, bool):
            raise UserError(f"{name}: labels must be integers or text, got {label!r}")
    return images, labels


def _rows_of(name: str, dataset: Any) -> tuple[Tensor, list[Any]]:
    images, labels = [], []
    for i in range(len(dataset)):
        row = dataset[i]
        if not isinstance(row, tuple | list) or len(row) != 2:
            raise UserError(f"{name}: a Dataset must hold pairs (image, label), got {_shown(row)}")
        images.append(_tensor(f"{name} image {i}", row[0]))
        labels.append(row[1].item() if hasattr(row[1], "item") else row[1])
        if images[-1].shape != images[0].shape:
            shapes = [tuple(image.shape) for image in (images[0], images[-1])]
            raise UserError(f"{name}: images must have one size, got {shapes[0]} and {shapes[1]}")
    if not images:
        raise UserError(f"{name}: no images")
    return torch.stack(images), labels


def _tensor(name: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    import numpy as np

    try:
        return torch.from_numpy(np.array(values))  # a copy: the values may be read-only, or a PIL image
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: cannot be converted to a tensor: {error}") from None


def _channels_second(name: str, images: Tensor) -> Tensor:
    if images.dim() == 3:
        images = images.unsqueeze(1)
    if images.dim() != 4 or 0 in images.shape:
        shape = tuple(images.shape)
        raise UserError(f"{name}: images must be (N, H, W), (N, C, H, W) or (N, H, W, C), got {shape}")
    if images.shape[1] not in _CHANNELS and images.shape[3] in _CHANNELS:
        images = images.permute(0, 3, 1, 2)
    return images.contiguous()


def _bytes(name: str, images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images
    if images.is_floating_point() and bool(((images >= 0) & (images <= 1)).all()):
        return images.float().mul(255).round().to(torch.uint8)
    low, high = images.aminmax()
    raise UserError(f"{name}: images must be uint8, or floats in [0, 1], got {images.dtype} from {low:g} to {high:g}")


def _statistics(images: Tensor) -> Stats:
    """Mean and standard deviation of each channel, of pixels in [0, 1]. A constant channel gets a deviation of 1."""
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = (counts @ values) / counts.sum()
        deviation = (counts @ (values - mean).square() / counts.sum()).sqrt()
        means.append(round(mean.item(), 4))
        deviations.append(round(deviation.item(), 4) or 1.0)
    return tuple(means), tuple(deviations)


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
    return " ".join(text.split())[:60]
