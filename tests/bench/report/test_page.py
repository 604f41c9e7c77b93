"""The HTML page: what it shows, that it needs nothing beside it, and that names in records stay text."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import chromium
import pytest
from records import record

from tbbn.bench.engine.record import Record
from tbbn.bench.report.columns import SHORT
from tbbn.bench.report.figures import Panel
from tbbn.bench.report.groups import groups
from tbbn.bench.report.matrices import matrix_panels
from tbbn.bench.report.page import Page, Section, html, page, write_files
from tbbn.bench.report.svg import inline_svg
from tbbn.bench.report.table import Table
from tbbn.errors import UserError

HOSTILE = '<script>document.title = "taken"</script>'
NAMES = (
    HOSTILE + "\"'><img src=x onerror=alert(1)>",
    r"$x$ \input{/etc/passwd} 50% {{ 7 * 7 }} 汉" + "\u202e\x07",
    "x" * 300,
)
MATRICES = ([[0.9], [0.4, 0.8], [0.3, 0.5, 0.7]], [[0.8], [0.5, 0.7], [0.35, 0.5, 0.65]])


def runs_of(*names: str) -> dict[Path, Record]:
    """For each data set two norms with two seeds."""
    return {
        Path(name, f"{norm}-{seed}"): record(MATRICES[seed], data__name=name, norm__name=norm, seed=seed)
        for name in names
        for norm in ("bn", "tbbn")
        for seed in (0, 1)
    }


def page_of(runs: dict[Path, Record]) -> str:
    return html(page(runs))


class Parsed(HTMLParser):
    """The elements of a page and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]


@pytest.fixture(scope="module")
def written() -> str:
    return page_of(runs_of("digits"))


@pytest.fixture(scope="module")
def plain(written: str) -> Parsed:
    return Parsed(written)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = runs_of(*NAMES)
    first = next(iter(runs.values()))
    first.environment, first.message = {HOSTILE: HOSTILE}, HOSTILE
    first.plugins = [{"name": HOSTILE, "brings": [HOSTILE]}]
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_of(runs))
    return path


def test_every_part_is_there_and_linked(plain: Parsed) -> None:
    parts = ["results", "accuracy", "gain", "forgetting", "matrix", "errors", "cost", "settings", "environment", "runs"]
    shown = [attributes["id"] for tag, attributes in plain.tags if tag == "section"]
    assert shown == [part for part in parts if part != "environment"]  # these records know no environment
    links = [attributes["href"] for tag, attributes in plain.tags if tag == "a"]
    assert links == [f"#{part}" for part in shown]
    text = " ".join(plain.text)
    # A_f of the seeds: .5 and .5 for both norms; the difference is 0 on both.
    assert "50.0 ± 0.0" in text and "+0.0 [0.0, 0.0]" in text
    assert plain.text.count("finished") == 4


def test_it_asks_for_nothing_and_runs_nothing(plain: Parsed) -> None:
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in plain.tags}
    addresses = [value for _, a in plain.tags for key, value in a.items() if key in ("href", "src", "xlink:href")]
    assert addresses and all(value and value.startswith("#") for value in addresses)
    (policy,) = (a["content"] for tag, a in plain.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    styles = "".join(plain.text) + "".join(a.get("style") or "" for _, a in plain.tags)
    assert "@import" not in styles and not re.search(r"url\((?!#)", styles)


def test_the_best_norm_of_a_block_is_bold() -> None:
    best = record([[1.0], [1.0] * 2, [1.0] * 3], norm__name="tbbn", sizes=[4, 2, 2])
    runs = {Path("a"): record(MATRICES[0]), Path("b"): best}
    text = html(replace(page(runs), sections=page(runs).sections[:1]))
    assert "<strong>100.0</strong>" in text and "<strong>50.0</strong>" not in text
    assert "A<sub>f</sub> %" in text and "A<sub>f</sub><sup>w</sup> %" in text


def test_ids_are_unique_and_figures_take_the_colour_of_the_page(plain: Parsed) -> None:
    assert len(plain.ids) == len(set(plain.ids))
    used = {value[1:] for _, a in plain.tags for key, value in a.items() if key == "href" and value}
    used |= set(re.findall(r"url\(#([^)]+)\)", " ".join(v or "" for _, a in plain.tags for v in a.values())))
    assert used <= set(plain.ids), "a picture refers to itself alone"
    styles = " ".join(a.get("style") or "" for _, a in plain.tags)
    assert "currentColor" in styles and "#0a0b0c" not in styles and "#000000" not in styles.replace("fill: #000000", "")


def test_hostile_names_stay_text(hostile: Path) -> None:
    parsed = Parsed(hostile.read_text())
    tags = {tag for tag, _ in parsed.tags}
    assert not {"script", "img"} & tags and not any(key.startswith("on") for _, a in parsed.tags for key in a)
    text = "".join(parsed.text)
    assert HOSTILE in text and "{{ 7 * 7 }}" in text and "49 runs" not in text
    assert "\u202e" not in hostile.read_text() and "\x07" not in hostile.read_text(), "nothing turns the text around"


def test_every_table_has_a_caption() -> None:
    tables = [table for section in page(runs_of("digits")).sections for table in section.all_tables]
    assert len(tables) == 6 and all(table.caption for table in tables)


def test_the_same_runs_give_the_same_page(written: str) -> None:
    assert page_of(runs_of("digits")) == written


def test_parts_of_the_caller_have_their_places(tmp_path: Path) -> None:
    runs = {Path("a"): record(MATRICES[0])}
    drift = Section("drift", "Drift", "A line.", (Table(("a", "b"), (("1", "2"),)),), (Panel("p", lambda axes: None),))
    made = page(runs, (), [drift, Section("empty", "Empty")], [replace(drift, name="b")])
    names = [section.name for section in made.sections]
    assert names[:3] == ["results", "drift", "accuracy"] and names[names.index("b") + 1] == "cost"
    assert "empty" not in names and "gain" not in names, "one norm alone has nothing to gain"
    assert "<h2>Drift</h2>\n<p>A line.</p>" in html(Page("a", 1, [drift]))
    assert {path.name for path in write_files(Page("a", 1, [drift]), tmp_path / "new" / "x")} == {
        "drift.csv",
        "drift.tex",
        "drift.svg",
        "drift.png",
    }


def test_files_of_runs_that_trained_a_part_say_so_in_every_figure_and_table_of_results(tmp_path: Path) -> None:
    runs = runs_of("digits")
    for each in runs.values():
        each.config = {**each.config, "train": {"scale": 0.5}, "data": {"name": "digits", "tasks": 5, "stop_after": 3}}
    written = write_files(page(runs), tmp_path)
    mark = "SCALE 0.5: a fraction of the epochs. STOPPED: after 3 of 5 tasks."
    figures = [path for path in written if path.suffix == ".svg"]
    assert {path.stem for path in figures} == {"accuracy", "gain", "forgetting", "matrix", "errors"}
    assert all("STOPPED: after 3 of 5" in path.read_text() for path in figures)
    for name in ("results", "gain", "errors", "cost"):
        assert f"\\caption{{{mark} " in (tmp_path / f"{name}.tex").read_text(), name
    assert "SCALE" not in (tmp_path / "settings.tex").read_text()


def test_runs_that_failed_at_once_have_a_page() -> None:
    broken = record([], "failed")
    broken.message = "OSError: no space"
    text = page_of({Path("a"): broken})
    assert "failed: OSError: no space" in text and "<svg" not in text


def test_without_jinja2_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("jinja2"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"tbbn report --html needs jinja2; pip install 'tbbn\[bench\]'\."):
        html(Page("a", 1, []))


def test_text_of_a_figure_is_text() -> None:
    picture = inline_svg(Panel("a < b & $c$", lambda axes: axes.plot([0, 1], label="x")), "n")
    assert "#ffffff" not in picture, "the page shows through"
    assert "a &lt; b &amp; $c$</text>" in picture and 'aria-label="a &lt; b &amp; $c$"' in picture


def test_a_heat_map_of_many_tasks_has_a_scale_and_no_raster() -> None:
    (panel,) = matrix_panels(groups([record([[0.5] * (t + 1) for t in range(13)])]))
    picture = inline_svg(panel, "n")
    assert "<image" not in picture and ">100</text>" in picture and ">50</text>" in picture


# Elements that reach beyond the window, and text of figures that is cut off.
OVERFLOWING = """
[...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || e.closest(".scroll") && !e.matches(".scroll")) return false;
  const frame = e.ownerSVGElement ? e.ownerSVGElement.getBoundingClientRect() : {left: 0, right: innerWidth};
  return e.tagName != "svg" && e.ownerSVGElement && e.tagName != "text"
    ? false : box.right > frame.right + 1 || box.left < frame.left - 1;
}).map(e => e.tagName + " " + e.textContent.trim().slice(0, 60))
"""


@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
def test_in_a_browser_nothing_overflows_and_nothing_runs(hostile: Path) -> None:
    with chromium.Chromium() as browser:
        seen = {}
        for width in (390, 1280):
            for dark in (False, True):
                browser.open(hostile, width, dark=dark)
                assert browser.evaluate("innerWidth") == width
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                assert browser.evaluate(OVERFLOWING) == []
                assert "taken" not in browser.evaluate("document.title").replace(HOSTILE, "")
                assert browser.evaluate("document.scripts.length + document.images.length") == 0
                colours = "[getComputedStyle(document.documentElement).backgroundColor, "
                colours += "getComputedStyle(document.querySelector('svg text')).fill].join(' ')"
                seen[dark] = browser.evaluate(colours)
        assert seen == {False: "rgb(255, 255, 255) rgb(26, 26, 26)", True: "rgb(22, 24, 27) rgb(230, 230, 230)"}
        assert set(browser.requests) == {hostile.resolve().as_uri()}


# The widest table beside the paper's, with long numbers, and one of differences in all metrics.
METRIC = ("35.41", "36.5 ± 2.1", "+10.8 =")
BESIDE = Table(
    ("method + norm", "seeds", *("A_f paper", "ours", "diff.") * 3, "F_text ours", "A_l paper", "ours", "diff."),
    (("lucir + cn(groups=8)", "10", *METRIC * 3, "36.5 ± 2.1", *METRIC),),
)
DIFFERENCES = Table(
    ("method + norm", "over", "seeds", *SHORT.values()),
    (("ft + tbbn [data.tasks=10, paper, train.keep=last]", "bn", "10", *["-12.3 [-11.7, 17.2]"] * len(SHORT)),),
    align="ll" + "r" * (1 + len(SHORT)),
)


@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
def test_a_table_beside_the_papers_needs_no_scrolling_on_a_desktop(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(html(Page("t", 1, [Section("paper", "Paper", tables=(BESIDE,))])))
    fits = "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
    one_line = "document.querySelector('tbody tr').getBoundingClientRect().height < 30"
    with chromium.Chromium() as browser:
        browser.open(path, 1280)
        assert browser.evaluate(fits) and browser.evaluate(one_line)


# For each row the space between the text of neighbours, and for each number the lines that its text takes.
TEXT = """
const around = cell => {
  const text = document.createRange();
  text.selectNodeContents(cell);
  return text;
};
"""
GAPS = """
[...document.querySelectorAll("tr")].flatMap(row => {
  const boxes = [...row.cells].map(cell => around(cell).getBoundingClientRect());
  return boxes.slice(1).map((box, i) => box.left - boxes[i].right);
})
"""
LINES = '[...document.querySelectorAll("td.r")].map(cell => around(cell).getClientRects().length)'


@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
@pytest.mark.parametrize(("table", "lines"), [(BESIDE, 1), (DIFFERENCES, 3)], ids=["beside", "differences"])
def test_on_a4_a_wide_table_is_between_the_margins_and_its_columns_do_not_touch(
    table: Table, lines: int, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(html(Page("t", 1, [Section("paper", "Paper", tables=(table,))])))
    between_margins = round((21 - 2 * 1.2) / 2.54 * 96)
    with chromium.Chromium() as browser:
        browser.open(path, between_margins)
        browser.send("Emulation.setEmulatedMedia", media="print")
        assert browser.evaluate("document.querySelector('table').getBoundingClientRect().right") <= between_margins
        browser.evaluate(TEXT)
        assert min(browser.evaluate(GAPS)) > 4
        assert max(browser.evaluate(LINES)) == lines


@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
def test_in_print_the_settings_that_all_runs_share_are_shown(written: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(written)
    with chromium.Chromium() as browser:
        browser.open(path, 800)
        # A table that is folded has a size, but its section does not grow by it.
        height = "document.querySelector('details').getBoundingClientRect().height"
        folded = browser.evaluate(height)
        browser.send("Emulation.setEmulatedMedia", media="print")
        assert folded < 50 and browser.evaluate(height) > 200
