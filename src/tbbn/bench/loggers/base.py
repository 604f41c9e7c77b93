"""The protocol of a logger, and the class that calls a run's loggers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tbbn.bench.config import flatten
from tbbn.bench.engine.events import EpochEnded, Event, TaskEnded
from tbbn.bench.engine.loop import Run
from tbbn.errors import UserError, printable
from tbbn.registry import LOGGERS

DEFAULT = ("jsonl",)
Scalars = Mapping[str, float]


@dataclass(frozen=True)
class RunInfo:
    """What a logger is told about a run at its start."""

    name: str  # such as "lucir + tbbn, seed 0"
    directory: Path  # the run's folder; a logger may write inside it
    config: Mapping[str, Any]  # every setting, by dotted name
    tasks: int
    resumed: bool  # whether tasks or epochs were done in an earlier session


class Logger(Protocol):
    """The interface of a logger. An exception in any method turns the logger off for the run, but never ends the run.

    Epochs are counted over the whole run, from 1. A run that was killed repeats the epochs after its last checkpoint; later
    values then replace earlier ones.
    """

    def start(self, run: RunInfo) -> None:
        """Called when the first epoch of a session is done, or a task that needed no further epoch."""

    def epoch(self, number: int, values: Mapping[str, Any]) -> None:
        """Called after an epoch. ``values``: task (0-based), phase, epoch in the phase, lr, the mean of each loss term."""

    def task(self, epoch: int, number: int, accuracy: Sequence[float], metrics: Scalars) -> None:
        """Called after task ``number`` (0-based), with the accuracy on each task so far and the metrics of the run so far."""

    def finish(self, status: str, metrics: Scalars) -> None:
        """Called at the end of a session; ``status`` is "finished", "interrupted", "diverged" or "failed"."""


def make_loggers(names: Sequence[str]) -> dict[str, Logger]:
    """New loggers by name. Raises for an unknown name or a missing package."""
    return {name: LOGGERS.make(name) for name in names}


def parse_names(text: str) -> tuple[str, ...]:
    """Parse the value of ``--log``; the default loggers come first.

    >>> parse_names("tensorboard,wandb"), parse_names("none")
    (('jsonl', 'tensorboard', 'wandb'), ())
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    return () if names == ["none"] else tuple(dict.fromkeys((*DEFAULT, *names)))


class RunLog:
    """The loggers of one run. They start with its first epoch, so that a run that cannot begin leaves nothing behind."""

    def __init__(self, names: Sequence[str], run: Run, directory: Path) -> None:
        self.run, self.directory = run, directory
        self.loggers = make_loggers(names)
        self.waiting: list[tuple[str, tuple[Any, ...]]] = []  # calls held back so far
        self.has_started = False

    def event(self, event: Event, *, hold: bool = False) -> None:
        """Pass an event to the loggers. ``hold`` keeps it back until a call without ``hold``, or until ``finish``.

        A run that overwrites another holds its events until its first save, because before that it must not change any file.
        """
        record = self.run.record
        if isinstance(event, EpochEnded):
            self._start(resumed=len(record.history) > 1)
            self.waiting.append(("epoch", (len(record.history), record.history[-1])))
        elif isinstance(event, TaskEnded):
            self._start(resumed=True)
            done = len(record.history), event.task, event.accuracy, _scalars(record.metrics)
            self.waiting.append(("task", done))
        if not hold:
            self._tell()

    def finish(self) -> None:
        if self.has_started:
            self.waiting.append(("finish", (self.run.record.status, _scalars(self.run.record.metrics))))
            self._tell()

    def _start(self, *, resumed: bool) -> None:
        if not self.has_started:
            self.has_started = True
            config, record = self.run.config, self.run.record
            name, settings = f"{config.label}, seed {config.seed}", flatten(record.config)
            info = RunInfo(name, self.directory, settings, len(record.task_sizes), resumed)
            self.waiting.append(("start", (info,)))

    def _tell(self) -> None:
        calls, self.waiting = self.waiting, []
        for method, arguments in calls:
            for name, logger in list(self.loggers.items()):
                try:
                    getattr(logger, method)(*arguments)
                except Exception as error:
                    del self.loggers[name]
                    _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    line = f"tbbn: {LOGGERS.place(name, error)} failed and is off for this run: {type(error).__name__}: {reason}"
    with suppress(OSError, AttributeError):  # standard error may be closed or missing
        sys.stderr.write(printable(line) + "\n")


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def missing(logger: str, package: str) -> UserError:
    return UserError(f"logger {logger!r} needs {package}; pip install 'tbbn[{logger}]'.")
