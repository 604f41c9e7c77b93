"""Metrics by name."""

from __future__ import annotations

import pytest

from tbbn.bench.metrics import ERROR_TYPES, FORMULAS
from tbbn.bench.report.columns import SHORT, formulas, parse_metrics
from tbbn.errors import UserError


def test_every_metric_has_a_short_name_and_a_line() -> None:
    assert set(SHORT) == set(FORMULAS) - set(ERROR_TYPES)
    assert all(line.startswith(short) for line, short in zip(formulas(tuple(SHORT)), SHORT.values(), strict=True))


def test_short_and_long_names_in_any_order() -> None:
    names = parse_metrics("A_a^w, FM,final_accuracy,A_f task-IL")
    assert names == ("weighted_average_accuracy", "forgetting_past", "final_accuracy", "task_il_final_accuracy")


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match=r"unknown metric 'learning_acuracy'; .* Did you mean 'learning_accuracy'"):
        parse_metrics("A_f,learning_acuracy")
    with pytest.raises(UserError, match=r"unknown metric ''"):
        parse_metrics("")
    with pytest.raises(UserError, match=r"--metrics: each metric once, got 'A_f,final_accuracy'\."):
        parse_metrics("A_f,final_accuracy")
