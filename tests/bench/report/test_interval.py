"""Intervals of means: against the t distribution of scipy, which scikit-learn brings."""

from __future__ import annotations

import pytest
from scipy import stats

from tbbn.bench.report.interval import difference, half_width, quantile


@pytest.mark.parametrize("freedom", [*range(1, 40), 100, 1000])
def test_quantiles_are_those_of_students_t(freedom: int) -> None:
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


def test_an_interval_reaches_as_far_as_scipys() -> None:
    values = [1.0, 4.0, 4.5, 7.0]
    low, high = stats.t.interval(0.95, 3, loc=4.125, scale=stats.sem(values))
    assert 2 * half_width(values) == pytest.approx(high - low, abs=2e-3)
    assert difference(values) == f"+4.1 [{low:.1f}, {high:.1f}]"


def test_a_bound_that_rounds_to_0_has_a_sign_if_it_is_below_0() -> None:
    assert difference([0.0, 0.0]) == "+0.0 [0.0, 0.0]"
    assert difference([-0.001, -0.0011]) == "+0.0 [-0.0, -0.0]"
