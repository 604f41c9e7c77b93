"""Save the state of a run to a checkpoint, and restore it."""

from __future__ import annotations

from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tbbn.bench.config import PLACE, RunConfig, flatten, parse_toml, resolve, to_dict, to_toml, without_place
from tbbn.bench.data.batches import BatchSpec
from tbbn.bench.engine.events import Position
from tbbn.bench.engine.loop import BestEpoch, Run
from tbbn.bench.engine.phase import STATE, optimizer_state
from tbbn.bench.engine.record import Record
from tbbn.bench.engine.step import SavedTotals
from tbbn.bench.engine.task import PhaseRows
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import record_from
from tbbn.errors import UserError

SMALL = 8 * 2**20  # bytes; with save.tasks = "small", networks up to this size keep the state at each task's start


def save(run: Run, directory: Path) -> None:
    """Write a checkpoint; call it between two steps."""
    keep = ""
    if _is_between_tasks(run) and run.position.task < len(run.scenario.tasks) and _keeps_tasks(run):
        keep = checkpoint.task_file(run.position.task)
    checkpoint.save(directory, _values(run), _tensors(run), keep)


def encoded(run: Run) -> bytes:
    """The state of a run as the content of a checkpoint file."""
    return checkpoint.encode(_values(run), _tensors(run))


def _is_between_tasks(run: Run) -> bool:
    return run.position == Position(run.position.task)


def _keeps_tasks(run: Run) -> bool:
    """Whether to keep the state at each task's start, for ``tbbn verify --retrain-task``."""
    if run.config.save.tasks == "small":
        return sum(tensor.nbytes for tensor in run.network.state_dict().values()) <= SMALL
    return run.config.save.tasks == "all"


def _tensors(run: Run) -> dict[str, Tensor]:
    tensors = checkpoint.join("network", run.network.state_dict()) | checkpoint.join("memory", run.memory.state_dict())
    tensors |= checkpoint.join("predictions", run.record.predictions)
    if run.previous is not None and not _is_between_tasks(run):  # between tasks the teacher equals the network
        tensors |= checkpoint.join("previous", run.previous.state_dict())
    if run.best is not None:
        tensors |= checkpoint.join("best", run.best.weights)
    if run.rows is not None:
        tensors |= {"rows.current": run.rows.current, "rows.memory": run.rows.memory}
    if run.optimizer is not None:
        tensors |= optimizer_state(run.optimizer)
    return tensors | {f"totals.{i}": step.totals for i, step in enumerate(run.steps.values())}


def _values(run: Run) -> dict[str, Any]:
    rows = run.rows
    return {
        "config": to_toml(run.config),
        "position": asdict(run.position),
        "record": run.record.tree(),
        "task_sizes": run.network.task_sizes,
        "previous_task_sizes": None if run.previous is None else run.previous.task_sizes,
        "best": None if run.best is None else run.best.loss,
        "rows": None if rows is None else {"kind": rows.kind, "ratio": rows.ratio, "has_layout": rows.has_layout},
        "totals": [
            {"spec": asdict(spec), "names": step.names, "count": step.count, "finite": int(step.finite_steps)}
            for spec, step in run.steps.items()
        ],
    }


def load(run: Run, directory: Path) -> None:
    """Resume from the checkpoint in a locked folder, if there is one. Raises if it has another config."""
    found = checkpoint.load(directory, repair=True)
    if found is None:
        return
    if not is_of(found[0], run.config):
        raise UserError(f"{directory}: holds a run with another config; use another folder, or --overwrite.")
    restore(run, *found, str(directory))


def is_of(values: dict[str, Any], config: RunConfig) -> bool:
    """Whether a state's config is this one, except for the place of the data. Older versions may have written it differently."""
    text = values.get("config")
    try:
        saved = resolve(("checkpoint", parse_toml(text))) if isinstance(text, str) else None
        return saved is not None and without_place(to_dict(saved)) == without_place(to_dict(config))
    except (ValueError, RecursionError):
        return False


def restore(run: Run, values: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
    """Restore a run to a state read from a checkpoint; ``where`` is the checkpoint's name for errors."""
    try:
        _restore(run, values, tensors, where)
    except UserError:
        raise
    except Exception as error:  # a file with a valid checksum may still contain anything
        reason = (str(error).strip().splitlines() or [""])[0][:120]
        raise UserError(
            f"{where}: its checkpoint does not fit this run ({type(error).__name__}: {reason}); delete it to start again."
        ) from error


def _restore(run: Run, values: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
    run.position = Position(**values["position"])
    here, saved = run.record.environment, record_from(values["record"], where)
    require_same_data(saved, run.record, where)  # before the rows are checked, because other data may have fewer
    _check(run, tensors)
    run.record = saved
    _move_data(run.record, run.config)
    if here not in (run.record.environment, *run.record.resumed):
        run.record.resumed.append(here)
    run.record.predictions = checkpoint.section(tensors, "predictions")
    run.network.restore(_on(run.device, tensors, "network"), values["task_sizes"])
    if values["previous_task_sizes"] is not None:
        previous = run.make_network()
        weights = "network" if _is_between_tasks(run) else "previous"
        previous.restore(_on(run.device, tensors, weights), values["previous_task_sizes"])
        run.previous = previous.teacher()
    run.memory.load_state_dict(checkpoint.section(tensors, "memory"))
    if values["best"] is not None:
        run.best = BestEpoch(values["best"], _on(run.device, tensors, "best"))
    if (rows := values["rows"]) is not None:
        ratio = (rows["ratio"][0], rows["ratio"][1])
        run.rows = PhaseRows(rows["kind"], tensors["rows.current"], tensors["rows.memory"], ratio, rows["has_layout"])
    run.restored_optimizer = {name: _on(run.device, tensors, name) for name in STATE}
    run.restored_totals = {
        BatchSpec(**entry["spec"]): SavedTotals(
            entry["names"], tensors[f"totals.{i}"].to(run.device), entry["count"], entry["finite"]
        )
        for i, entry in enumerate(values["totals"])
    }


def _move_data(record: Record, config: RunConfig) -> None:
    """Note in the record where its data is now. Its other settings stay as written: an earlier version may have had fewer."""
    now = flatten(to_dict(config))
    data = {**record.config.get("data", {}), **{key.removeprefix("data."): now[key] for key in PLACE}}
    record.config = {**record.config, "data": data}


def require_same_data(saved: Record, here: Record, where: str) -> None:
    """Raise if a run was trained on other data than the data here, for example because ``data.root`` is wrong."""
    one, other = ({**r.data, "class_order": r.class_order, "skipped": r.skipped} for r in (saved, here))
    changed = next((key for key in one if one[key] != other.get(key)), "")
    if changed:
        pairs = zip_longest(one[changed], other.get(changed, ()))
        was, now = next((a, b) for a, b in pairs if a != b)
        data = here.run_config.data
        raise UserError(
            f"{where}: was trained on different data than {data.name} in {data.root} ({changed}: {was!r:.40} then, {now!r:.40} "
            "now); set --data.root to the folder of the original data."
        )


def _check(run: Run, tensors: dict[str, Tensor]) -> None:
    """Raise if the position or the rows do not exist in this run."""
    position = tuple(asdict(run.position).values())
    if not all(type(n) is int and n >= 0 for n in position) or run.position.task > len(run.scenario.tasks):
        raise ValueError(f"there is no position {position}")
    for name in ("memory.index", "rows.current", "rows.memory"):
        rows = tensors.get(name, torch.empty(0)).tolist()
        if rows and not 0 <= min(rows) <= max(rows) < len(run.source.train.labels):
            n, root = len(run.source.train.labels), run.config.data.root
            raise ValueError(f"{name} has rows outside the data set, of which there are {n} in {root}")


def _on(device: torch.device, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in checkpoint.section(tensors, prefix).items()}
