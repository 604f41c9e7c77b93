"""The events that a run yields, and its position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """The next step to train. All numbers count from 0."""

    task: int = 0
    phase: int = 0
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class Loading:
    """Images of the data set are being decoded; comes before any event that the run yields."""

    done: int
    images: int  # in total


@dataclass(frozen=True)
class Stepped:
    """A step was enqueued; the device may not have finished it yet."""

    position: Position
    phase: str
    epochs: int  # of the phase
    step: int  # steps done in this epoch
    steps: int  # of this epoch


@dataclass(frozen=True)
class EpochEnded:
    """An epoch is done; ``losses`` are the means of its loss terms."""

    position: Position
    phase: str
    epochs: int  # of the phase
    losses: dict[str, float]
    validation: float | None  # the validation loss, where the best epoch is kept


@dataclass(frozen=True)
class TaskEnded:
    """A task has been learnt and evaluated."""

    task: int
    accuracy: list[float]  # of each task so far
    exemplars: int


@dataclass(frozen=True)
class Waiting:
    """The run is about to wait for a result; the caller may do other work until ``done()`` is true."""

    done: Callable[[], bool]


Event = Loading | Stepped | EpochEnded | TaskEnded | Waiting


class Diverged(Exception):
    """The loss or a weight is not finite."""
