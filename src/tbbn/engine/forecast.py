"""What a run would do, task by task, without training: the batches, the splits, the steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tbbn.config import RunConfig
from tbbn.data import sources
from tbbn.data.batches import n_steps, parts
from tbbn.engine.check import check, make_memory, ratio
from tbbn.engine.run import scenario_of
from tbbn.norm import splits


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


def forecast(config: RunConfig) -> list[TaskForecast]:
    """One entry a task; later phases of a method are not counted."""
    method = check(config)
    source = sources.load(
        config.data.name, config.data.root, download=config.data.download, size=config.data.size or None
    )
    scenario = scenario_of(config, source)
    store = make_memory(config)
    sizes = torch.bincount(torch.cat([scenario.train_labels[t.train] for t in scenario.tasks])).tolist()
    entries, kept = [], 0
    for task in scenario.tasks:
        images = sum(sizes[: task.classes.stop]) if method.all_data else len(task.train)
        union = images + kept if config.batch.current_from == "union" else images
        current, memory = parts(config.batch.size, ratio(config)) if kept else (config.batch.size, 0)
        memory *= method.memory_views(task.number) if kept else 1
        rule = config.norm.dict().get("rule", "paper")
        steps = n_steps(
            union,
            kept,
            batch_size=config.batch.size,
            ratio=ratio(config),
            length=config.batch.length,
            last=config.batch.last,
            stream=config.data.online,
        )
        r = splits(current, memory, task.number, rule) if kept else 1
        entries.append(
            TaskForecast(task.number, len(task.classes), images, kept, current, memory, r, steps, config.train.epochs)
        )
        if method.uses_memory and store.budget:
            seen = task.classes.stop
            if store.selection == "reservoir":
                kept = min(store.budget, sum(sizes[:seen]))
            else:
                kept = sum(min(store.quota(seen), size) for size in sizes[:seen])
    return entries
