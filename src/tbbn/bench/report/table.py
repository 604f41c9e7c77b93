"""A table of text, rendered as plain text, Markdown, CSV or LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tbbn.bench.report import latex
from tbbn.errors import printable, unknown_name

FORMATS = ("text", "md", "csv", "latex")
SPREAD = " ± "
_STD = re.compile(f"{SPREAD}(\\S+)")
_MARKDOWN = {sign: "\\" + sign for sign in "\\|`*<["}


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, with notes below. ``align`` has l or r per column (default: the first l, the others r).

    ``blocks`` has the rows at which a new block begins, ``bold`` the cells (row, column) to set in bold type.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    align: str = ""
    caption: str = ""
    blocks: tuple[int, ...] = ()
    bold: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        # The text comes from records, which may have been written by anyone.
        for name, lines in (("header", self.header), ("notes", self.notes)):
            object.__setattr__(self, name, tuple(map(printable, lines)))
        object.__setattr__(self, "rows", tuple(tuple(map(printable, row)) for row in self.rows))
        object.__setattr__(self, "caption", printable(self.caption))
        object.__setattr__(self, "align", self.align or "l" + "r" * (len(self.header) - 1))

    def render(self, form: str) -> str:
        form = "latex" if form == "tex" else form
        if form not in FORMATS:
            raise unknown_name("format", form, FORMATS)
        return {"text": self._text, "md": self._markdown, "csv": self._csv, "latex": self._latex}[form]()

    def with_column(self, mark: str) -> Table:
        """The table with the stamp in every row: CSV has no caption or note that could carry it."""
        rows = tuple((mark, *row) for row in self.rows)
        return replace(self, header=("runs", *self.header), rows=rows, align="l" + self.align)

    def _text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]

        def line(row: Sequence[str]) -> str:
            cells = zip(row, widths, self.align, strict=True)
            return "  ".join(c.ljust(w) if side == "l" else c.rjust(w) for c, w, side in cells).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([line(self.header), rule, *map(line, self.rows), *(("", *self.notes) if self.notes else ())])

    def _markdown(self) -> str:
        def line(row: Sequence[str]) -> str:
            return "| " + " | ".join("".join(_MARKDOWN.get(c, c) for c in cell) for cell in row) + " |"

        rule = "|" + "|".join("---" if side == "l" else "---:" for side in self.align) + "|"
        notes = ["", *(f"- `{note.replace('`', chr(39))}`" for note in self.notes)] if self.notes else []
        return "\n".join([line(self.header), rule, *map(line, self.rows), *notes])

    def _csv(self) -> str:
        """As CSV, with mean and standard deviation in separate columns, so that programs can read the numbers."""
        columns: list[list[str]] = []
        for title, *cells in zip(self.header, *self.rows, strict=True):
            columns.append([title, *(_STD.sub("", cell) for cell in cells)])
            if any(SPREAD in cell for cell in cells):
                spreads = map(_STD.search, cells)
                columns.append([f"{title} std", *(found[1] if found else "" for found in spreads)])
        return csv_text(zip(*columns, strict=True))

    def _latex(self) -> str:
        """As LaTeX, with notes as comments, so that whoever pastes the table decides what goes into the caption."""
        made = latex.render(
            self.header, self.rows, align=self.align, caption=self.caption, blocks=self.blocks, bold=self.bold
        )
        return "\n".join([made, *(f"% {note}" for note in self.notes)])


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """Rows as CSV, with cells escaped so that a spreadsheet runs no formulas."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_no_formula(cell) for cell in row] for row in rows)
    return out.getvalue().rstrip("\n")


def _no_formula(cell: str) -> str:
    """Put a quote before a cell that a spreadsheet would run as a formula."""
    try:
        float(cell)
    except ValueError:
        return "'" + cell if cell.startswith(("=", "+", "-", "@")) and cell != "-" else cell
    return cell
