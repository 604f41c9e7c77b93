"""The figures of ``tbbn reproduce``, each with a table of the numbers that it draws."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tbbn.bench.cli.common import TimeLimitReached, print_table
from tbbn.bench.cli.train import deadline
from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tbbn.bench.engine.record import Record
    from tbbn.bench.report.table import Table
    from tbbn.paper.published import PaperTable

FIGURES = {  # for each figure: the table whose runs it shows
    "fig-toy": "",
    "fig-oracle": "",
    "fig-curves": "table2",
    "fig-errors": "table1",
}


class Drawn(NamedTuple):
    """A figure, and the table of its numbers."""

    table: Table
    figure: Figure


def toy() -> Drawn:
    from tbbn.paper import toy

    outcomes = toy.toy()
    return Drawn(toy.table(outcomes), toy.figure(outcomes))


def oracle(args: argparse.Namespace, folders: Sequence[Path], out: Path) -> Drawn:
    """The oracle experiment on the runs in these folders; ``out`` caches its results."""
    from tbbn.paper import oracle

    pairs = oracle.pairs(folders)
    title = oracle.title(next(iter(pairs.values()))[0])
    progress = _OracleProgress(args)
    root = args.settings.get("data.root")
    seeds = [oracle.outcome(*pair, out, progress.of_seed(seed), root) for seed, pair in pairs.items()]
    return Drawn(oracle.accuracy_table(seeds, title), oracle.figure(seeds, title))


def of_runs(
    name: str, table: PaperTable, records: Sequence[Record], given: dict[str, Any], rows: Sequence[tuple[str, str]]
) -> Drawn:
    """Curves or error types of the finished runs in these rows of the paper's table."""
    from tbbn.bench.report.curves import curves_table
    from tbbn.bench.report.errors import errors_table
    from tbbn.bench.report.groups import groups, stamp
    from tbbn.bench.report.plots import figure
    from tbbn.paper.published import departures_note, left_out, members, with_recipe

    in_rows = members(table, records, given, rows=rows)
    finished = [record for of_row in in_rows.values() for group in of_row for record in group.records]
    if not finished:
        said = f"{name}: none of these is a finished run of {table.title} with the requested settings."
        raise UserError(" ".join([said, *left_out(table, records, given, in_rows)]))
    found = groups(finished)
    kind, numbers = ("accuracy", curves_table(found)) if name == "fig-curves" else ("errors", errors_table(found))
    caption = f"{stamp(group.config for group in found)}{table.title}. {numbers.caption}"
    notes = (*numbers.notes, *departures_note(with_recipe(table, in_rows)))
    return Drawn(replace(numbers, caption=caption, notes=notes), figure(finished, kind))


def show(name: str, drawn: Drawn, folder: Path, form: str) -> None:
    """Print the numbers of a figure, and write its picture as SVG and PNG."""
    from tbbn.bench.report.figures import save_as_files

    print_table(drawn.table, form)
    for path in save_as_files(drawn.figure, folder, name):
        print(printable(f"figure: {path}"), file=sys.stderr)


class _OracleProgress:
    """Reports the progress of the oracle experiment at most every ten seconds, and ends it at the time limit."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.quiet, self.end, self.said = args.quiet, deadline(args), -math.inf

    def of_seed(self, seed: int) -> Callable[[str], None]:
        return lambda where: self(f"seed {seed}: {where}")

    def __call__(self, where: str) -> None:
        now = time.monotonic()
        if now >= self.end:
            raise TimeLimitReached("everything is saved except the oracle experiment on this seed")
        if not self.quiet and now >= self.said + 10:
            print(where, file=sys.stderr)
            self.said = now
