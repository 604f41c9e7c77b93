"""What a run would do, task by task, without training: the batches, the splits, the steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tbbn.bench.config import RunConfig
from tbbn.bench.data.batches import n_steps
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.engine.setup import full_batch, load_source, memory_of, method_of, ratio_of, scenario_of
from tbbn.bench.engine.validate import check, check_memory
from tbbn.bench.methods import Method


@dataclass(frozen=True)
class TaskForecast:
    task: int
    classes: int
    images: int  # to train on
    exemplars: int  # in memory
    current: int  # rows of a whole batch
    memory: int
    splits: int  # r*
    steps: int  # of an epoch of the main phase
    epochs: int

    @property
    def all_steps(self) -> int:
        return self.steps * self.epochs


def forecast(config: RunConfig) -> list[TaskForecast]:
    """One entry a task; later phases of a method are not counted."""
    check(config)
    method = method_of(config)
    source = load_source(config)
    scenario = scenario_of(config, source)
    store = memory_of(config)
    check_memory(method, store, scenario, source)
    sizes = torch.bincount(torch.cat([scenario.train_labels[t.train] for t in scenario.tasks])).tolist()
    stream = config.data.online and not method.all_data
    entries: list[TaskForecast] = []
    kept: list[float] = []  # exemplars of each class
    for task in scenario.tasks:
        images = sum(sizes[: task.classes.stop]) if method.all_data else len(task.train)
        current, memory, r = full_batch(config, method, task.number)
        new, old = _left_to_train(method, sizes[task.classes.start : task.classes.stop], kept)
        new = images if method.all_data else new
        steps = n_steps(
            new + old if config.batch.current_from == "union" else new,
            old,
            batch_size=config.batch.size,
            ratio=ratio_of(config),
            length=config.batch.length,
            last=config.batch.last,
            stream=stream,
        )
        n_kept = round(sum(kept))
        entries.append(
            TaskForecast(task.number, len(task.classes), images, n_kept, current, memory, r, steps, config.train.epochs)
        )
        if method.uses_memory and store.budget:
            kept = _kept(store, sizes[: task.classes.stop])
    return entries


def _left_to_train(method: Method, new: list[int], kept: list[float]) -> tuple[int, int]:
    """PhaseRows of the new task and of the memory that the method does not hold out of its main phase."""
    share = method.holdout()
    if not share or not kept:
        return sum(new), round(sum(kept))
    each = max(1, round(share * sum(kept) / len(kept)))
    return sum(n - min(each, n) for n in new), round(sum(n - min(each, n) for n in kept))


def _kept(store: ExemplarMemory, sizes: list[int]) -> list[float]:
    """The exemplars of each class; what a reservoir holds of a class is an expectation."""
    if store.selection == "reservoir":
        share = min(1.0, store.budget / sum(sizes))
        return [share * size for size in sizes]
    return [min(store.quota(len(sizes)), size) for size in sizes]
