from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbbn.bench import metrics
from tbbn.errors import UserError

# By hand, T = 3:         task 0  task 1  task 2
EXAMPLE = [
    [0.9],
    [0.5, 0.8],
    [0.6, 0.4, 0.7],
]
WEIGHTS = [4, 1, 1]

accuracies = st.floats(0, 1)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[float]]:
    n_tasks = draw(st.integers(1, 6))
    return [draw(st.lists(accuracies, min_size=t + 1, max_size=t + 1)) for t in range(n_tasks)]


def test_doctests() -> None:
    result = doctest.testmod(metrics)
    assert result.attempted > 8
    assert result.failed == 0


def test_example_by_hand() -> None:
    assert metrics.final_accuracy(EXAMPLE) == pytest.approx((0.6 + 0.4 + 0.7) / 3)
    assert metrics.average_accuracy(EXAMPLE) == pytest.approx((0.9 + 0.65 + 1.7 / 3) / 3)
    assert metrics.learning_accuracy(EXAMPLE) == pytest.approx((0.9 + 0.8 + 0.7) / 3)
    # Task 0 falls by 0.4 at worst, task 1 by 0.4, task 2 cannot.
    assert metrics.forgetting(EXAMPLE, from_text=True) == pytest.approx(0.8 / 3)
    # Best earlier minus final: 0.9 - 0.6 and 0.8 - 0.4.
    assert metrics.forgetting(EXAMPLE) == pytest.approx(0.7 / 3)
    assert metrics.forgetting_past(EXAMPLE) == pytest.approx(0.7 / 2)  # the mean over the two past tasks
    assert metrics.backward_transfer(EXAMPLE) == pytest.approx((-0.3 - 0.4) / 2)
    assert metrics.final_accuracy(EXAMPLE, WEIGHTS) == pytest.approx((2.4 + 0.4 + 0.7) / 6)
    assert metrics.average_accuracy(EXAMPLE, WEIGHTS) == pytest.approx((0.9 + (2.0 + 0.8) / 5 + 3.5 / 6) / 3)


def test_history_forgetting_remembers_a_peak_after_learning() -> None:
    rows = [[0.5], [0.9, 1.0], [0.7, 1.0, 1.0]]
    assert metrics.forgetting(rows, from_text=True) == pytest.approx((0.5 - 0.7) / 3)
    assert metrics.forgetting(rows) == pytest.approx((0.9 - 0.7) / 3)


def test_one_task_forgets_nothing() -> None:
    summary = metrics.summary([[0.4]])
    assert summary == {
        "final_accuracy": 0.4,
        "average_accuracy": 0.4,
        "forgetting": 0.0,
        "forgetting_text": 0.0,
        "forgetting_past": 0.0,
        "learning_accuracy": 0.4,
        "backward_transfer": 0.0,
    }


@given(matrices())
def test_metrics_match_the_formulas_counted_from_one(rows: list[list[float]]) -> None:
    n = len(rows)
    a = {(t, i): rows[t - 1][i - 1] for t in range(1, n + 1) for i in range(1, t + 1)}
    tasks = range(1, n + 1)
    paper = [max([a[i, i] - a[t, i] for t in tasks if t > i], default=0) for i in tasks]
    history = [max([a[t, i] for t in tasks if i <= t < n], default=a[n, i]) - a[n, i] for i in tasks]
    summary = metrics.summary(rows)
    close = pytest.approx
    assert summary["final_accuracy"] == close(sum(a[n, i] for i in tasks) / n)
    assert summary["average_accuracy"] == close(sum(sum(a[t, i] for i in range(1, t + 1)) / t for t in tasks) / n)
    assert summary["learning_accuracy"] == close(sum(a[i, i] for i in tasks) / n)
    assert summary["forgetting_text"] == close(sum(paper) / n, abs=1e-12)
    assert summary["forgetting"] == close(sum(history) / n, abs=1e-12)
    if n > 1:
        assert summary["forgetting_past"] == close(sum(history[:-1]) / (n - 1), abs=1e-12)
        assert summary["backward_transfer"] == close(sum(a[n, i] - a[i, i] for i in tasks) / (n - 1), abs=1e-12)


@given(matrices())
def test_forgetting_is_at_least_learning_minus_final(rows: list[list[float]]) -> None:
    least = metrics.learning_accuracy(rows) - metrics.final_accuracy(rows)
    assert metrics.forgetting(rows, from_text=True) >= least - 1e-12
    assert metrics.forgetting(rows) >= least - 1e-12


@given(matrices())
def test_both_forgettings_agree_when_accuracy_only_falls(rows: list[list[float]]) -> None:
    for t in range(1, len(rows)):
        for i in range(t):
            rows[t][i] = min(rows[t][i], rows[t - 1][i])
    assert metrics.forgetting(rows, from_text=True) == pytest.approx(metrics.forgetting(rows), abs=1e-12)


@given(matrices(), st.integers(1, 9))
def test_equal_weights_change_nothing(rows: list[list[float]], weight: int) -> None:
    weights = [weight] * len(rows)
    assert metrics.final_accuracy(rows, weights) == pytest.approx(metrics.final_accuracy(rows))
    assert metrics.average_accuracy(rows, weights) == pytest.approx(metrics.average_accuracy(rows))


def test_summary_adds_what_it_is_given() -> None:
    task_il = [[1.0], [0.9, 0.7], [0.8, 0.8, 0.5]]
    summary = metrics.summary(EXAMPLE, weights=WEIGHTS, task_il=task_il)
    assert summary["weighted_final_accuracy"] == pytest.approx(3.5 / 6)
    assert summary["weighted_average_accuracy"] == pytest.approx((0.9 + 0.56 + 3.5 / 6) / 3)
    assert summary["task_il_final_accuracy"] == pytest.approx(0.7)
    assert summary["task_il_average_accuracy"] == pytest.approx((1.0 + 0.8 + 0.7) / 3)


def test_every_metric_has_a_formula() -> None:
    summary = metrics.summary(EXAMPLE, weights=WEIGHTS, task_il=EXAMPLE)
    assert [*summary, *metrics.ERROR_TYPES] == list(metrics.FORMULAS)
    assert all(metrics.FORMULAS.values())


predicted = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.integers(0, n),
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40),
    )
)


def confusion(pairs: list[tuple[int, int]], n: int) -> list[list[int]]:
    """How often each label (row) was predicted as each class (column)."""
    counts = [[0] * n for _ in range(n)]
    for prediction, label in pairs:
        counts[label][prediction] += 1
    return counts


@given(predicted)
def test_error_types_equal_a_count_image_by_image(case: tuple[int, int, list[tuple[int, int]]]) -> None:
    n, first_current, pairs = case
    wrong = [(y, p) for p, y in pairs if p != y]
    assert metrics.confusion_error_types(confusion(pairs, n), first_current) == {
        "C->C": sum(min(y, p) >= first_current for y, p in wrong),
        "C->P": sum(y >= first_current > p for y, p in wrong),
        "P->C": sum(p >= first_current > y for y, p in wrong),
        "P->P": sum(max(y, p) < first_current for y, p in wrong),
    }


def test_error_types_by_hand() -> None:
    # classes 0, 1 past; 2, 3 current
    labels = [0, 0, 0, 1, 2, 2, 3, 3]
    predictions = [0, 1, 3, 2, 3, 0, 3, 1]
    counts = metrics.confusion_error_types(confusion(list(zip(predictions, labels, strict=True)), 4), 2)
    assert counts == {"C->C": 1, "C->P": 2, "P->C": 2, "P->P": 1}


@pytest.mark.parametrize(
    "metric",
    [
        metrics.summary,
        metrics.final_accuracy,
        metrics.average_accuracy,
        metrics.forgetting,
        metrics.forgetting_past,
        metrics.learning_accuracy,
        metrics.backward_transfer,
    ],
)
def test_a_matrix_that_is_not_triangular_is_refused(metric) -> None:
    with pytest.raises(UserError, match=r"row 1 must have 2 entries \(tasks 0 to 1\), got 1"):
        metric([[0.5], [0.5]])
    with pytest.raises(UserError, match="row 0 must have 1 entries"):
        metric([[0.5, 0.0], [0.5, 0.5]])
    with pytest.raises(UserError, match="needs at least one row, got none"):
        metric([])


@pytest.mark.parametrize("weights", [[1, 2], [1, 0, 1], [1, 1, -1]])
def test_weights_must_be_one_positive_number_a_task(weights: list[int]) -> None:
    for metric in (metrics.final_accuracy, metrics.average_accuracy):
        with pytest.raises(UserError, match="weights must be 3 positive numbers"):
            metric(EXAMPLE, weights)


def test_error_types_refuse_what_does_not_fit() -> None:
    with pytest.raises(UserError, match="must be square, but row 0 has 1 entries, not 2"):
        metrics.confusion_error_types([[1], [1, 1]], 1)
    with pytest.raises(UserError, match=r"first_current must be in 0\.\.2 \(classes seen\), got 3"):
        metrics.confusion_error_types([[1, 0], [1, 1]], 3)
