"""Each task's share in the statistics, against the paper's closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tbbn
from tbbn.bench.analysis.shares import norm_options, share, shares_table
from tbbn.bench.config import RunConfig, resolve
from tbbn.errors import UserError


def config(norm: str, **options: Any) -> RunConfig:
    chosen = {f"norm.{name}": value for name, value in options.items()}
    return resolve(("test", {"data.tasks": 4, "batch.size": 64, "norm.name": norm, **chosen}))


@pytest.mark.parametrize("past", range(1, 10))
def test_a_share_is_that_of_the_rows_in_a_split(past: int) -> None:
    r = tbbn.splits(48, 16, past)
    found = share(48, 16, past, norm_options("tbbn", {}))
    assert found.splits == r and found.exact == 3 * past
    assert found.current == pytest.approx((48 / r) / (48 / r + 16))
    for name, newest in (("bn", 48 / 64), ("weighted", 1 / (past + 1))):
        other = share(48, 16, past, norm_options(name, {}))
        assert other.current == pytest.approx(newest) and other.splits is None, "only TBBN splits"
    ablation = share(48, 16, past, norm_options("tbbn", {"case": 2}))  # its plan has one group more than splits
    assert ablation.splits == r and ablation.current == pytest.approx(48 / 64 if r > 1 else found.current)


def test_a_share_is_what_a_layer_puts_into_its_running_mean() -> None:
    """With the value 1 in current rows and 0 in memory rows, the running mean is the share of the current task."""
    layer = tbbn.TaskBalancedBatchNorm1d(1, momentum=1.0).double().train()
    rows = torch.cat([torch.ones(48, 1), torch.zeros(16, 1)]).double()
    with tbbn.balance(layer, current=48, memory=16, past_tasks=7):
        layer(rows)
    assert layer.running_mean is not None
    assert share(48, 16, 7, norm_options("tbbn", {})).current == pytest.approx(layer.running_mean.item())


def test_the_table_has_a_row_for_each_task_and_a_column_for_each_norm() -> None:
    table = shares_table([config("bn"), config("tbbn")])
    assert [row[0] for row in table.rows] == ["1", "2", "3", "4"]
    assert table.header == ("task", "batch", "r", "bn %", "tbbn r*", "tbbn %", "balanced %")
    assert table.rows[3] == ("4", "48+16", "9", "75.0", "8", "27.3", "25.0")


def test_each_norm_has_its_own_number_of_splits() -> None:
    # 48 current rows and 16 of one past task: 2 splits divide both counts, 3 divide 48. 24 / (24 + 16) = 60 %, 16 / 32 = 50 %.
    table = shares_table([config("bn"), config("tbbn"), config("tbbn", rule="current")])
    assert table.header[3:] == (
        "bn %",
        "tbbn r*",
        "tbbn %",
        "tbbn(rule=current) r*",
        "tbbn(rule=current) %",
        "balanced %",
    )
    assert table.rows[1][3:] == ("75.0", "2", "60.0", "3", "50.0", "50.0")
    table = shares_table([config("bn"), config("weighted")])
    assert table.header == ("task", "batch", "r", "bn %", "weighted %", "balanced %")
    assert "r*" not in " ".join(table.notes), "no norm here has splits"


def test_a_norm_without_fixed_shares_is_refused() -> None:
    with pytest.raises(UserError, match="'gn' has no fixed share"):
        norm_options("gn", {})
