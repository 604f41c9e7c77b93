"""Figures of the analyses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tbbn.bench.analysis.drift import LayerDrift
from tbbn.bench.analysis.epochs import RULES, EpochScore, kept_by
from tbbn.bench.report.figures import COLOURS, MARKERS, literal, new_figure, save_figure, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def epochs_figure(scores: Mapping[str, Sequence[Sequence[EpochScore]]], path: str | Path, stamp: str = "") -> Path:
    """Accuracy on past and new tasks after every epoch, with one panel per run name for all its seeds."""
    figure = new_figure(8.0, 0.6 + 3.0 * len(scores))
    panels = figure.subplots(len(scores), 1, squeeze=False, sharey=True).flatten()
    for axes, (name, seeds) in zip(panels, scores.items(), strict=True):
        _draw_epochs(axes, seeds)
        title = name if len(seeds) == 1 else f"{name}, mean over {len(seeds)} seeds"
        axes.set_title(literal(title), fontsize=10)
        axes.set_ylabel("accuracy (%)")
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=len(labels), loc="outside lower center")
    panels[-1].set_xlabel("epochs, task after task; marks: mean over all tasks at the kept epoch")
    return _stamped(figure, path, stamp)


def _stamped(figure: Figure, path: str | Path, stamp: str) -> Path:
    """Save the figure; its title says if runs trained only part of their epochs or tasks."""
    if stamp:
        figure.suptitle(wrapped(stamp, 80), fontsize=10)
    return save_figure(figure, path)


def _draw_epochs(axes: Any, seeds: Sequence[Sequence[EpochScore]]) -> None:
    """The mean over seeds, each seed as a faint line, and a mark at the mean epoch and accuracy that each rule keeps."""
    x = range(1, len(seeds[0]) + 1)
    for key, label, colour in (("past", "past tasks", COLOURS[0]), ("new", "new task", COLOURS[1])):
        curves = [[100 * getattr(score, key) for score in run] for run in seeds]
        axes.plot(x, [fmean(same) for same in zip(*curves, strict=True)], color=colour, linewidth=0.9, label=label)
        for curve in curves if len(curves) > 1 else ():
            axes.plot(x, curve, color=colour, linewidth=0.5, alpha=0.3)
    places = {id(score): place for run in seeds for place, score in enumerate(run, 1)}
    for i, rule in enumerate(RULES):
        kept = list(zip(*(kept_by(run, rule) for run in seeds), strict=True))
        style: dict[str, Any] = {"color": COLOURS[2 + i], "marker": MARKERS[i], "linestyle": ""}
        style["markersize"] = 7 - 1.5 * i  # where rules agree, the rim of the mark below stays visible
        epochs = [fmean(places[id(score)] for score in same) for same in kept]
        axes.plot(epochs, [100 * fmean(score.mean for score in same) for same in kept], label=rule, **style)
    for place, (before, after) in enumerate(pairwise(seeds[0]), 1):
        if (before.task, before.phase) != (after.task, after.phase):
            line = "-" if before.task != after.task else ":"
            axes.axvline(place + 0.5, color="grey", linewidth=0.5, linestyle=line)


def drift_figure(
    labels: Sequence[str], drifts: Sequence[Sequence[LayerDrift]], path: str | Path, stamp: str = ""
) -> Path:
    """Distance of the running mean from the balanced population's, and the newest task's weight in it, layer by layer."""
    figure = new_figure(8.0, 3.4 + 0.2 * -(-len(labels) // 3))
    left, right = figure.subplots(1, 2)
    from matplotlib.ticker import MaxNLocator  # after new_figure, which raises a clear error without matplotlib

    for i, (label, layers) in enumerate(zip(labels, drifts, strict=True)):
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 3,
        }
        left.plot(range(1, len(layers) + 1), [layer.mean for layer in layers], label=literal(label), **style)
        right.plot(range(1, len(layers) + 1), [100 * layer.newest for layer in layers], **style)
    left.set_ylabel("running mean off (sd)")
    right.set_ylabel("weight of the newest task (%)")
    for axes in (left, right):
        axes.set_xlabel("norm layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    return _stamped(figure, path, stamp)
