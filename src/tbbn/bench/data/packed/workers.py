"""The processes that decode images into shards. They touch their own files only, so each can be killed at any moment.

Nothing here imports torch, which takes seconds: the processes begin at once, unless the script that packs imports it, for
they import that too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tbbn.bench.data.packed.shards import Job, write_shard
from tbbn.bench.data.sources.decoding import pil_silenced
from tbbn.errors import UserError

_AT_ONCE = 1024  # image files whose size is looked at in one go
_EVERY = 0.1  # seconds between two looks at the progress


def image_sizes(files: Sequence[Path]) -> set[tuple[int, int]]:
    """The sizes (width, height) among these files, two at most; nothing is decoded, unreadable files have none."""
    import PIL.Image

    found: set[tuple[int, int]] = set()
    with pil_silenced():
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
            with _all_alive():
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
        with _all_alive():
            left: set[Future[None]] = {self._begun().submit(_write_here, job) for job in jobs}
            while left:
                done, left = wait(left, _EVERY, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if on_progress is not None:
                    on_progress(self.count.value)


@contextmanager
def _all_alive() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise UserError(
            "pack: a process that decoded images has died, perhaps for want of memory; the same command goes on "
            "from here, with fewer --workers (a script that packs must do so under if __name__ == '__main__')"
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
