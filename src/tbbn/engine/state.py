"""A run to a checkpoint and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tbbn.config import to_toml
from tbbn.engine import checkpoint
from tbbn.engine.events import Position
from tbbn.engine.stage import Rows
from tbbn.engine.step import Shape, eager
from tbbn.errors import UserError
from tbbn.record import record_from

if TYPE_CHECKING:
    from tbbn.engine.run import Run


def save(run: Run, directory: Path) -> None:
    """Write everything the run is, between two steps."""
    tensors = checkpoint.join("network", run.network.state_dict()) | checkpoint.join("memory", run.memory.state_dict())
    tensors |= checkpoint.join("predictions", run.record.predictions)
    if run.previous is not None:
        tensors |= checkpoint.join("previous", run.previous.state_dict())
    if run.best is not None:
        tensors |= checkpoint.join("best", run.best[1])
    if run.rows is not None:
        tensors |= {"rows.current": run.rows.current, "rows.memory": run.rows.memory}
    if run.optimizer is not None:
        moved = [run.optimizer.state[p].get("momentum_buffer") for p in run.optimizer.param_groups[0]["params"]]
        tensors |= {f"momentum.{i}": m for i, m in enumerate(moved) if m is not None}
    totals = {shape: eager(step) for shape, step in run.steps.items()}
    tensors |= {f"totals.{i}": step.totals for i, step in enumerate(totals.values())}
    state = {
        "config": to_toml(run.config),
        "position": asdict(run.position),
        "record": json.loads(run.record.to_json()),
        "task_sizes": run.network.task_sizes,
        "previous_task_sizes": None if run.previous is None else run.previous.task_sizes,
        "best": None if run.best is None else run.best[0],
        "rows": None
        if run.rows is None
        else {"kind": run.rows.kind, "ratio": run.rows.ratio, "layout": run.rows.layout},
        "totals": [
            {"shape": asdict(shape), "names": step.names, "count": step.count} for shape, step in totals.items()
        ],
    }
    checkpoint.save(directory, state, tensors)
    run.record.save(directory)


def load(run: Run, directory: Path) -> bool:
    """Take up the state saved in a directory, if there is one; a run of another config there is an error."""
    found = checkpoint.load(directory)
    if found is None:
        return False
    state, tensors = found
    if state["config"] != to_toml(run.config):
        raise UserError(f"{directory}: holds a run of another config; use another directory, or --overwrite.")
    run.position = Position(**state["position"])
    run.record = record_from(state["record"], str(directory))
    run.record.predictions = checkpoint.split(tensors, "predictions")
    run.network.restore(_on(run.device, tensors, "network"), state["task_sizes"])
    if state["previous_task_sizes"] is not None:
        previous = run.make_network()
        previous.restore(_on(run.device, tensors, "previous"), state["previous_task_sizes"])
        run.previous = previous.teacher()
    run.memory.load_state_dict(checkpoint.split(tensors, "memory"))
    if state["best"] is not None:
        run.best = state["best"], _on(run.device, tensors, "best")
    if state["rows"] is not None:
        rows = state["rows"]
        current, memory = tensors["rows.current"], tensors["rows.memory"]
        run.rows = Rows(rows["kind"], current, memory, (rows["ratio"][0], rows["ratio"][1]), rows["layout"])
    run.momentum = _on(run.device, tensors, "momentum")
    run.totals = {
        Shape(**entry["shape"]): (entry["names"], tensors[f"totals.{i}"].to(run.device), entry["count"])
        for i, entry in enumerate(state["totals"])
    }
    return True


def _on(device: torch.device, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in checkpoint.split(tensors, prefix).items()}
