"""Norms of plugins: the engine gives no meaning to the names of their options."""

from __future__ import annotations

from typing import Any

import torch
from tinyrun import finish, tiny
from torch import nn

import tbbn
from tbbn.plugins import temporary


def test_an_option_called_rule_may_mean_anything() -> None:
    with temporary(fresh=True):

        @tbbn.register_norm("ruled", "batch norm with an option of its own")
        class Ruled(nn.BatchNorm2d):
            def __init__(self, num_features: int, *, rule: str = "mine", **more: Any) -> None:
                super().__init__(num_features, **more)

        assert finish(tiny(norm__name="ruled")).record.status == "finished"


def test_a_function_registered_as_a_norm_leaves_other_norms_alone() -> None:
    with temporary(fresh=True):

        @tbbn.register_norm("function", "not a class")
        def make(num_features: int) -> nn.Module:
            return nn.BatchNorm2d(num_features)

        model = tbbn.convert(nn.Sequential(nn.BatchNorm2d(3)))
        assert type(model[0]) is tbbn.TaskBalancedBatchNorm2d
        assert model(torch.randn(4, 3, 2, 2)).shape == (4, 3, 2, 2)
