"""The choice of epoch: the score of every epoch of a run, and which epoch each rule would have kept.

The run trains as usual. After each epoch its network is also evaluated as if training ended there; whatever the method does after
training, such as rescaling weights or remembering tensors, is done to a copy. A rule is applied to one phase at a time: the next
phase starts from the epoch that the run itself keeps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.config import RunConfig
from tbbn.bench.data.scenario import Task
from tbbn.bench.engine import loop
from tbbn.bench.engine.evaluate import evaluate
from tbbn.bench.engine.events import EpochEnded, Event
from tbbn.bench.engine.forward import evaluation_pass
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.record import Record
from tbbn.bench.methods import Method
from tbbn.bench.models import Network
from tbbn.bench.report.groups import stamp
from tbbn.bench.report.tables import Table
from tbbn.errors import UserError

RULES: dict[str, Callable[[Sequence[EpochScore]], EpochScore]] = {
    "last": lambda epochs: epochs[-1],
    "best on the new task": lambda epochs: min(epochs, key=lambda score: score.new_loss),
    "best on all tasks": lambda epochs: min(epochs, key=lambda score: score.all_loss),
}


@dataclass(frozen=True)
class EpochScore:
    """The network's scores if training ended after an epoch of a phase. Task and epoch are 0-based."""

    task: int
    phase: str
    epoch: int
    lr: float
    accuracy: tuple[float, ...]  # of each task so far, on test images
    new_loss: float  # cross-entropy on the new task's validation rows, which train.keep = "best" minimises
    all_loss: float  # on the validation rows of all tasks so far

    @property
    def past(self) -> float:
        """Mean accuracy over the past tasks; nan in the first task."""
        return fmean(self.accuracy[:-1]) if self.task else float("nan")

    @property
    def new(self) -> float:
        return self.accuracy[-1]

    @property
    def mean(self) -> float:
        return fmean(self.accuracy)


def score_epochs(config: RunConfig, on_event: Callable[[Event], None] | None = None) -> list[EpochScore]:
    """Train a run without saving it, and score its network after every epoch."""
    if not config.data.validation:
        raise UserError(
            "epochs: rules choose by validation rows, and data.validation is 0; set it to 0.1, for example."
        )
    scores: list[EpochScore] = []

    def drive(run: Run) -> Any:
        for event in run.events():
            if isinstance(event, EpochEnded):
                scores.append(_score(run, event))
            yield event

    record = loop.run(config, on_event=on_event, drive=drive)
    if record.status != "finished":
        raise UserError(f"epochs: the run {record.status}: {record.message}")
    return scores


def _score(run: Run, event: EpochEnded) -> EpochScore:
    task = run.scenario.tasks[event.position.task]
    result = evaluate(task, run.config, run.scenario, run.method, _ended(run, task), run.test_data)
    new = _loss(run, task.validation)  # of the network as trained, by which train.keep compares epochs
    both = _loss(run, torch.cat([seen.validation for seen in run.scenario.tasks[: task.number + 1]]))
    lr = float(run.record.history[-1]["lr"])
    return EpochScore(task.number, event.phase, event.position.epoch, lr, tuple(result.accuracy), new, both)


def _ended(run: Run, task: Task) -> Network:
    """The network that the run would evaluate if training ended here. The run's own network is not changed."""
    method, kind = run.method, type(run.method)
    stores = kind.after_task is not Method.after_task  # only then choose exemplars, which takes a pass over the task
    if not stores and kind.after_training is Method.after_training:
        return run.network
    network = copy.deepcopy(run.network).eval()
    context = replace(run.context(task), network=network)
    if run.config.data.online:  # the draw of the pass decides which rows are stored
        context.draw(context.phase_rows("replay"), method.phases(context)[0].name, 0)
    context.hook("after_training")
    if stores:
        if method.uses_memory:
            context.memory = context.updated_memory()
        context.hook("after_task")
    return network


def _loss(run: Run, rows: Tensor) -> float:
    """The cross-entropy on these rows over all classes so far."""
    size, precision = run.config.batch.evaluation, run.config.precision
    logits = torch.cat(
        list(evaluation_pass(run.network, run.train_data, rows, size, precision, lambda output: output.logits.float()))
    )
    labels = run.train_data.labels[rows.to(run.train_data.labels.device)]
    return F.cross_entropy(logits, labels).item()


def kept_by(scores: Sequence[EpochScore], rule: str) -> list[EpochScore]:
    """For each phase of each task, the epoch that a rule keeps."""
    phases = groupby(scores, key=lambda score: (score.task, score.phase))
    return [RULES[rule](list(epochs)) for _, epochs in phases]


def rules_table(scores: Mapping[str, Sequence[Sequence[EpochScore]]]) -> Table:
    """For each run by name (with its seeds) and each phase: the epoch that each rule keeps, and that epoch's scores."""
    entries = []
    for name, seeds in scores.items():
        for rule in RULES:
            kept = [kept_by(run, rule) for run in seeds]
            entries += [(name, rule, same) for same in zip(*kept, strict=True)]
    places = {(name, same[0].task, same[0].phase) for name, _, same in entries}
    has_phases = len(places) > len({place[:2] for place in places})
    rows = []
    for name, rule, same in entries:
        phase = (same[0].phase,) if has_phases else ()
        values = [_percent([getattr(score, key) for score in same]) for key in ("past", "new", "mean")]
        epochs = f"{fmean(score.epoch + 1 for score in same):.4g}"
        rows.append((name, rule, f"{same[0].task + 1}", *phase, epochs, *values))
    stretch = "phase" if has_phases else "task"
    notes = (
        "Accuracy on test images if training ends after the epoch that a rule keeps, mean over seeds.",
        f"Each rule is applied to a single {stretch}; the next {stretch} starts from the epoch that the run's settings keep.",
    )
    columns = ("run", "rule", "task", *(("phase",) if has_phases else ()), "epoch")
    header = (*columns, "past tasks %", "new task %", "all tasks %")
    return Table(header, tuple(rows), notes, align="llrlrrrr" if has_phases else "llrrrrr")


def kept_table(records: Mapping[str, Record]) -> Table:
    """The epoch that each run kept in the first phase of every task, from its history."""
    rows = []
    for name, record in records.items():
        first: dict[int, int] = {}
        for (task, _), epoch in record.kept_epochs().items():
            first.setdefault(task, epoch + 1)
        train = record.run_config.train
        rows.append((name, *map(str, first.values()), str(train.scaled(train.epochs))))
    tasks = max((len(row) for row in rows), default=2) - 2
    padded = [(*row[:-1], *("-",) * (tasks + 2 - len(row)), row[-1]) for row in rows]
    notes = ("The epoch that was kept in the first phase of each task, of how many.",)
    return Table(("run", *(f"task {task + 1}" for task in range(tasks)), "of"), tuple(padded), notes)


def kept_json(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """The epoch that each run kept in every phase, from its history. Tasks and epochs are 0-based."""
    entries = []
    for name, record in records.items():
        config = record.run_config
        kept = [{"task": t, "phase": phase, "epoch": epoch} for (t, phase), epoch in record.kept_epochs().items()]
        about = {"directory": name, "run": config.label, "seed": config.seed, "stamp": stamp([config]).strip()}
        entries.append({**about, "kept": kept})
    return entries


def _percent(values: Sequence[float]) -> str:
    mean = fmean(values)
    return "-" if mean != mean else f"{100 * mean:.1f}"
