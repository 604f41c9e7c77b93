"""Check that training is reproducible: train a task again from the state at its start, and compare bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tbbn.bench.engine.events import Event, Position, TaskEnded
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.plugins import check_unchanged, require_plugins
from tbbn.bench.engine.record import Record, digest
from tbbn.bench.runs import checkpoint, state
from tbbn.bench.runs.crosscheck import explanation, same_place
from tbbn.bench.runs.finding import Finding
from tbbn.bench.runs.record import load_record
from tbbn.errors import UserError


def retrain(
    directory: Path,
    task: int,
    *,
    from_start: bool = False,
    on_event: Callable[[Event], None] | None = None,
    root: str | None = None,
) -> list[Finding]:
    """Train a task (0-based) again, or all tasks up to it, and compare with the record. Writes nothing.

    ``root`` is the folder of the data sets, if they have moved since the run.
    """
    record = load_record(directory)
    n = len(record.accuracy)
    if not 0 <= task < n:
        learnt = f"has learnt tasks 1 to {n}" if n else "has learnt no task yet"
        raise UserError(f"{directory}: the run {learnt}; cannot retrain task {task + 1}.")
    require_plugins(record.run_config, record.plugins, str(directory))
    check_unchanged(record.run_config, record.plugins, str(directory))
    config = same_place(record, root)
    run = Run(replace(config, data=replace(config.data, stop_after=task + 1)))
    here = {**run.record.environment}
    findings: list[Finding] = []
    if task and not from_start:
        findings.append(_restore(run, directory, task, record))
    for event in run.events():
        if on_event is not None:
            on_event(event)
        if isinstance(event, TaskEnded):
            findings += _compared(record, run, event.task, directory, _explanation(record, here))
    if run.record.status == "diverged":
        problem = f"diverged: {run.record.message}; {_explanation(record, here)}"
        findings.append(Finding(f"task {run.position.task + 1}, retrained", problem))
    return findings


def _restore(run: Run, directory: Path, task: int, record: Record) -> Finding:
    """Restore the state at the start of the task."""
    file = directory / checkpoint.task_file(task)
    if not file.exists():
        raise UserError(
            f"{file}: the state at the start of task {task + 1} was not saved. Use --from-start to retrain tasks 1 to "
            f"{task + 1}; runs with --save.tasks all save it."
        )
    found, tensors = checkpoint.read(file)
    if not state.is_of(found, record.run_config) or Position(**found["position"]) != Position(task):
        raise UserError(f"{file}: is not this run's state at the start of task {task + 1}.")
    state.restore(run, found, tensors, str(file))
    same = digest(run.network.state_dict()) == record.weights[task - 1]
    return Finding(file.name, "" if same else f"its weights differ from the record's after task {task}.")


def _compared(record: Record, run: Run, task: int, directory: Path, explanation: str) -> list[Finding]:
    after = f"after task {task + 1}, retrained"
    findings = [_weights(record, run, task, directory, after, explanation)]
    stored, now = record.accuracy[task], run.record.accuracy[task]
    apart = max(abs(a - b) for a, b in zip(stored, now, strict=True))
    problem = f"differs by up to {apart:.2g}: the record says {stored}, retrained: {now}."
    findings.append(Finding(f"accuracy {after}", problem if apart else ""))
    losses = [[e for e in r.history if e["task"] == task] for r in (record, run.record)]
    findings.append(Finding(f"losses of task {task + 1}, retrained", _loss_difference(*losses)))
    return findings


def _weights(record: Record, run: Run, task: int, directory: Path, after: str, explanation: str) -> Finding:
    mine = run.network.state_dict()
    if digest(mine) == record.weights[task]:
        return Finding(f"weights {after}")
    theirs: dict[str, Tensor] = {}
    with suppress(UserError):  # they may not be saved
        theirs = checkpoint.section(checkpoint.after_task(directory, task + 1)[1], "network")
    how = "they differ"
    if theirs.keys() == mine.keys():
        apart = {k: (mine[k].cpu().double() - theirs[k]).abs().max().item() for k in mine if mine[k].numel()}
        worst = max(apart, key=lambda name: apart[name])
        how = f"they differ by up to {apart[worst]:.2g}, in {worst}"
    return Finding(f"weights {after}", f"{how}; {explanation}")


def _loss_difference(stored: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    if stored == now:
        return ""
    if len(stored) != len(now):
        return f"the record has {len(stored)} epochs, retrained: {len(now)}."
    apart = [abs(a["total"] - b["total"]) for a, b in zip(stored, now, strict=True)]
    first = next(i for i, (a, b) in enumerate(zip(stored, now, strict=True)) if a != b)
    return f"differ by up to {max(apart):.2g}, first in epoch {first + 1} of {len(now)}."


def _explanation(record: Record, here: dict[str, Any]) -> str:
    return explanation(record, here) or "the environment is the same, so they should be equal."
