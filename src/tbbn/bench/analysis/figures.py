"""Pictures of the analyses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tbbn.bench.analysis.drift import LayerDrift
from tbbn.bench.analysis.epochs import RULES, EpochScore, kept_by
from tbbn.bench.report.figures import COLOURS, MARKERS, literal, new_figure, save_figure


def epochs_figure(name: str, scores: Sequence[EpochScore], path: str | Path) -> Path:
    """Accuracy on past and new tasks after every epoch of a run, with a mark for what each rule keeps."""
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    place = {id(score): x for x, score in enumerate(scores, 1)}
    for key, label, colour in (("past", "past tasks", COLOURS[0]), ("new", "new task", COLOURS[1])):
        heights = [100 * getattr(score, key) for score in scores]
        axes.plot([*place.values()], heights, color=colour, linewidth=0.9, label=label)
    for i, rule in enumerate(RULES):
        kept = kept_by(scores, rule)
        style: dict[str, Any] = {"color": COLOURS[2 + i], "marker": MARKERS[i], "markersize": 4, "linestyle": ""}
        axes.plot([place[id(score)] for score in kept], [100 * score.mean for score in kept], label=rule, **style)
    for x, (before, after) in enumerate(pairwise(scores), 1):
        if before.task != after.task:
            axes.axvline(x + 0.5, color="grey", linewidth=0.5)
    axes.set_xlabel("epochs, task after task; marks: mean over all tasks at the kept epoch")
    axes.set_ylabel("accuracy (%)")
    axes.set_title(literal(name), fontsize=10)
    axes.legend(frameon=False, fontsize=7)
    axes.grid(alpha=0.3)
    return save_figure(figure, path)


def drift_figure(labels: Sequence[str], drifts: Sequence[Sequence[LayerDrift]], path: str | Path) -> Path:
    """Distance of the running mean from the balanced population's, and the newest task's weight in it, layer by layer."""
    figure = new_figure(8.0, 3.4)
    left, right = figure.subplots(1, 2)
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
        axes.grid(alpha=0.3)
    left.legend(frameon=False, fontsize=7)
    return save_figure(figure, path)
