"""Tables of the settings and environments in which runs differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tbbn.bench.config import flatten, to_dict
from tbbn.bench.engine.plugins import describe_plugins
from tbbn.bench.engine.record import Record
from tbbn.bench.report.groups import WHERE, Group, blocks
from tbbn.bench.report.table import Table

_NOT_SHOWN = ("seed", "data.class_order_seed", *WHERE)


def differences_table(groups: Sequence[Group]) -> Table:
    """Settings that differ between runs: each value, and the methods and protocols that have it."""
    trees = _settings(groups)
    rows = []
    for name in sorted({name for tree in trees.values() for name in tree}):
        values = _by_value((setup, tree[name]) for setup, tree in trees.items())
        rows += _value_rows(name, values, len(trees)) if len(values) > 1 else []
    return Table(("setting", "value", "runs"), tuple(rows), align="lll", caption="Settings that differ between runs.")


def common_table(groups: Sequence[Group]) -> Table:
    """Settings that all runs share."""
    trees = list(_settings(groups).values())
    shared = [(k, str(v)) for k, v in sorted(trees[0].items()) if all(t[k] == v for t in trees)]
    return Table(("setting", "value"), tuple(shared), align="ll", caption="Settings that all runs share.")


def environment_table(records: Sequence[Record]) -> Table:
    """Versions and devices, and the number of runs with each."""
    rows = []
    facts = [record.environment | _plugins(record) for record in records]
    for name in dict.fromkeys(name for fact in facts for name in fact):
        values = _by_value((str(i), fact.get(name, "-")) for i, fact in enumerate(facts))
        rows += [(name, value, str(len(members))) for value, members in values.items()]
    return Table(("what", "value", "runs"), tuple(rows), align="llr", caption="Environment of the runs.")


def _settings(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """The settings of each block of groups that differ only in their norm, by the label without the norm."""
    trees = {}
    for first, *_ in blocks(groups):
        tree = flatten(to_dict(first.config))
        # Leave out method and norm, which are already in the labels.
        trees[first.setup] = {
            k: v for k, v in tree.items() if k not in _NOT_SHOWN and not k.startswith(("method.", "norm."))
        }
    return trees


def _plugins(record: Record) -> dict[str, str]:
    lines = describe_plugins(record.plugins)
    return {"plugins": "; ".join(lines)} if lines else {}


def _by_value(entries: Iterable[tuple[str, Any]]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for label, value in entries:
        values.setdefault(str(value), []).append(label)
    return values


def _value_rows(name: str, values: Mapping[str, list[str]], total: int) -> list[tuple[str, ...]]:
    """One row per value, rare ones first. Groups with the value of the majority are not listed."""
    rows: list[tuple[str, ...]] = []
    for value, labels in sorted(values.items(), key=lambda item: len(item[1])):
        many = len(labels) > 4 and 2 * len(labels) > total
        rows.append(("" if rows else name, value, f"the other {len(labels)}" if many else ", ".join(labels)))
    return rows
