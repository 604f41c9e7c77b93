"""One shard of a packed set: its sources, and how it is written.

No torch import here: worker processes start fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import prod
from pathlib import Path

from tbbn.bench.data.sources.decoding import Unreadable, open_image
from tbbn.bench.files import atomic_writer, write_atomic
from tbbn.errors import UserError


@dataclass(frozen=True)
class Shard:
    """A file of whole images (C, H, W), one after the other, without the unreadable ones."""

    file: str
    images: int
    sha256: str
    digest: str  # of its sources: paths, lengths, modification times, labels and the stored shape
    labels: list[list[int]]  # run lengths, see `run_lengths`
    unreadable: list[list[str]]  # file and reason


def run_lengths(labels: Sequence[int]) -> list[list[int]]:
    """Run-length encoding of labels, as [label, count], because the images of a class are mostly consecutive.

    >>> run_lengths([0, 0, 2])
    [[0, 2], [2, 1]]
    """
    return [[label, len(list(run))] for label, run in groupby(labels)]


@dataclass(frozen=True)
class ShardJob:
    """A shard to write."""

    file: Path
    source: Path  # the folder that the images are in
    images: tuple[Path, ...]
    labels: tuple[int, ...]
    shape: tuple[int, int, int]  # of each stored image
    square: bool  # whether images are resized and cut to that shape; otherwise they must have it
    digest: str

    @property
    def receipt(self) -> Path:
        """A JSON file with the `Shard`, written after the shard itself; the index replaces it."""
        return self.file.with_suffix(".json")

    @property
    def image_bytes(self) -> int:
        return prod(self.shape)

    def read_receipt(self) -> Shard:
        return Shard(**json.loads(self.receipt.read_text()))

    def is_done(self) -> bool:
        """Whether the whole shard exists and was made from the same images."""
        try:
            shard = self.read_receipt()
            return shard.digest == self.digest and self.file.stat().st_size == shard.images * self.image_bytes
        except (OSError, ValueError, TypeError):
            return False


class _Stopped(Exception):
    """Packing was stopped while a shard was being written."""


def write_shard(job: ShardJob, on_images: Callable[[int], None], stopped: Callable[[], bool]) -> None:
    """Decode the images of a job into its file, then write its receipt; calls `on_images` with 1 after each image."""
    digest = hashlib.sha256()
    labels: list[int] = []
    unreadable: list[list[str]] = []
    try:
        with atomic_writer(job.file) as out:
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
                on_images(1)
            # The receipt of an older shard must not vouch for the new one.
            job.receipt.unlink(missing_ok=True)
        shard = Shard(job.file.name, len(labels), digest.hexdigest(), job.digest, run_lengths(labels), unreadable)
        write_atomic(job.receipt, json.dumps(asdict(shard)).encode())
    except OSError as error:
        raise UserError(
            f"{job.file}: cannot be written ({error.strerror}); run the same command again to continue from here"
        ) from error


def _pixels(file: Path, job: ShardJob) -> bytes:
    """The bytes (C, H, W) of an image."""
    channels, height, width = job.shape
    image = open_image(file, channels, height if job.square else None)
    if image.size != (width, height):
        raise UserError(f"{file}: changed while it was being packed; run the same command again")
    return b"".join(band.tobytes() for band in image.split())
