"""A tiny run, and a look at every batch it trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.data.batches import BatchSpec
from tbbn.bench.engine import Event
from tbbn.bench.engine.loop import Run

TINY: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,  # sums over threads depend on how many there are
    "data.name": "synthetic:6x12x5x8",
    "data.tasks": 3,
    "train.epochs": 2,
    "batch.size": 8,
    "memory.budget": 12,
}


@dataclass
class Trained:
    """One training step: which loss it minimised, the layout of its batch, and the rows of the data in it."""

    loss: str
    spec: BatchSpec
    index: Tensor

    @property
    def current(self) -> Tensor:
        return self.index[: self.spec.n_current]

    @property
    def memory(self) -> Tensor:
        return self.index[self.spec.n_current : self.spec.base_rows]


def tiny(**settings: Any) -> RunConfig:
    """The tiny config with these settings over it; a double underscore stands for the dot."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    once = {"train.epochs": 1} if given.get("data.online") else {}
    return resolve(("test", {**TINY, **once, **given}))


def finish(config: RunConfig, look: Callable[[Run, Event], None] | None = None) -> Run:
    """The run after its end; ``look`` sees it after every event."""
    job = Run(config)
    for event in job.events():
        if look is not None:
            look(job, event)
    return job
