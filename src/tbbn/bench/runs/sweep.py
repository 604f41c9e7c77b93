"""Several runs from one description: every method with every norm and every seed, one directory each."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tbbn.bench.config import RunConfig, Values, flatten, parse_value, resolve, to_dict, to_toml
from tbbn.bench.engine import Event
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.engine.validate import check
from tbbn.bench.runs.record import FILES, RECORD, load_record, save_record, write_atomic
from tbbn.bench.runs.saved import run_lanes_saved, run_saved
from tbbn.errors import UserError
from tbbn.paper import read_recipe

Layer = tuple[str, Values]
PLAN = "runs.toml"  # in a sweep's folder, the recipe of all its runs


@dataclass(frozen=True)
class Axes:
    """What varies: names of methods and norms, options in brackets as in ``cn(groups=8)``, and seeds."""

    methods: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """A run to be done, and where its files go."""

    config: RunConfig
    directory: Path


def split_names(text: str) -> tuple[str, ...]:
    """Names at top-level commas.

    >>> split_names("bn, cn(groups=8,eps=1e-5),tbbn")
    ('bn', 'cn(groups=8,eps=1e-5)', 'tbbn')
    """
    parts = re.split(r",(?![^()]*\))", text)  # a comma after which a bracket closes before one opens is inside it
    return tuple(part.strip() for part in parts if part.strip())


def parse_choice(kind: str, text: str) -> dict[str, Any]:
    """``name(option=value, ...)`` as settings.

    >>> parse_choice("norm", "cn(groups=8)")
    {'norm.name': 'cn', 'norm.groups': 8}
    """
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise UserError(f"{kind} must look like name or name(option=value), got {text!r}.")
    found: dict[str, Any] = {f"{kind}.name": match[1]}
    for part in filter(None, (p.strip() for p in (match[2] or "").split(","))):
        option, separator, value = (p.strip() for p in part.partition("="))
        if not separator or not option:
            raise UserError(f"{kind} {match[1]!r}: options look like option=value, got {part!r}.")
        found[f"{kind}.{option}"] = parse_value(f"{kind}.{option}", value)
    return found


def parse_seeds(text: str) -> tuple[int, ...]:
    """A number of seeds, or the seeds themselves.

    >>> parse_seeds("3"), parse_seeds("0,5"), parse_seeds("7,")
    ((0, 1, 2), (0, 5), (7,))
    """
    try:
        seeds = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"seeds must be a number of seeds or seeds with commas, got {text!r}.") from None
    if "," not in text and seeds:
        if seeds[0] == 0:
            raise UserError("seeds: 0 is a number of seeds, and none; the seed 0 is '0,' with a comma.")
        seeds = tuple(range(seeds[0]))
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds must be different numbers, none negative, got {text!r}.")
    return seeds


def expand(layers: Sequence[Layer], axes: Axes, out: Path) -> list[Job]:
    """Every combination as a checked config with its own directory; one alone gets ``out`` itself."""
    jobs = []
    for method, norm, seed in product(axes.methods or ("",), axes.norms or ("",), axes.seeds or (None,)):
        layer: dict[str, Any] = {}
        if method:
            layer |= parse_choice("method", method)
        if norm:
            layer |= parse_choice("norm", norm)
        if seed is not None:
            layer["seed"] = seed
        config = resolve(*layers, ("command line", layer))
        check(config)
        name = re.sub(r"[^\w.=-]+", "_", f"{config.method}-{config.norm}-{config.seed}").strip("_")
        jobs.append(Job(config, out / name))
    if len(jobs) == 1:
        return [Job(jobs[0].config, out)]
    for name, n in Counter(job.directory.name for job in jobs).items():
        if n > 1:
            raise UserError(f"{n} of the runs would be kept in {out / name}; name each method, norm and seed once.")
    return jobs


def plan(layers: Sequence[Layer], axes: Axes) -> str:
    """A recipe of what :func:`expand` makes of these."""
    tree: dict[str, Any] = {}
    for key, value in {key: value for _, layer in layers for key, value in layer.items()}.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return to_toml({**tree, "sweep": {name: values for name, values in asdict(axes).items() if values}})


def planned(folder: Path) -> list[Job]:
    """The runs of the sweeps in a folder, whether they have begun or not."""
    jobs = []
    for file in sorted(folder.rglob(PLAN)):
        path, values, sweep = read_recipe(str(file))
        jobs += expand([(str(path), values)], Axes(**{name: tuple(v) for name, v in sweep.items()}), path.parent)
    return jobs


def check_apart(jobs: Sequence[Job]) -> None:
    """Refuse a run inside another's folder, and one around others: what is said of the folder would be said of them all."""
    for folder in (job.directory for job in jobs):
        for holder, what in ((folder.parent, RECORD), (folder, PLAN), (folder, f"*/{RECORD}")):
            if any(holder.glob(what)):
                held = "a run, and no other fits inside it" if what == RECORD else "a sweep, and no run fits around it"
                raise UserError(f"{holder}: holds {held}; use another --name, or delete that folder.")


@contextmanager
def _kept(plan: str, jobs: Sequence[Job]) -> Iterator[None]:
    """The plan in the jobs' folder before the first of them begins; if none could, nothing of it stays."""
    folder = jobs[0].directory.parent
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / PLAN, plan.encode())
        yield
    except Exception:
        if not any(job.directory.exists() for job in jobs):
            for undo in ((folder / PLAN).unlink, *(place.rmdir for place in made)):
                with suppress(OSError):
                    undo()
        raise


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Whether to stop: a first Ctrl-C (or a scheduler's SIGTERM) asks the runs to save themselves, a second ends at once."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        # Past Python's buffers: the signal may have come in the middle of a print.
        os.write(2, b"tbbn: stopping after this step; once more to stop at once.\n")

    if threading.current_thread() is not threading.main_thread():  # only there may signals be handled
        yield lambda: False
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finished(job: Job) -> Record | None:
    """The record of a job that was done before, with the same config; another config there is an error."""
    if not (job.directory / RECORD).exists():
        return None
    record = load_record(job.directory)
    there, now = (flatten(to_dict(config)) for config in (record.run_config, job.config))
    changed = [key for key in {**there, **now} if there.get(key) != now.get(key)]
    if changed:
        first = changed[0]
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"{job.directory}: holds a run of another config ({first} = {there.get(first)!r} there, {now.get(first)!r} "
            f"now{others}); use --name or --overwrite."
        )
    return record if record.status == "finished" else None


def forget(job: Job) -> None:
    """Delete what an earlier run left in the job's folder, and nothing else there."""
    for name in FILES:
        for file in job.directory.glob(name):
            file.unlink()


def run_all(
    jobs: Sequence[Job],
    *,
    lanes: int | None = 1,
    on_start: Callable[[Job], None] | None = None,
    on_event: Callable[[Job, Event], None] | None = None,
    on_end: Callable[[Job, Record], None] | None = None,
    overwrite: bool = False,
    plan: str = "",
    stop: Callable[[], bool] | None = None,
) -> list[Record]:
    """Do the jobs, ``lanes`` at a time (None: as many as pay); those finished before are taken as they are.

    A ``plan`` is kept in the folder of several jobs, from where ``tbbn resume`` knows those that have not begun.
    Of several jobs a failing one stops no other; what the user has to mend (:class:`UserError`) ends a sweep without lanes.
    Once ``stop`` says yes, what is at work saves itself, and this raises KeyboardInterrupt.
    """
    records = {job: record for job in jobs if not overwrite and (record := finished(job)) is not None}
    todo = [job for job in jobs if job not in records]
    started: set[Job] = set()

    def event(number: int, event: Event) -> None:
        job = todo[number]
        if job not in started and on_start is not None:
            on_start(job)
        started.add(job)
        if on_event is not None:
            on_event(job, event)

    def end(job: Job, record: Record) -> None:
        records[job] = record
        if on_end is not None:
            on_end(job, record)

    def ended(number: int, record: Record) -> None:
        end(todo[number], record)

    for job in jobs:
        if job in records:
            end(job, records[job])
        elif overwrite:
            forget(job)
    with _kept(plan, jobs) if plan and len(jobs) > 1 else nullcontext():
        if lanes is None or lanes > 1:
            configs, places = [job.config for job in todo], [job.directory for job in todo]
            run_lanes_saved(configs, places, lanes, on_event=event, on_end=ended, stop=stop)
            if stop is not None and stop():
                raise KeyboardInterrupt
        else:
            for i, job in enumerate(todo):
                end(job, _run_one(job, partial(event, i), stop, alone=len(jobs) == 1))
                if stop is not None and stop():
                    raise KeyboardInterrupt
    return [records[job] for job in jobs]


def _run_one(job: Job, on_event: Callable[[Event], None], stop: Callable[[], bool] | None, alone: bool) -> Record:
    try:
        return run_saved(job.config, job.directory, on_event=on_event, stop=stop)
    except UserError:
        raise
    except Exception as error:
        if alone:
            raise
        there = (job.directory / RECORD).exists()
        record = load_record(job.directory) if there else new_record(job.config)
        record.status, record.message = "failed", f"{type(error).__name__}: {error}"
        save_record(record, job.directory)
        return record
