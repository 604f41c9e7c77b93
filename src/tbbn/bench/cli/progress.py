"""Progress on standard error: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO

from tbbn.bench.config import RunConfig
from tbbn.bench.engine import EpochEnded, Event, Stepped, TaskEnded
from tbbn.bench.engine.record import Record
from tbbn.bench.runs.sweep import Job
from tbbn.errors import printable

_BLINK = 0.1  # seconds between two pictures of a bar


class Quiet:
    """Says nothing."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, job: Job) -> None: ...

    def event(self, job: Job, event: Event) -> None: ...

    def end(self, job: Job, record: Record) -> None: ...


class Lines(Quiet):
    """A line a task, and one at least every ``every`` seconds in between."""

    def __init__(self, n_jobs: int, stream: TextIO | None = None, every: float = 30.0) -> None:
        self.n_jobs, self.number, self.every = n_jobs, 0, every
        self.stream = stream or sys.stderr
        self.said = time.monotonic()
        self.began: dict[Job, float] = {}

    def say(self, text: str) -> None:
        self.said = time.monotonic()
        print(text, file=self.stream, flush=True)

    def start(self, job: Job) -> None:
        self.began[job] = time.monotonic()
        self.number += 1
        self.say(f"run {self.number}/{self.n_jobs}: {_name(job)}")

    def event(self, job: Job, event: Event) -> None:
        if isinstance(event, TaskEnded):
            seconds = time.monotonic() - self.began[job]
            task = f"task {event.task + 1}/{_tasks(job.config)}"
            self.say(f"  {_name(job)}: {task}, mean accuracy {_mean(event)} % ({seconds:.0f} s)")
        elif isinstance(event, EpochEnded) and time.monotonic() - self.said > self.every:
            at, loss = event.position, event.losses.get("total", float("nan"))
            epoch = f"{event.phase} epoch {at.epoch + 1}/{event.epochs}"
            self.say(f"  {_name(job)}: task {at.task + 1} {epoch}: loss {loss:.3f}")

    def end(self, job: Job, record: Record) -> None:
        if job not in self.began and record.status == "finished":
            self.number += 1
            taken = printable(str(job.directory))
            self.say(f"run {self.number}/{self.n_jobs}: {_name(job)}: finished before, taken from {taken}")
        elif record.status != "finished":
            self.say(f"  {_name(job)}: {_ending(record)}")


class Bars(Quiet):
    """rich's bars: the tasks of all runs, and for each run at work the epochs of its task, with loss and accuracy."""

    def __init__(self, jobs: list[Job]) -> None:
        from rich.progress import TextColumn

        self.bars = _rich_bars(TextColumn("{task.fields[count]}"), TextColumn("{task.fields[note]}"), transient=True)
        self.total = sum(_tasks(job.config) for job in jobs)
        many = f"{len(jobs)} runs" if len(jobs) > 1 else "1 run"
        self.all = self.bars.add_task(many, total=self.total, count=f"0/{self.total} tasks", note="")
        self.mine: dict[Job, Any] = {}
        self.accuracy: dict[Job, str] = {}
        self.done: dict[Job, float] = {}  # tasks, the one at work as a share
        self.drawn: dict[Job, float] = {}  # when

    def __enter__(self) -> Bars:
        self.bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bars.__exit__(*error)

    def start(self, job: Job) -> None:
        self.mine[job] = self.bars.add_task(_name(job), total=1, count="", note="")

    def event(self, job: Job, event: Event) -> None:
        if isinstance(event, Stepped):
            now = time.monotonic()
            if now - self.drawn.get(job, 0.0) < _BLINK and event.step < event.steps:
                return  # lanes make thousands of steps a second, and a bar costs more than enqueuing one
            self.drawn[job] = now
            at, tasks = event.position, _tasks(job.config)
            here = at.epoch + event.step / event.steps
            name = f"{_name(job)}: task {at.task + 1}/{tasks}" + ("" if event.phase == "train" else f" {event.phase}")
            count = f"{at.epoch + 1}/{event.epochs} epochs"
            self.bars.update(self.mine[job], description=name, total=event.epochs, completed=here, count=count)
            # Later phases of a task are short: to the whole they count as done.
            self._advance(job, at.task + (0.95 if at.phase else 0.95 * here / event.epochs))
        elif isinstance(event, EpochEnded):
            loss = f"loss {event.losses.get('total', float('nan')):.3f}"
            self.bars.update(self.mine[job], note=f"{loss}  {self.accuracy.get(job, '')}".rstrip())
        elif isinstance(event, TaskEnded):
            self.accuracy[job] = f"accuracy {_mean(event)} %"
            self.bars.update(self.mine[job], note=self.accuracy[job])
            self._advance(job, event.task + 1)

    def _advance(self, job: Job, tasks: float) -> None:
        self.done[job] = tasks
        whole = int(sum(int(n) for n in self.done.values()))
        count = f"{whole}/{self.total} tasks"
        self.bars.update(self.all, completed=sum(self.done.values()), count=count)

    def end(self, job: Job, record: Record) -> None:
        if job in self.mine:
            self.bars.remove_task(self.mine.pop(job))
            how = f"{record.seconds:.0f} s"
        else:
            how = "finished before" if record.status == "finished" else "not begun"
        self._advance(job, _tasks(job.config))
        state = "" if record.status == "finished" else f": {_ending(record)}"
        accuracy = f"A_f {100 * record.metrics['final_accuracy']:.1f} %" if record.accuracy else "no task learnt"
        self.bars.console.print(f"{_name(job)}: {accuracy} ({how}){state}", highlight=False, markup=False)


def _name(job: Job) -> str:
    return printable(f"{job.config.label}, seed {job.config.seed}")


def _ending(record: Record) -> str:
    return printable(f"{record.status}: {record.message}" if record.message else record.status)


def _tasks(config: RunConfig) -> int:
    return min(config.data.tasks, config.data.stop_after or config.data.tasks)


def _mean(event: TaskEnded) -> str:
    return f"{100 * sum(event.accuracy) / len(event.accuracy):.1f}"


def _rich_bars(count: Any, *more: Any, transient: bool) -> Any:
    """rich's progress display: description, bar, the column `count`, times, and further columns."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        count,
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        *more,
        console=Console(stderr=True),
        transient=transient,
    )


def progress(jobs: list[Job], quiet: bool) -> Quiet:
    if quiet:
        return Quiet()
    if sys.stderr.isatty():
        try:
            return Bars(jobs)
        except ImportError:
            pass
    return Lines(len(jobs))


Counter = Callable[[int, int], None]  # called with what is done and with all there is


@contextmanager
def counter(name: str, unit: str, *, quiet: bool = False) -> Iterator[Counter | None]:
    """Show the progress of one long operation: a bar in a terminal, a line every ten seconds elsewhere."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.progress import DownloadColumn, MofNCompleteColumn

        with _rich_bars(DownloadColumn() if unit == "bytes" else MofNCompleteColumn(), transient=False) as bars:
            bar = bars.add_task(f"{name}: listing files", total=None)
            yield lambda done, total: bars.update(bar, description=name, completed=done, total=total)
    else:
        yield _counter_lines(name, unit)


def _counter_lines(name: str, unit: str, every: float = 10.0) -> Counter:
    last_time = start = time.monotonic()
    first = last = -1  # what was done before this call does not count for the rate

    def count(done: int, total: int) -> None:
        nonlocal last_time, first, last
        now = time.monotonic()
        first = done if first < 0 else first
        if done > max(first, last) and (now - last_time >= every or done == total):
            last_time, last = now, done
            rate = (done - first) / (now - start)
            print(f"{name}: {done} of {total} {unit}, {rate:.0f} per second", file=sys.stderr, flush=True)

    return count
