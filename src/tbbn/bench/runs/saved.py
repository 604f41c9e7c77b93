"""A run with a folder: locked while it works, saved on the way, resumed where it was saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tbbn.bench.config import RunConfig
from tbbn.bench.engine import lanes, loop
from tbbn.bench.engine.events import EpochEnded, Event, TaskEnded
from tbbn.bench.engine.loop import Run, Stop
from tbbn.bench.engine.record import Record
from tbbn.bench.files import is_blank, locked
from tbbn.bench.runs import state
from tbbn.bench.runs.record import save_record
from tbbn.errors import UserError

SAVE_EVERY = 60.0  # seconds between two checkpoints inside a task


def run_saved(
    config: RunConfig,
    directory: str | Path,
    *,
    on_event: Callable[[Event], None] | None = None,
    every: float = SAVE_EVERY,
    stop: Stop | None = None,
) -> Record:
    """:func:`tbbn.bench.engine.run` with a folder: see :func:`saved`."""
    return loop.run(config, on_event=on_event, drive=lambda run: saved(run, Path(directory), every=every, stop=stop))


def run_lanes_saved(
    configs: Sequence[RunConfig],
    directories: Sequence[Path],
    n_lanes: int | None,
    *,
    on_event: lanes.OnEvent | None = None,
    on_end: Callable[[int, Record], None] | None = None,
    stop: Stop | None = None,
) -> list[Record]:
    """:func:`tbbn.bench.engine.run_lanes` with a folder for each run; a failed run leaves its record there too."""

    def ended(number: int, record: Record) -> None:
        if record.status == "failed":
            save_record(record, directories[number])
        if on_end is not None:
            on_end(number, record)

    return lanes.run_lanes(
        configs,
        n_lanes,
        drive=lambda number, run: saved(run, directories[number], stop=stop),
        on_event=on_event,
        on_end=ended,
        stop=stop,
    )


def saved(run: Run, directory: Path, *, every: float = SAVE_EVERY, stop: Stop | None = None) -> Iterator[Event]:
    """The run's events, with its folder kept up to date.

    A folder that holds an unfinished run of the same config is resumed. A checkpoint is written after each task, and at the
    end of an epoch once ``every`` seconds have passed since the last one (0: after every epoch); where writing is slow, less
    often, so that it stays below a hundredth of the time. The record is written however the run ends.
    """
    with locked(directory):
        state.load(run, directory)
        user_error = False
        try:
            yield from _with_checkpoints(run, directory, every, stop)
        except UserError:
            user_error = True
            raise
        finally:
            # A user error found during training leaves as little behind as one found before it.
            if not (user_error and is_blank(directory)):
                save_record(run.record, directory)


def _with_checkpoints(run: Run, directory: Path, every: float, stop: Stop | None) -> Iterator[Event]:
    last, pause, due = time.monotonic(), every, False
    for event in run.events(stop):
        due = isinstance(event, TaskEnded) or (isinstance(event, EpochEnded) and time.monotonic() - last >= pause)
        if due:
            began = time.monotonic()
            state.save(run, directory)
            last = time.monotonic()
            pause = every and max(every, min(100 * (last - began), 600.0))
        yield event
    if run.record.status == "interrupted" and not due:
        state.save(run, directory)
