"""A run to a checkpoint and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tbbn.bench.config import to_toml
from tbbn.bench.data.batches import BatchSpec
from tbbn.bench.engine.events import Position
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.task import PhaseRows
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import record_from, save_record
from tbbn.errors import UserError

SMALL = 8 * 2**20  # bytes of a network whose state at each task's start is kept unless told otherwise


def save(run: Run, directory: Path) -> None:
    """Write everything the run is, between two steps."""
    # Between two tasks the teacher is the network, and there is no need to write it twice.
    between = run.position == Position(run.position.task)
    tensors = checkpoint.join("network", run.network.state_dict()) | checkpoint.join("memory", run.memory.state_dict())
    tensors |= checkpoint.join("predictions", run.record.predictions)
    if run.previous is not None and not between:
        tensors |= checkpoint.join("previous", run.previous.state_dict())
    if run.best is not None:
        tensors |= checkpoint.join("best", run.best[1])
    if run.rows is not None:
        tensors |= {"rows.current": run.rows.current, "rows.memory": run.rows.memory}
    if run.optimizer is not None:
        moved = [run.optimizer.state[p].get("momentum_buffer") for p in run.optimizer.param_groups[0]["params"]]
        tensors |= {f"momentum.{i}": m for i, m in enumerate(moved) if m is not None}
    tensors |= {f"totals.{i}": step.totals for i, step in enumerate(run.steps.values())}
    state = {
        "config": to_toml(run.config),
        "position": asdict(run.position),
        "record": run.record.tree(),
        "task_sizes": run.network.task_sizes,
        "previous_task_sizes": None if run.previous is None else run.previous.task_sizes,
        "best": None if run.best is None else run.best[0],
        "rows": None
        if run.rows is None
        else {"kind": run.rows.kind, "ratio": run.rows.ratio, "has_layout": run.rows.has_layout},
        "totals": [
            {"spec": asdict(spec), "names": step.names, "count": step.count, "finite": int(step.finite_steps)}
            for spec, step in run.steps.items()
        ],
    }
    kept = between and run.position.task < len(run.scenario.tasks) and keeps_tasks(run)
    checkpoint.save(directory, state, tensors, checkpoint.task_file(run.position.task) if kept else "")
    save_record(run.record, directory)


def keeps_tasks(run: Run) -> bool:
    """Whether the state at each task's start is kept, so that ``tbbn verify --retrain-task`` can begin there."""
    if run.config.save.tasks == "small":
        return sum(t.nbytes for t in run.network.state_dict().values()) <= SMALL
    return run.config.save.tasks == "all"


def load(run: Run, directory: Path) -> bool:
    """Take up the state saved in a directory, if there is one; a run of another config there is an error."""
    found = checkpoint.load(directory)
    if found is None:
        return False
    if found[0].get("config") != to_toml(run.config):
        raise UserError(f"{directory}: holds a run of another config; use another directory, or --overwrite.")
    restore(run, *found, str(directory))
    return True


def restore(run: Run, state: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
    """Take up a state as it was read; ``where`` names it in errors."""
    try:
        _restore(run, state, tensors, where)
    except UserError:
        raise
    except Exception as error:  # what is whole by its checksum may still be anyone's
        reason = (str(error).strip().splitlines() or [""])[0][:120]
        raise UserError(
            f"{where}: its checkpoint does not fit this run ({type(error).__name__}: {reason}); delete it to begin again."
        ) from error


def _restore(run: Run, state: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
    run.position = Position(**state["position"])
    at = asdict(run.position).values()
    if not all(type(n) is int and n >= 0 for n in at) or run.position.task > len(run.scenario.tasks):
        raise ValueError(f"there is no position {tuple(at)}")
    for name in ("memory.index", "rows.current", "rows.memory"):
        rows = tensors.get(name, torch.empty(0)).tolist()
        if rows and not 0 <= min(rows) <= max(rows) < len(run.source.train.labels):
            raise ValueError(f"{name} leads out of the data set")
    here = run.record.environment
    run.record = record_from(state["record"], where)
    if here not in (run.record.environment, *run.record.resumed):
        run.record.resumed.append(here)
    run.record.predictions = checkpoint.split(tensors, "predictions")
    run.network.restore(_on(run.device, tensors, "network"), state["task_sizes"])
    if state["previous_task_sizes"] is not None:
        previous = run.make_network()
        weights = "network" if run.position == Position(run.position.task) else "previous"
        previous.restore(_on(run.device, tensors, weights), state["previous_task_sizes"])
        run.previous = previous.teacher()
    run.memory.load_state_dict(checkpoint.split(tensors, "memory"))
    if state["best"] is not None:
        run.best = state["best"], _on(run.device, tensors, "best")
    if state["rows"] is not None:
        rows = state["rows"]
        current, memory = tensors["rows.current"], tensors["rows.memory"]
        run.rows = PhaseRows(rows["kind"], current, memory, (rows["ratio"][0], rows["ratio"][1]), rows["has_layout"])
    run.restored_momentum = _on(run.device, tensors, "momentum")
    run.restored_totals = {
        BatchSpec(**entry["spec"]): (
            entry["names"],
            tensors[f"totals.{i}"].to(run.device),
            entry["count"],
            entry["finite"],
        )
        for i, entry in enumerate(state["totals"])
    }


def _on(device: torch.device, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in checkpoint.split(tensors, prefix).items()}
