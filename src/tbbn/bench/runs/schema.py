"""Checks of every field of a ``record.json``, so that its readers can rely on them, and migrations from earlier schemas.

To rename or remove a field of a record or a setting of its config, raise the schema, add an entry to ``MIGRATIONS`` and test it
with a record of the earlier schema. A new field with a default needs none of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tbbn.bench.metrics import ERROR_TYPES

STATUSES = ("running", "finished", "interrupted", "diverged", "failed")


def _whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _each(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _triangle(value: Any, *, gaps: bool = False) -> bool:
    return isinstance(value, list) and all(
        _each(row, lambda v: _number(v) and 0 <= v <= 1) and (len(row) == t + 1 or (gaps and not row))
        for t, row in enumerate(value)
    )


def _errors(value: Any) -> bool:
    return _each(value, lambda e: isinstance(e, dict) and set(e) <= set(ERROR_TYPES) and all(map(_whole, e.values())))


def _defaults(value: Any) -> bool:
    return isinstance(value, dict) and all(k in ("method", "norm") and isinstance(v, dict) for k, v in value.items())


def _plugins(value: Any) -> bool:
    return _each(
        value,
        lambda v: (
            isinstance(v, dict)
            and isinstance(v.get("name"), str)
            and _each(v.get("brings"), lambda text: isinstance(text, str))
            and _defaults(v.get("defaults", {}))
        ),
    )


_OBJECTS = "a list of objects", lambda value: _each(value, lambda v: isinstance(v, dict))
_STRINGS = "a list of strings", lambda value: _each(value, lambda v: isinstance(v, str))
_COUNTS = "a list of whole numbers from 0", lambda value: _each(value, _whole)
_MATRIX = "rows of 1, 2, 3, ... numbers from 0 to 1", _triangle

FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schema": ("a whole number from 1", lambda value: _whole(value, 1)),
    "status": (f"one of {', '.join(STATUSES)}", lambda value: isinstance(value, str) and value in STATUSES),
    "message": ("a string", lambda value: isinstance(value, str)),
    "environment": ("an object", lambda value: isinstance(value, dict)),
    "data": ("an object", lambda value: isinstance(value, dict)),
    "class_order": _COUNTS,
    "task_sizes": ("a list of whole numbers from 1", lambda value: _each(value, lambda v: _whole(v, 1))),
    "accuracy": _MATRIX,
    "task_il": _MATRIX,
    "calibrated": ("rows of 1, 2, 3, ... numbers from 0 to 1, or empty ones", partial(_triangle, gaps=True)),
    "errors": (f"a list of counts of {', '.join(ERROR_TYPES)}", _errors),
    "exemplars": _COUNTS,
    "splits": _COUNTS,
    "history": _OBJECTS,
    "skipped": _STRINGS,
    "weights": _STRINGS,
    "plugins": ("a list of objects with a name and what it brings", _plugins),
    "resumed": _OBJECTS,
    "seconds": ("a number", lambda value: _number(value) and 0 <= value < math.inf),
}
# One entry per task learnt.
_BY_TASK = ("accuracy", "task_il", "calibrated", "errors", "exemplars", "splits", "weights")


def _to_2(tree: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 had no hashes of the weights and no checksums of its files."""
    return {**tree, "weights": [""] * len(tree.get("accuracy", ()))}


def _to_3(tree: dict[str, Any]) -> dict[str, Any]:
    """Up to schema 2, forgetting as in the paper's tables was `forgetting_history`, and as in its text `forgetting`."""
    names = {"forgetting": "forgetting_text", "forgetting_history": "forgetting"}
    metrics = tree.get("metrics")
    if isinstance(metrics, dict):
        tree = {**tree, "metrics": {names.get(name, name): value for name, value in metrics.items()}}
    return tree


def _to_4(tree: dict[str, Any]) -> dict[str, Any]:
    """Up to schema 3, evaluation did not calibrate."""
    return {**tree, "calibrated": [[] for _ in tree.get("accuracy", ())]}


# From this schema to the next.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _to_2, 2: _to_3, 3: _to_4}


def migrate(tree: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of a record from any supported schema to the newest one."""
    while (version := tree["schema"]) in MIGRATIONS:
        tree = {**MIGRATIONS[version](tree), "schema": version + 1}
    return tree


def problem(tree: Mapping[str, Any]) -> str:
    """The first problem with the fields of a record; empty if there is none."""
    for name, (expected, fits) in FIELDS.items():
        if name in tree and not fits(tree[name]):
            return f"{name} must be {expected}, got {tree[name]!r:.60}."
    n_learnt = len(tree.get("accuracy", ()))
    if n_learnt > len(tree.get("task_sizes", ())):
        return f"accuracy has {n_learnt} rows but task_sizes {len(tree.get('task_sizes', ()))} entries."
    for name in _BY_TASK:
        if len(tree.get(name, ())) != n_learnt:
            return f"{name} must have one entry for each of the {n_learnt} tasks learnt, has {len(tree.get(name, ()))}."
    return ""
