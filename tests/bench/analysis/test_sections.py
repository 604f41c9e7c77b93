"""Analyses on the page of a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from records import record

from tbbn.bench.analysis import sections
from tbbn.bench.analysis.drift import LayerDrift
from tbbn.bench.analysis.sections import drift_section, shares_section
from tbbn.bench.report.page import html, page
from tbbn.errors import UserError

TWO = [[0.9], [0.5, 0.7]]


def test_setups_with_the_same_shares_have_one_table() -> None:
    norms = ("bn", "tbbn", "gn")
    batch = {"batch__size": 64, "batch__ratio": "3:1"}
    runs = [record(TWO, method__name=m, norm__name=n, **batch) for m in ("ft", "lucir") for n in norms]
    runs.append(record(TWO, norm__name="gn", batch__size=32))
    (table,) = shares_section(runs).tables
    assert table.caption == "ft [batch.size=64], lucir"
    header = ("task", "batch", "r", "bn %", "tbbn r*", "tbbn %", "balanced %")
    assert table.header == header, "gn has no running statistics"
    # 48 current rows and 16 of one past task: 75 % with batch norm; in two splits each has 24 and 16, 60 %.
    assert table.rows[1] == ("2", "48+16", "3", "75.0", "2", "60.0", "50.0")


def test_the_drift_is_a_mean_over_seeds_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {Path(f"{norm}-{seed}"): record(TWO, norm__name=norm, seed=seed) for norm in ("bn", "gn") for seed in (0, 1)}

    def network(folder: Path) -> str:
        if folder.name.startswith("gn"):
            raise UserError(f"{folder}: is not saved.")
        return folder.name

    def measured(name: str, images: int) -> list[LayerDrift]:
        assert images == 7
        seed = int(name[-1])
        return [LayerDrift("a", 0.1 + seed, 0.2, 0.5), LayerDrift("b", 0.3 + seed, 0.4, 0.7)]

    monkeypatch.setattr(sections, "run_after", network)
    monkeypatch.setattr(sections, "drift", measured)
    section = drift_section(runs, 7)
    assert section.tables[0].rows == (("ft + bn", "2", "0.700", "30.0", "60.0"),)
    assert section.line.endswith("Not measured: 2 runs (gn-0: is not saved).")
    assert section.tables[0].caption.startswith("Drift") and "newest task: its weight" in section.tables[0].notes[0]
    (panel,) = section.panels
    (axes,) = panel.figure().axes
    (line,) = axes.lines
    assert list(line.get_ydata()) == pytest.approx([0.6, 0.8])
    assert axes.get_ylim()[0] == 0, "a distance: its place above 0 says how large it is"
    finished = {folder: record for folder, record in runs.items() if folder.name.startswith("bn")}
    assert "Not measured" not in drift_section(finished, 7).line


def test_a_page_says_why_no_drift_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def network(folder: Path) -> str:
        raise UserError(f"{folder}: is not saved.")

    monkeypatch.setattr(sections, "run_after", network)
    runs = {Path(f"bn-{seed}"): record(TWO, seed=seed) for seed in (0, 1)}
    shown = page(runs, before_cost=[drift_section(runs, 7)])
    (section,) = (section for section in shown.sections if section.name == "drift")
    assert section.line.endswith("Not measured: 2 runs (bn-0: is not saved).")
    assert "gain" not in {section.name for section in shown.sections}, "a line alone does not make a section"
    assert section.line in html(shown)
