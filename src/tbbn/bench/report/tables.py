"""Records to tables: text, Markdown, CSV, LaTeX. Nothing here trains."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tbbn.bench.config import RunConfig, SaveConfig, flatten, to_dict
from tbbn.bench.engine.forecast import TaskForecast
from tbbn.bench.engine.record import Record
from tbbn.bench.metrics import FORMULAS
from tbbn.errors import printable, unknown_name

FORMATS = ("text", "md", "csv", "latex")
HEADLINE = {"final_accuracy": "A_f", "average_accuracy": "A_a", "forgetting": "F", "learning_accuracy": "A_l"}
TASK_IL = {"task_il_final_accuracy": "A_f task-IL", "task_il_average_accuracy": "A_a task-IL"}
_SPREAD = " ± "
_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: "\\" + sign for sign in "&%#_${}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
}


_MARKDOWN = {sign: "\\" + sign for sign in "\\|`*<["}


def _no_formula(cell: str) -> str:
    """A cell that a spreadsheet does not compute: one that begins like a formula, and is no number, gets a quote before it."""
    try:
        float(cell)
    except ValueError:
        return "'" + cell if cell.startswith(("=", "+", "-", "@")) and cell != "-" else cell
    return cell


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, and lines to print below. ``align`` has an l or r for each column; by default all but
    the first are to the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    align: str = ""

    def __post_init__(self) -> None:
        # Names come from records, and a record may have been written by anyone.
        for name, lines in (("header", self.header), ("notes", self.notes)):
            object.__setattr__(self, name, tuple(map(printable, lines)))
        object.__setattr__(self, "rows", tuple(tuple(map(printable, row)) for row in self.rows))

    def render(self, form: str) -> str:
        if form not in FORMATS:
            raise unknown_name("format", form, FORMATS)
        return {"text": self._text, "md": self._markdown, "csv": self._csv, "latex": self._latex}[form]()

    @property
    def _align(self) -> str:
        return self.align or "l" + "r" * (len(self.header) - 1)

    def _text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]

        def line(row: Sequence[str]) -> str:
            cells = zip(row, widths, self._align, strict=True)
            return "  ".join(c.ljust(w) if side == "l" else c.rjust(w) for c, w, side in cells).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([line(self.header), rule, *map(line, self.rows), *(("", *self.notes) if self.notes else ())])

    def _markdown(self) -> str:
        def line(row: Sequence[str]) -> str:
            return "| " + " | ".join("".join(_MARKDOWN.get(c, c) for c in cell) for cell in row) + " |"

        rule = "|" + "|".join("---" if side == "l" else "---:" for side in self._align) + "|"
        notes = ["", *(f"- `{note.replace('`', chr(39))}`" for note in self.notes)] if self.notes else []
        return "\n".join([line(self.header), rule, *map(line, self.rows), *notes])

    def _csv(self) -> str:
        """Mean and standard deviation have a column each, so that a program reads numbers."""
        columns: list[list[str]] = []
        for title, *cells in zip(self.header, *self.rows, strict=True):
            columns.append([title, *(cell.partition(_SPREAD)[0] for cell in cells)])
            if any(_SPREAD in cell for cell in cells):
                columns.append([f"{title} std", *(cell.partition(_SPREAD)[2] for cell in cells)])
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [_no_formula(c) for c in row] for row in zip(*columns, strict=True)
        )
        return out.getvalue().rstrip("\n")

    def _latex(self) -> str:
        def cell(text: str) -> str:
            # After the end of a line, a bracket or a star would be taken for that command's argument.
            return "{}" * text.startswith(("[", "*")) + "".join(_LATEX.get(sign, sign) for sign in text)

        first, *rest = (" & ".join(map(cell, row)) + r" \\" for row in (self.header, *self.rows))
        begin, end = rf"\begin{{tabular}}{{{self._align}}}", r"\end{tabular}"
        return "\n".join([begin, r"\toprule", first, r"\midrule", *rest, r"\bottomrule", end])


def grouped(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records that differ in their seeds alone, under a label that tells the groups apart; in order of appearance.

    A run done twice counts once: two equal records are not two seeds.
    """
    runs: dict[tuple[RunConfig, int, int], Record] = {}
    for record in records:
        config = record.run_config
        key = _but_for_seed(config), config.seed, config.data.class_order_seed
        if key not in runs or runs[key].status != "finished":
            runs[key] = record
    groups: dict[RunConfig, list[Record]] = {}
    for (config, *_), record in runs.items():
        groups.setdefault(config, []).append(record)
    alike: dict[str, list[RunConfig]] = {}
    for config in groups:
        alike.setdefault(config.label, []).append(config)
    always = _scenario_settings(list(groups))
    names = {config: name for configs in alike.values() for config, name in _told_apart(configs, always).items()}
    return {names[config]: members for config, members in groups.items()}


def _but_for_seed(config: RunConfig) -> RunConfig:
    """The config without its seeds, and without what says where it ran rather than what was done."""
    data = replace(config.data, class_order_seed=-1, root="", download=True, stream="auto")
    return replace(config, seed=0, device="", threads=0, data=data, save=SaveConfig())


def _scenario_settings(configs: Sequence[RunConfig]) -> list[str]:
    """What every row must say where not all are of one scenario: the data set, and in what runs of one data set differ."""
    names = dict.fromkeys(config.data.name for config in configs)
    chosen = ["data.name"] if len(names) > 1 else []
    for key in ("tasks", "base_classes", "stop_after", "online"):
        if any(len({getattr(c.data, key) for c in configs if c.data.name == name}) > 1 for name in names):
            chosen.append(f"data.{key}")
    return chosen


def _told_apart(configs: Sequence[RunConfig], always: Sequence[str]) -> dict[RunConfig, str]:
    """A name for each of these configs, whose labels are one: the label, what is always said, and as few settings more
    as tell them apart."""
    trees = [flatten(to_dict(config)) for config in configs]
    keys = sorted({key for tree in trees for key in tree}, key=lambda k: (k != "data.name", k))
    chosen = list(always)
    seen = [tuple(str(tree.get(key)) for key in always) for tree in trees]
    for key in keys:
        longer = [(*known, str(tree.get(key))) for known, tree in zip(seen, trees, strict=True)]
        if len(set(longer)) > len(set(seen)):
            chosen, seen = [*chosen, key], longer
    names = {}
    for config, values in zip(configs, seen, strict=True):
        inside = ", ".join(
            value if key == "data.name" else f"{key}={value}" for key, value in zip(chosen, values, strict=True)
        )
        names[config] = f"{config.label} [{inside}]" if inside else config.label
    return names


def percent(values: Sequence[float]) -> str:
    """Mean and sample standard deviation, in percent.

    >>> percent([0.5]), percent([0.5, 0.6])
    ('50.0', '55.0 ± 7.1')
    """
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean}{_SPREAD}{100 * statistics.stdev(values):.1f}"


def summary_table(records: Sequence[Record], metrics: Mapping[str, str] = HEADLINE) -> Table:
    """One row for each group of seeds: the headline metrics of the finished runs as mean ± standard deviation."""
    rows, counted = [], 0
    for name, members in grouped(records).items():
        counted += len(members)
        done = [r for r in members if r.status == "finished"]
        cells = [percent([r.metrics[m] for r in done]) if done else "-" for m in metrics]
        rows.append((name, str(len(done)), *cells, _status(members)))
    header = ("method + norm", "seeds", *(f"{short} %" for short in metrics.values()), "status")
    align = "l" + "r" * (len(header) - 2) + "l"
    if all(record.status == "finished" for record in records):
        header, rows, align = header[:-1], [row[:-1] for row in rows], align[:-1]
    notes = [FORMULAS[m] for m in metrics]
    notes.append(
        "a[t,i]: accuracy on task i after learning task t, all classes seen so far to choose from; ± over seeds."
    )
    repeated = len(records) - counted
    if repeated:
        notes.append(
            f"not counted a second time: {repeated} of the {len(records)} runs, of a config and seed already there."
        )
    if any(record.skipped for record in records):
        notes.append(skipped_note(records))
    return Table(header, tuple(rows), tuple(notes), align)


def skipped_note(records: Sequence[Record]) -> str:
    """Which image files were left out of these runs because they could not be read."""
    files = list(dict.fromkeys(file for record in records for file in record.skipped))
    named = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
    return f"left out, as they could not be read: {len(files)} image files ({named})."


def _status(records: Sequence[Record]) -> str:
    """How the runs of a group ended, such as "2 finished, 1 diverged after 3 of 10 tasks"."""
    states = Counter(
        r.status if r.status == "finished" else f"{r.status} after {len(r.accuracy)} of {len(r.task_sizes)} tasks"
        for r in records
    )
    return ", ".join(f"{n} {state}" for state, n in states.items())


def forecast_table(entries: Sequence[TaskForecast]) -> Table:
    """What a run would do, a row for each task."""
    header = ("task", "classes", "images", "exemplars", "batch", "r*", "steps an epoch", "steps")
    rows = []
    for e in entries:
        numbers = (
            e.task + 1,
            e.classes,
            e.images,
            e.exemplars,
            f"{e.current}+{e.memory}",
            e.splits,
            e.steps,
            e.all_steps,
        )
        rows.append(tuple(map(str, numbers)))
    return Table(header, tuple(rows))


def accuracy_table(record: Record) -> Table:
    """The accuracy matrix of one run: a row for each task learnt."""
    n = len(record.task_sizes)
    rows = []
    for t, row in enumerate(record.accuracy):
        cells = [f"{100 * a:.1f}" for a in row] + [""] * (n - len(row))
        rows.append((f"after task {t + 1}", *cells, f"{100 * sum(row) / len(row):.1f}", f"{record.exemplars[t]}"))
    header = ("accuracy %", *(f"task {i + 1}" for i in range(n)), "mean", "memory")
    return Table(header, tuple(rows))


def metrics_table(record: Record) -> Table:
    """Every metric of one run with its formula, and the errors after the last task by kind."""
    rows = []
    for name, value in record.metrics.items():
        short, _, formula = FORMULAS[name].rpartition(" = ")
        rows.append((short or TASK_IL[name], f"{100 * value:.2f} %", formula))
    for kind, n in (record.errors or [{}])[-1].items():
        rows.append((kind, str(n), FORMULAS[kind]))
    return Table(("metric", "value", "formula"), tuple(rows), align="lrl")
