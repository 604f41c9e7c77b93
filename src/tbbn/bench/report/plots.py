"""Records to pictures."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from tbbn.bench.engine.record import Record
from tbbn.bench.report.tables import grouped
from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours: apart for colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

FEW = 6  # curves whose legend fits between them


def accuracy_curves(records: Sequence[Record], path: str | Path) -> Path:
    """Draw :func:`accuracy_figure` into a file."""
    figure, path = accuracy_figure(records), Path(path)
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise UserError(
            f"{path}: curves are drawn as .{', .'.join(sorted(known))}, got {path.suffix or 'no suffix'!r}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a sign that the font does not have is drawn as a box
        figure.savefig(path, dpi=150)
    return path


def accuracy_figure(records: Sequence[Record]) -> Figure:
    """Mean accuracy over the tasks seen so far, after each task; a band shows the standard deviation over seeds."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib; pip install 'tbbn[bench]'.") from None
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:  # a notebook shows it without pyplot
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    figure = Picture(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    names = []
    for i, (name, members) in enumerate(grouped(records).items()):
        # An unfinished run would cut the others' curves short.
        shown = [r for r in members if r.status == "finished"] or members
        curves = [[sum(row) / len(row) for row in r.accuracy] for r in shown if r.accuracy]
        if not curves:
            continue
        length = min(map(len, curves))
        tasks = range(1, length + 1)
        mean = [100 * statistics.fmean(c[t] for c in curves) for t in range(length)]
        turn = i // len(COLOURS)  # after the last colour they begin again, with other lines and markers
        colour, marker, line = COLOURS[i % len(COLOURS)], "os^Dv<>p"[(i + turn) % 8], ("-", "--", ":", "-.")[turn % 4]
        seeds = "1 seed" if len(curves) == 1 else f"{len(curves)} seeds"
        label = _literal(f"{name} ({seeds})")
        axes.plot(tasks, mean, color=colour, marker=marker, linestyle=line, markersize=5, label=label)
        if len(curves) > 1:
            spread = [100 * statistics.stdev(c[t] for c in curves) for t in range(length)]
            low = [m - s for m, s in zip(mean, spread, strict=True)]
            high = [m + s for m, s in zip(mean, spread, strict=True)]
            axes.fill_between(tasks, low, high, color=colour, alpha=0.15, linewidth=0)
        names.append(members[0].run_config.data.name)
    axes.set_xlabel("tasks learnt")
    axes.set_ylabel("mean accuracy over tasks seen (%)")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if names:
        if len(names) <= FEW:
            axes.legend(frameon=False)
        else:  # beside the curves, in a picture as high and wide as that takes
            figure.legend(loc="outside right upper", frameon=False, fontsize="small")
            longest = max(len(text) for text in axes.get_legend_handles_labels()[1])
            figure.set_size_inches(6.4 + 0.085 * longest, max(4.0, 0.6 + 0.21 * len(names)))
        axes.set_title(_literal(", ".join(dict.fromkeys(names))))
    return figure


def _literal(text: str) -> str:
    """The text as it stands: a dollar sign would begin a formula, and a leading underscore hide a curve's name."""
    return "\u200b" * text.startswith("_") + printable(text).replace("$", r"\$")
