"""What a run tells while it goes on, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """The next step to train: of which epoch, phase and task."""

    task: int = 0
    phase: int = 0
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class Stepped:
    """A step has been enqueued; nothing has been waited for."""

    position: Position
    phase: str
    epochs: int
    step: int  # done in this epoch
    steps: int


@dataclass(frozen=True)
class EpochEnded:
    position: Position
    phase: str
    epochs: int
    losses: dict[str, float]
    validation: float | None


@dataclass(frozen=True)
class TaskEnded:
    task: int
    accuracy: list[float]  # of each task so far
    exemplars: int


@dataclass(frozen=True)
class Waiting:
    """The run is about to read a result: whoever has other work may do it until ``done()``."""

    done: Callable[[], bool]


Event = Stepped | EpochEnded | TaskEnded | Waiting


class Diverged(Exception):
    """The loss is no longer a number."""
