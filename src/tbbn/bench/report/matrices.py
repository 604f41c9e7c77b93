"""Accuracy matrices as heat maps: one row per task learnt, one column per task tested."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from tbbn.bench.report.figures import Panel
from tbbn.bench.report.groups import Group

_READABLE = 12  # with more tasks, the numbers do not fit into their cells


def mean_matrix(group: Group) -> list[list[float]]:
    """The accuracy matrix in percent, averaged over the seeds of a group."""
    matrices = [record.accuracy for record in group.drawn]
    tasks = min(map(len, matrices))
    return [[100 * statistics.fmean(m[t][i] for m in matrices) for i in range(t + 1)] for t in range(tasks)]


def matrix_panels(groups: Sequence[Group]) -> list[Panel]:
    return [
        Panel(group.label, partial(_draw, matrix=mean_matrix(group)), height=3.5) for group in groups if group.drawn
    ]


def _draw(axes: Any, matrix: list[list[float]]) -> None:
    n = len(matrix)
    square = [[*row, *[float("nan")] * (n - len(row))] for row in matrix]
    edges = [t + 0.5 for t in range(n + 1)]
    cells = axes.pcolormesh(edges, edges, square, cmap="viridis", vmin=0, vmax=100, linewidth=0)
    if n <= _READABLE:
        for t, row in enumerate(matrix):
            for i, value in enumerate(row):
                red, green, blue, _ = cells.cmap(value / 100)
                dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
                colour = "white" if dark else "black"
                text = axes.text(i + 1, t + 1, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)
                text.set_in_layout(False)  # it is inside its cell, and measuring each text takes most of the time
    else:
        scale = axes.figure.colorbar(cells, shrink=0.7, boundaries=range(0, 101, 5), ticks=range(0, 101, 25))
        scale.ax.tick_params(labelsize=7)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_xlabel("accuracy (%) on task", fontsize=8)
    axes.set_ylabel("after task", fontsize=8)
    ticks = range(1, n + 1) if n <= _READABLE else range(5, n + 1, 5)
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.tick_params(labelsize=7, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
