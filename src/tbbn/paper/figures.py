"""Figures of the paper from our runs: accuracy over the tasks for each method, and the types of errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tbbn.bench.engine.record import Record
from tbbn.bench.report.figures import save_figure
from tbbn.bench.report.plots import figure
from tbbn.errors import UserError

KINDS = {"fig-curves": "accuracy", "fig-errors": "errors"}


def draw(name: str, records: Sequence[Record], path: str | Path, title: str = "") -> Path:
    """Draw a figure of the paper from the finished runs among these."""
    finished = [record for record in records if record.status == "finished"]
    if not finished:
        raise UserError("no finished run to draw.")
    return save_figure(figure(finished, KINDS[name], title), path)
