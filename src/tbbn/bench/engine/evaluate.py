"""Evaluation after a task: accuracies, error types and predictions on every test image of the tasks so far."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tbbn.bench import metrics
from tbbn.bench.config import RunConfig
from tbbn.bench.data.device import DeviceDataset
from tbbn.bench.data.scenario import Scenario, Task, task_of_class
from tbbn.bench.engine.forward import evaluation_pass
from tbbn.bench.engine.ranks import ALONE, Ranks
from tbbn.bench.methods import Method
from tbbn.bench.models import Network, Output
from tbbn.errors import UserError
from tbbn.registry import METHODS


class Evaluation(NamedTuple):
    """The results after a task. Accuracies and predictions cover every test image of the tasks so far."""

    accuracy: list[float]  # per task, class-IL: the prediction is among all classes so far
    task_il: list[float]  # per task, task-IL: the prediction is among the classes of the image's task
    calibrated: list[float]  # per task, class-IL without a bias to or against the newest task: see `_calibrated`
    errors: dict[str, int]  # by type: C->C, C->P, P->C, P->P
    predictions: Tensor  # class-IL, int16


def evaluate(
    task: Task,
    config: RunConfig,
    scenario: Scenario,
    method: Method,
    network: Network,
    test_data: DeviceDataset,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Evaluate the network after a task."""
    rows = torch.cat([evaluated_rows(config, t) for t in scenario.tasks[: task.number + 1]])
    labels = scenario.test_labels[rows]
    class_task = task_of_class(scenario)
    image_task = class_task[labels]
    class_task = class_task[: task.classes.stop]
    found = _predict(rows, image_task, class_task, config, method, network, test_data, ranks)
    class_il, task_il, newest, past = found[:4].long()
    unbiased = _calibrated(newest, past, found[4], int((image_task == task.number).sum()))
    of_task = [image_task == t for t in range(task.number + 1)]
    confusion = confusion_of(labels, class_il, task.classes.stop)
    return Evaluation(
        accuracy=[(class_il == labels)[mask].double().mean().item() for mask in of_task],
        task_il=[(task_il == labels)[mask].double().mean().item() for mask in of_task],
        calibrated=[(unbiased == labels)[mask].double().mean().item() for mask in of_task],
        errors=metrics.confusion_error_types(confusion, task.classes.start),
        predictions=class_il.to(torch.int16),
    )


def _predict(
    rows: Tensor,
    image_task: Tensor,
    class_task: Tensor,
    config: RunConfig,
    method: Method,
    network: Network,
    data: DeviceDataset,
    ranks: Ranks,
) -> Tensor:
    """(5, rows): the best class of all, of the image's own task, of the newest task and of the past ones, and by how much the
    best score of the newest task is above that of the past ones. In float32, which holds every class number exactly.
    """
    image_task, class_task = ranks.part(image_task).to(data.labels.device), class_task.to(data.labels.device)
    is_past = class_task < class_task[-1]
    done = 0

    def predict(output: Output) -> Tensor:
        nonlocal done
        scores = method.predict(output)
        wanted = len(output.logits), len(class_task)
        if not isinstance(scores, Tensor) or scores.shape != wanted:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            where = METHODS.place(config.method.name, method.predict)
            raise UserError(f"{where}: predict must return scores {wanted}, a column for each class, got {got}.")
        is_other = image_task[done : done + len(scores), None] != class_task
        done += len(scores)
        known = scores.masked_fill(is_other, -math.inf).argmax(1)
        newest, past = (scores.masked_fill(mask, -math.inf).max(1) for mask in (is_past, ~is_past))
        columns = scores.argmax(1), known, newest.indices, past.indices, newest.values - past.values
        return torch.stack([column.float() for column in columns], 1)

    batches = evaluation_pass(network, data, ranks.part(rows), config.batch.evaluation, config.precision, predict)
    return ranks.gather(torch.cat(list(batches)), len(rows)).T.cpu()


def _calibrated(newest: Tensor, past: Tensor, lead: Tensor, n_newest: int) -> Tensor:
    """The predictions if all scores of the newest task's classes are shifted alike, so that it gets as many images as it has.

    It shows how far a network tells new from past, apart from where it draws the line between them.
    """
    is_newest = torch.zeros_like(newest, dtype=torch.bool)
    is_newest[lead.argsort(descending=True, stable=True)[:n_newest]] = True
    return torch.where(is_newest, newest, past)


def evaluated_rows(config: RunConfig, task: Task) -> Tensor:
    """The test rows of a task to evaluate: all, or with ``data.test = "whole-batches"`` only those in full batches."""
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
    """The confusion matrix: how often each class (row) was predicted as each class (column)."""
    counts = torch.bincount(labels * n_classes + predicted, minlength=n_classes * n_classes)
    return counts.view(n_classes, n_classes).tolist()
