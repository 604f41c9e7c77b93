"""Accuracy curves, read back from matplotlib's objects."""

from __future__ import annotations

import builtins
import statistics
from pathlib import Path
from typing import Any

import pytest

from tbbn.bench.config import resolve, to_dict
from tbbn.bench.engine.record import Record
from tbbn.bench.report.plots import accuracy_curves
from tbbn.errors import UserError


def record(accuracy: list[list[float]], seed: int = 0, norm: str = "bn", status: str = "finished") -> Record:
    config = resolve(("test", {"seed": seed, "norm.name": norm}))
    return Record(to_dict(config), status=status, task_sizes=[2, 2], accuracy=accuracy)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    savefig = Figure.savefig

    def keep(self: Figure, *arguments: Any, **options: Any) -> None:
        saved.append(self)
        savefig(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def test_a_curve_is_the_mean_over_seeds_and_its_band_one_deviation(tmp_path: Path, figures: list[Any]) -> None:
    records = [record([[1.0], [0.5, 0.7]]), record([[0.8], [0.3, 0.5]], seed=1), record([[0.9], [0.1, 0.1]], norm="gn")]
    path = accuracy_curves(records, tmp_path / "new" / "curves.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (axes,) = figures[0].axes
    first, second = axes.lines
    assert list(first.get_xdata()) == [1, 2]
    assert list(first.get_ydata()) == pytest.approx([90.0, 50.0])
    assert list(second.get_ydata()) == pytest.approx([90.0, 10.0])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ft + bn (2 seeds)", "ft + gn (1 seed)"]
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.max() == 100  # 90 + the deviation of 14.1, but no accuracy is above 100
    assert heights.min() == pytest.approx(50 - 100 * statistics.stdev([0.6, 0.4]))
    assert band.get_alpha() < 0.3, "the curves behind it can be seen"


def test_an_unfinished_run_does_not_cut_the_curve_of_the_others(tmp_path: Path, figures: list[Any]) -> None:
    whole, broken = record([[1.0], [0.5, 0.7]]), record([[0.2]], seed=1, status="interrupted")
    accuracy_curves([whole, broken], tmp_path / "a.png")
    assert list(figures[0].axes[0].lines[0].get_ydata()) == pytest.approx([100.0, 60.0])
    accuracy_curves([broken], tmp_path / "b.png")
    assert list(figures[1].axes[0].lines[0].get_ydata()) == pytest.approx([20.0])


def test_runs_without_a_task_give_an_empty_picture_not_an_error(tmp_path: Path) -> None:
    assert accuracy_curves([record([], status="failed")], tmp_path / "none.png").exists()


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"plots need matplotlib; pip install 'tbbn\[bench\]'\."):
        accuracy_curves([record([[1.0]])], tmp_path / "x.png")


def test_many_curves_look_different_and_the_legend_stands_beside_the_axes(tmp_path: Path, figures: list[Any]) -> None:
    norms = ["bn", "in", "gn", "sn", "brn", "cn", "tbbn", "adab2n", "weighted"]
    records = [record([[1.0], [0.5, 0.7]], norm=norm) for norm in norms]
    for method in ("er", "lucir"):
        for norm in norms:
            config = resolve(("test", {"norm.name": norm, "method.name": method}))
            records.append(Record(to_dict(config), status="finished", task_sizes=[2, 2], accuracy=[[1.0], [0.4, 0.6]]))
    accuracy_curves(records, tmp_path / "many.png")
    (figure,) = figures
    (axes,) = figure.axes
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines}
    assert len(axes.lines) == len(looks) == 27
    (legend,) = figure.legends
    assert axes.get_legend() is None
    figure.draw_without_rendering()
    box, whole = legend.get_window_extent(), figure.bbox
    assert axes.get_window_extent().x1 < box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1


def test_dollars_and_underscores_of_a_name_are_drawn_as_they_are(tmp_path: Path, figures: list[Any]) -> None:
    config = resolve(("test", {"data.name": "_my $x$ and $y"}))
    named = Record(to_dict(config), status="finished", task_sizes=[2, 2], accuracy=[[1.0], [0.5, 0.7]])
    other = record([[1.0], [0.5, 0.7]])
    accuracy_curves([named, other], tmp_path / "x.png")
    (axes,) = figures[0].axes
    assert axes.get_title() == "\u200b" + r"_my \$x\$ and \$y, digits"  # a leading underscore would hide a label
    label, _ = (text.get_text() for text in axes.get_legend().get_texts())
    assert label == r"ft + bn [_my \$x\$ and \$y] (1 seed)"
