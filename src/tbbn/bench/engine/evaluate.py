"""Every test image of the tasks so far: the accuracies, the errors and the predictions of a record."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tbbn.bench import metrics
from tbbn.bench.config import RunConfig
from tbbn.bench.data.device import DeviceDataset
from tbbn.bench.data.scenario import Scenario, Task, task_of_class
from tbbn.bench.engine.forward import evaluation_pass
from tbbn.bench.engine.record import Record
from tbbn.bench.methods import Method
from tbbn.bench.models import Network, Output
from tbbn.errors import UserError


def evaluate(
    record: Record,
    task: Task,
    config: RunConfig,
    scenario: Scenario,
    method: Method,
    network: Network,
    data: DeviceDataset,
) -> None:
    """Predict every test image of the tasks so far, with all classes to choose from and with its own task's alone.

    Adds a row to the record's matrices; ``data`` is the test split.
    """
    rows = torch.cat([evaluated_rows(config, t) for t in scenario.tasks[: task.number + 1]])
    labels = scenario.test_labels[rows]
    tasks = task_of_class(scenario)
    device = data.images.device
    own = tasks[labels].to(device)
    seen = tasks[: task.classes.stop].to(device)
    done = 0

    def predict(output: Output) -> Tensor:
        nonlocal done
        scores = method.predict(output)
        others = own[done : done + len(scores)].unsqueeze(1) != seen
        done += len(scores)
        return torch.stack([scores.argmax(1), scores.masked_fill(others, -math.inf).argmax(1)])

    size, precision = config.batch.evaluation, config.precision
    parts = list(evaluation_pass(network, data, rows, size, precision, predict))
    free, known = torch.cat(parts, 1).cpu()
    by_task = [tasks[labels] == t for t in range(task.number + 1)]
    record.accuracy.append([(free == labels)[m].double().mean().item() for m in by_task])
    record.task_il.append([(known == labels)[m].double().mean().item() for m in by_task])
    confusion = confusion_of(labels, free, task.classes.stop)
    record.errors.append(metrics.confusion_error_types(confusion, task.classes.start))
    record.predictions[f"task{task.number}"] = free.to(torch.int16)


def evaluated_rows(config: RunConfig, task: Task) -> Tensor:
    """The test images of a task that are evaluated: all of them, but for a quirk."""
    if config.data.test == "all":
        return task.test
    whole = len(task.test) // config.batch.size * config.batch.size
    if not whole:
        raise UserError(
            f"data.test = 'whole-batches': task {task.number + 1} has {len(task.test)} test images, fewer than a batch of "
            f"{config.batch.size}; lower batch.size, or evaluate all."
        )
    return task.test[:whole]


def confusion_of(labels: Tensor, predicted: Tensor, n_classes: int) -> list[list[int]]:
    """How often each class (row) was taken for each (column)."""
    counts = torch.bincount(labels * n_classes + predicted, minlength=n_classes * n_classes)
    return counts.view(n_classes, n_classes).tolist()
