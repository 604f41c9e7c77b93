"""Check a record against values recomputed from the config, the data set and the stored predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tbbn.bench import metrics
from tbbn.bench.config import RunConfig
from tbbn.bench.data.scenario import Scenario
from tbbn.bench.data.types import Source
from tbbn.bench.engine.evaluate import confusion_of, evaluated_rows
from tbbn.bench.engine.phase import PhaseSettings, known_phases
from tbbn.bench.engine.plugins import without_plugins
from tbbn.bench.engine.record import Record
from tbbn.bench.engine.setup import data_facts, full_batch, memory_of, method_of
from tbbn.bench.methods import Method
from tbbn.bench.runs.finding import Finding, compare


def status(record: Record) -> Finding:
    """Check that a finished run has learnt every task; needs no data set."""
    data = record.run_config.data
    n_tasks, n_learnt = data.learnt_tasks, len(record.accuracy)
    if record.status == "finished" and n_learnt != n_tasks:
        return Finding("status", f"the record says finished, but has {n_learnt} of {n_tasks} tasks.")
    if n_learnt > n_tasks:
        return Finding("status", f"the record has {n_learnt} tasks, the config {n_tasks}.")
    return Finding("status")


def predictions_present(record: Record, predictions: Mapping[str, Tensor]) -> Finding:
    """Check that there are predictions for every task learnt.

    They are written before the record, so a run killed in between has predictions for one more task.
    """
    n = len(record.accuracy)
    extra = predictions.keys() - {f"task{t}" for t in range(n)}
    allowed = set() if record.status == "finished" else {f"task{n}"}
    if extra <= allowed and len(predictions) - len(extra) == n:
        return Finding("predictions")
    names = ", ".join(sorted(predictions)) or "none"
    return Finding("predictions", f"the record has {n} tasks, but there are predictions for: {names}.")


def known_before_training(record: Record, source: Source, scenario: Scenario) -> Iterator[Finding]:
    """Check everything that follows from the config and the data set: classes, task sizes, splits, exemplars, epochs."""
    config, n = record.run_config, len(record.accuracy)
    yield compare("class order", record.class_order, list(scenario.class_order))
    yield compare("task sizes", record.task_sizes, list(scenario.task_sizes))
    if record.data:
        yield compare("data", record.data, data_facts(config, source))
    else:
        yield Finding("data", not_checked="the record is from a version that did not write it")
    yield compare("skipped images", record.skipped, list(source.skipped))
    if reason := without_plugins(config):
        yield Finding("splits, exemplars and epochs", not_checked=reason)
        return
    method = method_of(config)
    yield compare("splits", record.splits, [full_batch(config, method, t).splits for t in range(n)])
    exemplars = [_n_exemplars(config, method, scenario, t) for t in range(n)]
    yield compare("exemplars", record.exemplars, exemplars)
    yield _epochs(record, method, exemplars)


def _n_exemplars(config: RunConfig, method: Method, scenario: Scenario, task: int) -> int:
    """The number of rows in the memory after a task."""
    memory = memory_of(config)
    if not method.uses_memory or not memory.budget:
        return 0
    rows = torch.cat([t.train for t in scenario.tasks[: task + 1]])
    if memory.selection == "reservoir":
        return min(memory.budget, len(rows))
    quota = memory.quota(scenario.tasks[task].classes.stop)
    return int(torch.bincount(scenario.train_labels[rows].cpu()).clamp(max=quota).sum())


def _epochs(record: Record, method: Method, exemplars: list[int]) -> Finding:
    """Check that the history has every epoch with the right learning rate, perhaps also the first epochs of the next task."""
    config, wanted = record.run_config, []
    for task in range(len(record.accuracy) + 1):
        rows = torch.arange(exemplars[task - 1] if task else 0)
        phases = known_phases(method, task, replace(memory_of(config), index=rows))
        if phases is None:
            return Finding("epochs in the history", not_checked=f"the phases of {config.method.name} need its network")
        for phase in phases:
            settings = PhaseSettings.of(config, phase, task)
            has_validation = settings.keep == "best"
            wanted += [(task, phase.name, e, settings.lr_at(e), has_validation) for e in range(settings.epochs)]
    n_past = sum(entry[0] < len(record.accuracy) for entry in wanted)
    found = [(*(e.get(k) for k in ("task", "phase", "epoch", "lr")), "validation" in e) for e in record.history]
    if found == wanted[: len(found)] and n_past <= len(found):
        return Finding("epochs in the history")
    i = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    there, here = (_entry(entries[i]) if i < len(entries) else "nothing" for entries in (found, wanted))
    return Finding("epochs in the history", f"entry {i + 1} is {there}; the config asks for {here}.")


def _entry(entry: tuple[Any, ...]) -> str:
    task, phase, epoch, lr, _ = entry
    return f"task {task}, phase {phase}, epoch {epoch}, lr {lr}"


def results(record: Record, scenario: Scenario, predictions: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Check accuracies and error types against those computed from the predictions and the data set's labels."""
    for t, task in enumerate(scenario.tasks[: len(record.accuracy)]):
        after = f"after task {t + 1}"
        rows = [evaluated_rows(record.run_config, task) for task in scenario.tasks[: t + 1]]
        labels, predicted = scenario.test_labels[torch.cat(rows)], predictions[f"task{t}"]
        if len(labels) != len(predicted):
            yield Finding(f"accuracy {after}", f"{len(predicted)} predictions for {len(labels)} test images.")
            continue
        if not 0 <= int(predicted.min()) <= int(predicted.max()) < task.classes.stop:
            yield Finding(f"accuracy {after}", f"there are predictions outside the {task.classes.stop} classes.")
            continue
        hits = (predicted == labels).split([len(part) for part in rows])
        yield compare(f"accuracy {after}", record.accuracy[t], [h.double().mean().item() for h in hits])
        errors = metrics.confusion_error_types(confusion_of(labels, predicted, task.classes.stop), task.classes.start)
        yield compare(f"error types {after}", record.errors[t], errors)
        # An image that is classified correctly among all classes is also classified correctly among those of its task.
        low = any(il < accuracy for il, accuracy in zip(record.task_il[t], record.accuracy[t], strict=True))
        yield Finding(f"task-IL accuracy {after}", "it is below the accuracy among all classes." if low else "")
        if calibrated := record.calibrated[t]:  # so is one that is classified correctly by shifted scores
            high = any(il < accuracy for il, accuracy in zip(record.task_il[t], calibrated, strict=True))
            yield Finding(f"calibrated accuracy {after}", "it is above the task-IL accuracy." if high else "")
