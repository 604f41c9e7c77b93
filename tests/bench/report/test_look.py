"""How figures look: sizes, colours, ranges and ticks, as one table of facts. A page is read by how it looks."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from records import record

from tbbn.bench.engine.record import Record
from tbbn.bench.report.curves import GREY, accuracy_panels, forgetting_panels, gain_panels
from tbbn.bench.report.errors import errors_panels
from tbbn.bench.report.figures import COLOURS, LINES, MARKERS, Look, Panel, figure_of, legend_height, save_figure
from tbbn.bench.report.figures import NORMS as LINED
from tbbn.bench.report.groups import groups
from tbbn.bench.report.matrices import matrix_panels
from tbbn.bench.report.plots import KINDS, figure
from tbbn.bench.report.svg import _adapt, inline_svg

UP = [[1.0], [0.5, 0.7]]
NORMS = ("bn", "in", "gn", "sn", "brn", "cn", "tbbn", "adab2n", "weighted")
METHODS = ("ft", "er", "lucir", "wa", "ssil", "bic", "il2m", "eeil", "icarl")


def of_norms(n: int, **settings: Any) -> list[Record]:
    return [record(UP, norm__name=norm, **settings) for norm in NORMS[:n]]


def long_run(tasks: int, **settings: Any) -> Record:
    return record([[0.5] * (t + 1) for t in range(tasks)], **settings)


def shown(records: list[Record], kind: str = "accuracy") -> list[Any]:
    return [axes for axes in figure(records, kind).axes if axes.axison]


@pytest.mark.parametrize("kind", KINDS)
def test_text_has_the_same_sizes_in_all_figures(kind: str) -> None:
    made = figure(of_norms(2, train__scale=0.5), kind)
    assert made._suptitle.get_fontsize() == 10
    for axes in made.axes:
        assert axes.title.get_fontsize() == 9
        assert axes.xaxis.label.get_fontsize() == 8
        assert not axes.get_ylabel() or axes.yaxis.label.get_fontsize() == 8
        ticks = {label.get_fontsize() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())}
        assert ticks == {7 if kind == "matrix" else 8}
        assert {text.get_fontsize() for text in axes.texts} <= {7}
        assert (axes.get_legend() is None) == (kind == "matrix")
        if legend := axes.get_legend():
            assert {text.get_fontsize() for text in legend.get_texts()} == {7}
            assert not legend.get_frame_on()
            assert legend._ncols == (4 if kind == "errors" else 1)


def test_curves_have_a_grid_whole_tasks_and_thin_lines_with_small_markers() -> None:
    (axes,) = shown([record(UP), record([[0.6], [0.4, 0.3]], seed=1)])
    (line,) = axes.lines
    assert line.get_linewidth() == 1.5 and line.get_markersize() == 4
    (band,) = axes.collections
    assert band.get_linewidth() == 0 and band.get_alpha() == 0.15
    assert axes.get_legend().handlelength == 3.2, "long enough to tell dashes apart"
    assert axes.xaxis.get_gridlines()[0].get_visible() and axes.xaxis.get_gridlines()[0].get_alpha() == 0.3
    assert all(tick == int(tick) for tick in axes.get_xticks())


@pytest.mark.parametrize(("tasks", "every"), [(2, 1), (11, 1), (12, 2), (23, 2), (24, 3)])
def test_a_long_curve_has_a_marker_at_some_tasks_only(tasks: int, every: int) -> None:
    (axes,) = shown([long_run(tasks)])
    assert axes.lines[0].get_markevery() == every


def test_a_curve_of_one_seed_has_no_band() -> None:
    (axes,) = shown([record(UP)])
    assert not axes.collections


def styles(made: Any) -> dict[str, tuple[Any, str]]:
    """The dashes and the marker of each norm in a figure."""
    lines = [line for axes in made.axes for line in axes.lines if not line.get_label().startswith("_")]
    assert lines
    return {
        line.get_label().split(" (")[0].split(" + ")[-1]: (line._unscaled_dash_pattern, line.get_marker())
        for line in lines
    }


@pytest.mark.parametrize(
    "order", [["bn", "cn", "tbbn"], ["tbbn", "cn", "bn"], ["in", "cn", "sn", "tbbn", "gn", "brn", "bn"]]
)
def test_a_norm_has_the_same_line_and_marker_in_every_figure(order: list[str]) -> None:
    records = [record(UP, norm__name=norm, method__name=method) for method in ("ft", "er") for norm in order]
    wanted = {"bn": ((0, None), "o"), "tbbn": ((0, (5, 2)), "s"), "cn": ((0, (1, 1.5)), "^")}
    for kind in ("accuracy", "forgetting", "gain"):
        found = styles(figure(records, kind))
        assert {norm: style for norm, style in found.items() if norm in wanted} == {
            norm: style for norm, style in wanted.items() if norm != "bn" or kind != "gain"
        }


def test_every_norm_of_the_package_has_a_line_and_a_marker_of_its_own() -> None:
    assert set(LINED) == set(NORMS) and len(LINED) == len(set(LINES)) == len(set(MARKERS)) == 9
    found = groups(of_norms(9))
    looks = [Look(found).of(group) for group in found]
    assert len({look["linestyle"] for look in looks}) == len({look["marker"] for look in looks}) == 9
    assert len({look["color"] for look in looks}) == 1


def test_a_norm_with_options_has_a_line_and_a_marker_that_no_other_norm_has() -> None:
    variants = [record(UP, norm__name="cn", norm__groups=n) for n in range(1, 74)]  # 16 is cn itself
    found = groups([*of_norms(9), *variants])
    looks = [Look(found).of(group) for group in found]
    assert len({(look["linestyle"], look["marker"]) for look in looks}) == 81
    assert len({look["linestyle"] for look in looks[9:18]}) == 9, "lines differ as long as they can"


def test_a_norm_with_options_looks_alike_if_another_one_has_no_pair() -> None:
    unpaired = record([[0.5]], "diverged", norm__name="cn", norm__groups=4)
    records = [record(UP), unpaired, record(UP, norm__name="cn", norm__groups=8)]
    accuracy, gain = (styles(figure(records, kind))["cn(groups=8)"] for kind in ("accuracy", "gain"))
    assert accuracy == gain


def test_colours_show_the_method_and_its_settings_and_repeat_after_the_last() -> None:
    assert len(COLOURS) == 8
    found = groups([record(UP, method__name=method) for method in METHODS])
    assert [Look(found).of(group)["color"] for group in found] == [*COLOURS, COLOURS[0]]
    found = groups([record(UP, train__epochs=e) for e in range(1, 10)])
    assert [Look(found).of(group)["color"] for group in found] == [*COLOURS, COLOURS[0]]


def test_five_curves_share_a_panel_and_six_do_not() -> None:
    (alone,) = accuracy_panels(groups(of_norms(5)))
    legend = 0.48  # three lines under the axes
    assert (alone.title, alone.width, alone.height) == ("digits", 4.4, 3.2 + legend)
    panels = accuracy_panels(groups([*of_norms(5), record(UP, method__name="er")]))
    assert [(p.title, p.width, p.height) for p in panels] == [("ft", 3.6, 2.7 + legend), ("er", 3.6, 2.7)]
    assert len(accuracy_panels(groups(of_norms(6)))) == 5
    assert len(gain_panels(groups(of_norms(6)))) == 1
    assert [p.title for p in gain_panels(groups(of_norms(7)))] == ["gain over ft + bn"] * 6


def test_the_legend_of_long_labels_has_room_for_one_column() -> None:
    short, long = ["bn"] * 6, ["a norm with options that leave no room for two columns"] * 6
    lines = [round(legend_height(labels, 3.6) / 0.16) for labels in (short, long, long[:4])]
    assert lines == [3, 6, 0] and legend_height(long, 20.0) == legend_height(short, 3.6)


def test_beside_many_norms_the_first_is_grey() -> None:
    panels = shown(of_norms(6))
    for axes in panels:
        first, other = axes.lines
        assert first.get_color() == GREY and other.get_color() == COLOURS[0]


def test_the_gain_has_a_line_at_zero_and_others_have_none() -> None:
    records = [record(UP), record([[0.9], [0.2, 0.2]], norm__name="gn")]
    (axes,) = shown(records, "gain")
    zero, gain = axes.lines
    assert list(zero.get_ydata()) == [0, 0] and zero.get_linewidth() == 0.8
    assert zero.get_color() == axes.spines["left"].get_edgecolor()
    assert list(gain.get_ydata()) == pytest.approx([-10.0, -40.0])
    for kind in ("accuracy", "forgetting"):
        assert len(shown(records, kind)[0].lines) == 2


def test_the_range_holds_every_band_with_some_air() -> None:
    # Bands of seeds 0.2 and 0.4: 30 +- 14.142; the air is 5 % of the range, and half a point.
    spread = 200**0.5
    seeds = [record([[0.2], [0.2, 0.2]]), record([[0.4], [0.4, 0.4]], seed=1)]
    air = 0.05 * 2 * spread + 0.5
    assert shown(seeds)[0].get_ylim() == pytest.approx((30 - spread - air, 30 + spread + air))
    # No further than a point beyond what is possible.
    assert shown([record([[1.0], [1.0, 1.0]]), record([[0.0], [0.0, 0.0]], norm__name="gn")])[0].get_ylim() == (-1, 101)
    # Forgetting may be negative; 0.6 learnt later to 0.8: -10 points, and one curve alone has half a point of air.
    assert shown([record([[0.6], [0.8, 0.9]])], "forgetting")[0].get_ylim() == pytest.approx((-10.5, -9.5))
    worst, best = record([[1.0], [0.0, 1.0]]), record([[0.0], [1.0, 1.0]], norm__name="gn")
    assert shown([worst, best], "forgetting")[0].get_ylim() == pytest.approx((-50 - 5.5, 50 + 5.5))
    # Gains of -50 and of 100 points: the upper end is cut.
    all_right, none_right = [[1.0], [1.0, 1.0]], [[0.0], [0.0, 0.0]]
    gains = [record(none_right), record(all_right, norm__name="gn"), record(none_right, norm__name="tbbn")]
    assert shown(gains, "gain")[0].get_ylim() == pytest.approx((-5.5, 101))
    losses = [record(all_right), record(none_right, norm__name="gn"), record(all_right, norm__name="tbbn")]
    assert shown(losses, "gain")[0].get_ylim() == pytest.approx((-101, 5.5))


def test_a_band_of_gains_or_of_forgetting_stays_within_100_points() -> None:
    none, whole = [[0.0], [0.0, 0.0]], [[1.0], [1.0, 1.0]]
    records = [record(none), record(none, seed=1), record(whole, norm__name="gn")]
    records.append(record([[0.2], [0.2, 0.2]], norm__name="gn", seed=1))
    for flipped in (False, True):  # gains of 100 and 20: 60 +- 12.7 * 40; and their negatives
        if flipped:
            for made in records:
                made.accuracy = [[1 - a for a in row] for row in made.accuracy]
        (axes,) = shown(records, "gain")
        heights = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((-100, 100))
    assert [p.title for p in forgetting_panels(groups(records))] == ["digits"]


def test_figures_do_not_follow_the_readers_own_settings_of_matplotlib() -> None:
    import matplotlib

    own = {"image.cmap": "gray", "lines.linewidth": 9, "lines.markersize": 9, "legend.frameon": True, "grid.alpha": 1}
    own |= {"patch.linewidth": 9, "hatch.linewidth": 9, "savefig.dpi": 50, "figure.dpi": 50, "font.size": 20}
    with matplotlib.rc_context(own):
        test_text_has_the_same_sizes_in_all_figures("accuracy")
        test_curves_have_a_grid_whole_tasks_and_thin_lines_with_small_markers()
        test_numbers_of_a_heat_map_can_be_read_on_their_colours()
        (axes,) = shown([record(UP)], "matrix")
        assert axes.collections[0].get_linewidth() == 0


def test_numbers_of_a_heat_map_can_be_read_on_their_colours() -> None:
    (axes,) = shown([record([[0.1], [0.97, 0.3]])], "matrix")
    cells = {text.get_position(): (text.get_text(), text.get_color()) for text in axes.texts}
    # Viridis is dark violet at 0 and bright yellow at 100.
    assert cells == {(1, 1): ("10", "white"), (1, 2): ("97", "black"), (2, 2): ("30", "white")}
    for text in axes.texts:
        assert (text.get_ha(), text.get_va(), text.get_in_layout()) == ("center", "center", False)
    mesh = axes.collections[0]
    assert mesh.get_clim() == (0, 100), "the same colours in every picture"
    assert mesh.cmap.name == "viridis" and mesh.get_coordinates()[0, :, 0].tolist() == [0.5, 1.5, 2.5]
    assert axes.get_aspect() == 1 and not any(side.get_visible() for side in axes.spines.values())
    assert {tick.tick1line.get_markersize() for tick in axes.xaxis.get_major_ticks()} == {0}


def test_black_and_white_numbers_change_where_the_colour_is_half_as_bright_as_white() -> None:
    import matplotlib

    values = iter(range(22, 100))
    matrix = [[next(values) / 100 for _ in range(t + 1)] for t in range(12)]
    (axes,) = shown([record(matrix)], "matrix")
    assert len(axes.texts) == 78
    for text in axes.texts:
        column, row = text.get_position()
        red, green, blue, _ = matplotlib.colormaps["viridis"](matrix[row - 1][column - 1])
        luma = sum(weight * part for weight, part in zip((299, 587, 114), (red, green, blue), strict=True)) / 1000
        assert text.get_color() == ("white" if luma < 0.5 else "black")
    assert {text.get_color() for text in axes.texts} == {"white", "black"}


def test_heat_maps_of_more_than_twelve_tasks_have_a_scale_in_place_of_numbers() -> None:
    twelve, (thirteen, scale) = shown([long_run(12)], "matrix"), shown([long_run(13)], "matrix")
    assert len(twelve) == 1 and len(twelve[0].texts) == 78
    assert list(twelve[0].get_xticks()) == list(twelve[0].get_yticks()) == list(range(1, 13))
    assert not thirteen.texts and list(thirteen.get_xticks()) == list(thirteen.get_yticks()) == [5, 10]
    assert list(scale.get_yticks()) == [0, 25, 50, 75, 100]
    bar = thirteen.collections[0].colorbar
    assert bar.ax is scale and list(bar.boundaries) == list(range(0, 101, 5))
    assert scale._colorbar_info["shrink"] == 0.7 and scale._colorbar_info["parents"] == [thirteen]
    assert {label.get_fontsize() for label in scale.get_yticklabels()} == {7}
    assert list(shown([long_run(15)], "matrix")[0].get_xticks()) == [5, 10, 15]
    assert {panel.height for panel in matrix_panels(groups(of_norms(2)))} == {3.5}


def test_bars_of_errors_lie_below_each_other_in_panels_with_one_scale() -> None:
    large, small = of_norms(3), of_norms(1, method__name="er")
    large[1].errors[-1] = {"C->C": 10, "C->P": 0, "P->C": 30, "P->P": 60}
    panels = errors_panels(groups([*large, *small]))
    assert [panel.height for panel in panels] == [1.5 + 0.75, 1.5 + 0.25]
    first, second = figure_of(panels).axes[:2]
    assert first.get_xlim() == second.get_xlim() == (0, pytest.approx(105))
    assert first.get_ylim() == (2.5, -1.2) and second.get_ylim() == (0.5, -1.2)
    bars = [bar for part in first.containers for bar in part]
    assert [bar.get_height() for bar in bars] == pytest.approx([0.7] * 12)
    assert [part[0].get_facecolor() for part in first.containers] == [_rgba(colour) for colour in COLOURS[:4]]
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["C->C", "C->P", "P->C", "P->P"]
    assert first.xaxis.get_gridlines()[0].get_visible() and not first.yaxis.get_gridlines()[0].get_visible()
    assert first.xaxis.get_gridlines()[0].get_alpha() == 0.3


def _rgba(colour: str) -> tuple[float, ...]:
    return (*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0)


def test_a_picture_has_200_dots_an_inch_and_100_in_a_notebook(tmp_path: Path) -> None:
    made = Panel("x", lambda axes: None, 3.0, 2.0).figure()
    saved = save_figure(made, tmp_path / "x.PNG").read_bytes()
    assert struct.unpack(">II", saved[16:24]) == (600, 400)
    assert struct.unpack(">II", made._repr_png_()[16:24]) == (300, 200)  # type: ignore[attr-defined]


def test_panels_are_laid_out_so_that_nothing_overlaps() -> None:
    made = figure_of([Panel("x", lambda axes: None)] * 2)
    assert type(made.get_layout_engine()).__name__ == "ConstrainedLayoutEngine"


def test_a_figure_of_nothing_says_so() -> None:
    made = figure_of([])
    (axes,) = made.axes
    (text,) = axes.texts
    assert text.get_text() == "nothing to draw" and text.get_position() == (0.5, 0.5) and text.get_ha() == "center"
    assert made.get_size_inches().tolist() == [4.4, 3.2]


def test_a_title_is_as_wide_as_its_panel() -> None:
    words = " ".join(["abcd"] * 40)  # five characters a word
    for width, characters in ((3.6, 40), (4.4, 48)):
        (axes,) = Panel(words, lambda axes: None, width).figure().axes
        lines = axes.get_title().split("\n")
        assert len(lines) == 4, "as many as tell apart the runs in results/"
        assert len(lines[0]) == (characters + 1) // 5 * 5 - 1 and lines[3].endswith(" ...")
    (axes,) = Panel("a-" * 30, lambda axes: None, 2.0).figure().axes
    assert len(axes.get_title().split("\n")[0]) == 22, "a long word is cut, not broken at its hyphens"


def test_a_panel_in_a_page_is_as_wide_as_is_good_to_read() -> None:
    for width, rem in ((3.6, 27), (4.4, 33)):
        picture = inline_svg(Panel("a", lambda axes: None, width), "n")
        head = picture[: picture.index(">")]
        assert f'style="max-width: {rem}rem"' in head and 'role="img"' in head
        assert " width=" not in head and " height=" not in head and "viewBox=" in head
        assert "<metadata" not in picture and "currentColor" in picture and "#808080" not in picture


def test_links_inside_a_picture_of_a_page_lead_to_its_own_parts() -> None:
    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], marker="o", label="a")
        axes.text(0, 0, "b", url="https://example.org/#part")

    picture = inline_svg(Panel("a", draw), "n")
    root = ElementTree.fromstring(picture)
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids)) > 5 and all(name.startswith("n-") for name in ids)
    links = {element.attrib["href"] for element in root.iter() if "href" in element.attrib}
    assert "https://example.org/#part" in links and len(links) > 2 and "xlink:href" not in picture
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    places = re.findall(r"url\(#([^)]*)\)", picture)
    assert places and set(places) <= set(ids)


def test_an_element_of_a_picture_gets_its_name_and_the_colour_of_the_page() -> None:
    link = "{http://www.w3.org/1999/xlink}href"
    given = {"id": "a", "fill": "#123456", link: "#b", "style": "fill: #0a0b0c; clip-path: url(#c)", "d": "M 0 0"}
    element = ElementTree.Element("use", given)
    _adapt(element, "n")
    assert element.attrib == {
        "id": "n-a", "fill": "#123456", "href": "#n-b", "style": "fill: currentColor; clip-path: url(#n-c)", "d": "M 0 0",
    }  # fmt: skip
    element = ElementTree.Element("a", {link: "https://example.org"})
    _adapt(element, "n")
    assert element.attrib == {"href": "https://example.org"}
