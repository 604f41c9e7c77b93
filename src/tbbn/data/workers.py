"""The processes that decode images into shards. They touch their own files only, so each can be killed at any moment."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tbbn.data.images import Unreadable, open_image
from tbbn.data.packed import Shard, run_lengths
from tbbn.errors import UserError

_AT_ONCE = 1024  # image files whose size is looked at in one go
_EVERY = 0.1  # seconds between two looks at the progress


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
    partial = job.file.with_name(f".{job.file.name}.{os.getpid()}")
    digest = hashlib.sha256()
    labels: list[int] = []
    unreadable: list[list[str]] = []
    try:
        with warnings.catch_warnings(), partial.open("wb") as out:
            warnings.simplefilter("ignore")  # PIL's, of what it reads all the same
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
            out.flush()
            os.fsync(out.fileno())
        # A receipt of what lay there before must not vouch for this.
        job.receipt.unlink(missing_ok=True)
        partial.replace(job.file)
        shard = Shard(job.file.name, len(labels), digest.hexdigest(), job.digest, run_lengths(labels), unreadable)
        write_whole(job.receipt, json.dumps(asdict(shard)))
    except OSError as error:
        raise UserError(
            f"{job.file}: cannot be written ({error.strerror}); the same command goes on from here"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _pixels(file: Path, job: Job) -> bytes:
    """The bytes (C, H, W) of an image."""
    channels, height, width = job.shape
    image = open_image(file, channels, height if job.square else None)
    if image.size != (width, height):
        raise UserError(f"{file}: has changed while it was being packed; run the same command again")
    return b"".join(band.tobytes() for band in image.split())


def write_whole(file: Path, text: str) -> None:
    """Write a file beside its place, flush and rename it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    with partial.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def image_sizes(files: Sequence[Path]) -> set[tuple[int, int]]:
    """The sizes (width, height) among these files, two at most; nothing is decoded, unreadable files have none."""
    import PIL.Image

    found: set[tuple[int, int]] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in files:
            try:
                with PIL.Image.open(file) as image:
                    found.add(image.size)
            except Exception:  # the decoder will say what is wrong with it
                continue
            if len(found) > 1:
                break
    return found


class Workers:
    """As many processes as asked for, begun when they are needed; with one the work is done right here."""

    def __init__(self, n: int | None) -> None:
        here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.n = n or here
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.stop.set()
            self.pool.shutdown(cancel_futures=True)

    def _begun(self) -> ProcessPoolExecutor:
        if self.pool is None:
            # Forked children would inherit the threads' locks and the lock on the folder.
            context = multiprocessing.get_context("spawn")
            self.count, self.stop = context.Value("q", 0), context.Event()
            self.pool = ProcessPoolExecutor(self.n, context, _begin, (self.count, self.stop))
        return self.pool

    def common_shape(self, files: Sequence[Path], size: int, channels: int) -> tuple[int, int, int] | None:
        """The shape of all images, if it is one and neither side is larger than `size`."""
        found: set[tuple[int, int]] = set()
        for some in self._sizes(files):
            found |= some
            if len(found) > 1 or any(max(sides) > size for sides in found):
                return None
        return next(((channels, height, width) for width, height in found), None)

    def _sizes(self, files: Sequence[Path]) -> Iterator[set[tuple[int, int]]]:
        """The sizes among the first two files, which mostly tell enough, and then among all."""
        yield image_sizes(files[:2])
        pieces = [files[start : start + _AT_ONCE] for start in range(0, len(files), _AT_ONCE)]
        if self.n == 1 or len(pieces) == 1:
            yield from map(image_sizes, pieces)
        else:
            yield from self._begun().map(image_sizes, pieces)  # what is not asked for any more is cancelled

    def write(self, jobs: Sequence[Job], on_progress: Callable[[int], None] | None) -> None:
        """Write all shards; `on_progress` hears of the images done so far."""
        if self.n == 1:
            done = 0

            def tell(n: int) -> None:
                nonlocal done
                done += n
                if on_progress is not None:
                    on_progress(done)

            for job in jobs:
                write_shard(job, tell, lambda: False)
        elif jobs:
            self._write_in_pool(jobs, on_progress)

    def _write_in_pool(self, jobs: Sequence[Job], on_progress: Callable[[int], None] | None) -> None:
        left: set[Future[None]] = {self._begun().submit(_write_here, job) for job in jobs}
        try:
            while left:
                done, left = wait(left, _EVERY, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if on_progress is not None:
                    on_progress(self.count.value)
        except BrokenProcessPool:
            raise UserError(
                "pack: a process that decoded images has died, perhaps for want of memory; the same command goes on "
                "from here, with fewer --workers"
            ) from None


_shared: Any = None  # in a worker: the count of images, and the word to stop


def _begin(count: Any, stop: Any) -> None:
    """What a worker does first."""
    global _shared
    _shared = count, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_here(job: Job) -> None:
    count, stop = _shared

    def tell(n: int) -> None:
        with count.get_lock():
            count.value += n

    write_shard(job, tell, stop.is_set)
