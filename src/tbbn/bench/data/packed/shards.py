"""One shard of a packed data set: what it is made from, and how it is written. Without torch, as the processes that write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from tbbn.bench.data.sources.decoding import Unreadable, open_image, pil_silenced
from tbbn.bench.files import atomic_writer, write_atomic
from tbbn.errors import UserError


@dataclass(frozen=True)
class Shard:
    """One file of whole images; those that could not be read were left out."""

    file: str
    images: int
    sha256: str
    digest: str  # of what it was made from: paths, lengths, times and the size of the stored images
    labels: list[list[int]]  # as run_lengths gives them
    unreadable: list[list[str]]  # file and reason


def run_lengths(labels: Sequence[int]) -> list[list[int]]:
    """Labels as [label, how often] in a row: classes mostly lie one after the other.

    >>> run_lengths([0, 0, 2])
    [[0, 2], [2, 1]]
    """
    return [[label, len(list(same))] for label, same in groupby(labels)]


@dataclass(frozen=True)
class Job:
    """One shard to be written."""

    file: Path
    source: Path  # the tree that the images lie in
    images: tuple[Path, ...]
    labels: tuple[int, ...]
    shape: tuple[int, int, int]  # of each stored image
    square: bool  # whether images are resized and cut to that shape; else they have it
    digest: str

    @property
    def receipt(self) -> Path:
        return self.file.with_suffix(".json")

    @property
    def row(self) -> int:
        """Bytes of a stored image."""
        return self.shape[0] * self.shape[1] * self.shape[2]

    def read_receipt(self) -> Shard:
        return Shard(**json.loads(self.receipt.read_text()))

    def is_done(self) -> bool:
        """Whether the shard was written from just this, and is whole."""
        try:
            shard = self.read_receipt()
            return shard.digest == self.digest and self.file.stat().st_size == shard.images * self.row
        except (OSError, ValueError, TypeError):
            return False


class _Stopped(Exception):
    """The pack was given up while a shard was being written."""


def write_shard(job: Job, tell: Callable[[int], None], stopped: Callable[[], bool]) -> None:
    """Decode the images of a job into its file, then write its receipt; `tell` hears of each image."""
    digest = hashlib.sha256()
    labels: list[int] = []
    unreadable: list[list[str]] = []
    try:
        with pil_silenced(), atomic_writer(job.file) as out:
            for file, label in zip(job.images, job.labels, strict=True):
                if stopped():
                    raise _Stopped
                try:
                    pixels = _pixels(file, job)
                    labels.append(label)
                    digest.update(pixels)
                    out.write(pixels)
                except Unreadable as error:
                    unreadable.append([str(file.relative_to(job.source)), str(error).removeprefix(f"{file}: ")])
                tell(1)
            # A receipt of what lay there before must not vouch for this.
            job.receipt.unlink(missing_ok=True)
        shard = Shard(job.file.name, len(labels), digest.hexdigest(), job.digest, run_lengths(labels), unreadable)
        write_atomic(job.receipt, json.dumps(asdict(shard)).encode())
    except OSError as error:
        raise UserError(
            f"{job.file}: cannot be written ({error.strerror}); the same command goes on from here"
        ) from error


def _pixels(file: Path, job: Job) -> bytes:
    """The bytes (C, H, W) of an image."""
    channels, height, width = job.shape
    image = open_image(file, channels, height if job.square else None)
    if image.size != (width, height):
        raise UserError(f"{file}: has changed while it was being packed; run the same command again")
    return b"".join(band.tobytes() for band in image.split())
