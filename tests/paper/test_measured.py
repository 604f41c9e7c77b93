"""Our results as data: what is computed from them, and that the pages made from them are current."""

from __future__ import annotations

import importlib
from dataclasses import replace
from math import isnan, pi, sqrt, tan
from pathlib import Path

import pytest

from tbbn.paper.measured import Measured, Paired, beside_paper, gain_in_paper, gains, gains_by_task, measured

ROOT = Path(__file__).parents[2]
RUNS = {
    ("ft", "bn", 0): [[0.8], [0.4, 0.6]],
    ("ft", "tbbn", 0): [[0.8], [0.5, 0.7]],
    ("ft", "bn", 1): [[0.6], [0.2, 0.8]],
    ("ft", "tbbn", 1): [[0.6], [0.6, 0.8]],
    ("ft", "bn", 2): [[0.1], [0.1, 0.1]],  # without its partner
}
TWO_SEEDS = Measured("x", "paper", "folder", RUNS, {"ft": "best"})


def test_gains_are_means_of_differences_on_the_same_seeds() -> None:
    final = TWO_SEEDS.metric("ft", "A_f")
    assert final.bn == pytest.approx([50, 50]) and final.tbbn == pytest.approx([60, 70])
    assert final.gain == pytest.approx(15)
    assert final.error == pytest.approx(sqrt(((10 - 15) ** 2 + (20 - 15) ** 2) / 1) / sqrt(2))
    forgotten = TWO_SEEDS.metric("ft", "F")  # (best in the past - final) / 2, for the first task
    assert forgotten.bn == pytest.approx([20, 20]) and forgotten.tbbn == pytest.approx([15, 0])
    assert TWO_SEEDS.new_task("ft", 1).tbbn == pytest.approx([70, 80])


def test_tables_show_means_spreads_and_gains() -> None:
    assert gains_by_task(TWO_SEEDS).rows[1] == ("2", "50.0 ± 0.0", "65.0 ± 7.1", "+15.0 (5.0)", "70.0", "75.0")
    assert gains({"x": TWO_SEEDS}).rows[0][:6] == (
        "paper, best epoch",
        "ft",
        "2",
        "50.0 ± 0.0",
        "65.0 ± 7.1",
        "+15.0 (5.0)",
    )
    single = replace(TWO_SEEDS, runs={key: m for key, m in RUNS.items() if key[2] == 0} | {("wa", "bn", 0): [[0.5]]})
    (row,) = gains({"x": single}).rows  # wa has no partner
    assert row[2:6] == ("1", "50.0", "60.0", "+10.0")
    cells = dict(zip(beside_paper(TWO_SEEDS).header, beside_paper(TWO_SEEDS).rows[2], strict=False))
    assert cells["A_f ours"] == "+15.0 (5.0)" and beside_paper(TWO_SEEDS).rows[2][2] == "3.05"  # 38.46 - 35.41


def test_every_measured_run_has_a_whole_matrix() -> None:
    for experiment in measured().values():
        assert all([len(row) for row in matrix] == list(range(1, 11)) for matrix in experiment.runs.values())


def test_the_pages_made_from_the_records_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make results`` would change nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("results")
    for path, make in ((tool.DATA, tool.data), (tool.PAGE, tool.page), (tool.README, tool.readme)):
        assert path.read_text() == make(), f"{path.name} is not current: run make results"


def test_the_gain_in_the_paper_is_of_the_metric_asked_for() -> None:
    assert gain_in_paper("F") == pytest.approx(beside_paper_of("F"))


def beside_paper_of(name: str) -> float:
    table = beside_paper(TWO_SEEDS)
    return float(table.rows[2][table.header.index(f"{name} ours") + 1])


def test_the_interval_is_that_of_students_t() -> None:
    backwards = replace(TWO_SEEDS, runs=dict(reversed(RUNS.items())))
    assert backwards.seeds("ft") == [0, 1]
    low, high = TWO_SEEDS.metric(
        "ft", "A_f"
    ).interval  # the error is 5, and t of one degree of freedom is tan(0.475 pi)
    assert (low, high) == (
        pytest.approx(15 - 5 * tan(0.475 * pi), abs=0.01),
        pytest.approx(15 + 5 * tan(0.475 * pi), abs=0.01),
    )
    assert isnan(Paired([1.0], [2.0]).error)
