"""Records to tables: text, Markdown, CSV, LaTeX. Nothing here trains."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tbbn.config import to_toml
from tbbn.errors import choose
from tbbn.metrics import FORMULAS
from tbbn.record import Record

FORMATS = ("text", "md", "csv", "latex")
HEADLINE = {"final_accuracy": "A_f", "average_accuracy": "A_a", "forgetting": "F", "learning_accuracy": "A_l"}


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, and lines to print below."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def render(self, form: str) -> str:
        if form not in FORMATS:
            raise choose("format", form, FORMATS)
        return {"text": self._text, "md": self._markdown, "csv": self._csv, "latex": self._latex}[form]()

    def _widths(self) -> list[int]:
        return [max(len(row[i]) for row in (self.header, *self.rows)) for i in range(len(self.header))]

    def _text(self) -> str:
        def line(row: Sequence[str]) -> str:
            first, *rest = zip(row, self._widths(), strict=True)
            return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()

        rule = "-" * len(line(self.header))
        return "\n".join([line(self.header), rule, *map(line, self.rows), *(("", *self.notes) if self.notes else ())])

    def _markdown(self) -> str:
        def line(row: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

        rule = "|" + "|".join(["---", *["---:"] * (len(self.header) - 1)]) + "|"
        notes = ["", *(f"{note}  " for note in self.notes)] if self.notes else []
        return "\n".join([line(self.header), rule, *map(line, self.rows), *notes])

    def _csv(self) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.header, *self.rows])
        return out.getvalue().rstrip("\n")

    def _latex(self) -> str:
        def cell(text: str) -> str:
            for sign in "&%#_":
                text = text.replace(sign, "\\" + sign)
            return text.replace("±", "$\\pm$")

        lines = [" & ".join(map(cell, row)) + r" \\" for row in (self.header, *self.rows)]
        columns = "l" + "r" * (len(self.header) - 1)
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                lines[0],
                r"\midrule",
                *lines[1:],
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )


def grouped(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records that differ in their seeds alone, under a label that tells the groups apart; in order of appearance."""
    groups: dict[str, list[Record]] = {}
    labels: dict[str, str] = {}
    for record in records:
        config = record.run_config
        key = to_toml(replace(config, seed=0, data=replace(config.data, class_order_seed=0)))
        groups.setdefault(key, []).append(record)
        labels[key] = config.label
    unique: dict[str, list[Record]] = {}
    for key, members in groups.items():
        name = labels[key]
        if sum(other == name for other in labels.values()) > 1:
            config = members[0].run_config
            name += f" [{config.data.name}, {config.backbone}, {config.protocol}]"
        while name in unique:
            name += "'"
        unique[name] = members
    return unique


def percent(values: Sequence[float]) -> str:
    """Mean and sample standard deviation, in percent.

    >>> percent([0.5]), percent([0.5, 0.6])
    ('50.0', '55.0 ± 7.1')
    """
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def summary_table(records: Sequence[Record], metrics: Mapping[str, str] = HEADLINE) -> Table:
    """One row for each group of seeds: the headline metrics as mean ± standard deviation."""
    rows = []
    for name, members in grouped(records).items():
        done = [r for r in members if r.accuracy]
        cells = [percent([r.metrics[m] for r in done]) if done else "-" for m in metrics]
        rows.append((name, str(len(members)), *cells, _status(members)))
    header = ("method + norm", "seeds", *(f"{short} %" for short in metrics.values()), "status")
    if all(row[-1] == "finished" for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    notes = [FORMULAS[m] for m in metrics]
    notes.append(
        "a[t,i]: accuracy on task i after learning task t, all classes seen so far to choose from; ± over seeds."
    )
    return Table(header, tuple(rows), tuple(notes))


def _status(records: Sequence[Record]) -> str:
    states = [f"{r.status} after {len(r.accuracy)} tasks" if r.status != "finished" else r.status for r in records]
    return ", ".join(sorted(set(states)))


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
    """Every metric of one run with its formula."""
    rows = [(FORMULAS[name], f"{100 * value:.2f} %") for name, value in record.metrics.items()]
    rows += [
        (f"{kind} after the last task: {FORMULAS[kind]}", str(n)) for kind, n in (record.errors or [{}])[-1].items()
    ]
    return Table(("metric", "value"), tuple(rows))
