"""The cost of runs: time, epochs, and the splits and exemplars that it depends on."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tbbn.bench.engine.forecast import forecast
from tbbn.bench.engine.record import Record
from tbbn.bench.engine.setup import has_splits
from tbbn.bench.report.groups import Group, blocks
from tbbn.bench.report.table import Table
from tbbn.errors import UserError


def cost_table(groups: Sequence[Group]) -> Table:
    # The norm does not change the number of steps.
    steps_of = {
        block[0].apart_from_norm: _steps([run for group in block for run in group.finished][:1])
        for block in blocks(groups)
    }
    rows = []
    for group in groups:
        if not (finished := group.finished):
            continue
        seconds = statistics.fmean(record.seconds for record in finished)
        epochs = statistics.fmean(len(record.history) for record in finished)
        steps = steps_of[group.apart_from_norm]
        devices = dict.fromkeys(_device(record.environment) for record in finished)
        rows.append(
            (
                group.label,
                duration(seconds),
                f"{epochs:.0f}",
                f"{seconds / epochs:.2f}" if epochs else "-",
                f"{1000 * seconds / steps:.2f}" if steps else "-",
                str(max(finished[0].splits, default=1)) if _norm_splits(group) else "-",
                str(max(record.exemplars[-1] for record in finished)),
                ", ".join(devices),
            )
        )
    header = ("method + norm", "time per run", "epochs", "s/epoch", "ms/step", "largest r*", "exemplars", "device")
    notes = (
        "Time for training, evaluation and exemplar selection, mean over finished runs. Runs that shared a device in lanes took "
        "longer each. ms/step is shown if the data set is present and the method has a single phase.",
        "Memory is not recorded, because the peak of a process covers all its lanes. On a GPU, tbbn speed measures the peak of a "
        "step for each norm, relative to batch norm.",
    )
    return Table(header, tuple(rows), notes, "l" + "r" * 6 + "l", "Cost per run.")


def _norm_splits(group: Group) -> bool:
    """Whether the norm has splits: records have the paper's r* for every norm."""
    try:
        return has_splits(group.config)
    except (UserError, OSError):  # a plugin is missing here
        return False


def _steps(runs: Sequence[Record]) -> int:
    """The number of steps of the first of these runs; 0 if it cannot be known."""
    if not runs:
        return 0
    try:
        found = forecast(runs[0].run_config)
    except (UserError, OSError):  # its data set or a plugin is missing here
        return 0
    # The forecast counts only the main phase. Its note is not empty if it had to estimate.
    as_forecast = sum(task.epochs for task in found.tasks) == len(runs[0].history)
    return found.all_steps if as_forecast and not found.note else 0


def duration(seconds: float) -> str:
    """
    >>> duration(7.25), duration(935), duration(7260)
    ('7.2 s', '15 min 35 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _device(environment: Mapping[str, Any]) -> str:
    names = ("cpu", "machine") if environment.get("device") == "cpu" else ("gpu", "machine")
    return str(next((environment[name] for name in names if name in environment), "-"))
