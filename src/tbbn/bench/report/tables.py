"""Records to tables: text, Markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tbbn.bench.engine.forecast import TaskForecast
from tbbn.bench.engine.record import Record
from tbbn.bench.metrics import FORMULAS
from tbbn.bench.report.groups import grouped
from tbbn.errors import printable, unknown_name

FORMATS = ("text", "md", "csv", "latex")
HEADLINE = {
    "final_accuracy": "A_f",
    "average_accuracy": "A_a",
    "forgetting_history": "F",  # as the paper's code computes it, and its tables have it
    "forgetting": "F_text",  # the formula of the paper's text
    "learning_accuracy": "A_l",
}
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
    """Put a quote before a cell that a spreadsheet would run as a formula."""
    try:
        float(cell)
    except ValueError:
        return "'" + cell if cell.startswith(("=", "+", "-", "@")) and cell != "-" else cell
    return cell


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, and notes below. ``align`` has l or r per column (default: the first l, the others r)."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    align: str = ""

    def __post_init__(self) -> None:
        # The text comes from records, which may have been written by anyone.
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
        """Mean and standard deviation in columns of their own, so that programs read numbers."""
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
            # After a line end \\, LaTeX would take a bracket or a star for its argument.
            return "{}" * text.startswith(("[", "*")) + "".join(_LATEX.get(sign, sign) for sign in text)

        first, *rest = (" & ".join(map(cell, row)) + r" \\" for row in (self.header, *self.rows))
        begin, end = rf"\begin{{tabular}}{{{self._align}}}", r"\end{tabular}"
        return "\n".join([begin, r"\toprule", first, r"\midrule", *rest, r"\bottomrule", end])


def percent(values: Sequence[float]) -> str:
    """Mean and sample standard deviation, in percent.

    >>> percent([0.5]), percent([0.5, 0.6])
    ('50.0', '55.0 ± 7.1')
    """
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean}{_SPREAD}{100 * statistics.stdev(values):.1f}"


def summary_table(records: Sequence[Record], metrics: Mapping[str, str] = HEADLINE) -> Table:
    """One row per group of seeds: the headline metrics of its finished runs, as mean ± standard deviation."""
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
        "a[t,i]: accuracy on task i after learning task t, among all classes seen so far. ±: standard deviation over seeds."
    )
    repeated = len(records) - counted
    if repeated:
        notes.append(
            f"{repeated} of the {len(records)} runs repeat the config and seed of another and are not counted again."
        )
    if any(record.skipped for record in records):
        notes.append(skipped_note(records))
    return Table(header, tuple(rows), tuple(notes), align)


def skipped_note(records: Sequence[Record]) -> str:
    """Which image files these runs skipped because they could not be read."""
    files = list(dict.fromkeys(file for record in records for file in record.skipped))
    named = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
    return f"skipped {len(files)} unreadable image files ({named})."


def _status(records: Sequence[Record]) -> str:
    """How the runs of a group ended, such as "2 finished, 1 diverged after 3 of 10 tasks"."""
    states = Counter(
        r.status if r.status == "finished" else f"{r.status} after {len(r.accuracy)} of {len(r.task_sizes)} tasks"
        for r in records
    )
    return ", ".join(f"{n} {state}" for state, n in states.items())


def forecast_table(entries: Sequence[TaskForecast]) -> Table:
    """What a run will do: a row per task."""
    header = ("task", "classes", "images", "exemplars", "batch", "r*", "steps/epoch", "steps")
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
    """The accuracy matrix of one run: a row per task learnt."""
    n = len(record.task_sizes)
    rows = []
    for t, row in enumerate(record.accuracy):
        cells = [f"{100 * a:.1f}" for a in row] + [""] * (n - len(row))
        rows.append((f"after task {t + 1}", *cells, f"{100 * sum(row) / len(row):.1f}", f"{record.exemplars[t]}"))
    header = ("accuracy %", *(f"task {i + 1}" for i in range(n)), "mean", "memory")
    return Table(header, tuple(rows))


def metrics_table(record: Record) -> Table:
    """Every metric of one run with its formula, and the error types after the last task."""
    rows = []
    for name, value in record.metrics.items():
        short, _, formula = FORMULAS[name].rpartition(" = ")
        rows.append((short or TASK_IL[name], f"{100 * value:.2f} %", formula))
    for kind, n in (record.errors or [{}])[-1].items():
        rows.append((kind, str(n), FORMULAS[kind]))
    return Table(("metric", "value", "formula"), tuple(rows), align="lrl")
