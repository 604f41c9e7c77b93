"""Curves over the tasks: accuracy, forgetting, and what a norm gains over another on the same seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

from tbbn.bench.metrics import Matrix, forgetting
from tbbn.bench.report.figures import Look, Panel, literal
from tbbn.bench.report.groups import Group, blocks
from tbbn.bench.report.pairs import Pair

FEW = 5  # more curves than this are not told apart in one panel
Numbers = Callable[[Matrix], list[float]]  # of a run: one after each task, in percent
Limits = tuple[float, float]
ALONE = 4.4, 3.2  # inches of a panel that has the figure for itself


def accuracy_after(accuracy: Matrix) -> list[float]:
    """Mean accuracy over the tasks seen so far, after each task."""
    return [100 * sum(row) / len(row) for row in accuracy]


def forgetting_after(accuracy: Matrix) -> list[float]:
    """F of the tasks learnt so far, after each task from the second on."""
    return [100 * forgetting(accuracy[: t + 1], paper=False) for t in range(1, len(accuracy))]


def accuracy_panels(groups: Sequence[Group]) -> list[Panel]:
    """Mean accuracy over the tasks seen so far. A band shows ± one standard deviation over seeds."""
    return _panels(groups, accuracy_after, "mean accuracy (%)", (0, 100), first=1)


def forgetting_panels(groups: Sequence[Group]) -> list[Panel]:
    """Forgetting (F) of the tasks learnt so far. A band shows ± one standard deviation over seeds."""
    longer = [group for group in groups if any(len(record.accuracy) > 1 for record in group.drawn)]
    return _panels(longer, forgetting_after, "forgetting F (points)", (-100, 100), first=2)


def _panels(groups: Sequence[Group], numbers: Numbers, ylabel: str, limits: Limits, first: int) -> list[Panel]:
    """One panel for few curves. For many one for each method, or for each norm beside the first where those are many too."""
    shown = [group for group in groups if group.drawn]
    if not shown:
        return []
    look = Look(shown)
    draw = partial(_draw, look=look, numbers=numbers, ylabel=ylabel, limits=limits, first=first)
    if len(shown) <= FEW:
        data = ", ".join(dict.fromkeys(group.config.data.name for group in shown))
        return [Panel(data, partial(draw, groups=shown), *ALONE)]
    reach = _reach(shown, numbers, limits)
    panels = []
    for block in blocks(shown):
        if len(block) <= FEW:
            panels.append(Panel(block[0].setup, partial(draw, groups=block, reach=reach, name="norm")))
            continue
        base, *others = block
        for group in others:
            panels.append(Panel(group.label, partial(draw, groups=[base, group], reach=reach, name="norm")))
    return panels


def _draw(
    axes: Any, groups: Sequence[Group], look: Look, numbers: Numbers, ylabel: str, limits: Limits, first: int,
    reach: Limits | None = None, name: str = "label",
) -> None:  # fmt: skip
    for group in groups:
        curves = [numbers(record.accuracy) for record in group.drawn]
        seeds = "1 seed" if len(curves) == 1 else f"{len(curves)} seeds"
        draw_curve(axes, curves, f"{getattr(group, name)} ({seeds})", look.of(group), limits, first)
    finish(axes, ylabel)
    if reach is not None:  # the same in all panels, so that they can be compared
        axes.set_ylim(*reach)


def _reach(groups: Sequence[Group], numbers: Numbers, limits: Limits) -> Limits:
    """The range that holds all curves and some air."""
    values = [value for group in groups for record in group.drawn for value in numbers(record.accuracy)] or [0.0]
    air = 0.06 * (max(values) - min(values)) + 1
    return max(limits[0], min(values) - air), min(limits[1], max(values) + air)


def draw_curve(
    axes: Any, curves: Sequence[Sequence[float]], label: str, look: dict[str, Any], limits: Limits, first: int
) -> None:
    """The mean of the curves, and where there are several a band of one standard deviation, inside the limits."""
    length = min(map(len, curves))
    tasks = range(first, first + length)
    columns = [[curve[t] for curve in curves] for t in range(length)]
    mean = list(map(statistics.fmean, columns))
    axes.plot(tasks, mean, label=literal(label), **look)
    if len(curves) > 1:
        draw_band(axes, tasks, mean, list(map(statistics.stdev, columns)), look["color"], limits)


def draw_band(
    axes: Any, tasks: range, mean: Sequence[float], half: Sequence[float], colour: str, limits: Limits
) -> None:
    low = [max(limits[0], m - h) for m, h in zip(mean, half, strict=True)]
    high = [min(limits[1], m + h) for m, h in zip(mean, half, strict=True)]
    axes.fill_between(tasks, low, high, color=colour, alpha=0.15, linewidth=0)


def finish(axes: Any, ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("tasks learnt", fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=7, handlelength=3.2)


def gain_panels(pairs: Sequence[Pair]) -> list[Panel]:
    """What norms gain in mean accuracy over another, seed by seed. A band shows ± one standard error."""
    look = Look([pair.other for pair in pairs])
    means = [statistics.fmean(column) for pair in pairs for column in pair.differences(accuracy_after)] or [0.0]
    reach = min(means) - 1, max(means) + 1
    together: dict[str, list[Pair]] = {}
    for pair in pairs:
        together.setdefault(pair.base.label, []).append(pair)
    panels = []
    for base, members in together.items():
        for some in [members] if len(members) <= FEW else [[pair] for pair in members]:
            panels.append(Panel(f"gain over {base}", partial(_draw_gains, pairs=some, look=look, reach=reach)))
    return panels


def _draw_gains(axes: Any, pairs: Sequence[Pair], look: Look, reach: Limits) -> None:
    axes.axhline(0, linewidth=0.8, color=axes.spines["left"].get_edgecolor())
    for pair in pairs:
        columns = pair.differences(accuracy_after)
        tasks = range(1, len(columns) + 1)
        mean = list(map(statistics.fmean, columns))
        style = look.of(pair.other)
        n = len(pair.seeds)
        axes.plot(tasks, mean, label=literal(f"{pair.other.norm} ({'1 seed' if n == 1 else f'{n} seeds'})"), **style)
        if n > 1:
            half = [statistics.stdev(column) / sqrt(n) for column in columns]
            draw_band(axes, tasks, mean, half, style["color"], (-100, 100))
    finish(axes, "difference (points)")
    axes.set_ylim(*reach)
