"""What a ``record.json`` must look like, field by field: whoever reads it may then rely on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tbbn.bench.metrics import ERROR_TYPES

STATUSES = ("running", "finished", "interrupted", "diverged", "failed")


def _whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _each(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _triangle(value: Any) -> bool:
    return isinstance(value, list) and all(
        _each(row, lambda v: _number(v) and 0 <= v <= 1) and len(row) == t + 1 for t, row in enumerate(value)
    )


def _errors(value: Any) -> bool:
    return _each(value, lambda e: isinstance(e, dict) and set(e) <= set(ERROR_TYPES) and all(map(_whole, e.values())))


def _plugins(value: Any) -> bool:
    return _each(
        value,
        lambda v: (
            isinstance(v, dict)
            and isinstance(v.get("name"), str)
            and _each(v.get("brings"), lambda text: isinstance(text, str))
        ),
    )


_TABLES = "a list of tables", lambda value: _each(value, lambda v: isinstance(v, dict))
_TEXTS = "a list of texts", lambda value: _each(value, lambda v: isinstance(v, str))
_COUNTS = "a list of whole numbers, none negative", lambda value: _each(value, _whole)
_MATRIX = "rows of 1, 2, 3, ... shares of 1", _triangle

FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schema": ("a whole number from 1 on", lambda value: _whole(value, 1)),
    "status": (f"one of {', '.join(STATUSES)}", lambda value: isinstance(value, str) and value in STATUSES),
    "message": ("text", lambda value: isinstance(value, str)),
    "environment": ("a table", lambda value: isinstance(value, dict)),
    "data": ("a table", lambda value: isinstance(value, dict)),
    "class_order": _COUNTS,
    "task_sizes": ("a list of numbers of classes", lambda value: _each(value, lambda v: _whole(v, 1))),
    "accuracy": _MATRIX,
    "task_il": _MATRIX,
    "errors": (f"a list of the numbers of {', '.join(ERROR_TYPES)}", _errors),
    "exemplars": _COUNTS,
    "splits": _COUNTS,
    "history": _TABLES,
    "skipped": _TEXTS,
    "weights": _TEXTS,
    "plugins": ("a list of tables with a name and what it brings", _plugins),
    "resumed": _TABLES,
    "seconds": ("a number", lambda value: _number(value) and 0 <= value < math.inf),
}
_BY_TASK = ("accuracy", "task_il", "errors", "exemplars", "splits", "weights")  # an entry for each task learnt


def problem(tree: Mapping[str, Any]) -> str:
    """What is wrong with the fields of a record; nothing, if all that are there are as they must be."""
    for name, (expected, fits) in FIELDS.items():
        if name in tree and not fits(tree[name]):
            return f"{name} must be {expected}, got {tree[name]!r:.60}."
    n_learnt = len(tree.get("accuracy", ()))
    if n_learnt > len(tree.get("task_sizes", ())):
        return f"accuracy has {n_learnt} rows but task_sizes {len(tree.get('task_sizes', ()))} entries."
    for name in _BY_TASK:
        # What an older version did not write is empty.
        if len(tree.get(name, ())) not in (0, n_learnt):
            return f"{name} must have an entry for each of the {n_learnt} tasks learnt, has {len(tree[name])}."
    return ""
