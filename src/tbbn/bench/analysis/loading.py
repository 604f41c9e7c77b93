"""Load a saved run as it was after one of its tasks: network, data and scenario, on this machine's device."""

from __future__ import annotations

from pathlib import Path

from tbbn.bench.engine.events import Position
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.plugins import require_plugins
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.crosscheck import same_place
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.state import require_same_data
from tbbn.errors import UserError


def run_after(folder: str | Path, task: int | None = None, root: str | None = None) -> Run:
    """The run with its network after ``task`` (0-based; default: the last one learnt), in eval mode. Downloads nothing.

    ``root`` is the folder of the data sets, if they have moved since the run.
    """
    directory = Path(folder)
    record = load_record(directory)
    require_plugins(record.run_config, record.plugins, str(directory))
    wanted = len(record.accuracy) - 1 if task is None else task
    if not 0 <= wanted < len(record.accuracy):
        raise UserError(
            f"{directory}: has learnt {len(record.accuracy)} tasks; there is no task {wanted + 1} to look at."
        )
    values, tensors = checkpoint.after_task(directory, wanted + 1)
    run = Run(same_place(record, root))
    require_same_data(record, run.record, str(directory))
    weights = {key: tensor.to(run.device) for key, tensor in checkpoint.section(tensors, "network").items()}
    run.network.restore(weights, values["task_sizes"])
    run.network.eval()
    run.memory.load_state_dict(checkpoint.section(tensors, "memory"))
    run.position, run.record = Position(wanted + 1), record
    return run
