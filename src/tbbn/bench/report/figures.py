"""Common code of all figures: create them, compose them of panels, save them, and style their curves."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tbbn.bench.files import write_atomic
from tbbn.bench.report.groups import Group
from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart, with grey and brown instead of black and yellow, so that
# all colours are visible on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#A6611A")
# Each of these norms has the line and the marker at its place, in every figure. Those often compared come first, because the
# first lines differ most.
NORMS = ("bn", "tbbn", "cn", "in", "sn", "brn", "gn", "adab2n", "weighted")
LINES: tuple[Any, ...] = (
    "-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 3)), (0, (8, 2, 3, 2)),
    (0, (1, 4)),
)  # fmt: skip
MARKERS = "os^Dv<>pX"
FEW = 5  # more curves than this cannot be told apart in one panel
_COLUMNS = 3
_SHORT = 7  # characters per inch of panel width up to which two legend entries fit side by side
_INSIDE = 4  # a legend with more entries does not fit inside the axes


@dataclass(frozen=True)
class Panel:
    """One picture of a figure."""

    title: str
    draw: Callable[[Any], None]  # draws into matplotlib axes
    width: float = 3.6  # in inches
    height: float = 2.7

    def figure(self) -> Figure:
        return figure_of([self])


def matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib; pip install 'tbbn[bench]'.") from None
    return matplotlib


def new_figure(width: float, height: float) -> Figure:
    matplotlib()
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A figure that notebooks display without pyplot."""

        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained")


def figure_of(panels: Sequence[Panel], title: str = "") -> Figure:
    """The panels side by side in one figure, three to a row."""
    columns = min(_COLUMNS, len(panels)) or 1
    lines = -(-len(panels) // columns) or 1
    width = max((panel.width for panel in panels), default=4.4)
    heights = [max(panel.height for panel in panels[i : i + columns]) for i in range(0, len(panels), columns)]
    figure = new_figure(width * columns, sum(heights) or 3.2)
    grid = figure.subplots(lines, columns, squeeze=False, height_ratios=heights or None).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        panel.draw(axes)
        axes.set_title(wrapped(panel.title, round(11 * panel.width), lines=4), fontsize=9)
    for axes in grid[len(panels) :]:
        axes.axis("off")
    if not panels:
        grid[0].text(0.5, 0.5, "nothing to draw", ha="center")
    if title:
        figure.suptitle(wrapped(title, round(10 * width * columns)), fontsize=10)
    return figure


def legend_height(labels: Sequence[str], width: float) -> float:
    """The height in inches that :func:`add_legend` needs below the axes of a panel of this width for these entries."""
    return 0.16 * -(-len(labels) // _legend_columns(labels, width)) if len(labels) > _INSIDE else 0.0


def _legend_columns(labels: Sequence[str], width: float) -> int:
    return 2 if max(map(len, labels)) <= _SHORT * width else 1


def add_legend(axes: Any) -> None:
    """Add a legend where it covers least of the curves, or below the axes if it has many entries."""
    from matplotlib.transforms import ScaledTranslation

    labels = axes.get_legend_handles_labels()[1]
    style: dict[str, Any] = {"frameon": False, "fontsize": 7, "handlelength": 3.2}
    if len(labels) > _INSIDE:
        below = axes.transAxes + ScaledTranslation(0, -0.4, axes.figure.dpi_scale_trans)  # the axis label is in between
        columns = _legend_columns(labels, axes.figure.get_figwidth() / axes.get_gridspec().ncols)
        style |= {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below, "ncols": columns}
    axes.legend(**style)


def check_picture(path: str | Path) -> Path:
    """Raise if a file's suffix is not a supported figure format. Call it before the work for the figure."""
    matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    path, known = Path(path), FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        formats = ", ".join(f".{suffix}" for suffix in sorted(known))
        raise UserError(f"{path}: the picture must end in {formats}, got {path.suffix or 'no suffix'!r}.")
    return path


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file, in the format of its suffix."""
    path = check_picture(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters missing from the font are drawn as boxes
        figure.savefig(picture, format=path.suffix.lstrip(".").lower(), dpi=200)
    write_atomic(path, picture.getvalue())
    return path


def save_as_files(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG for print and as PNG for the screen."""
    return [save_figure(figure, folder / f"{name}.{suffix}") for suffix in ("svg", "png")]


def literal(text: str) -> str:
    """Escape text for matplotlib: a dollar sign starts no formula, and a leading underscore hides no label."""
    return "\u200b" * text.startswith("_") + printable(text).replace("$", r"\$")


def wrapped(text: str, width: int, lines: int = 3) -> str:
    """Wrap text to at most so many lines of this many characters, each escaped by :func:`literal`."""
    made = textwrap.wrap(printable(text), width, max_lines=lines, placeholder=" ...", break_on_hyphens=False)
    return "\n".join(map(literal, made))


class Look:
    """The style of a group's curve: its method and settings set the colour, its norm the line and the marker.

    Figures that are read together are made with the same groups, so that a norm with options or from a plugin, whose style
    depends on which others there are, looks alike in them.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._setups = list(dict.fromkeys(group.setup for group in groups))
        self._others = list(dict.fromkeys(group.norm for group in groups if group.norm not in NORMS))

    def of(self, group: Group) -> dict[str, Any]:
        """Keyword arguments for ``axes.plot``."""
        line, marker = self._style(group.norm)
        return {
            "color": COLOURS[self._setups.index(group.setup) % len(COLOURS)],
            "linestyle": LINES[line],
            "marker": MARKERS[marker],
            "markersize": 4,
            "linewidth": 1.5,
        }

    def _style(self, norm: str) -> tuple[int, int]:
        """The places of a norm's line and marker. Any other norm than those in NORMS has a line with another one's marker."""
        if norm in NORMS:
            return NORMS.index(norm), NORMS.index(norm)
        place, many = self._others.index(norm), len(LINES)
        line = (place + 3) % many  # first those of norms that are rarely compared
        return line, (line + 1 + place // many % (many - 1)) % many
