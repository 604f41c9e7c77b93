"""Wrong predictions after the last task by type: a current (C) or past (P) class predicted as a current or past one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from tbbn.bench.metrics import ERROR_TYPES, FORMULAS
from tbbn.bench.report.figures import COLOURS, Panel, wrapped
from tbbn.bench.report.groups import Group, blocks
from tbbn.bench.report.table import SPREAD, Table


def last_errors(group: Group) -> dict[str, list[int]]:
    """The errors of each type after the last task, one number per finished run; empty without any."""
    last = [record.errors[-1] for record in group.finished if record.errors]
    return {kind: [errors.get(kind, 0) for errors in last] for kind in ERROR_TYPES} if last else {}


def totals(counts: dict[str, list[int]]) -> list[int]:
    """The errors of each run."""
    return [sum(of_run) for of_run in zip(*counts.values(), strict=True)]


def errors_table(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        if counts := last_errors(group):
            of_runs = totals(counts)
            total = sum(of_runs)
            shares = (f" ({100 * sum(numbers) / total:.0f} %)" if total else "" for numbers in counts.values())
            cells = (_count(numbers) + share for numbers, share in zip(counts.values(), shares, strict=True))
            rows.append((group.label, str(len(of_runs)), _count(of_runs), *cells))
    notes = [f"{kind}: {FORMULAS[kind].removeprefix('errors: ')}." for kind in ERROR_TYPES]
    caption = (
        "Wrong predictions after the last task by type: mean ± standard deviation over seeds, and share of all errors."
    )
    return Table(("method + norm", "seeds", "errors", *ERROR_TYPES), tuple(rows), tuple(notes), caption=caption)


def _count(numbers: Sequence[int]) -> str:
    """
    >>> _count([7]), _count([6, 8])
    ('7', '7 ± 1')
    """
    mean = f"{statistics.fmean(numbers):.0f}"
    return mean if len(numbers) == 1 else f"{mean}{SPREAD}{statistics.stdev(numbers):.0f}"


def errors_panels(groups: Sequence[Group]) -> list[Panel]:
    """One panel per method, with a bar for each norm, divided by error type. Panels of the same data set share a scale.

    Data sets do not share one because their numbers of test images differ: the bars of a small one would be invisible. A line at
    the end of a bar shows ± one standard deviation of all errors over seeds.
    """
    shown = [group for group in groups if last_errors(group)]
    most: dict[str, float] = {}
    for group in shown:
        data = group.config.data.name
        most[data] = max(most.get(data, 0.0), _ends(group)[1])
    panels = []
    for block in blocks(shown):
        reach = 1.05 * most[block[0].config.data.name]
        panels.append(Panel(block[0].setup, partial(_draw, groups=block, reach=reach), height=1.5 + 0.25 * len(block)))
    return panels


def _ends(group: Group) -> tuple[float, float]:
    """The mean of all errors minus and plus one standard deviation over seeds."""
    of_runs = totals(last_errors(group))
    mean = statistics.fmean(of_runs)
    spread = statistics.stdev(of_runs) if len(of_runs) > 1 else 0.0
    return mean - spread, mean + spread


def _draw(axes: Any, groups: Sequence[Group], reach: float) -> None:
    from matplotlib.ticker import MaxNLocator

    places = range(len(groups))
    left = [0.0] * len(groups)
    for kind, colour in zip(ERROR_TYPES, COLOURS, strict=False):
        widths = [statistics.fmean(last_errors(group)[kind]) for group in groups]
        axes.barh(places, widths, 0.7, left=left, label=kind, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    low, high = zip(*map(_ends, groups), strict=True)
    if low != high:
        axes.hlines(places, low, high, linewidth=1.5, color=axes.spines["left"].get_edgecolor())
    seeds = (len(totals(last_errors(group))) for group in groups)
    names = [wrapped(f"{group.norm}, n={n}", 16) for group, n in zip(groups, seeds, strict=True)]
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylim(len(groups) - 0.5, -1.2)  # from top to bottom, with room for the legend
    axes.set_xlim(0, reach or 1)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_xlabel("wrong predictions, mean ± std over n seeds", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(alpha=0.3, axis="x")
    style = {"handlelength": 1, "columnspacing": 1.2, "handletextpad": 0.5}
    axes.legend(frameon=False, fontsize=7, ncols=len(ERROR_TYPES), loc="upper center", borderpad=0.2, **style)
