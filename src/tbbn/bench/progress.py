"""Progress on standard error: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, TextIO

from tbbn.bench.engine import EpochEnded, Event, Loading, Stepped, TaskEnded
from tbbn.bench.engine.record import Record
from tbbn.bench.runs.pending import PendingRun
from tbbn.errors import printable


class RunProgress:
    """Receives the events of runs. This class shows only why runs failed."""

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, run: PendingRun) -> None: ...

    def event(self, run: PendingRun, event: Event) -> None: ...

    def end(self, run: PendingRun, record: Record) -> None:
        if record.status in ("failed", "diverged"):
            print(f"tbbn: {_name(run)}: {_ending(record)}", file=sys.stderr)


class RunLines(RunProgress):
    """Prints a line per task, and in between at most one every ``every`` seconds."""

    def __init__(
        self,
        n_runs: int,
        stream: TextIO | None = None,
        every: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.n_runs, self.number, self.every, self.clock = n_runs, 0, every, clock
        self.stream = stream or sys.stderr
        self.last_line = clock()
        self.started: dict[PendingRun, float] = {}

    def _print(self, text: str) -> None:
        self.last_line = self.clock()
        with suppress(OSError):  # a run continues even if nobody reads its progress
            print(text, file=self.stream, flush=True)

    def start(self, run: PendingRun) -> None:
        self.started[run] = self.clock()
        self.number += 1
        self._print(f"run {self.number}/{self.n_runs}: {_name(run)}")

    def event(self, run: PendingRun, event: Event) -> None:
        if isinstance(event, Loading) and self.clock() - self.last_line >= self.every:
            self._print(f"  {_name(run)}: {event.done} of {event.images} images decoded")
        elif isinstance(event, TaskEnded):
            seconds = self.clock() - self.started[run]
            task = f"task {event.task + 1}/{run.config.data.learnt_tasks}"
            self._print(f"  {_name(run)}: {task}, mean accuracy {_mean(event)} % ({seconds:.0f} s)")
        elif isinstance(event, EpochEnded) and self.clock() - self.last_line >= self.every:
            at, loss = event.position, event.losses.get("total", float("nan"))
            epoch = f"{event.phase} epoch {at.epoch + 1}/{event.epochs}"
            self._print(f"  {_name(run)}: task {at.task + 1} {epoch}: loss {loss:.3f}")

    def end(self, run: PendingRun, record: Record) -> None:
        if run not in self.started and record.status == "finished":
            self.number += 1
            folder = printable(str(run.directory))
            self._print(f"run {self.number}/{self.n_runs}: {_name(run)}: already finished, read from {folder}")
        elif record.status != "finished":
            self._print(f"  {_name(run)}: {_ending(record)}")


class RunBars(RunProgress):
    """Progress bars with rich: one for the tasks of all runs, and one per active run for the epochs of its task."""

    def __init__(
        self, runs: list[PendingRun], redraw: float = 0.1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.progress import TextColumn

        self.bars = _rich_bars(TextColumn("{task.fields[count]}"), TextColumn("{task.fields[note]}"), transient=True)
        self.redraw, self.clock = redraw, clock
        self.total = sum(run.config.data.learnt_tasks for run in runs)
        many = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
        self.whole = self.bars.add_task(many, total=self.total, count=f"0/{self.total} tasks", note="")
        self.bar_of: dict[PendingRun, Any] = {}
        self.accuracy: dict[PendingRun, str] = {}
        self.done: dict[PendingRun, float] = {}  # tasks done, with the current one as a fraction
        self.drawn: dict[PendingRun, float] = {}  # time of the last redraw

    def __enter__(self) -> RunBars:
        self.bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bars.__exit__(*error)

    def start(self, run: PendingRun) -> None:
        self.bar_of[run] = self.bars.add_task(_name(run), total=1, count="", note="")

    def event(self, run: PendingRun, event: Event) -> None:
        if isinstance(event, Loading):
            self.bars.update(
                self.bar_of[run],
                description=f"{_name(run)}: decoding",
                total=event.images,
                completed=event.done,
                count=f"{event.done}/{event.images} images",
            )
        elif isinstance(event, Stepped):
            self._step(run, event)
        elif isinstance(event, EpochEnded):
            loss = f"loss {event.losses.get('total', float('nan')):.3f}"
            self.bars.update(self.bar_of[run], note=f"{loss}  {self.accuracy.get(run, '')}".rstrip())
        elif isinstance(event, TaskEnded):
            self.accuracy[run] = f"accuracy {_mean(event)} %"
            self.bars.update(self.bar_of[run], note=self.accuracy[run])
            self._advance(run, event.task + 1)

    def _step(self, run: PendingRun, event: Stepped) -> None:
        now = self.clock()
        if now - self.drawn.get(run, float("-inf")) < self.redraw and event.step < event.steps:
            return  # lanes do thousands of steps per second, and drawing a bar takes longer than enqueuing a step
        self.drawn[run] = now
        at, tasks = event.position, run.config.data.learnt_tasks
        here = at.epoch + event.step / event.steps
        name = f"{_name(run)}: task {at.task + 1}/{tasks}" + ("" if event.phase == "train" else f" {event.phase}")
        count = f"{at.epoch + 1}/{event.epochs} epochs"
        self.bars.update(self.bar_of[run], description=name, total=event.epochs, completed=here, count=count)
        # Later phases of a task are short, so in the overall bar they count as done.
        self._advance(run, at.task + (0.95 if at.phase else 0.95 * here / event.epochs))

    def _advance(self, run: PendingRun, tasks: float) -> None:
        self.done[run] = tasks
        count = f"{sum(int(n) for n in self.done.values())}/{self.total} tasks"
        self.bars.update(self.whole, completed=sum(self.done.values()), count=count)

    def end(self, run: PendingRun, record: Record) -> None:
        if run in self.bar_of:
            self.bars.remove_task(self.bar_of.pop(run))
            how = f"{record.seconds:.0f} s"
        else:
            how = "already finished" if record.status == "finished" else "not started"
        self._advance(run, run.config.data.learnt_tasks)
        state = "" if record.status == "finished" else f": {_ending(record)}"
        accuracy = f"A_f {100 * record.metrics['final_accuracy']:.1f} %" if record.accuracy else "no task finished"
        self.bars.console.print(f"{_name(run)}: {accuracy} ({how}){state}", highlight=False, markup=False)


def run_progress(runs: list[PendingRun], quiet: bool) -> RunProgress:
    """The progress display that suits standard error: errors only, bars or lines."""
    if quiet:
        return RunProgress()
    if sys.stderr.isatty() or _in_notebook():
        try:
            return RunBars(runs)
        except ImportError:
            pass
    return RunLines(len(runs))


def _in_notebook() -> bool:
    """Whether this is a notebook in which rich can draw bars, which needs ipywidgets."""
    return "ipykernel" in sys.modules and find_spec("ipywidgets") is not None


def _name(run: PendingRun) -> str:
    return printable(f"{run.config.label}, seed {run.config.seed}")


def _ending(record: Record) -> str:
    return printable(f"{record.status}: {record.message}" if record.message else record.status)


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


Counter = Callable[[int, int], None]  # called with the number done and the total


@contextmanager
def counter(
    name: str, unit: str, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[Counter | None]:
    """Show the progress of one long operation: a bar in a terminal, a line every ten seconds elsewhere."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.progress import DownloadColumn, MofNCompleteColumn

        with _rich_bars(DownloadColumn() if unit == "bytes" else MofNCompleteColumn(), transient=False) as bars:
            bar = bars.add_task(f"{name}: listing files", total=None)
            yield lambda done, total: bars.update(bar, description=name, completed=done, total=total)
    else:
        yield _counter_lines(name, unit, clock)


def _counter_lines(name: str, unit: str, clock: Callable[[], float], every: float = 10.0) -> Counter:
    last_time = start = clock()
    first = last = -1  # the number at the first call does not count for the rate

    def count(done: int, total: int) -> None:
        nonlocal last_time, first, last
        now = clock()
        first = done if first < 0 else first
        if done > max(first, last) and (now - last_time >= every or done == total):
            last_time, last = now, done
            rate = (done - first) / max(now - start, 1e-9)
            print(f"{name}: {done} of {total} {unit}, {rate:.0f} per second", file=sys.stderr, flush=True)

    return count
