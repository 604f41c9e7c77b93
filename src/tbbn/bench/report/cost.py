"""What runs cost: time, epochs, and the splits and exemplars that it depends on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tbbn.bench.report.groups import Group
from tbbn.bench.report.table import Table


def cost_table(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        drawn = group.drawn
        if not drawn:
            continue
        seconds = statistics.fmean(record.seconds for record in drawn)
        epochs = statistics.fmean(len(record.history) for record in drawn)
        each = f"{seconds / epochs:.2f}" if epochs else "-"
        devices = dict.fromkeys(str(r.environment.get("gpu", r.environment.get("machine", "-"))) for r in drawn)
        splits = drawn[0].splits
        largest = f"{max(record.exemplars[-1] for record in drawn)}"
        cells = (duration(seconds), f"{epochs:.0f}", each, str(max(splits, default=1)), largest, ", ".join(devices))
        rows.append((group.label, *cells))
    header = ("method + norm", "time a run", "epochs", "s an epoch", "largest r*", "exemplars", "device")
    notes = ("Time of training and evaluation, mean over seeds. Runs that shared a device in lanes took longer each.",)
    return Table(header, tuple(rows), notes, "l" + "r" * 5 + "l", "Cost of a run.")


def duration(seconds: float) -> str:
    """
    >>> duration(7.25), duration(935), duration(7260)
    ('7.2 s', '15 min 35 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
