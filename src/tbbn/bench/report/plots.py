"""Records to pictures."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tbbn.bench.engine.record import Record
from tbbn.bench.files import write_atomic
from tbbn.bench.report.groups import grouped
from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito's
MARKERS, LINES = "os^Dv<>p", ("-", "--", ":", "-.")
FEW = 6  # with more curves than this, the legend stands beside the axes


def accuracy_curves(records: Sequence[Record], path: str | Path) -> Path:
    """Draw :func:`accuracy_figure` into a file."""
    return save_figure(accuracy_figure(records), path)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file of the format its name says."""
    path = Path(path)
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        formats = ", ".join(f".{suffix}" for suffix in sorted(known))
        raise UserError(f"{path}: the picture must end in {formats}, got {path.suffix or 'no suffix'!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters missing from the font are drawn as boxes
        figure.savefig(picture, format=path.suffix.lstrip(".").lower(), dpi=150)
    write_atomic(path, picture.getvalue())
    return path


def accuracy_figure(records: Sequence[Record]) -> Figure:
    """Mean accuracy over the tasks seen so far, after each task. A band shows ± one std over seeds."""
    figure = new_figure()
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    names = []
    for i, (name, members) in enumerate(grouped(records).items()):
        # An unfinished run would cut the curve of its group short.
        shown = [r for r in members if r.status == "finished"] or members
        curves = [[sum(row) / len(row) for row in r.accuracy] for r in shown if r.accuracy]
        if curves:
            draw_curve(axes, i, name, curves)
            names.append(members[0].run_config.data.name)
    axes.set_xlabel("tasks learnt")
    axes.set_ylabel("mean accuracy over tasks seen (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if names:
        _add_legend(figure, axes)
        axes.set_title(literal(", ".join(dict.fromkeys(names))))
    return figure


def new_figure(width: float = 6.4, height: float = 4.0) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plots need matplotlib; pip install 'tbbn[bench]'.") from None

    class NotebookFigure(Figure):
        """A figure that notebooks show without pyplot."""

        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained")


def draw_curve(axes: Any, number: int, name: str, curves: list[list[float]]) -> None:
    """One group's curve; colours repeat after the last one, with other markers and line styles."""
    length = min(map(len, curves))
    tasks = range(1, length + 1)
    mean = [100 * statistics.fmean(c[t] for c in curves) for t in range(length)]
    turn = number // len(COLOURS)
    seeds = "1 seed" if len(curves) == 1 else f"{len(curves)} seeds"
    axes.plot(
        tasks,
        mean,
        color=COLOURS[number % len(COLOURS)],
        marker=MARKERS[(number + turn) % len(MARKERS)],
        linestyle=LINES[turn % len(LINES)],
        markersize=5,
        label=literal(f"{name} ({seeds})"),
    )
    if len(curves) > 1:
        std = [100 * statistics.stdev(c[t] for c in curves) for t in range(length)]
        low = [max(0.0, m - s) for m, s in zip(mean, std, strict=True)]
        high = [min(100.0, m + s) for m, s in zip(mean, std, strict=True)]
        axes.fill_between(tasks, low, high, color=COLOURS[number % len(COLOURS)], alpha=0.15, linewidth=0)


def _add_legend(figure: Figure, axes: Any) -> None:
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) <= FEW:
        axes.legend(frameon=False)
    else:  # beside the axes, in a figure large enough for it
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
        figure.set_size_inches(6.4 + 0.085 * max(map(len, labels)), max(4.0, 0.6 + 0.21 * len(labels)))


def literal(text: str) -> str:
    """Text that matplotlib draws as it is: no formula at a dollar sign, no hidden label at a leading underscore."""
    return "\u200b" * text.startswith("_") + printable(text).replace("$", r"\$")
