"""Records without a training run: what the tests of tables, figures and pages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tbbn.bench.config import resolve, to_dict
from tbbn.bench.engine.record import Record
from tbbn.bench.report.groups import groups

ERRORS = {"C->C": 1, "C->P": 2, "P->C": 3, "P->P": 4}


def record(accuracy: list[list[float]], status: str = "finished", sizes: Sequence[int] = (), **settings: Any) -> Record:
    """A record with this accuracy matrix; a setting such as ``train__epochs`` is train.epochs."""
    n = len(accuracy)
    layer = {"data.tasks": max(n, 2), **{key.replace("__", "."): value for key, value in settings.items()}}
    made = Record(to_dict(resolve(("test", layer))), status=status, accuracy=accuracy)
    made.task_sizes = list(sizes) or [2] * max(n, 2)
    made.task_il, made.exemplars, made.splits = accuracy, [8] * n, [1] * n
    made.errors = [dict(ERRORS) for _ in range(n)]
    return made


def labels(records: Sequence[Record]) -> list[str]:
    return [group.label for group in groups(records)]
