"""A tiny run for tests, and a record of every step it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.data.batches import BatchSpec
from tbbn.bench.engine import Event, Record
from tbbn.bench.engine.loop import Run

TINY: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,  # sums depend on the number of threads
    "data.name": "synthetic:6x12x5x8",
    "data.tasks": 3,
    "train.epochs": 2,
    "batch.size": 8,
    "memory.budget": 12,
}


# Second phases of one or two epochs; by default they are as long as published.
SHORT: dict[str, dict[str, Any]] = {
    "eeil": {"method__balanced_epochs": 2},
    "bic": {"method__correction_epochs": 2},
    "podnet": {"method__finetune_epochs": 2},
    "afc": {"method__finetune_epochs": 2},
}


@dataclass
class Trained:
    """One training step: its loss function, the spec of its batch, and the rows in it."""

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
    """The tiny config with these settings; a double underscore stands for the dot."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    once = {"train.epochs": 1} if given.get("data.online") else {}
    return resolve(("test", {**TINY, **once, **given}))


def finish(config: RunConfig, watch: Callable[[Run, Event], None] | None = None) -> Run:
    """Do a run; ``watch`` is called after every event."""
    run = Run(config)
    for event in run.events():
        if watch is not None:
            watch(run, event)
    return run


def results(record: Record) -> dict[str, Any]:
    """Everything in a record except how long it took and where."""
    tree = {key: value for key, value in asdict(record).items() if key not in ("seconds", "environment", "predictions")}
    return {**tree, "predictions": {key: value.tolist() for key, value in record.predictions.items()}}
