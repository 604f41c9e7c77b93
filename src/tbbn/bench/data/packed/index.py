"""A packed data set: images decoded once into uint8 shards that are mapped into memory, and an index of them.

A folder holds `index.json` and the shards `train-00000.u8`, ..., each the bytes of whole images (C, H, W) one after the
other. The index is written last, so a folder with one is whole; it names the size and the SHA-256 of each shard and
carries a checksum of itself. `tbbn.bench.data.packed.pack` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tbbn.bench.data.packed.shards import Shard
from tbbn.bench.files import file_sha256
from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    import numpy

SCHEMA = 1
KIND = "tbbn packed images"
INDEX = "index.json"
PARTS = ("train", "test")


@dataclass(frozen=True, eq=False)
class PackedImages:
    """The images (N, C, H, W) uint8 of a split as they lie on the disk; nothing is read until they are asked for."""

    folder: Path
    shards: tuple[Shard, ...]
    shape: torch.Size

    @cached_property
    def _maps(self) -> list[numpy.ndarray]:
        row = self.shape[1:].numel()
        files = ((self.folder / shard.file, shard.images) for shard in self.shards)
        # Private maps need no right to write; torch closes the file, so that many shards are no many open files.
        return [_mapped(file, n, row).numpy() for file, n in files]

    @cached_property
    def _starts(self) -> numpy.ndarray:
        import numpy

        return numpy.array([0, *accumulate(shard.images for shard in self.shards)])

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Copy the images of `rows` (n,) on the CPU into `out` (n, C, H, W); torch is not asked for any thread."""
        into, wanted = out.flatten(1).numpy(), rows.numpy()
        shards = self._starts.searchsorted(wanted, "right") - 1
        inside = wanted - self._starts[shards]
        maps = self._maps
        for i, (shard, row) in enumerate(zip(shards.tolist(), inside.tolist(), strict=True)):
            into[i] = maps[shard][row]

    def to(self, device: torch.device | str) -> Tensor:
        """All images as one tensor there."""
        whole = torch.empty(self.shape, dtype=torch.uint8, device=device)
        for start, shard, mapped in zip(self._starts.tolist(), self.shards, self._maps, strict=False):
            whole[start : start + shard.images].copy_(torch.from_numpy(mapped).view(-1, *self.shape[1:]))
        return whole


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed data set: of train and test the images and the labels (N,) int64, and the classes by their ids."""

    folder: Path
    images: tuple[PackedImages, PackedImages]
    labels: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    skipped: tuple[str, ...]  # files that could not be read when it was packed


def is_packed(folder: Path) -> bool:
    """Whether a whole packed data set lies there."""
    return (folder / INDEX).is_file()


def open_packed(folder: Path) -> Packed:
    """The packed data set in `folder`; its index and the sizes of its shards are checked, their bytes are not."""
    index = read_index(folder)
    try:
        shape = tuple(int(side) for side in index["shape"])
        shards = [tuple(Shard(**shard) for shard in index["shards"][part]) for part in PARTS]
        labels = [_labels([run for shard in own for run in shard.labels]) for own in shards]
        classes = tuple(index["classes"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / INDEX}: damaged: {type(error).__name__} {error}; pack the set again") from None
    row = torch.Size(shape).numel()
    for own, ids in zip(shards, labels, strict=True):
        assert sum(shard.images for shard in own) == len(ids), "an image has a label"
        for shard in own:
            problem = _wrong_size(folder / shard.file, shard.images * row)
            if problem:
                raise UserError(f"{folder / shard.file}: {problem}; the same tbbn data pack as before restores it")
    images = tuple(
        PackedImages(folder, own, torch.Size((len(ids), *shape))) for own, ids in zip(shards, labels, strict=True)
    )
    skipped = tuple(file for own in shards for shard in own for file, _ in shard.unreadable)
    return Packed(folder, (images[0], images[1]), (labels[0], labels[1]), classes, skipped)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a packed data set, its schema and its own checksum checked."""
    file = folder / INDEX
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; make it with tbbn data pack IMAGES {folder}")
    if not file.is_file():
        raise UserError(f"{folder}: holds no whole packed set ({INDEX}); tbbn data pack IMAGES {folder} makes one")
    try:
        index = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{file}: damaged, or not an index ({type(error).__name__}); pack the set again") from None
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise UserError(f"{file}: is not the index of a packed data set; choose another folder")
    if index.get("schema") != SCHEMA:
        raise UserError(f"{file}: has schema {index.get('schema')!r}; this version reads {SCHEMA}; pack the set again")
    if index.get("sha256") != index_digest(index):
        raise UserError(f"{file}: damaged: its content does not match its checksum; pack the set again")
    return index


def index_digest(index: dict[str, Any]) -> str:
    """The checksum of an index, over all of it but the checksum."""
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _mapped(file: Path, n: int, row: int) -> Tensor:
    if not n:  # all its images were skipped; no map is empty
        return torch.empty(0, row, dtype=torch.uint8)
    return torch.from_file(str(file), shared=False, size=n * row, dtype=torch.uint8).view(n, row)


def _labels(runs: list[list[int]]) -> Tensor:
    values = torch.tensor(runs, dtype=torch.int64).view(-1, 2)
    return values[:, 0].repeat_interleave(values[:, 1])


@dataclass(frozen=True)
class Checked:
    """What a check of all bytes found."""

    shards: int
    n_bytes: int
    problems: tuple[tuple[str, str], ...]  # file and what is wrong with it


def check_packed(folder: Path, on_progress: Callable[[int, int], None] | None = None) -> Checked:
    """Read every shard and compare it with its checksum; `on_progress` hears of the bytes read and of all."""
    index = read_index(folder)
    row = torch.Size(index["shape"]).numel()
    shards = [Shard(**shard) for part in PARTS for shard in index["shards"][part]]
    n_all = sum(shard.images for shard in shards) * row
    n_done = 0
    problems: list[tuple[str, str]] = []
    for shard in shards:
        problem = _wrong_size(folder / shard.file, shard.images * row)
        before = n_done

        def heard(n: int, before: int = before) -> None:
            if on_progress is not None:
                on_progress(before + n, n_all)

        if problem is None and file_sha256(folder / shard.file, heard) != shard.sha256:
            problem = "damaged: its content does not match its checksum"
        if problem is not None:
            problems.append((shard.file, problem))
        n_done += shard.images * row
        heard(shard.images * row)
    return Checked(len(shards), n_all, tuple(problems))


def _wrong_size(file: Path, n_bytes: int) -> str | None:
    """What is wrong with the file's length; a map beyond a file's end would kill the process that reads it."""
    try:
        size = file.stat().st_size
    except OSError as error:
        return f"cannot be read ({printable(error.strerror or type(error).__name__)})"
    return None if size == n_bytes else f"has {size} bytes, must have {n_bytes}"
