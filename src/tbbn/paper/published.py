"""The paper's tables as data (``published.toml``), and our runs beside them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import sqrt
from typing import Any

from tbbn.bench.config import SETTINGS, RunConfig, Values, flatten, resolve, to_dict
from tbbn.bench.engine.record import Record
from tbbn.bench.metrics import FORMULAS
from tbbn.bench.report.groups import Group, groups, repeated_note, stamp, without_seed
from tbbn.bench.report.interval import signed
from tbbn.bench.report.table import Table
from tbbn.bench.report.tables import best_means, mean_std
from tbbn.bench.runs.recipe import Axes, Layer, parse_choice, read_recipe
from tbbn.errors import UserError, unknown_name
from tbbn.paper import find_recipe, printed_tables, table_names

METRICS = {
    "A_f": "final_accuracy",
    "A_a": "average_accuracy",
    "F": "forgetting",
    "A_l": "learning_accuracy",
    "A_f^w": "weighted_final_accuracy",
    "A_a^w": "weighted_average_accuracy",
    "A_f task-IL": "task_il_final_accuracy",
}
# Settings in which a run must agree with a table's row to belong to it. Runs that differ in other settings get separate rows.
_IDENTITY = (
    "protocol", "backbone", "method.", "norm.", "data.name", "data.tasks", "data.base_classes", "data.online",
    "train.epochs", "train.scale", "train.keep",
)  # fmt: skip
_SEEDS = ("seed", "data.class_order_seed")
_TEXT_F = "F_text"  # the paper prints one F; ours by the formula of its text gets a column beside it
_OURS_OF = {**METRICS, _TEXT_F: "forgetting_text"}
_OURS = " (ours)"  # a row that the paper does not have
Key = tuple[str, str]  # a row's method and norm


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper for one data set and network, and the recipe that reproduces it."""

    name: str
    data: str
    title: str
    columns: tuple[str, ...]
    rows: dict[Key, tuple[float, ...]]
    notes: tuple[str, ...] = ()
    backbone: str = ""
    cost: dict[str, Any] = field(default_factory=dict)  # the device, and each norm's memory and time

    @property
    def recipe(self) -> str:
        return f"{self.name}-{self.data}"

    def layers(self) -> tuple[list[Layer], Axes]:
        """The settings and the axes of the runs that reproduce the table."""
        path = find_recipe(self.recipe)
        values, axes = read_recipe(path)
        return [(str(path), values), (self.title, {"backbone": self.backbone} if self.backbone else {})], axes

    def cost_notes(self) -> Iterator[str]:
        """The cost of each norm in the paper, also relative to batch norm."""
        base = self.cost.get("bn", {})
        for norm, cost in self.cost.items():
            if isinstance(cost, dict):
                more = "" if cost is base else f" ({cost['memory_mib'] / base['memory_mib']:.1f}x)"
                longer = "" if cost is base else f" ({cost['hours'] / base['hours']:.1f}x)"
                yield (
                    f"Cost in the paper ({self.cost['device']}), {norm}: {cost['memory_mib']} MiB{more}, training "
                    f"{cost['hours']:.1f} h{longer}, {cost['test_seconds']:g} s per test batch."
                )

    def impossible(self) -> Iterator[str]:
        """Rows whose numbers contradict each other: under both definitions, F is at least A_l - A_f."""
        if {"A_f", "F", "A_l"} <= set(self.columns):
            for (method, norm), row in self.rows.items():
                value = dict(zip(self.columns, row, strict=True))
                least = value["A_l"] - value["A_f"]
                if value["F"] < least - 0.05:
                    yield (
                        f"{method} + {norm}: the paper's F of {value['F']} is impossible: F is never below A_l - A_f, "
                        f"which is {least:.2f}."
                    )


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    return tuple(map(_table, printed_tables()))


def _table(entry: dict[str, Any]) -> PaperTable:
    rows = {(method, norm): tuple(values) for method, norm, *values in entry["rows"]}
    lists = {"columns": tuple(entry["columns"]), "notes": tuple(entry.get("notes", ()))}
    return PaperTable(**{**entry, **lists, "rows": rows})


def find_tables(name: str, data: str | None = None) -> list[PaperTable]:
    """The tables with this name for one data set (by default the paper's first), one for each network."""
    named = [table for table in paper_tables() if table.name == name]
    if not named:
        raise unknown_name("table", name, table_names())
    sets = list(dict.fromkeys(table.data for table in named))
    if data is not None and data not in sets:
        raise UserError(f"{name}: the paper reports it for {' and '.join(sets)}, not for {data!r}.")
    return [table for table in named if table.data == (data or sets[0])]


def beside(records: Sequence[Record]) -> list[Table]:
    """The paper's tables with at least one row that these records reproduce, with only the rows that have records.

    A table without a run that keeps the epoch which the recipe keeps shows runs that keep another, and says so in its notes.
    """
    names = {record.run_config.data.name for record in records}
    tables = []
    for table in paper_tables():
        layers, _ = table.layers()
        if resolve(*layers).data.name in names:
            keeps = ({}, *({"train.keep": keep} for keep in SETTINGS["train.keep"].choices))
            made = (compare(table, records, settings, missing=False) for settings in keeps)
            found = next((shown for shown in made if any(_OURS not in row[0] for row in shown.rows)), None)
            tables += [found] if found else []
    return tables


def compare(
    table: PaperTable,
    records: Sequence[Record],
    settings: Values | None = None,
    *,
    rows: Sequence[Key] | None = None,
    missing: bool = True,
) -> Table:
    """The paper's table with three columns per metric: the paper's value, ours (mean ± standard deviation), the difference.

    Beside F, for which the paper has two formulas, our F by the other one has a column.

    Ours are the finished runs of the table's recipe with ``settings`` applied; runs that differ only in their seeds form a row.
    With three seeds or more, a difference within two standard errors of our mean is marked "=". Rows that the paper does not
    have are marked "(ours)". If ``rows`` is given, only these are shown; ``missing=False`` omits rows without runs.
    """
    recipe, records = _recipe(table), _of_seeds(records, settings)
    found = members(table, records, settings, rows=rows)
    beside_recipe = with_recipe(table, found)
    common = _common_departures(beside_recipe)
    cells, lines = [], list[tuple[str, Group | None]]()
    for key, of_row in found.items():
        printed = table.rows.get(key)
        name = " + ".join(key) + ("" if printed else _OURS)
        for group in of_row:
            own = ", ".join(
                f"{setting}={value}"
                for setting, value in _departures(recipe[key], group.config)
                if (setting, value) not in common
            )
            cells.append(_row(f"{name} [{own}]" if own else name, table.columns, printed, group.finished))
            lines.append((key[0], group))
        if missing and not of_row:
            cells.append(_row(name, table.columns, printed, []))
            lines.append((key[0], None))
    shown = [" + ".join(key) for key, of_row in found.items() if of_row or missing]
    known = {" + ".join(key) for key in recipe}
    about = [*table.notes, *table.cost_notes(), *table.impossible()]
    # A note about a row is shown only if the table shows that row.
    notes = [note for note in about if (row := note.partition(":")[0]) not in known or row in shown]
    notes += [FORMULAS[_OURS_OF[column]] for column in _with_text_f(table.columns)]
    notes += ["F is by the formula of the released code, F_text by that of the text; the paper prints one F."] * (
        "F" in table.columns
    )
    notes.append(
        "ours: mean ± standard deviation over seeds. diff.: ours - paper; = means within two standard errors (three seeds or "
        "more)."
    )
    notes += departures_note(beside_recipe)
    in_rows = [group for of_row in found.values() for group in of_row]
    configs = {group.config for group in in_rows}
    of_table = [r for r in records if r.status == "finished" and without_seed(r.run_config) in configs]
    notes += repeated_note(of_table, in_rows) if in_rows else ["No finished run of this table was found."]
    notes += left_out(table, records, settings, found) if missing else []
    others = [replace(record, status="finished") for record in records if record.status != "finished"]
    n_others = sum(len(g.runs) for of_row in members(table, others, settings, rows=rows).values() for g in of_row)
    if n_others:
        notes.append(f"Unfinished runs of this table, not counted: {n_others}.")
    return Table(
        header(table.columns), tuple(cells), tuple(notes), caption=f"{stamp(configs)}{table.title}",
        blocks=tuple(i for i, (method, _) in enumerate(lines) if not i or method != lines[i - 1][0]),
        bold=frozenset(_bold(lines, table.columns)),
    )  # fmt: skip


def header(columns: Sequence[str], *, unique: bool = False) -> tuple[str, ...]:
    """The titles of a table with these metrics; ``unique`` names the metric in each, for formats that need unique titles."""
    titles = ["method + norm", "seeds"]
    for column in _with_text_f(columns):
        name = f"{column} " if unique else ""
        titles += [f"{column} ours"] if column == _TEXT_F else [f"{column} paper", f"{name}ours", f"{name}diff."]
    return tuple(titles)


def _with_text_f(columns: Sequence[str]) -> list[str]:
    """The metrics of a table of the paper, with F_text after F."""
    return [name for column in columns for name in ([column, _TEXT_F] if column == "F" else [column])]


def _bold(lines: Sequence[tuple[str, Group | None]], columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The cells with the best of our means among the rows of a method; ``lines`` has each row's method and runs."""
    metrics = _with_text_f(columns)
    places = [i for i, title in enumerate(header(columns)) if title.endswith("ours")]
    for method in dict.fromkeys(method for method, _ in lines):
        block = [(i, group) for i, (name, group) in enumerate(lines) if name == method and group is not None]
        for row, metric in best_means([group for _, group in block], [_OURS_OF[name] for name in metrics]):
            yield block[row][0], places[metric]


def members(
    table: PaperTable, records: Sequence[Record], settings: Values | None = None, *, rows: Sequence[Key] | None = None
) -> dict[Key, list[Group]]:
    """The groups of finished runs that belong to each row of the table, those closest to the recipe's settings first.

    A run belongs to a row if it has the row's value for every setting in ``_IDENTITY`` and in ``settings``.
    """
    recipe = _recipe(table)
    finished = groups([record for record in _of_seeds(records, settings) if record.status == "finished"])
    trees = [_tree(group.config) for group in finished]
    found: dict[Key, list[Group]] = {}
    for key in recipe if rows is None else rows:
        asked = _asked(table, key, settings or {})
        own = [g for g, tree in zip(finished, trees, strict=True) if all(tree.get(n) == asked[n] for n in asked)]
        found[key] = sorted(own, key=lambda group: len(_departures(recipe[key], group.config)))
    return found


def _asked(table: PaperTable, key: Key, settings: Values) -> dict[str, Any]:
    """The settings that a run must have to belong to a row."""
    wanted = _tree(_config([*table.layers()[0], ("settings", settings)], *key))
    return {n: v for n, v in wanted.items() if n.startswith(_IDENTITY) or (n in settings and n not in _SEEDS)}


def left_out(
    table: PaperTable, records: Sequence[Record], settings: Values | None, found: dict[Key, list[Group]]
) -> list[str]:
    """A note on finished runs of rows without any, with the settings for which they are not shown; empty if there are none."""
    empty = [_asked(table, key, settings or {}) for key, of_row in found.items() if not of_row]
    shown = {group.config for of_row in found.values() for group in of_row}
    kinds = Counter[str]()
    for group in groups([record for record in _of_seeds(records, settings) if record.status == "finished"]):
        tree = _tree(group.config)
        rows = [a for a in empty if all(a[n] == tree[n] for n in ("method.name", "norm.name"))]
        if rows and group.config not in shown:
            differ = min(([n for n in a if tree.get(n) != a[n]] for a in rows), key=len)
            names = ["data.name"] if "data.name" in differ else differ[:3]  # another data set has everything else
            more = " and more" if len(differ) > len(names) == 3 else ""
            kinds[", ".join(f"{n} = {tree.get(n, '-')}" for n in names) + more] += len(group.finished)
    said = "; ".join(f"{n} with {kind}" for kind, n in kinds.most_common(3)) + "; ..." * (len(kinds) > 3)
    return [f"Finished runs with other settings, not shown: {said}."] * bool(kinds)


def _of_seeds(records: Sequence[Record], settings: Values | None) -> list[Record]:
    """The records with the seeds in ``settings``. Filtered here because groups of runs no longer have them."""
    asked = {name: value for name, value in (settings or {}).items() if name in _SEEDS}
    trees = [(record, flatten(to_dict(record.run_config))) for record in records]
    return [record for record, tree in trees if all(tree[name] == value for name, value in asked.items())]


def has_settings(table: PaperTable, record: Record, settings: Values) -> bool:
    """Whether a run has all of these settings, applied to the table's recipe, whatever its other settings are."""
    wanted = _tree(_config([*table.layers()[0], ("settings", settings)], *row_keys(table)[0]))
    own = _tree(record.run_config)
    asked = [name for name in settings if name not in _SEEDS]
    return bool(_of_seeds([record], settings)) and all(own.get(name) == wanted.get(name) for name in asked)


def row_keys(table: PaperTable) -> list[Key]:
    """The table's rows: the paper's, then those found only in the recipe."""
    return list(_recipe(table))


def _recipe(table: PaperTable) -> dict[Key, RunConfig]:
    """The config of each row: the paper's rows, then those found only in the recipe."""
    layers, axes = table.layers()
    more = [(method, norm) for method in axes.methods or ("ft",) for norm in axes.norms or ("bn",)]
    return {key: _config(layers, *key) for key in dict.fromkeys([*table.rows, *more])}


def _config(layers: Sequence[Layer], method: str, norm: str) -> RunConfig:
    return resolve(*layers, ("row", parse_choice("method", method) | parse_choice("norm", norm)))


def _tree(config: RunConfig) -> dict[str, Any]:
    return flatten(to_dict(without_seed(config)))


def with_recipe(table: PaperTable, found: dict[Key, list[Group]]) -> list[tuple[RunConfig, RunConfig]]:
    """For each group of runs, the recipe's config for its row and the group's own config."""
    recipe = _recipe(table)
    return [(recipe[key], group.config) for key, of_row in found.items() for group in of_row]


def _departures(recipe: RunConfig, own: RunConfig) -> list[tuple[str, str]]:
    """Settings in which a run differs from the recipe, with the run's values."""
    expected = _tree(recipe)
    return [(name, str(value)) for name, value in _tree(own).items() if expected.get(name) != value]


def _common_departures(pairs: Iterable[tuple[RunConfig, RunConfig]]) -> set[tuple[str, str]]:
    """Settings in which all of these runs differ from the recipe in the same way, with their common value."""
    departures = [set(_departures(*pair)) for pair in pairs]
    return set.intersection(*departures) if departures else set()


def departures_note(pairs: Iterable[tuple[RunConfig, RunConfig]]) -> list[str]:
    """A note on the settings in which all of these runs differ from the recipe; empty if there are none."""
    common = _common_departures(pairs)
    return [f"Different from the recipe: {'; '.join(f'{name} = {value}' for name, value in sorted(common))}."] * bool(
        common
    )


def _row(name: str, columns: Sequence[str], printed: Sequence[float] | None, runs: Sequence[Record]) -> tuple[str, ...]:
    row = [name, str(len(runs))]
    papers = dict(zip(columns, printed or (), strict=False))
    for column in _with_text_f(columns):
        cells = _cells(papers.get(column), [100 * run.metrics[_OURS_OF[column]] for run in runs])
        row += cells[1:2] if column == _TEXT_F else cells
    return tuple(row)


def _cells(paper: float | None, ours: Sequence[float]) -> list[str]:
    printed = "-" if paper is None else f"{paper:.2f}"
    if not ours:
        return [printed, "-", "-"]
    mean, text = statistics.fmean(ours), mean_std(ours)
    if paper is None:
        return [printed, text, "-"]
    # The standard deviation of two seeds is next to meaningless.
    within = len(ours) > 2 and abs(mean - paper) <= 2 * statistics.stdev(ours) / sqrt(len(ours))
    return [printed, text, signed(mean - paper) + (" =" if within else "")]
