"""Curves over the tasks: accuracy, forgetting, and the gain of one norm over another on the same seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from tbbn.bench.metrics import Matrix, forgetting
from tbbn.bench.report.figures import FEW, Look, Panel, add_legend, legend_height, wrapped
from tbbn.bench.report.groups import Group, blocks
from tbbn.bench.report.interval import half_width
from tbbn.bench.report.pairs import pairs
from tbbn.bench.report.table import Table
from tbbn.bench.report.tables import percent

ALONE = Panel("", lambda axes: None, 4.4, 3.2)  # size of the only panel of a figure
AMONG = Panel("", lambda axes: None)  # size of one of several panels
_WIDE = 50  # characters per line of a label
GREY = "#7F7F7F"
Numbers = Callable[[Matrix], list[float]]  # a run's values, one after each task, in percent
Limits = tuple[float, float]


def accuracy_after(accuracy: Matrix) -> list[float]:
    """Mean accuracy over the tasks seen so far, after each task."""
    return [100 * sum(row) / len(row) for row in accuracy]


def forgetting_after(accuracy: Matrix) -> list[float]:
    """F of the tasks learnt so far, after each task from the second on."""
    return [100 * forgetting(accuracy[: t + 1]) for t in range(1, len(accuracy))]


@dataclass(frozen=True)
class Curve:
    """A line over the tasks, and the band around it."""

    label: str
    look: dict[str, Any]
    first: int  # the task at which it starts
    mean: list[float]
    low: list[float]
    high: list[float]

    def draw(self, axes: Any) -> None:
        tasks = range(self.first, self.first + len(self.mean))
        every = 1 + len(self.mean) // 12  # more markers would hide the line style
        axes.plot(tasks, self.mean, label=wrapped(self.label, _WIDE), markevery=every, **self.look)
        if self.low != self.mean:
            axes.fill_between(tasks, self.low, self.high, color=self.look["color"], alpha=0.15, linewidth=0)


def _curve(
    name: str, columns: Sequence[Sequence[float]], half: Callable[[Sequence[float]], float], limits: Limits,
    look: dict[str, Any], first: int,
) -> Curve:  # fmt: skip
    """The curve of ``columns``, one per task with one number per seed. Its band is clipped to the limits."""
    seeds = len(columns[0])
    mean = list(map(statistics.fmean, columns))
    halves = [half(column) if seeds > 1 else 0.0 for column in columns]
    low = [max(limits[0], m - h) for m, h in zip(mean, halves, strict=True)]
    high = [min(limits[1], m + h) for m, h in zip(mean, halves, strict=True)]
    return Curve(f"{name} ({'1 seed' if seeds == 1 else f'{seeds} seeds'})", look, first, mean, low, high)


def accuracy_panels(groups: Sequence[Group]) -> list[Panel]:
    """Mean accuracy over the tasks seen so far. A band shows ± one standard deviation over seeds."""
    return _panels(groups, accuracy_after, "mean accuracy (%)", (0, 100), first=1)


def curves_table(groups: Sequence[Group]) -> Table:
    """The values of the curves of :func:`accuracy_panels`."""
    columns = {}
    for group in groups:
        runs = [[sum(row) / len(row) for row in record.accuracy] for record in group.drawn]
        if of_tasks := [percent(values) for values in zip(*runs, strict=False)]:
            columns[group.label] = str(len(runs)), of_tasks
    tasks = max((len(of_tasks) for _, of_tasks in columns.values()), default=0)
    rows = [(label, n, *cells, *["-"] * (tasks - len(cells))) for label, (n, cells) in columns.items()]
    header = ("method + norm", "seeds", *(f"after {t} %" for t in range(1, tasks + 1)))
    caption = "Mean accuracy over the tasks seen so far, after each task: mean ± standard deviation over seeds."
    return Table(header, tuple(rows), caption=caption)


def forgetting_panels(groups: Sequence[Group]) -> list[Panel]:
    """Forgetting (F) of the tasks learnt so far. A band shows ± one standard deviation over seeds."""
    return _panels(groups, forgetting_after, "forgetting F (points)", (-100, 100), first=2)


def _panels(groups: Sequence[Group], numbers: Numbers, ylabel: str, limits: Limits, first: int) -> list[Panel]:
    """One panel for a few curves, else one per method. A method with many norms gets a panel for each norm with batch norm."""
    look = Look(groups)
    curves = {}
    for group in groups:
        runs = [numbers(record.accuracy) for record in group.drawn]
        if columns := list(zip(*runs, strict=False)):
            curves[group.label] = _curve(group.norm, columns, statistics.stdev, limits, look.of(group), first)
    if not curves:
        return []
    shown = [group for group in groups if group.label in curves]
    draw = partial(_draw, ylabel=ylabel, reach=_reach(list(curves.values()), limits))
    if len(shown) <= FEW:
        named = [replace(c, label=f"{g.label}{c.label.removeprefix(g.norm)}") for g in shown for c in [curves[g.label]]]
        data = ", ".join(dict.fromkeys(group.config.data.name for group in shown))
        return [_panel(data, draw, named, ALONE)]
    panels = []
    for block in blocks(shown):
        own = [curves[group.label] for group in block]
        if len(block) <= FEW:
            panels.append(_panel(block[0].setup, draw, own))
        else:
            at = next((i for i, group in enumerate(block) if group.norm == "bn"), 0)  # the same base as in pairs()
            base = replace(own[at], look={**own[at].look, "color": GREY})
            others = [(group, curve) for group, curve in zip(block, own, strict=True) if group is not block[at]]
            panels += [_panel(group.label, draw, [base, curve]) for group, curve in others]
    return panels


def gain_panels(groups: Sequence[Group]) -> list[Panel]:
    """Gains of norms over a base norm in mean accuracy, paired by seed. A band shows the 95 % interval of the mean."""
    look = Look(groups)
    together: dict[str, list[Curve]] = {}
    for pair in pairs(groups):
        columns = pair.differences(accuracy_after)
        curve = _curve(pair.other.norm, columns, half_width, (-100, 100), look.of(pair.other), 1)
        together.setdefault(pair.base.label, []).append(curve)
    if not together:
        return []
    reach = _reach([curve for curves in together.values() for curve in curves], (-100, 100), beyond=10)
    draw = partial(_draw, ylabel="difference (points)", reach=reach, zero=True)
    panels = []
    for base, curves in together.items():
        for some in [curves] if len(curves) <= FEW else [[curve] for curve in curves]:
            panels.append(_panel(f"gain over {base}", draw, some))
    return panels


def _panel(title: str, draw: Callable[..., None], curves: Sequence[Curve], size: Panel = AMONG) -> Panel:
    below = legend_height([curve.label for curve in curves], size.width)
    return Panel(title, partial(draw, curves=curves), size.width, size.height + below)


def _reach(curves: Sequence[Curve], limits: Limits, beyond: float = inf) -> Limits:
    """The y limits for all curves and bands with a margin. All panels share them, so that they can be compared.

    A band that extends further than ``beyond`` to a side is cut: the interval of two seeds would flatten every curve.
    """
    low = min(max(edge, mean - beyond) for curve in curves for edge, mean in zip(curve.low, curve.mean, strict=True))
    high = max(min(edge, mean + beyond) for curve in curves for edge, mean in zip(curve.high, curve.mean, strict=True))
    air = 0.05 * (high - low) + 0.5
    return max(limits[0] - 1, low - air), min(limits[1] + 1, high + air)


def _draw(axes: Any, curves: Sequence[Curve], ylabel: str, reach: Limits, zero: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    if zero:
        axes.axhline(0, linewidth=0.8, color=axes.spines["left"].get_edgecolor())
    for curve in curves:
        curve.draw(axes)
    axes.set_ylim(*reach)
    axes.set_xlabel("tasks learnt", fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    add_legend(axes)
