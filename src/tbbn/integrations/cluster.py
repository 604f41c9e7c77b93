"""Distribute runs over the machines of a cluster. This part is common to all clusters.

The machines share a file system, which holds the folders of the runs. Runs are submitted in bundles: one process does a bundle,
its runs in lanes on one GPU. A worker does what ``tbbn sweep`` does on one machine, so the records are the same: it skips
finished runs and resumes others from their checkpoint. Runs that failed or whose worker was lost are submitted again.

Workers and the driver communicate through files in a folder beside the runs, the :class:`Board`. Workers write events, which the
driver shows as progress. The driver creates a file to ask the workers to stop.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from tbbn.bench.engine import EpochEnded, Event, Loading, Stepped, TaskEnded
from tbbn.bench.engine.events import Position
from tbbn.bench.engine.lanes import MAX_LANES
from tbbn.bench.engine.loop import Stop
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.files import FolderInUse
from tbbn.bench.loggers import DEFAULT
from tbbn.bench.runs.interrupt import stop_on_signal
from tbbn.bench.runs.pending import PendingRun, check_versions, finished_record
from tbbn.bench.runs.record import load_or_restore
from tbbn.bench.runs.saved import save_failure
from tbbn.bench.runs.sweep import recipe_on_disk, run_all
from tbbn.errors import UserError
from tbbn.plugins import failure

BOARD = ".board"  # the folder of the board, beside the runs
ATTEMPTS = 3  # at a run that fails or whose worker is lost
_TALK = 0.5  # seconds between step messages of a run, and between checks for the stop file
_PATIENCE = 60.0  # seconds to wait for a folder that a dying worker still holds


class Job(Protocol):
    """A submitted bundle."""

    def done(self) -> bool: ...

    def result(self) -> str:
        """The return value of :func:`work`; raises if the worker was lost."""

    def drop(self) -> None:
        """Cancel the bundle if it has not started yet."""


class Cluster(Protocol):
    """The cluster that bundles are submitted to."""

    @property
    def gpus(self) -> int | None:
        """The number of GPUs; None if there are some but their number is unknown."""
        ...

    def submit(self, bundle: Bundle) -> Job: ...


@dataclass(frozen=True)
class Bundle:
    """The runs for one worker, and everything that the worker needs to know."""

    runs: tuple[PendingRun, ...]
    numbers: tuple[int, ...]  # of the runs on the board
    lanes: int | None
    board: Path
    home: Path  # the driver's working folder: paths of data and plugins may be relative
    threads: int  # the driver's number of threads: sums depend on it
    on_gpu: bool
    log: Sequence[str] = DEFAULT  # loggers

    @property
    def cpus(self) -> int:
        return 1 if self.on_gpu else max(run.config.threads or self.threads for run in self.runs)


@dataclass
class Board:
    """Messages in files: one file per worker process, one line per message."""

    folder: Path
    read: dict[Path, int] = field(default_factory=dict)  # bytes read so far of each file

    @property
    def _stop(self) -> Path:
        return self.folder / "stop"

    def ask_to_stop(self) -> None:
        self._stop.touch()

    def is_stopping(self) -> bool:
        return self._stop.exists()

    def write(self, number: int, event: Event | str) -> None:
        """Report on a run: an event, or "start" or "end"."""
        kind, fields = (event, {}) if isinstance(event, str) else (type(event).__name__, asdict(event))
        with (self.folder / f"{os.uname().nodename}-{os.getpid()}").open("a") as file:
            file.write(json.dumps([number, kind, fields]) + "\n")

    def news(self) -> Iterator[tuple[int, Event | str]]:
        """The messages written since the last call."""
        for file in sorted(self.folder.glob("*-*")):
            with file.open("rb") as content:
                content.seek(self.read.get(file, 0))
                lines = content.read().split(b"\n")[:-1]  # the last one is empty or not complete yet
            self.read[file] = self.read.get(file, 0) + sum(len(line) + 1 for line in lines)
            for line in lines:
                number, kind, fields = json.loads(line)
                yield number, _event(kind, fields)


def _event(kind: str, fields: dict[str, Any]) -> Event | str:
    if "position" in fields:
        fields["position"] = Position(**fields["position"])
    kinds: dict[str, Callable[..., Event]] = {cls.__name__: cls for cls in (Loading, Stepped, EpochEnded, TaskEnded)}
    return kinds[kind](**fields) if kind in kinds else kind


class _Reporter:
    """Writes a worker's events to the board: every epoch and task, and a step now and then. Also checks for a stop."""

    def __init__(self, bundle: Bundle) -> None:
        self.board, self.number = Board(bundle.board), dict(zip(bundle.runs, bundle.numbers, strict=True))
        self.told: dict[PendingRun, float] = {}
        self.looked, self.stopping = float("-inf"), False

    def start(self, run: PendingRun) -> None:
        self.board.write(self.number[run], "start")

    def event(self, run: PendingRun, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Loading | Stepped) and now - self.told.get(run, float("-inf")) < _TALK:
            return
        if isinstance(event, Loading | Stepped | EpochEnded | TaskEnded):
            self.told[run] = now
            self.board.write(self.number[run], event)

    def end(self, run: PendingRun, record: Record) -> None:
        self.board.write(self.number[run], "end")

    def stop(self) -> bool:
        if time.monotonic() - self.looked > _TALK:
            self.looked, self.stopping = time.monotonic(), self.board.is_stopping()
        return self.stopping


def work(bundle: Bundle) -> str:
    """Do the runs of a bundle, in a worker. Returns the message of a user's mistake, or ""; all else is in the records."""
    report, gives_up = _Reporter(bundle), time.monotonic() + _PATIENCE
    with suppress(OSError):
        os.chdir(bundle.home)
    torch.set_num_threads(bundle.threads)
    with stop_on_signal(tell=False) as asked:
        while not report.stop():
            try:
                run_all(
                    bundle.runs,
                    lanes=bundle.lanes,
                    on_start=report.start,
                    on_event=report.event,
                    on_end=report.end,
                    stop=lambda: asked() or report.stop(),
                    log=bundle.log,
                )
            except FolderInUse as error:  # the run's previous worker has not quite died yet
                if time.monotonic() > gives_up:
                    return str(error)
                time.sleep(1.0)
                continue
            except UserError as error:
                return str(error)
            except KeyboardInterrupt:  # the runs are saved
                pass
            except Exception as error:
                _leave_failure(bundle.runs[0], error)
            return ""
    return ""


def _leave_failure(run: PendingRun, error: Exception) -> None:
    record = new_record(run.config)
    record.status, record.message = "failed", failure(error)
    save_failure(record, run.directory)


def run_on(
    cluster: Cluster,
    runs: Sequence[PendingRun],
    *,
    lanes: int | None = 1,
    workers: int | None = None,
    on_start: Callable[[PendingRun], None] | None = None,
    on_event: Callable[[PendingRun, Event], None] | None = None,
    on_end: Callable[[PendingRun, Record], None] | None = None,
    recipe: str = "",
    stop: Stop | None = None,
    log: Sequence[str] = DEFAULT,
) -> list[Record]:
    """:func:`tbbn.bench.runs.sweep.run_all` on a cluster, in bundles of ``lanes`` runs, at most ``workers`` bundles at a time."""
    runs = [PendingRun(run.config, run.directory.resolve()) for run in runs]
    done = {run: record for run in runs if (record := finished_record(run)) is not None}
    check_versions(runs, done, resumes=not recipe)
    for run, record in done.items():
        if on_end is not None:
            on_end(run, record)
    todo = [run for run in runs if run not in done]
    with recipe_on_disk(recipe, runs) if recipe and len(runs) > 1 else nullcontext():
        if todo:
            driver = _Driver(cluster, runs, todo, lanes, workers, log)
            try:
                driver.drive(on_start, on_event, on_end, stop)
            finally:
                driver.close()
            done |= {run: driver.record(run) for run in todo}
    records = [done[run] for run in runs]
    if stop is not None and stop() and any(record.status == "interrupted" for record in records):
        raise KeyboardInterrupt
    return records


class _Driver:
    """Submits bundles, shows their progress, and submits again the runs that failed or whose worker was lost."""

    def __init__(
        self,
        cluster: Cluster,
        runs: list[PendingRun],
        todo: list[PendingRun],
        lanes: int | None,
        workers: int | None,
        log: Sequence[str],
    ) -> None:
        self.cluster, self.runs, self.workers, self.log = cluster, runs, workers, log
        self.board = Board(runs[0].directory.parent / BOARD / f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}")
        self.board.folder.mkdir(parents=True)
        self.attempts = dict.fromkeys(todo, 0)
        self.ended: dict[PendingRun, Record] = {}
        self.waiting = [self._bundle(chosen, lanes) for chosen in _split(todo, lanes, cluster.gpus)]
        self.jobs: dict[Job, Bundle] = {}
        self.mistake = ""

    def close(self) -> None:
        """Remove the board."""
        shutil.rmtree(self.board.folder, ignore_errors=True)
        with suppress(OSError):
            self.board.folder.parent.rmdir()

    def _bundle(self, chosen: list[PendingRun], lanes: int | None) -> Bundle:
        on_gpu = self.cluster.gpus != 0 and any(run.config.device != "cpu" for run in chosen)
        return Bundle(
            tuple(chosen),
            tuple(self.runs.index(run) for run in chosen),
            lanes if on_gpu else 1,
            self.board.folder,
            Path.cwd(),
            torch.get_num_threads(),
            on_gpu,
            self.log,
        )

    def drive(
        self,
        on_start: Callable[[PendingRun], None] | None,
        on_event: Callable[[PendingRun, Event], None] | None,
        on_end: Callable[[PendingRun, Record], None] | None,
        stop: Stop | None,
    ) -> None:
        """Work until every run has ended, or until all have saved themselves after ``stop()``."""
        started: set[PendingRun] = set()
        while self.waiting or self.jobs:
            if (stop is not None and stop()) or self.mistake:
                self.board.ask_to_stop()
                self.waiting.clear()
                for job in self.jobs:
                    job.drop()
            while self.waiting and (self.workers is None or len(self.jobs) < self.workers):
                bundle = self.waiting.pop(0)
                self.jobs[self.cluster.submit(bundle)] = bundle
            finished = [job for job in self.jobs if job.done()]
            for number, event in self.board.news():
                run = self.runs[number]
                if run not in started and on_start is not None:
                    on_start(run)
                started.add(run)
                if not isinstance(event, str) and on_event is not None:
                    on_event(run, event)
            for job in finished:
                for run in self._settle(job, self.jobs.pop(job)):
                    if on_end is not None:
                        on_end(run, self.ended[run])
            time.sleep(0.05)
        if self.mistake:
            raise UserError(self.mistake)

    def _settle(self, job: Job, bundle: Bundle) -> list[PendingRun]:
        """The runs that ended with a job; those that failed or whose worker was lost are queued again."""
        lost = ""
        try:
            self.mistake = self.mistake or job.result()
        except Exception as error:  # whatever a cluster raises for a lost worker
            lost = f"its worker was lost ({(str(error).strip().splitlines() or [type(error).__name__])[0]:.200})"
        over, again = [], []
        for run in bundle.runs:
            record = self.record(run, lost)
            self.attempts[run] += 1
            is_open = record.status not in ("finished", "diverged")  # includes runs that their machine interrupted
            if is_open and self.attempts[run] < ATTEMPTS and not self.board.is_stopping() and not self.mistake:
                again.append(run)
            else:
                self.ended[run] = record
                over.append(run)
        self.waiting += [self._bundle([run], 1) for run in again]
        return over

    def record(self, run: PendingRun, lost: str = "") -> Record:
        """The record in a run's folder, or an empty one whose status and message say why there is none."""
        if run in self.ended:
            return self.ended[run]
        try:
            record = load_or_restore(run.directory)
        except (UserError, OSError):
            record = new_record(run.config)
            record.status = "failed" if lost else "interrupted"
        if lost and record.status not in ("finished", "diverged"):
            record.status, record.message = "failed", lost
        return record


def _split(todo: list[PendingRun], lanes: int | None, gpus: int | None) -> Iterator[list[PendingRun]]:
    """Split runs into bundles: as many runs as share a GPU, or one each on CPUs or if the number of GPUs is unknown."""
    size = 1 if gpus == 0 else lanes
    if size is None:
        size = min(MAX_LANES, -(-len(todo) // gpus)) if gpus else 1
    return (todo[i : i + size] for i in range(0, len(todo), size))
