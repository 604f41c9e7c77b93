"""Export runs for other programs: every number of every run in full precision, as JSON or CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tbbn.bench.engine.record import Record
from tbbn.bench.report.columns import SHORT
from tbbn.bench.report.table import csv_text
from tbbn.errors import printable

Runs = Mapping[Path, Record]  # by folder
_NAMES = (
    "directory", "label", "method", "norm", "data", "protocol", "keep", "scale", "seed", "class_order_seed", "status"
)  # fmt: skip


def runs_json(runs: Runs, metrics: Sequence[str] = ()) -> str:
    """A list with one object per run; ``accuracy``, ``task_il`` and ``calibrated`` are matrices of fractions."""
    entries = [
        {
            **_names(folder, record),
            "metrics": _metrics(record, metrics),
            "task_sizes": record.task_sizes,
            "accuracy": record.accuracy,
            "task_il": record.task_il,
            "calibrated": record.calibrated,
            "errors": record.errors,
            "seconds": record.seconds,
        }
        for folder, record in runs.items()
    ]
    return json.dumps(entries, indent=1)


def runs_csv(runs: Runs, metrics: Sequence[str] = ()) -> str:
    """One row per run: its names, metrics, seconds, and the accuracy matrix in columns a[t,i] with 1-based tasks."""
    tasks = max((len(record.accuracy) for record in runs.values()), default=0)
    places = [(t, i) for t in range(tasks) for i in range(t + 1)]
    metrics = metrics or tuple(SHORT)
    rows = []
    for folder, record in runs.items():
        names, values = _names(folder, record), _metrics(record, metrics)
        matrix = [record.accuracy[t][i] if t < len(record.accuracy) else "" for t, i in places]
        rows.append([*names.values(), *(values.get(m, "") for m in metrics), record.seconds, *matrix])
    header = [*_NAMES, *metrics, "seconds"]
    header += [f"a[{t + 1},{i + 1}]" for t, i in places]
    return csv_text([[printable(str(cell)) for cell in row] for row in (header, *rows)])


def _names(folder: Path, record: Record) -> dict[str, Any]:
    config = record.run_config
    train = (config.train.keep, config.train.scale)
    scenario = (config.data.name, config.protocol, *train, config.seed, config.data.class_order_seed)
    values = (str(folder), config.label, *config.names, *scenario, record.status)
    return dict(zip(_NAMES, values, strict=True))


def _metrics(record: Record, chosen: Sequence[str]) -> dict[str, float]:
    """The chosen metrics, in that order; all of them if none is chosen."""
    found = record.metrics
    return {m: found[m] for m in chosen if m in found} if chosen else found
