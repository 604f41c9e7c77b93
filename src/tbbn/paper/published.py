"""The paper's tables as data (``published.toml``), and our runs beside them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import sqrt
from pathlib import Path
from typing import Any

from tbbn.bench.config import RunConfig, Values, flatten, read_toml, resolve, to_dict
from tbbn.bench.engine.record import Record
from tbbn.bench.metrics import FORMULAS
from tbbn.bench.report.groups import WHERE
from tbbn.bench.report.table import Table
from tbbn.bench.runs.recipe import Axes, Layer, parse_choice, read_recipe
from tbbn.errors import UserError, unknown_name
from tbbn.paper import find_recipe

METRICS = {
    "A_f": "final_accuracy",
    "A_a": "average_accuracy",
    "F": "forgetting_history",
    "A_l": "learning_accuracy",
    "A_f^w": "weighted_final_accuracy",
    "A_a^w": "weighted_average_accuracy",
    "A_f task-IL": "task_il_final_accuracy",
}
# Settings that make a run the one of a table's row. The others may differ, and the table says so.
_IDENTITY = (
    "protocol", "backbone", "method.", "norm.", "data.name", "data.tasks", "data.base_classes", "data.online",
    "train.epochs", "train.keep",
)  # fmt: skip
_OURS = " (ours)"  # a row that the paper does not have
_ALLOWED = ("seed", "plugins", *WHERE)  # settings in which runs may differ from the recipe


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper for one data set and network, and the recipe that repeats it."""

    name: str
    data: str
    title: str
    columns: tuple[str, ...]
    rows: dict[tuple[str, str], tuple[float, ...]]  # by method and norm
    notes: tuple[str, ...] = ()
    backbone: str = ""

    @property
    def recipe(self) -> str:
        return f"{self.name}-{self.data}"

    def layers(self) -> tuple[list[Layer], Axes]:
        """The settings and the axes of the runs that repeat the table."""
        path = find_recipe(self.recipe)
        values, axes = read_recipe(path)
        return [(str(path), values), (self.title, {"backbone": self.backbone} if self.backbone else {})], axes

    def impossible(self) -> Iterator[str]:
        """Rows whose numbers contradict each other: under both definitions F is at least A_l - A_f."""
        if {"A_f", "F", "A_l"} <= set(self.columns):
            for (method, norm), row in self.rows.items():
                value = dict(zip(self.columns, row, strict=True))
                least = value["A_l"] - value["A_f"]
                if value["F"] < least - 0.05:
                    yield (
                        f"{method} + {norm}: the paper's F of {value['F']} cannot be: A_l - A_f is {least:.2f}, and F is "
                        "never smaller."
                    )


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    path = Path(str(resources.files(__package__))) / "published.toml"
    return tuple(_table(entry) for entry in read_toml(path)["table"])


def _table(entry: dict[str, Any]) -> PaperTable:
    rows = {(method, norm): tuple(values) for method, norm, *values in entry["rows"]}
    lists = {"columns": tuple(entry["columns"]), "notes": tuple(entry.get("notes", ()))}
    return PaperTable(**{**entry, **lists, "rows": rows})


def find_tables(name: str, data: str | None = None) -> list[PaperTable]:
    """The tables of this name for one data set (default: the first the paper has), one for each network."""
    named = [table for table in paper_tables() if table.name == name]
    if not named:
        raise unknown_name("table", name, dict.fromkeys(table.name for table in paper_tables()))
    sets = list(dict.fromkeys(table.data for table in named))
    if data is not None and data not in sets:
        raise UserError(f"{name}: the paper has it for {' and '.join(sets)}, not for {data!r}.")
    return [table for table in named if table.data == (data or sets[0])]


def beside(records: Sequence[Record]) -> list[Table]:
    """The tables of the paper of which these records repeat a row, each with the rows that there are records of."""
    names = {record.run_config.data.name for record in records}
    tables = []
    for table in paper_tables():
        layers, _ = table.layers()
        if resolve(*layers).data.name in names:
            found = compare(table, records, missing=False)
            tables += [found] if any(not row[0].endswith(_OURS) for row in found.rows) else []
    return tables


def compare(
    table: PaperTable, records: Sequence[Record], settings: Values | None = None, *, missing: bool = True
) -> Table:
    """The paper's table: for each number the paper's, ours (mean ± standard deviation), and the difference.

    Ours are the finished runs of the table's recipe, with ``settings`` over it. A difference within two standard errors of our
    mean is marked "=". Rows that the paper does not have are "ours". Without ``missing``, rows without a run are left out.
    """
    layers, axes = table.layers()
    recipe = {key: _config(layers, *key) for key in _rows(table, axes)}
    wanted = {key: _config([*layers, ("settings", settings or {})], *key) for key in recipe}
    ours: dict[tuple[str, str], list[Record]] = {}
    finished = _once([record for record in records if record.status == "finished"])
    known = [(_identity(record.run_config), record) for record in finished]
    for key, config in wanted.items():
        identity = _identity(config)
        members = [record for its, record in known if its == identity]
        if members or missing:
            ours[key] = members
    cells = []
    for (method, norm), members in ours.items():
        printed = table.rows.get((method, norm))
        row = [f"{method} + {norm}" + ("" if printed else _OURS), str(len(members))]
        for number, column in enumerate(table.columns):
            row += _cells(printed[number] if printed else None, [100 * r.metrics[METRICS[column]] for r in members])
        cells.append(tuple(row))
    header = ["method + norm", "seeds"]
    for column in table.columns:
        header += [f"{column} paper", "ours", "diff."]
    shown = [f"{method} + {norm}" for method, norm in ours]
    notes = [*table.notes, *(note for note in table.impossible() if note.partition(":")[0] in shown)]
    notes += [FORMULAS[METRICS[column]] for column in table.columns]
    notes.append("ours: mean ± standard deviation over seeds. diff.: ours - paper; = means within two standard errors.")
    notes += _departures(recipe, ours)
    return Table(tuple(header), tuple(cells), tuple(notes), caption=table.title)


def _rows(table: PaperTable, axes: Axes) -> list[tuple[str, str]]:
    """The paper's rows, then those that only the recipe has."""
    recipe = [(method, norm) for method in axes.methods or ("ft",) for norm in axes.norms or ("bn",)]
    return list(dict.fromkeys([*table.rows, *recipe]))


def _config(layers: Sequence[Layer], method: str, norm: str) -> RunConfig:
    return resolve(*layers, ("row", parse_choice("method", method) | parse_choice("norm", norm)))


def _identity(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in flatten(to_dict(config)).items() if key.startswith(_IDENTITY)}


def _once(records: Sequence[Record]) -> list[Record]:
    """Each config once: the same run may lie in two folders."""
    return list({record.run_config: record for record in records}.values())


def _cells(paper: float | None, ours: Sequence[float]) -> list[str]:
    printed = "-" if paper is None else f"{paper:.2f}"
    if not ours:
        return [printed, "-", "-"]
    mean = statistics.fmean(ours)
    if len(ours) == 1:
        return [printed, f"{mean:.1f}", "-" if paper is None else f"{mean - paper:+.1f}"]
    spread = statistics.stdev(ours)
    text = f"{mean:.1f} ± {spread:.1f}"
    if paper is None:
        return [printed, text, "-"]
    within = abs(mean - paper) <= 2 * spread / sqrt(len(ours))
    return [printed, text, f"{mean - paper:+.1f}{' =' if within else ''}"]


def _departures(recipe: dict[tuple[str, str], RunConfig], ours: dict[tuple[str, str], list[Record]]) -> Iterator[str]:
    """What our runs did otherwise than the recipe says, in a line."""
    if not any(ours.values()):
        yield "No finished run of this table was found."
    seen: dict[str, set[str]] = {}
    for key, members in ours.items():
        expected = flatten(to_dict(recipe[key]))
        for record in members:
            for setting, value in flatten(to_dict(record.run_config)).items():
                if setting not in _ALLOWED and expected.get(setting) != value:
                    seen.setdefault(setting, set()).add(str(value))
    if seen:
        listed = "; ".join(f"{setting} = {' or '.join(sorted(values))}" for setting, values in sorted(seen.items()))
        yield f"Not as in the recipe: {listed}."
