"""The analyses on docs/results.md that `make results` computes from the records: against values worked out by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tbbn.paper.measured import Measured, Paired

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bias(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("results_bias")


@pytest.fixture
def epochs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("results_epochs")


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("results_numbers")


def run(norm: str, seed: int, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(run_config=SimpleNamespace(names=("ft", norm), seed=seed), **fields)


def test_shares_count_new_and_past_images_that_are_called_new(bias: ModuleType) -> None:
    errors = {"C->C": 3, "C->P": 2, "P->C": 6, "P->P": 5}  # of 9 new images, 7 are called new; of 2 x 9 past ones, 6
    assert bias.shares(errors, past_tasks=2, per_task=9) == pytest.approx((7.5 / 10, 6.5 / 19))


def test_the_calibrated_gain_needs_the_number_from_every_run(bias: ModuleType) -> None:
    runs = [run(norm, seed, calibrated=[[0.9], [a, a + 0.2]]) for norm, seed, a in (("bn", 0, 0.3), ("tbbn", 0, 0.35))]
    assert bias.calibrated_gain(runs) == "+5.0"
    for older in ([], [[], []]):
        assert bias.calibrated_gain([*runs, run("tbbn", 1, calibrated=older)]) == "-"


def test_separation_and_bias_are_those_of_two_normal_distributions(bias: ModuleType) -> None:
    # A standard normal variable is above 0 with probability 0.5, below 1 with 0.841345 and below 2 with 0.977250.
    up, down = 0.841345, 1 - 0.977250
    assert bias.separation(up, down) == pytest.approx(3, abs=1e-4)  # the means are 1 + 2 apart
    assert bias.bias(up, down) == pytest.approx(0.5, abs=1e-4)  # the line is half a deviation nearer to the new mean
    assert bias.separation(0.5, 0.5) == bias.bias(0.5, 0.5) == 0
    assert bias.bias(0.9, 0.5) < 0  # new is favoured


def test_the_parts_of_a_gain_add_up(bias: ModuleType) -> None:
    final, known = Paired([40.0], [63.0]), Paired([80.0], [90.0])  # the task is found for 0.5 and 0.7 of them
    within, between = bias.parts(final, known)
    assert within == pytest.approx([10 * 0.6]) and between == pytest.approx([0.2 * 85])
    assert within[0] + between[0] == pytest.approx(final.gain)


def test_runs_are_paired_by_seed(bias: ModuleType) -> None:
    runs = [run("tbbn", 1, x=5), run("bn", 2, x=9), run("bn", 1, x=3), run("cn", 1, x=7), run("tbbn", 0, x=1)]
    assert bias.paired(runs, lambda record: record.x) == Paired([3], [5])


def blocks(epochs: ModuleType, noise: float) -> tuple[list[Any], list[float]]:
    """Four runs of four tasks: norms 10 points apart, tasks and seeds that differ, and early epochs that cost 4 points."""
    early = {("a", 0): {1, 2}, ("a", 1): {2, 3, 4}, ("b", 0): {2}, ("b", 1): {4}}  # a is better, and has more of them
    cases = [
        epochs.Case(norm, seed, task, task in tasks) for (norm, seed), tasks in early.items() for task in range(1, 5)
    ]
    values = [
        50 + 10 * (c.norm == "a") + 7 * c.seed - c.task**2 - 4 * c.early + noise * (-1) ** (at // 3)
        for at, c in enumerate(cases)
    ]
    return cases, values


def test_the_effect_of_an_early_epoch_is_free_of_norm_task_and_seed(epochs: ModuleType) -> None:
    exact = epochs.effect(*blocks(epochs, noise=0), by_norm=True)
    assert exact == pytest.approx((-4, -4, -4))
    assert epochs.effect(*blocks(epochs, noise=0), by_norm=False)[0] > 0  # the better norm kept more early epochs


def test_the_interval_of_an_effect_is_the_jackknife_over_runs(epochs: ModuleType) -> None:
    cases, values = blocks(epochs, noise=1)
    estimate, low, high = epochs.effect(cases, values, by_norm=True)
    # Without one of the four runs of four tasks each. The error is the root of 3/4 of the sum of squares; t of 3 is 3.182.
    parts = [(cases[:at] + cases[at + 4 :], values[:at] + values[at + 4 :]) for at in (0, 4, 8, 12)]
    others = [epochs._early(*part, True) for part in parts]
    mean = sum(others) / 4
    error = (3 / 4 * sum((other - mean) ** 2 for other in others)) ** 0.5
    assert error > 0.05
    assert (low, high) == pytest.approx((estimate - 3.182 * error, estimate + 3.182 * error))


def test_an_outcome_after_another_task_leaves_out_the_last_task(epochs: ModuleType) -> None:
    accuracy = [[(t + i) / 100 for i in range(t + 1)] for t in range(10)]  # after task t: 1.5 t points on average
    record = SimpleNamespace(accuracy=accuracy)
    later = epochs.OUTCOMES["mean accuracy one task later"]
    assert later(epochs.Case("a", 0, 8, True, record)) == pytest.approx(13.5)
    assert later(epochs.Case("a", 0, 9, True, record)) is None
    earlier = epochs.OUTCOMES["mean accuracy one task earlier"]
    assert earlier(epochs.Case("a", 0, 9, True, record)) == pytest.approx(12)


def test_cases_are_early_up_to_the_first_drop_and_leave_out_the_first_task(
    epochs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs.numbers, "first_drop", lambda: 80)
    kept = {(0, "train"): 3, (1, "train"): 79, (1, "balanced"): 99, (2, "train"): 80}  # from 0
    (first, second) = epochs.cases([run("cn", 5, kept_epochs=lambda: kept)])
    assert (first.norm, first.seed, first.task, first.early) == ("cn", 5, 1, True)
    assert (second.task, second.early) == (2, False)


def test_a_gain_of_the_paper_is_judged_by_the_spread_of_both_sides(numbers: ModuleType) -> None:
    def experiment(gains: list[float]) -> Measured:
        runs = {("ft", "bn", s): [[0.9], [0.5, 0.5]] for s in range(3)}
        runs |= {("ft", "tbbn", s): [[0.9], [0.5 + g / 100, 0.5 + g / 100]] for s, g in enumerate(gains)}
        return Measured("x", "paper", "folder", runs, {}, {"ft": "best"})

    # The paper: A_f +3.05, A_a +2.29, F -1.48, A_l +1.57. Ours: A_f g, A_a, F and A_l half of it,
    # with the gains g of the three seeds.
    # Half an interval of A_f: 4.303 * 0.5 / sqrt(3) = 1.24, and with the paper's spread 1.76. Of the others half of it.
    assert numbers.beyond_chance([experiment([-0.5, 0.5, 0.0])]).startswith("4 of the 4 differences")
    # A spread of 1: 2.48 and 3.51 for A_f, 1.24 and 1.76 for the others.
    wider = numbers.beyond_chance([experiment([-1.0, 1.0, 0.0])])
    assert wider == "1 of the 4 differences marked `*` remain outside the wider interval (A_a of ft)"
