"""Our results as data: what is computed from them, and that the pages made from them are current."""

from __future__ import annotations

import importlib
from dataclasses import replace
from math import pi, tan
from pathlib import Path

import pytest

from tbbn.paper.measured import TASK_KNOWN, Measured, gains, gains_beside_paper, gains_by_task, measured

ROOT = Path(__file__).parents[2]
RUNS = {
    ("ft", "bn", 0): [[0.8], [0.4, 0.6]],
    ("ft", "tbbn", 0): [[0.8], [0.5, 0.7]],
    ("ft", "bn", 1): [[0.6], [0.2, 0.8]],
    ("ft", "tbbn", 1): [[0.6], [0.6, 0.8]],
    ("ft", "bn", 2): [[0.1], [0.1, 0.1]],  # without its partner
}
KNOWN = {key: matrix[-1][-1] for key, matrix in RUNS.items()}
TWO_SEEDS = Measured("x", "paper", "folder", RUNS, KNOWN, {"ft": "best"})


def test_gains_are_means_of_differences_on_the_same_seeds() -> None:
    final = TWO_SEEDS.metric("ft", "A_f")
    assert final.bn == pytest.approx([50, 50]) and final.tbbn == pytest.approx([60, 70])
    assert final.gain == pytest.approx(15)
    forgotten = TWO_SEEDS.metric("ft", "F")  # (best in the past - final) / 2, for the first task
    assert forgotten.bn == pytest.approx([20, 20]) and forgotten.tbbn == pytest.approx([15, 0])
    assert TWO_SEEDS.new_task("ft", 1).tbbn == pytest.approx([70, 80])


def test_tables_show_means_spreads_and_gains_with_their_intervals() -> None:
    # The interval: the error is 5, and t of one degree of freedom is 12.7.
    assert gains_by_task(TWO_SEEDS).rows[1] == (
        "2", "50.0 ± 0.0", "65.0 ± 7.1", "+15.0 [-48.5, 78.5]", "+5.0 [-58.5, 68.5]",
    )  # fmt: skip
    (row,) = gains({"x": TWO_SEEDS}, ("A_f", TASK_KNOWN)).rows
    assert row == ("paper", "ft", "2", "50.0 ± 0.0", "65.0 ± 7.1", "+15.0 [-48.5, 78.5]", "+5.0 [-58.5, 68.5]")
    single = replace(TWO_SEEDS, runs={key: m for key, m in RUNS.items() if key[2] == 0} | {("wa", "bn", 0): [[0.5]]})
    (row,) = gains({"x": single}, ("A_f",)).rows  # wa has no partner
    assert row[2:] == ("1", "50.0", "60.0", "+10.0")


@pytest.mark.parametrize(
    ("protocol", "method", "kept", "title"),
    [
        ("paper", "ft", "best", "paper"),
        ("paper", "ft", "last", "paper, last epoch"),
        ("paper", "afc", "last", "paper"),
        ("clean", "ft", "last", "clean"),
    ],
)
def test_a_title_names_the_epoch_only_where_the_protocol_keeps_another(
    protocol: str, method: str, kept: str, title: str
) -> None:
    assert Measured("x", protocol, "folder", {}, {}, {method: kept}).title(method) == title


def test_a_gain_of_the_paper_outside_of_the_interval_is_marked() -> None:
    accuracies = {("bn", 0): 0.50, ("bn", 1): 0.40, ("tbbn", 0): 0.501, ("tbbn", 1): 0.4012}
    runs = {("ft", norm, seed): [[0.9], [a, a]] for (norm, seed), a in accuracies.items()}
    (row,) = gains_beside_paper([replace(TWO_SEEDS, runs=runs)]).rows
    # 0.1 and 0.12 points: 0.11 ± 12.706 * 0.01. The paper: 38.46 - 35.41, 56.17 - 53.88, 41.90 - 43.38, 80.36 - 78.79.
    assert row[:3] == ("ft", "+0.1 [-0.0, 0.2]", "+3.1 *") and row[4] == "+2.3 *"
    assert row[6] == "-1.5 *" and row[8] == "+1.6 *"
    wide = replace(TWO_SEEDS, runs=RUNS)
    assert gains_beside_paper([wide]).rows[0][2] == "+3.1"


def test_every_measured_run_has_a_whole_matrix() -> None:
    for experiment in measured().values():
        assert all([len(row) for row in matrix] == list(range(1, 11)) for matrix in experiment.runs.values())


def test_the_pages_made_from_the_records_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make results`` would change nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("results")
    for path, make in ((tool.DATA, tool.data), (tool.PAGE, tool.page), (tool.README, tool.readme)):
        assert path.read_text() == make(), f"{path.name} is not current: run make results"


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
