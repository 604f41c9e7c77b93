"""Is a task's training repeatable? Train it again from the state at its start and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tbbn.bench.config import RunConfig, to_toml
from tbbn.bench.engine.events import Event, Position, TaskEnded
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.plugins import check_unchanged, require_plugins
from tbbn.bench.engine.record import Record, digest
from tbbn.bench.engine.setup import device_of
from tbbn.bench.runs import checkpoint, state
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.verify import Finding
from tbbn.errors import UserError

# What sums of floating-point numbers depend on.
ENVIRONMENT = ("device", "gpu", "torch", "cuda", "cudnn", "machine", "threads", "tbbn")


def retrain(
    directory: Path, task: int, *, from_start: bool = False, on_event: Callable[[Event], None] | None = None
) -> list[Finding]:
    """Train a task (counted from 0) again, or all tasks up to it, and compare it with what the run did; writes nothing."""
    record = load_record(directory)
    n = len(record.accuracy)
    if not 0 <= task < n:
        learnt = f"1 to {n}" if n else "none: no task has been learnt"
        raise UserError(f"{directory}: tasks that can be retrained are {learnt}; got {task + 1}.")
    require_plugins(record.run_config, record.plugins, str(directory))
    check_unchanged(record.run_config, record.plugins, str(directory))
    job = Run(_config(record, task))
    here = {**job.record.environment}
    findings: list[Finding] = []
    if task and not from_start:
        findings.append(_begin(job, directory, task, record))
    for event in job.events():
        if on_event is not None:
            on_event(event)
        if isinstance(event, TaskEnded):
            findings += _compared(record, job, event.task, directory, _reason(record, here))
    if job.record.status == "diverged":
        problem = f"it diverged: {job.record.message}; {_reason(record, here)}"
        findings.append(Finding(f"task {job.position.task + 1}, retrained", problem))
    return findings


def _config(record: Record, task: int) -> RunConfig:
    """The run's config as far as the task, with its number of threads, and a device that is here."""
    config = record.run_config
    threads = config.threads or int(record.environment.get("threads", 0))
    config = replace(config, threads=threads, data=replace(config.data, download=False, stop_after=task + 1))
    try:
        device_of(config)
    except UserError:
        return replace(config, device="auto")
    return config


def _begin(job: Run, directory: Path, task: int, record: Record) -> Finding:
    """Put the run at a task's start."""
    file = directory / checkpoint.task_file(task)
    if not file.exists():
        raise UserError(
            f"{file}: the state at the start of task {task + 1} was not kept; --from-start trains tasks 1 to {task + 1} again, "
            "and a run with --save.tasks all keeps it. Task 1 needs no file."
        )
    found, tensors = checkpoint.read(file)
    if found["config"] != to_toml(record.run_config) or Position(**found["position"]) != Position(task):
        raise UserError(f"{file}: is not this run's state at the start of task {task + 1}.")
    state.restore(job, found, tensors, str(file))
    same = not record.weights or digest(job.network.state_dict()) == record.weights[task - 1]
    return Finding(file.name, "" if same else f"its weights are not those the record has after task {task}.")


def _compared(record: Record, job: Run, task: int, directory: Path, reason: str) -> list[Finding]:
    after = f"after task {task + 1}, retrained"
    findings = [_weights(record, job, task, directory, after, reason)]
    stored, now = record.accuracy[task], job.record.accuracy[task]
    apart = max(abs(a - b) for a, b in zip(stored, now, strict=True))
    problem = f"up to {apart:.2g} apart: the record has {stored}, retrained it is {now}."
    findings.append(Finding(f"accuracy {after}", problem if apart else ""))
    losses = [[e for e in r.history if e["task"] == task] for r in (record, job.record)]
    findings.append(Finding(f"losses of task {task + 1}, retrained", _losses_apart(*losses)))
    return findings


def _weights(record: Record, job: Run, task: int, directory: Path, after: str, reason: str) -> Finding:
    if task >= len(record.weights):
        return Finding(f"weights {after} (the record has no checksum of them)")
    mine = job.network.state_dict()
    if digest(mine) == record.weights[task]:
        return Finding(f"weights {after}")
    theirs = _stored_weights(directory, task)
    how = "they differ"
    if theirs is not None and theirs.keys() == mine.keys():
        apart = {k: (mine[k].cpu().double() - theirs[k].double()).abs().max().item() for k in mine if mine[k].numel()}
        worst = max(apart, key=lambda name: apart[name])
        how = f"they differ by up to {apart[worst]:.2g}, in {worst}"
    return Finding(f"weights {after}", f"{how}; {reason}")


def _stored_weights(directory: Path, task: int) -> dict[str, Tensor] | None:
    """The run's own weights after a task, where a file still has them."""
    for name in (checkpoint.task_file(task + 1), checkpoint.NEWEST, checkpoint.BEFORE):
        try:
            found, tensors = checkpoint.read(directory / name)
        except UserError:
            continue
        if Position(**found["position"]) == Position(task + 1):
            return checkpoint.split(tensors, "network")
    return None


def _losses_apart(stored: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    if stored == now:
        return ""
    if len(stored) != len(now):
        return f"the record has {len(stored)} epochs, retrained there are {len(now)}."
    apart = [abs(a["total"] - b["total"]) for a, b in zip(stored, now, strict=True)]
    first = next(i for i, (a, b) in enumerate(zip(stored, now, strict=True)) if a != b)
    return f"up to {max(apart):.2g} apart, the first in epoch {first + 1} of {len(now)}."


def _reason(record: Record, here: dict[str, Any]) -> str:
    """What may explain a difference."""
    there = record.environment
    changed = [f"{k} was {there.get(k)}, is {here.get(k)}" for k in ENVIRONMENT if there.get(k) != here.get(k)]
    if changed:
        return f"equality is promised on one device and torch version alone, and {', '.join(changed)}."
    if record.resumed:
        return "the run was continued in another environment, which may explain it."
    return "device and torch version are those of the run, so they should not."
