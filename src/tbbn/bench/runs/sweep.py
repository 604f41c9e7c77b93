"""Do many runs, one after another or in lanes, skipping those already finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from tbbn.bench.engine import Event
from tbbn.bench.engine.loop import Stop
from tbbn.bench.engine.ranks import ALONE, Ranks
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.engine.setup import check_ranks
from tbbn.bench.files import write_atomic
from tbbn.bench.loggers import DEFAULT, make_loggers
from tbbn.bench.runs.pending import PendingRun, check_versions, finished_record
from tbbn.bench.runs.recipe import RECIPE
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_lanes_saved, run_saved, save_failure
from tbbn.errors import UserError
from tbbn.plugins import failure


def run_all(
    runs: Sequence[PendingRun],
    *,
    lanes: int | None = 1,
    on_start: Callable[[PendingRun], None] | None = None,
    on_event: Callable[[PendingRun, Event], None] | None = None,
    on_end: Callable[[PendingRun, Record], None] | None = None,
    overwrite: bool = False,
    recipe: str = "",
    stop: Stop | None = None,
    ranks: Ranks = ALONE,
    log: Sequence[str] = DEFAULT,
) -> list[Record]:
    """Do the runs, ``lanes`` in parallel (None: as many as raise throughput); finished ones are read from disk.

    The ``recipe`` of several runs is written to their folder, so that ``tbbn resume`` finds those that never started; without
    one the runs are resumed. A run that fails does not stop the others; a user's mistake (:class:`UserError`) ends a sweep
    without lanes. When ``stop`` returns True, the active runs save themselves and KeyboardInterrupt is raised. With several
    ``ranks``, which share each run, call this on rank 0; the first failure then ends the sweep. ``log`` names the loggers.
    """
    if ranks.size > 1:
        if lanes is not None and lanes > 1:
            raise UserError(f"several ranks share one run at a time, got --lanes {lanes}; leave --lanes out.")
        lanes = 1
        for pending in runs:
            check_ranks(pending.config)
    make_loggers(log)  # raises before any training if a logger's package is missing
    records = {pending: r for pending in runs if not overwrite and (r := finished_record(pending)) is not None}
    check_versions(runs, records, resumes=not recipe)
    todo = [pending for pending in runs if pending not in records]
    started: set[PendingRun] = set()

    def event(number: int, event: Event) -> None:
        pending = todo[number]
        if pending not in started and on_start is not None:
            on_start(pending)
        started.add(pending)
        if on_event is not None:
            on_event(pending, event)

    def end(pending: PendingRun, record: Record) -> None:
        records[pending] = record
        if on_end is not None:
            on_end(pending, record)

    def raise_if_stopped() -> None:
        done = all(pending in records and records[pending].status != "interrupted" for pending in runs)
        if stop is not None and stop() and not done:
            raise KeyboardInterrupt

    for pending in runs:
        if pending in records:
            end(pending, records[pending])
    with recipe_on_disk(recipe, runs) if recipe and len(runs) > 1 else nullcontext():
        if lanes is None or lanes > 1:
            run_lanes_saved(
                [pending.config for pending in todo],
                [pending.directory for pending in todo],
                lanes,
                on_event=event,
                on_end=lambda number, record: end(todo[number], record),
                stop=stop,
                overwrite=overwrite,
                log=log,
            )
            raise_if_stopped()
        else:
            for i, pending in enumerate(todo):
                end(pending, _run_one(pending, partial(event, i), stop, overwrite, ranks, log, alone=len(runs) == 1))
                raise_if_stopped()
    return [records[pending] for pending in runs]


def _run_one(
    pending: PendingRun,
    on_event: Callable[[Event], None],
    stop: Stop | None,
    overwrite: bool,
    ranks: Ranks,
    log: Sequence[str],
    alone: bool,
) -> Record:
    given: dict[str, Any] = {"stop": stop, "overwrite": overwrite, "ranks": ranks, "log": log}
    try:
        return run_saved(pending.config, pending.directory, on_event=on_event, **given)
    except UserError:
        raise
    except Exception as error:
        if alone or ranks.size > 1:  # other ranks are in the middle of the run
            raise
        message = failure(error)
        with suppress(UserError):
            record = load_record(pending.directory)
            if (record.status, record.message) == ("failed", message):
                return record
        record = new_record(pending.config)
        record.status, record.message = "failed", message
        save_failure(record, pending.directory)
        return record


@contextmanager
def recipe_on_disk(text: str, runs: Sequence[PendingRun]) -> Iterator[None]:
    """Write the sweep's recipe before the first run starts. If no run could start, remove it and the folders made for it."""
    folder = runs[0].directory.parent
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / RECIPE, text.encode())
        yield
    except Exception:
        if not any(pending.directory.exists() for pending in runs):
            for undo in ((folder / RECIPE).unlink, *(place.rmdir for place in made)):
                with suppress(OSError):
                    undo()
        raise
