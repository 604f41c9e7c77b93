"""Each task's share in the statistics, against the paper's closed form."""

from __future__ import annotations

import pytest
import torch

import tbbn
from tbbn.bench.analysis.shares import norm_options, share, shares_table
from tbbn.bench.config import resolve
from tbbn.errors import UserError


@pytest.mark.parametrize("past", range(1, 10))
def test_a_share_is_that_of_the_rows_in_a_split(past: int) -> None:
    r = tbbn.splits(48, 16, past)
    found = share(48, 16, past, norm_options("tbbn", {}))
    assert found.splits == r and found.exact == 3 * past
    assert found.current == pytest.approx((48 / r) / (48 / r + 16))
    assert found.past * past + found.current == pytest.approx(1)
    assert share(48, 16, past, None).current == pytest.approx(48 / 64)
    assert share(48, 16, past, norm_options("weighted", {})).current == pytest.approx(1 / (past + 1))


def test_a_share_is_what_a_layer_puts_into_its_running_mean() -> None:
    """With the value 1 in current rows and 0 in memory rows, the running mean is the share of the current task."""
    layer = tbbn.TaskBalancedBatchNorm1d(1, momentum=1.0).double().train()
    rows = torch.cat([torch.ones(48, 1), torch.zeros(16, 1)]).double()
    with tbbn.balance(layer, current=48, memory=16, past_tasks=7):
        layer(rows)
    assert layer.running_mean is not None
    assert share(48, 16, 7, norm_options("tbbn", {})).current == pytest.approx(layer.running_mean.item())


def test_the_table_has_a_row_for_each_task_and_a_column_for_each_norm() -> None:
    config = [resolve(("test", {"data.tasks": 4, "batch.size": 64, "norm.name": norm})) for norm in ("bn", "tbbn")]
    table = shares_table(config)
    assert [row[0] for row in table.rows] == ["1", "2", "3", "4"]
    assert table.rows[3] == ("4", "48+16", "9", "8", "75.0", "27.3", "25.0")


def test_a_norm_without_fixed_shares_is_refused() -> None:
    with pytest.raises(UserError, match="'gn' has no fixed share"):
        norm_options("gn", {})
