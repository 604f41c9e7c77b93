"""What a logger is, and how a run keeps several of them going."""

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
    """What a logger knows of a run before it begins."""

    name: str  # such as "lucir + tbbn, seed 0"
    directory: Path  # of the run; a logger may write below it
    config: Mapping[str, Any]  # every setting, by dotted name
    tasks: int
    resumed: bool  # whether tasks or epochs were done in an earlier session


class Logger(Protocol):
    """Four calls. An exception in one of them turns this logger off for the run, and never ends the run.

    Epochs are counted over the whole run, from 1. A run that was killed repeats epochs after its last checkpoint: what comes
    later replaces what came before.
    """

    def start(self, run: RunInfo) -> None:
        """The first epoch of a session is done, or its run was finished already."""

    def epoch(self, number: int, values: Mapping[str, Any]) -> None:
        """An epoch ended: task (from 0), phase, epoch in the phase, lr, the mean of each loss term."""

    def task(self, epoch: int, number: int, accuracy: Sequence[float], metrics: Scalars) -> None:
        """A task (from 0) was learnt: the accuracy on each task so far, and the metrics of the run so far."""

    def finish(self, status: str, metrics: Scalars) -> None:
        """The session ended: "finished", "interrupted", "diverged" or "failed"."""


def make_loggers(names: Sequence[str]) -> dict[str, Logger]:
    """New loggers by name. An unknown name, or a package that is missing, is an error."""
    return {name: LOGGERS.make(name) for name in names}


def parse_names(text: str) -> tuple[str, ...]:
    """The loggers that ``--log`` asks for, the default ones first.

    >>> parse_names("tensorboard,wandb"), parse_names("none")
    (('jsonl', 'tensorboard', 'wandb'), ())
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    return () if names == ["none"] else tuple(dict.fromkeys((*DEFAULT, *names)))


class RunLog:
    """The loggers of one run. They start with its first epoch, so a run that cannot begin leaves nothing behind."""

    def __init__(self, names: Sequence[str], run: Run, directory: Path) -> None:
        self.run, self.directory = run, directory
        self.loggers = make_loggers(names)
        self.waiting: list[tuple[str, tuple[Any, ...]]] = []  # calls that were held back
        self.has_started = False

    def event(self, event: Event, *, hold: bool = False) -> None:
        """Tell the loggers. ``hold`` keeps the event until a call without it, or until ``finish``.

        A run that overwrites another holds its events until it first saves: before that it changes no file.
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
    line = f"tbbn: logger {name!r} failed and is off for this run: {type(error).__name__}: {reason}"
    with suppress(OSError, AttributeError):  # nobody reads standard error, or there is none
        sys.stderr.write(printable(line) + "\n")


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def missing(logger: str, package: str) -> UserError:
    return UserError(f"logger {logger!r} needs {package}; pip install 'tbbn[{logger}]'.")
