"""Forecast the batches, splits and steps of each task of a run, without training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tbbn.bench.config import RunConfig
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.data.sampling import steps_per_epoch
from tbbn.bench.engine.phase import known_phases
from tbbn.bench.engine.setup import full_batch, memory_of, method_of, outline_source, ratio_of, scenario_of
from tbbn.bench.engine.validate import check, check_data
from tbbn.bench.methods import Method, Phase


@dataclass(frozen=True)
class TaskForecast:
    task: int
    classes: int
    images: int  # training images
    exemplars: int  # in the memory
    current: int  # current rows of a full batch
    memory: int  # memory rows of a full batch
    splits: int  # r* of a full batch
    steps: int  # in an epoch of the main phase
    epochs: int

    @property
    def all_steps(self) -> int:
        return self.steps * self.epochs


@dataclass(frozen=True)
class Forecast:
    tasks: list[TaskForecast]
    note: str  # which numbers are estimates, because the data is not here or the method draws other rows; usually empty

    @property
    def all_steps(self) -> int:
        return sum(task.all_steps for task in self.tasks)


def forecast(config: RunConfig) -> Forecast:
    """The forecast of each task. Later phases of a method are not counted. Needs no images, and downloads nothing."""
    config = check(config)
    method = method_of(config)
    source, note = outline_source(config)
    scenario = scenario_of(config, source)
    store = memory_of(config)
    check_data(config, method, store, scenario, source)
    class_sizes = torch.bincount(torch.cat([scenario.train_labels[task.train] for task in scenario.tasks])).tolist()
    entries: list[TaskForecast] = []
    kept: list[float] = []  # exemplars of each class
    other = ""
    for task in scenario.tasks:
        images = sum(class_sizes[: task.classes.stop]) if method.all_data else len(task.train)
        new, old = _main_phase_rows(method, class_sizes[task.classes.start : task.classes.stop], kept)
        new = images if method.all_data else new
        steps = steps_per_epoch(
            new + old if config.batch.current_from == "union" else new,
            old,
            batch_size=config.batch.size,
            ratio=ratio_of(config),
            length=config.batch.length,
            last=config.batch.last,
            online=config.data.online and not method.all_data,
        )
        first = _first_phase(method, task.number, store)
        if first.rows != "replay":
            other = f"method {config.method.name!r} trains on {first.rows!r} rows; batches and steps shown are of 'replay' rows"
        batch = full_batch(config, method, task.number)
        train = config.train.of_task(task.number)
        entries.append(
            TaskForecast(
                task=task.number,
                classes=len(task.classes),
                images=images,
                exemplars=round(sum(kept)),
                current=batch.current,
                memory=batch.memory,
                splits=batch.splits,
                steps=steps,
                epochs=train.scaled(train.epochs if first.epochs is None else first.epochs),
            )
        )
        if method.uses_memory and store.budget:
            kept = _exemplars(store, class_sizes[: task.classes.stop])
    return Forecast(entries, "; ".join(filter(None, (note, other))))


def _first_phase(method: Method, task: int, memory: ExemplarMemory) -> Phase:
    """The first phase of a task as far as it is known: a plugin's may depend on the network, or be wrong."""
    phases = known_phases(method, task, memory)
    return phases[0] if isinstance(phases, tuple) and phases and isinstance(phases[0], Phase) else Phase()


def _main_phase_rows(method: Method, new: list[int], kept: list[float]) -> tuple[int, int]:
    """The number of task rows and memory rows in the main phase: those that the method does not hold out."""
    share = method.holdout()
    if not share or not kept:
        return sum(new), round(sum(kept))
    held = max(1, round(share * sum(kept) / len(kept)))  # rows per class
    return sum(max(0, n - held) for n in new), round(sum(max(0, n - held) for n in kept))


def _exemplars(store: ExemplarMemory, class_sizes: list[int]) -> list[float]:
    """The number of exemplars of each class; for a reservoir, the expected number."""
    if store.selection == "reservoir":
        share = min(1.0, store.budget / sum(class_sizes))
        return [share * size for size in class_sizes]
    return [min(store.quota(len(class_sizes)), size) for size in class_sizes]
