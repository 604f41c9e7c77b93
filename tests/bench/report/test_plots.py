"""Figures, read back from matplotlib's objects."""

from __future__ import annotations

import builtins
import csv
import io
import math
import statistics
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from records import record

from tbbn.bench.engine.record import Record
from tbbn.bench.report.curves import curves_table
from tbbn.bench.report.errors import errors_table
from tbbn.bench.report.figures import Panel, figure_of, save_figure
from tbbn.bench.report.groups import groups
from tbbn.bench.report.plots import KINDS, figure
from tbbn.errors import UserError

UP, DOWN = [[1.0], [0.5, 0.7]], [[0.8], [0.3, 0.5]]


def curves(records: Sequence[Record], kind: str = "accuracy") -> list[Any]:
    """The curves of a figure that has one panel."""
    (axes,) = figure(records, kind).axes
    return list(axes.lines)


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_curve_is_the_mean_over_seeds_and_its_band_one_deviation() -> None:
    drawn = figure([record(UP), record(DOWN, seed=1), record([[0.9], [0.1, 0.1]], norm__name="gn")])
    (axes,) = drawn.axes
    first, second = axes.lines
    assert list(first.get_xdata()) == [1, 2]
    assert list(first.get_ydata()) == pytest.approx([90.0, 50.0])
    assert list(second.get_ydata()) == pytest.approx([90.0, 10.0])
    assert legend(axes) == ["ft + bn (2 seeds)", "ft + gn (1 seed)"]
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.max() == 100  # 90 + the deviation of 14.1, but no accuracy is above 100
    assert heights.min() == pytest.approx(50 - 100 * statistics.stdev([0.6, 0.4]))
    assert band.get_alpha() < 0.3, "the curves behind it can be seen"


def test_the_table_of_the_curves_has_their_numbers() -> None:
    short = record([[0.9]], norm__name="gn")
    table = curves_table(groups([record(UP), record(DOWN, seed=1), short]))
    assert table.header == ("method + norm", "seeds", "after 1 %", "after 2 %")
    assert table.rows == (("ft + bn", "2", "90.0 ± 14.1", "50.0 ± 14.1"), ("ft + gn", "1", "90.0", "-"))


def test_bands_do_not_go_below_zero() -> None:
    (axes,) = figure([record([[0.0], [0.0, 0.0]]), record([[1.0], [0.4, 0.4]], seed=1)]).axes
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.min() == 0 and heights.max() == 100


def test_an_unfinished_run_does_not_cut_the_curve_of_the_others() -> None:
    whole, broken = record(UP), record([[0.2]], "interrupted", seed=1)
    assert list(curves([whole, broken])[0].get_ydata()) == pytest.approx([100.0, 60.0])
    assert list(curves([broken])[0].get_ydata()) == pytest.approx([20.0])


@pytest.mark.parametrize("kind", KINDS)
def test_runs_without_a_task_give_an_empty_picture_not_an_error(kind: str, tmp_path: Path) -> None:
    assert save_figure(figure([record([], "failed")], kind), tmp_path / "new" / "none.png").exists()


def test_the_file_is_of_the_format_its_name_says(tmp_path: Path) -> None:
    assert save_figure(figure([record(UP)]), tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(UserError, match=r"the picture must end in .*\.svg.*, got '\.doc'\."):
        save_figure(figure([record(UP)]), tmp_path / "x.doc")


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown kind of figure 'forgeting'; .* Did you mean 'forgetting'"):
        figure([record(UP)], "forgeting")


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"plots need matplotlib; pip install 'tbbn\[bench\]'\."):
        save_figure(figure([record(UP)]), tmp_path / "x.png")


def test_colour_is_the_method_with_its_settings_and_line_and_marker_the_norm() -> None:
    records = [record(UP, method__name=m, norm__name=n) for m in ("ft", "er") for n in ("bn", "tbbn")]
    lines = curves([*records, record(UP, train__epochs=7)])  # two groups are now "ft + bn"
    ft_bn, ft_tbbn, er_bn, er_tbbn, other = lines
    assert ft_bn.get_color() == ft_tbbn.get_color() != er_bn.get_color() == er_tbbn.get_color()
    dashes = [line._dash_pattern for line in lines]
    assert dashes[0] == dashes[2] == dashes[4] != dashes[1] == dashes[3]
    assert other.get_color() not in (ft_bn.get_color(), er_bn.get_color())
    markers = [line.get_marker() for line in lines]
    assert markers[0] == markers[2] == markers[4] != markers[1] == markers[3]


@pytest.mark.parametrize("kind", ["accuracy", "forgetting", "gain"])
@pytest.mark.parametrize("name", ["", "a-data-set-of-a-long-name-that-leaves-no-room-for-two-columns"])
def test_the_legend_of_five_curves_is_under_the_axes(name: str, kind: str) -> None:
    norms = ["bn", "in", "gn", "sn", "brn", "tbbn"][: 5 + (kind == "gain")]
    records = [record(UP, norm__name=norm) for norm in norms]
    if name and kind == "accuracy":  # in every label
        records[0] = record(UP, data__name=name)
    drawn = figure(records, kind)
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    box, around, whole = axes.get_legend().get_window_extent(), axes.get_window_extent(), drawn.bbox
    assert box.y1 < axes.xaxis.label.get_window_extent().y0 < around.y0 and len(legend(axes)) == 5
    assert box.y0 >= whole.y0 and whole.x0 <= box.x0 and box.x1 <= whole.x1, "all of it is seen"
    assert around.height / drawn.dpi > 1.8, "the curves keep their room"


def test_the_legend_of_four_curves_is_in_the_axes() -> None:
    drawn = figure([record(UP, norm__name=norm) for norm in ("bn", "in", "gn", "sn")])
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    assert axes.get_window_extent().y0 < axes.get_legend().get_window_extent().y0
    assert drawn.get_size_inches().tolist() == [4.4, 3.2]


def test_many_curves_have_a_panel_for_each_method() -> None:
    records = [record(UP, method__name=m, norm__name=n) for m in ("ft", "er", "lucir") for n in ("bn", "tbbn")]
    panels = figure(records).axes
    assert [axes.get_title() for axes in panels] == ["ft", "er", "lucir"]
    assert all(legend(axes) == ["bn (1 seed)", "tbbn (1 seed)"] for axes in panels)
    assert len({axes.get_ylim() for axes in panels}) == 1, "panels can be compared"


def test_many_norms_have_a_panel_each_beside_batch_norm() -> None:
    norms = ["bn", "in", "gn", "sn", "brn", "cn", "tbbn", "adab2n"]
    panels = [axes for axes in figure([record(UP, norm__name=norm) for norm in norms]).axes if axes.lines]
    assert [axes.get_title() for axes in panels] == [f"ft + {norm}" for norm in norms[1:]]
    assert all(
        legend(axes) == ["bn (1 seed)", f"{norm} (1 seed)"] for axes, norm in zip(panels, norms[1:], strict=True)
    )


def test_many_norms_stand_beside_batch_norm_wherever_it_comes() -> None:
    norms = ["adab2n", "gn", "bn", "in", "sn", "tbbn"]
    records = [record([[0.1 * (i + 1)]], norm__name=norm) for i, norm in enumerate(norms)]
    panels = [axes for axes in figure(records).axes if axes.lines]
    assert [axes.get_title() for axes in panels] == [f"ft + {norm}" for norm in norms if norm != "bn"]
    assert all(axes.lines[0].get_ydata()[0] == pytest.approx(30) for axes in panels)


def test_every_axis_is_named() -> None:
    records = [record(UP), record(UP, norm__name="gn")]
    named = {kind: {(a.get_xlabel(), a.get_ylabel()) for a in figure(records, kind).axes} for kind in KINDS}
    assert named == {
        "accuracy": {("tasks learnt", "mean accuracy (%)")},
        "forgetting": {("tasks learnt", "forgetting F (points)")},
        "gain": {("tasks learnt", "difference (points)")},
        "matrix": {("accuracy (%) on task", "after task")},
        "errors": {("wrong predictions, mean ± std over n seeds", "")},  # its bars are named by their norms
    }


def test_forgetting_begins_with_the_second_task() -> None:
    rows = [[0.6], [0.8, 0.9], [0.7, 0.5, 1.0]]
    (line,) = curves([record(rows)], "forgetting")
    assert list(line.get_xdata()) == [2, 3]
    # After 2 tasks: (.6 - .8) / 2. After 3: ((.8 - .7) + (.9 - .5)) / 3.
    assert list(line.get_ydata()) == pytest.approx([-10.0, 50 / 3])


def test_the_gain_is_over_batch_norm_on_the_same_seeds() -> None:
    records = [
        record([[0.9], [0.5, 0.7]], norm__name="tbbn"),
        record([[0.9], [0.4, 0.46]], norm__name="tbbn", seed=1),
        record([[0.2], [0.2, 0.2]], norm__name="tbbn", seed=2),  # batch norm has no such seed
        record([[0.8], [0.4, 0.6]]),
        record([[0.8], [0.3, 0.3]], seed=1),
    ]
    drawn = figure(records, "gain")
    (axes,) = drawn.axes
    assert axes.get_title() == "gain over ft + bn" and legend(axes) == ["tbbn (2 seeds)"]
    assert list(axes.lines[1].get_ydata()) == pytest.approx([10.0, 11.5])  # (10 + 10) / 2 and (10 + 13) / 2
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    half = math.tan(0.475 * math.pi) * 1.5  # t of one degree of freedom, and the standard error of 10 and 13
    assert (heights.min(), heights.max()) == pytest.approx((11.5 - half, 11.5 + half), abs=1e-3)
    # 10 points of the band on each side are shown, and some air: 5 % of what is shown and half a point.
    assert axes.get_ylim() == pytest.approx((1.5 - 1.5, 21.5 + 1.5))


def test_a_heat_map_has_the_mean_matrix() -> None:
    drawn = figure([record(UP), record(DOWN, seed=1), record(UP, norm__name="gn")], "matrix")
    first, second = drawn.axes
    assert first.get_title() == "ft + bn" and second.get_title() == "ft + gn"
    assert [text.get_text() for text in first.texts] == ["90", "40", "60"]
    values = first.collections[0].get_array().tolist()
    assert values == [[pytest.approx(90.0), None], [pytest.approx(40.0), pytest.approx(60.0)]]
    assert first.collections[0].get_clim() == (0, 100), "the same colours in all maps"
    assert first.yaxis_inverted(), "the first task is on top"


def test_errors_are_bars_of_four_parts() -> None:
    one, other = record(UP), record(UP, norm__name="gn")
    other.errors[-1] = {"C->C": 10, "C->P": 20, "P->C": 30, "P->P": 40}
    (axes,) = figure([one, other], "errors").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bn, n=1", "gn, n=1"]
    assert axes.yaxis_inverted() and axes.get_xlim() == (0, 105)
    widths = [[bar.get_width() for bar in part] for part in axes.containers]
    assert widths == [[1, 10], [2, 20], [3, 30], [4, 40]]
    assert [bar.get_x() for bar in (part[1] for part in axes.containers)] == [0, 10, 30, 60]
    assert axes.get_xlim() == (0, pytest.approx(105))
    cut = record(UP[:1], norm__name="cn", status="interrupted", data__tasks=2)
    (axes,) = figure([one, other, cut], "errors").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bn, n=1", "gn, n=1"], "not after the last task"
    other.errors[-1] = dict.fromkeys(other.errors[-1], 0)
    (axes,) = figure([other], "errors").axes
    assert axes.get_xlim() == (0, 1)


def test_errors_have_their_seeds_and_their_spread() -> None:
    runs = [record(UP, seed=seed) for seed in (0, 1)] + [record(UP, norm__name="gn")]
    runs[0].errors[-1] = {"C->C": 0, "C->P": 10, "P->C": 10, "P->P": 20}
    runs[1].errors[-1] = {"C->C": 0, "C->P": 30, "P->C": 10, "P->P": 40}
    found = groups(runs)
    table = errors_table(found)
    assert table.header[:3] == ("method + norm", "seeds", "errors")
    # 40 and 80 errors; 20 * sqrt(2) = 28.3
    assert table.rows[0][1:] == ("2", "60 ± 28", "0 ± 0 (0 %)", "20 ± 14 (33 %)", "10 ± 0 (17 %)", "30 ± 14 (50 %)")
    assert table.rows[1][1:4] == ("1", "10", "1 (10 %)")
    rows = list(csv.DictReader(io.StringIO(table.render("csv"))))
    assert [rows[0][name] for name in ("errors", "errors std", "C->P", "C->P std")] == ["60", "28", "20 (33 %)", "14"]
    assert [rows[1][name] for name in ("errors", "errors std", "C->P")] == ["10", "", "2 (20 %)"]
    (axes,) = figure(runs, "errors").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bn, n=2", "gn, n=1"]
    (spreads,) = axes.collections
    ends = [(left[0], right[0]) for left, right in spreads.get_segments()]
    assert ends == [pytest.approx((60 - 20 * sqrt(2), 60 + 20 * sqrt(2))), (10, 10)]
    assert axes.get_xlim()[1] == pytest.approx(1.05 * (60 + 20 * sqrt(2))), "the spread is not cut off"


def test_error_bars_have_one_scale_for_each_data_set() -> None:
    few = [record(UP, norm__name="gn"), record(UP, method__name="er")]
    many = [record(UP, data__name="cifar100", norm__name=norm) for norm in ("bn", "gn")]
    few[0].errors[-1]["P->P"] = 13
    many[1].errors[-1]["P->P"] = 994
    panels = {axes.get_title(): axes for axes in figure([*few, *many], "errors").axes}
    limits = {title: axes.get_xlim()[1] for title, axes in panels.items()}
    assert limits == pytest.approx({"ft [digits]": 1.05 * 19, "er [digits]": 1.05 * 19, "ft [cifar100]": 1050})


def test_panels_stand_three_to_a_row_and_each_row_is_as_high_as_its_highest() -> None:
    drawn: list[Any] = []
    sizes = ((3.0, 1.0), (4.0, 2.0), (2.0, 1.0), (1.0, 5.0))
    made = figure_of([Panel(f"{width:g}", drawn.append, width, height) for width, height in sizes], "a $ title")
    assert made.axes[:4] == drawn and [axes.get_title() for axes in drawn] == ["3", "4", "2", "1"]
    assert [axes.axison for axes in made.axes] == [True] * 4 + [False] * 2
    assert drawn[0].get_gridspec().get_geometry() == (2, 3)
    assert list(drawn[0].get_gridspec().get_height_ratios()) == [2.0, 5.0]
    assert made.get_size_inches().tolist() == [12.0, 7.0] and made.get_suptitle() == r"a \$ title"
    (alone,) = Panel("alone", drawn.append, 3.0, 1.0).figure().axes
    assert alone is drawn[-1] and alone.figure.get_size_inches().tolist() == [3.0, 1.0]


def test_dollars_and_underscores_of_a_name_are_drawn_as_they_are() -> None:
    (axes,) = figure([record(UP, data__name="_my $x$ and $y"), record(UP)]).axes
    assert axes.get_title() == "\u200b" + r"_my \$x\$ and \$y, digits"  # a leading underscore would hide a label
    assert legend(axes)[0] == r"ft + bn [_my \$x\$ and \$y] (1 seed)"


@pytest.mark.parametrize("methods", [("ft", "er", "lucir", "wa", "bic", "il2m"), ("ft",)])
def test_the_figure_of_scaled_runs_says_so_over_all_panels(methods: tuple[str, ...]) -> None:
    drawn = figure([record(UP, method__name=method, train__scale=0.1) for method in methods])
    assert drawn.get_suptitle().replace("\n", " ") == "SCALE 0.1: a fraction of the epochs."
    assert len([axes for axes in drawn.axes if axes.lines]) == len(methods)
    drawn.canvas.draw()
    assert drawn._suptitle.get_window_extent().width < drawn.bbox.width, "the whole title can be read"
    assert figure([record(UP, method__name=method) for method in methods]).get_suptitle() == ""


def test_long_titles_are_broken_into_lines() -> None:
    (axes,) = figure([record(UP, data__name="x" * 1000)]).axes
    lines = axes.get_title().splitlines()
    assert len(lines) == 4 and max(map(len, lines)) < 70 and lines[-1].endswith("...")
