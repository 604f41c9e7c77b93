"""Analyses as sections of the page that ``tbbn report --html`` writes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tbbn.bench.analysis.drift import LayerDrift, drift
from tbbn.bench.analysis.loading import run_after
from tbbn.bench.analysis.shares import NORMS, shares_table
from tbbn.bench.engine.record import Record
from tbbn.bench.report.figures import Look, Panel, add_legend, legend_height, literal
from tbbn.bench.report.groups import Group, blocks, groups
from tbbn.bench.report.page import Section
from tbbn.bench.report.table import Table
from tbbn.errors import UserError

Layers = Sequence[LayerDrift]


def shares_section(records: Sequence[Record]) -> Section:
    """Each task's share in the statistics, for norms whose shares depend only on the batch."""
    tables: dict[tuple[tuple[str, ...], ...], tuple[Table, list[str]]] = {}
    for block in blocks(groups(records)):
        if known := [group.config for group in block if group.config.norm.name in NORMS]:
            try:
                table = shares_table(known)
            except UserError:  # joint training has no newest task, or the method's plugin is missing
                continue
            tables.setdefault((table.header, *table.rows), (table, []))[1].append(block[0].setup)
    shown = tuple(replace(table, caption=", ".join(setups)) for table, setups in tables.values())
    return Section("shares", "Share of each task in the statistics", "", shown)


def drift_section(runs: Mapping[Path, Record], images: int) -> Section:
    """The drift of running statistics after the last task, for runs whose network and data are available here."""
    folders = {id(record): folder for folder, record in runs.items()}
    measured: list[tuple[Group, list[Layers]]] = []
    missing = []
    all_groups = groups(list(runs.values()))
    for group in all_groups:
        found: list[Layers] = []
        for record in group.drawn:
            try:
                found.append(drift(run_after(folders[id(record)]), images))
            except (UserError, OSError) as error:
                missing.append(str(error))
        if found:
            measured.append((group, found))
    line = "Running statistics after the last task compared with those of all tasks weighted equally, mean over seeds."
    if missing:
        line += f" Not measured: {len(missing)} runs ({missing[0].rstrip('.')})."
    look = Look(all_groups)
    panels = []
    for block in blocks([group for group, _ in measured]):
        curves = [(group, found) for group, found in measured if group in block]
        height = Panel.height + legend_height([group.norm for group, _ in curves], Panel.width)
        panels.append(Panel(block[0].setup, partial(_draw, curves=curves, look=look), height=height))
    return Section("drift", "Drift of running statistics", line, (_table(measured),), tuple(panels), asked=True)


def _table(measured: Sequence[tuple[Group, Sequence[Layers]]]) -> Table:
    rows = []
    for group, found in measured:
        layers = [layer for run in found for layer in run]
        means = [statistics.fmean(getattr(layer, key) for layer in layers) for key in ("mean", "std", "newest")]
        cells = (f"{means[0]:.3f}", f"{100 * means[1]:.1f}", f"{100 * means[2]:.1f}")
        rows.append((group.label, str(len(found)), *cells))
    header = ("method + norm", "seeds", "mean off, sd", "std off, %", "newest task, %")
    notes = ("newest task: its weight in the running mean; the past tasks share the rest.",)
    return Table(header, tuple(rows), notes, caption="Drift of running statistics, mean over layers.")


def _draw(axes: Any, curves: Sequence[tuple[Group, Sequence[Layers]]], look: Look) -> None:
    from matplotlib.ticker import MaxNLocator

    for group, found in curves:
        means = [statistics.fmean(layer.mean for layer in same) for same in zip(*found, strict=True)]
        axes.plot(range(1, len(means) + 1), means, label=literal(group.norm), **look.of(group))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("norm layer", fontsize=8)
    axes.set_ylabel("running mean off (sd)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    add_legend(axes)
