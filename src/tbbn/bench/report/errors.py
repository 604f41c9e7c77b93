"""Wrong predictions after the last task by type: a current (C) or past (P) class predicted as a current or past one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from tbbn.bench.metrics import ERROR_TYPES, FORMULAS
from tbbn.bench.report.figures import COLOURS, Panel, wrapped
from tbbn.bench.report.groups import Group, blocks
from tbbn.bench.report.table import Table


def mean_errors(group: Group) -> dict[str, float]:
    """The number of errors of each type after the last task, averaged over finished runs; empty without any."""
    last = [record.errors[-1] for record in group.finished if record.errors]
    return {kind: statistics.fmean(errors.get(kind, 0) for errors in last) for kind in ERROR_TYPES} if last else {}


def errors_table(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        if counts := mean_errors(group):
            total = sum(counts.values())
            cells = (f"{n:.0f} ({100 * n / total:.0f} %)" if total else "0" for n in counts.values())
            rows.append((group.label, f"{total:.0f}", *cells))
    notes = [f"{kind}: {FORMULAS[kind].removeprefix('errors: ')}." for kind in ERROR_TYPES]
    caption = "Wrong predictions after the last task by type: mean over seeds, and share of all errors."
    return Table(("method + norm", "errors", *ERROR_TYPES), tuple(rows), tuple(notes), caption=caption)


def errors_panels(groups: Sequence[Group]) -> list[Panel]:
    """One panel per method, with a bar for each norm, divided by error type. Panels of the same data set share a scale.

    Data sets do not share one because their numbers of test images differ: the bars of a small one would be invisible.
    """
    shown = [group for group in groups if mean_errors(group)]
    most: dict[str, float] = {}
    for group in shown:
        data = group.config.data.name
        most[data] = max(most.get(data, 0.0), sum(mean_errors(group).values()))
    panels = []
    for block in blocks(shown):
        reach = 1.05 * most[block[0].config.data.name]
        panels.append(Panel(block[0].setup, partial(_draw, groups=block, reach=reach), height=1.5 + 0.25 * len(block)))
    return panels


def _draw(axes: Any, groups: Sequence[Group], reach: float) -> None:
    from matplotlib.ticker import MaxNLocator

    places = range(len(groups))
    left = [0.0] * len(groups)
    for kind, colour in zip(ERROR_TYPES, COLOURS, strict=False):
        widths = [mean_errors(group)[kind] for group in groups]
        axes.barh(places, widths, 0.7, left=left, label=kind, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(places, [wrapped(group.norm, 16) for group in groups], fontsize=8)
    axes.set_ylim(len(groups) - 0.5, -1.2)  # from top to bottom, with room for the legend
    axes.set_xlim(0, reach or 1)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_xlabel("wrong predictions, mean over seeds", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(alpha=0.3, axis="x")
    style = {"handlelength": 1, "columnspacing": 1.2, "handletextpad": 0.5}
    axes.legend(frameon=False, fontsize=7, ncols=len(ERROR_TYPES), loc="upper center", borderpad=0.2, **style)
