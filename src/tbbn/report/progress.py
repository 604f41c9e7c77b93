"""What a person sees while runs go on, on standard error: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from tbbn.engine import EpochEnded, Event, Stepped, TaskEnded
from tbbn.record import Record
from tbbn.sweep import Job


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
        self.say(f"run {self.number}/{self.n_jobs}: {self.name(job)}")

    @staticmethod
    def name(job: Job) -> str:
        return f"{job.config.label}, seed {job.config.seed}"

    def event(self, job: Job, event: Event) -> None:
        if isinstance(event, TaskEnded):
            mean = 100 * sum(event.accuracy) / len(event.accuracy)
            seconds = time.monotonic() - self.began[job]
            task = f"task {event.task + 1}/{job.config.data.tasks}"
            self.say(f"  {self.name(job)}: {task}, mean accuracy {mean:.1f} % ({seconds:.0f} s)")
        elif isinstance(event, EpochEnded) and time.monotonic() - self.said > self.every:
            loss = event.losses.get("total", float("nan"))
            at = event.position
            self.say(
                f"  {self.name(job)}: task {at.task + 1} {event.phase} epoch {at.epoch + 1}/{event.epochs}: loss {loss:.3f}"
            )

    def end(self, job: Job, record: Record) -> None:
        if record.status != "finished":
            self.say(f"  {self.name(job)}: {record.status}: {record.message}")


class Bars(Quiet):
    """rich's bars: all runs, the tasks of this run, the epochs of this task, with loss, accuracy and time left."""

    def __init__(self, jobs: list[Job]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        tasks = sum(job.config.data.tasks for job in jobs)
        self.all = self.bars.add_task("all runs, tasks", total=tasks, note="")
        self.epochs = self.bars.add_task("", total=1, note="")

    def __enter__(self) -> Bars:
        self.bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bars.__exit__(*error)

    def start(self, job: Job) -> None:
        self.bars.update(self.all, note=f"{job.config.label}, seed {job.config.seed}")

    def event(self, job: Job, event: Event) -> None:
        if isinstance(event, Stepped):
            at = event.position
            name = f"task {at.task + 1}/{job.config.data.tasks} {event.phase}, epochs"
            done = at.epoch + event.step / event.steps
            self.bars.update(self.epochs, description=name, total=event.epochs, completed=done)
        elif isinstance(event, EpochEnded):
            self.bars.update(self.epochs, note=f"loss {event.losses.get('total', float('nan')):.3f}")
        elif isinstance(event, TaskEnded):
            mean = 100 * sum(event.accuracy) / len(event.accuracy)
            self.bars.advance(self.all)
            self.bars.reset(self.epochs, total=1, note=f"mean accuracy {mean:.1f} %")

    def end(self, job: Job, record: Record) -> None:
        state = "" if record.status == "finished" else f", {record.status} {record.message}"
        accuracy = f"A_f {100 * record.metrics['final_accuracy']:.1f} %" if record.accuracy else "no task learnt"
        self.bars.console.print(
            f"{job.config.label}, seed {job.config.seed}: {accuracy} ({record.seconds:.0f} s){state}", highlight=False
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
