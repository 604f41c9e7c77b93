"""A run with a folder, which is locked during the run, saved regularly, and resumed from the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from tbbn.bench import loggers
from tbbn.bench.config import RunConfig
from tbbn.bench.engine import lanes, loop
from tbbn.bench.engine.events import EpochEnded, Event, TaskEnded
from tbbn.bench.engine.loop import Run, Stop
from tbbn.bench.engine.ranks import ALONE, Ranks
from tbbn.bench.engine.record import Record
from tbbn.bench.files import is_blank, locked
from tbbn.bench.runs import schema, state
from tbbn.bench.runs.leading import leading
from tbbn.bench.runs.overwrite import replacing, settle
from tbbn.bench.runs.record import save_record, update_record
from tbbn.errors import UserError
from tbbn.plugins import failure

SAVE_EVERY = 60.0  # seconds between checkpoints within a task


def run_saved(
    config: RunConfig,
    directory: str | Path,
    *,
    on_event: Callable[[Event], None] | None = None,
    every: float = SAVE_EVERY,
    stop: Stop | None = None,
    overwrite: bool = False,
    ranks: Ranks = ALONE,
    log: Sequence[str] = loggers.DEFAULT,
) -> Record:
    """:func:`tbbn.bench.engine.run` with a folder: see :func:`saved`. With several ``ranks``, this one leads the others."""
    place = Path(directory)

    def drive(run: Run) -> Iterator[Event]:
        return saved(run, place, every=every, stop=stop, overwrite=overwrite, log=log)

    return loop.run(config, on_event=on_event, drive=drive, ranks=ranks)


def run_lanes_saved(
    configs: Sequence[RunConfig],
    directories: Sequence[Path],
    n_lanes: int | None,
    *,
    on_event: lanes.OnEvent | None = None,
    on_end: Callable[[int, Record], None] | None = None,
    stop: Stop | None = None,
    overwrite: bool = False,
    log: Sequence[str] = loggers.DEFAULT,
) -> list[Record]:
    """:func:`tbbn.bench.engine.run_lanes` with a folder for each run. A failed run leaves its record there, too."""

    def ended(number: int, record: Record) -> None:
        if record.status == "failed":
            save_failure(record, directories[number])
        if on_end is not None:
            on_end(number, record)

    return lanes.run_lanes(
        configs,
        n_lanes,
        drive=lambda number, run: saved(run, directories[number], stop=stop, overwrite=overwrite, log=log),
        on_event=on_event,
        on_end=ended,
        stop=stop,
    )


def save_failure(record: Record, directory: Path) -> None:
    """Save the record of a run that failed before it began. A folder that holds a run or is locked is not touched."""
    with suppress(UserError, OSError), locked(directory):  # if the disk is full, the other runs continue
        if is_blank(directory):
            save_record(record, directory)


def saved(
    run: Run,
    directory: Path,
    *,
    every: float = SAVE_EVERY,
    stop: Stop | None = None,
    overwrite: bool = False,
    log: Sequence[str] = loggers.DEFAULT,
) -> Iterator[Event]:
    """The run's events, keeping its folder up to date.

    If the folder holds an unfinished run of the same config, it is resumed; with ``overwrite``, the run starts again and replaces
    the old one at its first save. A checkpoint is written after each task, and at the end of an epoch once ``every`` seconds have
    passed since the last one (0: after every epoch). If writing is slow, it is done less often, to take less than a hundredth of
    the time. The record is written however the run ends. ``log`` names the loggers.
    """
    with locked(directory):
        settle(directory)
        files, told = _RunFiles(run, directory, overwrite), loggers.RunLog(log, run, directory)
        if not overwrite:
            state.load(run, directory)
        try:
            with leading(run):
                for event in _with_checkpoints(files, every, stop):
                    told.event(event, hold=files.overwrites)
                    yield event
        except BaseException as error:
            if isinstance(error, Exception):
                run.record.status, run.record.message = "failed", failure(error)
            # A user error during training leaves nothing behind in a blank folder, like one before training, and a run that was
            # to be overwritten is kept. A method that fails may leave a record whose lists do not match.
            leaves_nothing = files.overwrites or (isinstance(error, UserError) and is_blank(directory, loggers.LOG))
            if not leaves_nothing and not schema.problem(run.record.tree()):
                files.save(with_checkpoint=False)
            if not files.overwrites:
                told.finish()
            if leaves_nothing and is_blank(directory, loggers.LOG):
                (directory / loggers.LOG).unlink(missing_ok=True)
            raise
        files.save(with_checkpoint=False)
        told.finish()


class _RunFiles:
    """The files of a run in a folder that this process has locked."""

    def __init__(self, run: Run, directory: Path, overwrites: bool) -> None:
        self.run, self.directory = run, directory
        self.overwrites = overwrites  # the first save replaces an older run

    def save(self, *, with_checkpoint: bool = True) -> None:
        """Write the record and, by default, a checkpoint, which the caller must do between two steps."""
        with replacing(self.directory) if self.overwrites else nullcontext():
            if with_checkpoint:
                state.save(self.run, self.directory)
            write = save_record if self.overwrites else update_record
            write(self.run.record, self.directory)
        self.overwrites = False


def _with_checkpoints(files: _RunFiles, every: float, stop: Stop | None) -> Iterator[Event]:
    last, pause, due = time.monotonic(), every, False
    for event in files.run.events(stop):
        due = isinstance(event, TaskEnded) or (isinstance(event, EpochEnded) and time.monotonic() - last >= pause)
        if due:
            began = time.monotonic()
            files.save()
            last = time.monotonic()
            pause = every and max(every, min(100 * (last - began), 600.0))
        yield event
    if files.run.record.status == "interrupted" and not due:
        files.save()
