"""A packed set: images decoded once into uint8 shards, which are memory-mapped, and an index of them.

The folder holds `index.json` and the shards `train-00000.u8`, ..., each the concatenated bytes of whole images (C, H, W).
The index is written last, so a folder that has one is complete. It names the size and the SHA-256 of every shard and carries a
checksum of itself. `tbbn.bench.data.packed.writer` writes it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tbbn.bench.data.packed.shards import Shard
from tbbn.bench.files import file_sha256, read_limited
from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    import numpy

SCHEMA = 1
KIND = "tbbn packed images"
INDEX = "index.json"
PARTS = ("train", "test")
_LARGEST = 2**28  # bytes of an index, which has entries for each shard, class and unreadable file


@dataclass(frozen=True, eq=False)
class PackedImages:
    """The images (N, C, H, W) uint8 of one part of a data set, on disk. Nothing is read until it is asked for.

    A shard is compared with its checksum when this process first uses it, so that no damaged image is trained on.
    """

    folder: Path
    shards: tuple[Shard, ...]
    shape: torch.Size

    @cached_property
    def _locks(self) -> list[threading.Lock]:
        return [threading.Lock() for _ in self.shards]

    @cached_property
    def _maps(self) -> list[numpy.ndarray | None]:
        return [None] * len(self.shards)

    def _map(self, number: int) -> numpy.ndarray:
        """The images (n, bytes) of a shard. When it is first used, it is compared with its checksum."""
        found = self._maps[number]
        if found is None:
            with self._locks[number]:  # other threads wait for the comparison
                found = self._maps[number]
                if found is None:
                    shard = self.shards[number]
                    found = _mapped(self.folder / shard.file, shard.images, self.shape[1:].numel()).numpy()
                    _check_shard(self.folder / shard.file, shard.sha256, found)
                    self._maps[number] = found
        return found

    @cached_property
    def _starts(self) -> numpy.ndarray:
        import numpy

        return numpy.array([0, *accumulate(shard.images for shard in self.shards)])

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Copy the images of `rows` (n,) on the CPU into `out` (n, C, H, W).

        In numpy, because torch would start its own threads in every prefetch thread.
        """
        into, wanted = out.flatten(1).numpy(), rows.numpy()
        shards = self._starts.searchsorted(wanted, "right") - 1
        inside = wanted - self._starts[shards]
        for i, (shard, row) in enumerate(zip(shards, inside, strict=True)):
            into[i] = self._map(shard)[row]

    def to(self, device: torch.device | str) -> Tensor:
        """All images as one tensor on the device."""
        whole = torch.empty(self.shape, dtype=torch.uint8, device=device)
        for number, (start, shard) in enumerate(zip(self._starts.tolist(), self.shards, strict=False)):
            mapped = torch.from_numpy(self._map(number))
            whole[start : start + shard.images].copy_(mapped.view(-1, *self.shape[1:]))
        return whole


@dataclass(frozen=True, eq=False)
class PackedSet:
    """A packed set: images and labels (N,) int64 of train and test, and the class names in the order of their ids."""

    folder: Path
    images: tuple[PackedImages, PackedImages]
    labels: tuple[Tensor, Tensor]
    classes: tuple[str, ...]

    @property
    def unreadable(self) -> tuple[tuple[str, str], ...]:
        """The files that could not be read when the set was packed, and why."""
        shards = (shard for images in self.images for shard in images.shards)
        return tuple((file, reason) for shard in shards for file, reason in shard.unreadable)

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(file for file, _ in self.unreadable)

    @property
    def n_bytes(self) -> int:
        return sum(images.shape.numel() for images in self.images)


def is_packed(folder: Path) -> bool:
    """Whether the folder holds a complete packed set."""
    return (folder / INDEX).is_file()


def open_packed(folder: Path) -> PackedSet:
    """The packed set in `folder`. Checks its index and the sizes of its shards; their bytes are checked when first used."""
    index = read_index(folder)
    try:
        shape = tuple(int(side) for side in index["shape"])
        shards = [tuple(Shard(**shard) for shard in index["shards"][part]) for part in PARTS]
        labels = [_labels([run for shard in own for run in shard.labels]) for own in shards]
        classes = tuple(index["classes"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / INDEX}: damaged: {type(error).__name__} {error}; pack the set again") from None
    image_bytes = torch.Size(shape).numel()
    for own, ids in zip(shards, labels, strict=True):
        assert sum(shard.images for shard in own) == len(ids), "every image has a label"
        for shard in own:
            problem = _size_problem(folder / shard.file, shard.images * image_bytes)
            if problem:
                raise UserError(f"{folder / shard.file}: {problem}; run the same tbbn data pack again to restore it")
    images = tuple(
        PackedImages(folder, own, torch.Size((len(ids), *shape))) for own, ids in zip(shards, labels, strict=True)
    )
    return PackedSet(folder, (images[0], images[1]), (labels[0], labels[1]), classes)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a packed set; checks its schema and its own checksum."""
    file = folder / INDEX
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; create it with tbbn data pack IMAGES {folder}")
    if not file.is_file():
        raise UserError(
            f"{folder}: not a complete packed set (no {INDEX}); create one with tbbn data pack IMAGES {folder}"
        )
    try:
        index = json.loads(read_limited(file, _LARGEST))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{file}: damaged, or not an index ({type(error).__name__}); pack the set again") from None
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise UserError(f"{file}: not the index of a packed set; choose another folder")
    if index.get("schema") != SCHEMA:
        raise UserError(f"{file}: has schema {index.get('schema')!r}; this version reads {SCHEMA}; pack the set again")
    if index.get("sha256") != index_digest(index):
        raise UserError(f"{file}: damaged: its content does not match its checksum; pack the set again")
    return index


def index_digest(index: dict[str, Any]) -> str:
    """The checksum of an index, over everything but the checksum."""
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _mapped(file: Path, n: int, image_bytes: int) -> Tensor:
    if not n:  # all its images were skipped, and an empty file cannot be mapped
        return torch.empty(0, image_bytes, dtype=torch.uint8)
    # A private map works on read-only files. torch closes each file, so many shards do not mean many open files.
    return torch.from_file(str(file), shared=False, size=n * image_bytes, dtype=torch.uint8).view(n, image_bytes)


_unchanged: set[tuple[Path, int, int, str]] = set()  # shards that this process has compared: file, size, time, checksum


def _check_shard(file: Path, sha256: str, content: numpy.ndarray) -> None:
    """Raise if a shard's bytes are not those that were written."""
    status = file.stat()
    key = file, status.st_size, status.st_mtime_ns, sha256
    if key not in _unchanged and hashlib.sha256(content.data).hexdigest() != sha256:
        raise UserError(
            f"{file}: damaged: its content does not match its checksum; delete it and run the same tbbn data pack again"
        )
    _unchanged.add(key)


def _labels(runs: list[list[int]]) -> Tensor:
    values = torch.tensor(runs, dtype=torch.int64).view(-1, 2)
    return values[:, 0].repeat_interleave(values[:, 1])


@dataclass(frozen=True)
class CheckResult:
    """The result of `check_packed`."""

    shards: int
    n_bytes: int
    problems: tuple[tuple[str, str], ...]  # file and what is wrong with it


def check_packed(folder: Path, on_progress: Callable[[int, int], None] | None = None) -> CheckResult:
    """Compare every shard with its checksum; calls `on_progress` with the bytes read and the bytes in all."""
    index = read_index(folder)
    image_bytes = torch.Size(index["shape"]).numel()
    shards = [Shard(**shard) for part in PARTS for shard in index["shards"][part]]
    n_all = sum(shard.images for shard in shards) * image_bytes
    n_done = 0
    problems: list[tuple[str, str]] = []
    for shard in shards:
        problem = _size_problem(folder / shard.file, shard.images * image_bytes)
        before = n_done

        def on_bytes(n: int, before: int = before) -> None:
            if on_progress is not None:
                on_progress(before + n, n_all)

        if problem is None and file_sha256(folder / shard.file, on_bytes) != shard.sha256:
            problem = "damaged: its content does not match its checksum"
        if problem is not None:
            problems.append((shard.file, problem))
        n_done += shard.images * image_bytes
        on_bytes(shard.images * image_bytes)
    return CheckResult(len(shards), n_all, tuple(problems))


def _size_problem(file: Path, n_bytes: int) -> str | None:
    """The problem with a file's size, or None. Checked because reading a map beyond its file's end kills the process."""
    try:
        size = file.stat().st_size
    except OSError as error:
        return f"cannot be read ({printable(error.strerror or type(error).__name__)})"
    return None if size == n_bytes else f"has {size} bytes, must have {n_bytes}"
