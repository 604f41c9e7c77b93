"""A whole report as text, beside one that was once read and found right: ``whole.txt``, and ``whole.html`` without pictures.

To change them on purpose: ``PYTHONPATH=src:tests/helpers:tests/bench/report python -c "import test_whole; test_whole.write()"``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from records import record

import tbbn
from tbbn.bench.engine.record import Record
from tbbn.bench.report.curves import accuracy_panels
from tbbn.bench.report.export import runs_csv, runs_json
from tbbn.bench.report.figures import LINES, Panel
from tbbn.bench.report.groups import groups
from tbbn.bench.report.page import Page, Section, html, page, write_files
from tbbn.bench.report.settings import differences_table
from tbbn.bench.report.table import FORMATS, Table
from tbbn.bench.report.tables import accuracy_table, blocks_table, metrics_table, summary_table

HERE = Path(__file__).parent
ENVIRONMENTS: tuple[dict[str, Any], ...] = (
    {"torch": "2.9.0", "machine": "x86_64", "threads": 2, "device": "cpu"},
    {"torch": "2.9.0", "machine": "x86_64", "gpu": "H200", "device": "cuda"},
    {"torch": "2.8.0"},
)


def made(accuracy: list[list[float]], seconds: float, where: int = 0, **given: Any) -> Record:
    found = record(accuracy, **given)
    found.seconds, found.environment = seconds, dict(ENVIRONMENTS[where])
    epochs = found.run_config.train.epochs
    found.history = [{"task": t, "epoch": e} for t in range(len(accuracy)) for e in range(epochs)]
    found.exemplars = [10 * (t + 1) for t in range(len(accuracy))]
    found.splits = [2**t for t in range(len(accuracy))]
    return found


def records() -> list[Record]:
    """Runs of every kind: several seeds, norms, methods and settings; unfinished, repeated and uneven ones."""
    low, high = [[0.9], [0.4, 0.8], [0.25, 0.5, 0.75]], [[0.95], [0.6, 0.85], [0.5, 0.45, 0.8]]
    tasks = {"data__tasks": 3, "train__epochs": 4}
    found = [
        made(low, 59.96, **tasks),
        made(high, 60.0, seed=1, **tasks),
        made(high, 61.0, norm__name="tbbn", **tasks),
        made([[0.91], [0.7, 0.8], [0.6, 0.5, 0.7]], 3599.4, norm__name="tbbn", seed=1, **tasks),
        made(low, 3599.6, norm__name="gn", norm__groups=8, **tasks),
        made([[0.9]], 12.0, status="diverged", norm__name="gn", norm__groups=8, seed=1, **tasks),
        made([], 0.0, 2, status="failed", norm__name="cn", **tasks),
        made(high, 7260.0, 1, method__name="er", **tasks),
        made(low, 100.0, 1, method__name="er", norm__name="tbbn", **{**tasks, "train__epochs": 3}),
        made(low, 30.0, method__name="lucir", protocol="paper", **tasks),
        made(low, 31.0, method__name="wa", norm__name="tbbn", **tasks),
        made(high, 32.0, method__name="wa", norm__name="in", **tasks),
        made(low, 33.0, method__name="ssil", sizes=[4, 2, 2], **{**tasks, "data__base_classes": 6}),
        made(low, 34.0, method__name="bic", train__keep="best", data__validation=0.1, **tasks),
        made(high, 1.0, seed=1, **tasks),  # repeats the second
    ]
    found[5].message = "the loss is not finite | in task 2"
    found[6].message = "OSError: <no> space & more"
    found[1].errors[-1] = {"C->C": 2, "P->P": 5, "C->P": 1, "P->C": 4}
    found[7].errors[-1] = {"C->C": 0, "P->P": 50, "C->P": 25, "P->C": 25}
    found[9].errors[-1] = {}
    found[10].skipped = ["a.png", "b.png"]
    found[11].skipped = ["b.png", "c.png", "d.png"]
    found[12].plugins = [{"name": "mine", "version": "1.2", "brings": ["norm odd", "method other"]}]
    found[13].history = found[13].history[:-1]
    return found


def described(table: Table) -> list[str]:
    """A table with all that a rendering may use."""
    lines = [f"caption: {table.caption}", f"align: {table.align}  blocks: {table.blocks}  bold: {sorted(table.bold)}"]
    return [*lines, table.render("text")]


def drawn(panel: Panel) -> list[str]:
    """What a picture shows, in words: its axes, curves, bands, bars and numbers."""
    axes = panel.figure().axes[0]
    (_, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    ends = f"x {axes.get_xlabel()!r}, y {axes.get_ylabel()!r} from {low:.2f} to {high:.2f}"
    lines = [f"picture {panel.width} x {panel.height}: {axes.get_title()!r}, {ends}"]
    for line in axes.lines:
        points = ", ".join(f"{x:g} {y:.2f}" for x, y in zip(*line.get_data(), strict=True))
        name = "" if line.get_label().startswith("_") else f" {line.get_label()}"
        lines.append(f"  curve{name}: {points} ({line.get_color()} {line.get_marker()})")
    for band in axes.collections[: len(axes.lines)]:
        extent = band.get_paths()[0].get_extents()
        lines.append(f"  band {extent.x0:g} to {extent.x1:g}, {extent.y0:.2f} to {extent.y1:.2f}")
    for bars in axes.containers:
        widths = ", ".join(f"{bar.get_x():g} + {bar.get_width():g}" for bar in bars)
        lines.append(f"  bars {bars.get_label()}: {widths}; up to {right:g}")
    if axes.containers:
        lines.append("  named " + ", ".join(label.get_text().replace("\n", " ") for label in axes.get_yticklabels()))
        spreads = [segment for lines in axes.collections for segment in lines.get_segments()]
        lines += [f"  spread of bar {y:g}: {a:.2f} to {b:.2f}" for (a, y), (b, _) in spreads if a != b]
    if axes.texts:
        lines.append("  numbers " + ", ".join(f"{text.get_position()} {text.get_text()}" for text in axes.texts))
    return lines


def made_page(runs: dict[Path, Record]) -> Page:
    """The page, with the first four of the many settings that all runs share: these change with every new one."""
    shown = page(runs)
    sections = [
        replace(section, folded=tuple(replace(table, rows=table.rows[:4]) for table in section.folded))
        for section in shown.sections
    ]
    return replace(shown, sections=sections)


def whole() -> str:
    runs = {Path(f"runs/{i}"): found for i, found in enumerate(records())}
    shown = made_page(runs)
    lines = [f"{shown.title}: {shown.runs} runs"]
    for section in shown.sections:
        lines += ["", f"# {section.name}: {section.title}", section.line]
        lines += [line for panel in section.panels for line in drawn(panel)]
        for table in section.tables:
            lines += ["", *described(table)]
        for table in section.folded:
            lines += ["", "folded", *described(table)]
    some = list(runs.values())
    for title, table in (
        ("summary", summary_table(some)),
        ("two metrics", summary_table(some, ("backward_transfer", "final_accuracy"))),
        ("one run", accuracy_table(some[0])),
        ("an unfinished run", accuracy_table(some[5])),
        ("its metrics", metrics_table(some[5])),
        ("no metrics", metrics_table(some[6])),
    ):
        lines += ["", f"# {title}", *described(table)]
    blocks = shown.sections[0].tables[0]
    for form in FORMATS[1:]:
        lines += ["", f"# {form}", blocks.render(form)]
    first = dict(list(runs.items())[4:7])
    lines += ["", "# all numbers", runs_csv(first), runs_csv(first, ("forgetting",)), runs_csv({}), runs_json(first)]
    lines += [runs_json(first, ("forgetting", "final_accuracy"))]
    return "\n".join(line.rstrip() for text in lines for line in text.split("\n")) + "\n"


def whole_html() -> str:
    runs = {Path(f"runs/{i}"): found for i, found in enumerate(records())}
    with mock.patch("tbbn.bench.report.page.inline_svg", lambda panel, name: f"<svg>{name}: {panel.title}</svg>"):
        text = html(made_page(runs))
    return re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).replace(tbbn.__version__, "VERSION")


def write() -> None:
    (HERE / "whole.txt").write_text(whole())
    (HERE / "whole.html").write_text(whole_html())


def test_a_report_says_what_it_said() -> None:
    assert whole() == (HERE / "whole.txt").read_text()


def test_a_page_says_what_it_said() -> None:
    assert whole_html() == (HERE / "whole.html").read_text()


def test_sections_of_the_caller_stand_in_their_places_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    runs = {Path("a"): records()[0]}
    table = Table(("a", "b"), (("1", "2"),), caption="One.")
    panel = accuracy_panels(groups(records()[:1]))[0]
    given = [
        Section("empty", "Empty", "a line"),
        Section("asked", "Asked", "a line", asked=True),
        Section("tables", "Tables", "", (table, Table(("a",), ()), table), (panel,), folded=(table,)),
    ]
    shown = page(runs, ("final_accuracy",), given[:2], given[2:])
    names = [section.name for section in shown.sections]
    assert names == [
        "results", "asked", "accuracy", "forgetting", "matrix", "errors", "tables", "cost", "settings", "environment", "runs",
    ]  # fmt: skip
    folder = tmp_path / "a" / "b"
    written = write_files(Page("t", 1, given), folder)
    wanted = [f"tables.{s}" for s in ("svg", "png", "tex", "csv")]
    wanted += [f"tables-{i}.{s}" for i in (2, 3) for s in ("tex", "csv")]
    assert [path.name for path in written] == wanted and all(path.parent == folder for path in written)
    assert (folder / "tables.csv").read_text() == "a,b\n1,2\n"
    assert write_files(Page("t", 1, given), folder) == written, "again in the same folder"


def test_the_settings_of_most_runs_are_not_listed_run_by_run() -> None:
    def rows(common: int, rare: int) -> dict[str, str]:
        methods = ("ft", "er", "lucir", "wa", "ssil", "bic", "il2m", "eeil", "icarl", "derpp")
        made = [
            record([[1.0]], method__name=method, train__lr=0.5 if i < common else 0.25)
            for i, method in enumerate(methods[: common + rare])
        ]
        table = differences_table(groups(made))
        return {value: runs for _, value, runs in table.rows if value in ("0.5", "0.25")}

    assert rows(5, 4)["0.5"] == "the other 5" and rows(4, 1)["0.5"].count(",") == 3
    assert rows(5, 5)["0.5"].count(",") == 4, "five of ten are not most"
    assert list(rows(5, 4)) == ["0.25", "0.5"], "rare ones first"


def test_means_that_are_printed_alike_are_best_together() -> None:
    # 50.01 and 50.04 are 50.0; 50.06 is 50.1.
    def best(*percent: float) -> set[int]:
        norms = ("bn", "tbbn", "gn", "in")
        made = [record([[p / 100]], norm__name=norm) for p, norm in zip(percent, norms, strict=False)]
        return {row for row, column in blocks_table(made, ("final_accuracy",)).bold}

    assert best(50.01, 50.04, 49.9) == {0, 1} and best(50.04, 50.06) == {1} and best(50.0496, 50.02) == {0, 1}
    assert best(50.0) == set() and best(50.0, 50.0, 50.0) == {0, 1, 2}
    low = [record([[1.0], [a, 1.0]], norm__name=norm) for a, norm in ((0.5, "bn"), (0.9, "tbbn"))]
    assert {row for row, _ in blocks_table(low, ("forgetting",)).bold} == {1}, "less is better"


def test_lines_of_curves_differ_in_these_dashes() -> None:
    assert LINES == (
        "-",
        (0, (5, 2)),
        (0, (1, 1.5)),
        (0, (6, 2, 1, 2)),
        (0, (9, 3)),
        (0, (3, 1, 1, 1, 1, 1)),
        (0, (2, 3)),
        (0, (8, 2, 3, 2)),
        (0, (1, 4)),
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0.0 s"), (59.94, "59.9 s"), (59.99, "60.0 s"), (60, "1 min 0 s"), (60.4, "1 min 0 s"), (3599, "59 min 59 s"),
     (3599.6, "1 h 0 min"), (3600, "1 h 0 min"), (3659, "1 h 0 min"), (3660, "1 h 1 min"), (90000, "25 h 0 min")],
)  # fmt: skip
def test_durations_on_both_sides_of_a_minute_and_an_hour(seconds: float, said: str) -> None:
    from tbbn.bench.report.cost import duration

    assert duration(seconds) == said
