"""The worker processes or threads that decode images into shards. Each writes its own files and may be killed any time.

No torch import here: it takes seconds. Spawned workers also import the main script, so they only start fast if that
does not import torch either.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tbbn.bench.data.packed.shards import ShardJob, write_shard
from tbbn.bench.data.sources.decoding import FORMATS, pil_silenced
from tbbn.errors import UserError

_FILES_PER_TASK = 1024  # image files whose size one worker task looks at
_POLL_SECONDS = 0.1  # between two progress reports


def image_sizes(files: Sequence[Path]) -> set[tuple[int, int]]:
    """The sizes (width, height) among these files, two at most. Decodes nothing and ignores unreadable files."""
    import PIL.Image

    sizes: set[tuple[int, int]] = set()
    for file in files:
        # Decoding will report what is wrong with a file.
        with suppress(Exception), PIL.Image.open(file, formats=FORMATS) as image:
            sizes.add(image.size)
        if len(sizes) > 1:
            break
    return sizes


class Workers:
    """`n` workers, started when first needed; with one, the calling thread does the work.

    Processes decode fastest, but they import the main script, which must then be guarded by `if __name__ ==
    "__main__"`. Threads work in any script.
    """

    def __init__(self, n: int | None = None, *, threads: bool = False) -> None:
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.n, self.threads = n or n_cores, threads
        self.pool: Executor | None = None
        self.count: Any  # of images written, shared with the workers
        self.stop: Any  # event: give up

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.stop.set()
            self.pool.shutdown(cancel_futures=True)

    def _started(self) -> Executor:
        if self.pool is None and self.threads:
            self.count, self.stop = _Count(), threading.Event()
            self.pool = ThreadPoolExecutor(self.n)
        elif self.pool is None:
            # Forked children would inherit the locks of threads and the lock on the folder.
            context = multiprocessing.get_context("spawn")
            self.count, self.stop = context.Value("q", 0), context.Event()
            self.pool = ProcessPoolExecutor(self.n, context, _init_worker, (self.count, self.stop))
        return self.pool

    def common_shape(self, files: Sequence[Path], size: int, channels: int) -> tuple[int, int, int] | None:
        """The shape (C, H, W) of all images if they share one and neither side is larger than `size`."""
        sizes: set[tuple[int, int]] = set()
        with pil_silenced():
            for some in self._sizes(files):
                sizes |= some
                if len(sizes) > 1 or any(max(sides) > size for sides in sizes):
                    return None
        return next(((channels, height, width) for width, height in sizes), None)

    def _sizes(self, files: Sequence[Path]) -> Iterator[set[tuple[int, int]]]:
        """The sizes among the first two files, which often suffice, and then among all files."""
        yield image_sizes(files[:2])
        pieces = [files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK)]
        if self.n == 1 or len(pieces) == 1:
            yield from map(image_sizes, pieces)
        else:
            with _dead_workers_reported():
                yield from self._started().map(image_sizes, pieces)  # the rest is cancelled if the caller stops early

    def write(self, jobs: Sequence[ShardJob], on_progress: Callable[[int], None] | None) -> None:
        """Write all shards; calls `on_progress` with the number of images done so far."""
        with pil_silenced():
            if self.n == 1:
                self._write_here(jobs, on_progress)
            elif jobs:
                self._write_in_pool(jobs, on_progress)

    def _write_here(self, jobs: Sequence[ShardJob], on_progress: Callable[[int], None] | None) -> None:
        n_done = 0

        def on_images(n: int) -> None:
            nonlocal n_done
            n_done += n
            if on_progress is not None:
                on_progress(n_done)

        for job in jobs:
            write_shard(job, on_images, lambda: False)

    def _write_in_pool(self, jobs: Sequence[ShardJob], on_progress: Callable[[int], None] | None) -> None:
        pool = self._started()
        with _dead_workers_reported():
            pending: set[Future[None]] = {
                pool.submit(_write_counted, job, self.count, self.stop)
                if self.threads
                else pool.submit(_write_in_process, job)
                for job in jobs
            }
            while pending:
                done, pending = wait(pending, _POLL_SECONDS)
                for future in done:
                    future.result()
                if on_progress is not None:
                    on_progress(self.count.value)


class _Count:
    """The counterpart of `multiprocessing.Value` for threads."""

    def __init__(self) -> None:
        self.value, self._lock = 0, threading.Lock()

    def get_lock(self) -> threading.Lock:
        return self._lock


@contextmanager
def _dead_workers_reported() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise UserError(
            "pack: a worker process died, perhaps out of memory; run the same command again to continue, with fewer "
            "--workers (a script that packs must be guarded by if __name__ == '__main__')"
        ) from None


def _write_counted(job: ShardJob, count: Any, stop: Any) -> None:
    def on_images(n: int) -> None:
        with count.get_lock():
            count.value += n

    write_shard(job, on_images, stop.is_set)


_shared: Any = (
    None  # in a worker process: the count of images and the stop event, which only an initializer can receive
)


def _init_worker(count: Any, stop: Any) -> None:
    global _shared
    _shared = count, stop
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_in_process(job: ShardJob) -> None:
    _write_counted(job, *_shared)
