"""Figures of the paper from our runs: accuracy over the tasks for each method, and the types of errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tbbn.bench.engine.record import Record
from tbbn.bench.metrics import ERROR_TYPES
from tbbn.bench.report.groups import grouped
from tbbn.bench.report.plots import COLOURS, draw_curve, literal, new_figure, save_figure
from tbbn.errors import UserError


def _finished(records: Sequence[Record]) -> list[Record]:
    finished = [record for record in records if record.status == "finished"]
    if not finished:
        raise UserError("no finished run to draw.")
    return finished


def accuracy_by_method(records: Sequence[Record], path: str | Path, title: str = "") -> Path:
    """Mean accuracy over the tasks seen so far, after each task: a panel for each method, a curve for each norm."""
    methods: dict[str, list[Record]] = {}
    for record in _finished(records):
        methods.setdefault(str(record.run_config.method), []).append(record)
    columns = min(3, len(methods))
    lines = -(-len(methods) // columns)
    figure = new_figure(3.4 * columns + 0.4, 2.8 * lines + 0.2)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, (method, members) in zip(panels, methods.items(), strict=False):
        for i, (_, group) in enumerate(sorted(grouped(members).items())):
            curves = [[sum(row) / len(row) for row in r.accuracy] for r in group]
            draw_curve(axes, i, str(group[0].run_config.norm), curves)
        axes.set_title(literal(method), fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
    for axes in panels[len(methods) :]:
        axes.axis("off")
    for axes in panels[: len(methods)][-columns:]:
        axes.tick_params(labelbottom=True)  # also above an empty panel
    figure.supxlabel("tasks learnt", fontsize=9)
    figure.supylabel("mean accuracy over tasks seen (%)", fontsize=9)
    figure.suptitle(literal(title), fontsize=9)
    return save_figure(figure, path)


def error_types(records: Sequence[Record], path: str | Path, title: str = "") -> Path:
    """Wrong predictions after the last task by type, from C (current) or P (past) classes to C or P; a bar for each norm."""
    groups = grouped(_finished(records))
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    width = 0.8 / len(groups)
    for i, (name, members) in enumerate(groups.items()):
        heights = [statistics.fmean(record.errors[-1][kind] for record in members) for kind in ERROR_TYPES]
        places = [number + (i - (len(groups) - 1) / 2) * width for number in range(len(ERROR_TYPES))]
        axes.bar(places, heights, width, label=literal(name), color=COLOURS[i % len(COLOURS)])
    axes.set_xticks(range(len(ERROR_TYPES)), ERROR_TYPES)
    axes.set_ylabel("wrong predictions, mean over seeds")
    axes.set_title(literal(title or "errors after the last task, true -> predicted"), fontsize=10)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)
