"""Norms of plugins: the engine gives no meaning to the names of their options."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest
from tinyrun import finish, tiny
from torch import nn

import tbbn
from tbbn.bench.engine.validate import check
from tbbn.errors import UserError
from tbbn.options import Option
from tbbn.plugins import temporary
from tbbn.registry import NORMS


def test_an_option_called_rule_may_mean_anything() -> None:
    with temporary(fresh=True):

        @tbbn.register_norm("ruled", "batch norm with an option of its own")
        class Ruled(nn.BatchNorm2d):
            def __init__(self, num_features: int, *, rule: str = "mine", **more: Any) -> None:
                super().__init__(num_features, **more)

        assert finish(tiny(norm__name="ruled")).record.status == "finished"


def test_every_keyword_of_the_constructor_is_an_option_listed_checked_and_written() -> None:
    with temporary(fresh=True):

        @tbbn.register_norm("scaled", "batch norm times a number")
        class Scaled(nn.BatchNorm2d):
            def __init__(
                self,
                channels: int,
                factor: Annotated[float, Option(help="multiplies the output", above=0, most=8)] = 1.0,
                shape: tuple[int, ...] = (1, 2),
                act: Any = nn.ReLU,  # no config can hold it: accepted, and not written
                *,
                mode: str = "plain",
                **more: Any,
            ) -> None:
                super().__init__(channels, **more)
                self.factor = factor

        inherited = {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}
        wanted = {"factor": 1.0, "shape": (1, 2), "mode": "plain"}
        assert set(NORMS.options("scaled")) == {*wanted, *inherited, "act"}
        assert NORMS.options("scaled")["factor"].accepts == "positive and at most 8"
        run = finish(tiny(norm__name="scaled", norm__factor=2))
        assert run.record.config["norm"] == {"name": "scaled", **inherited, **wanted, "factor": 2.0, "shape": [1, 2]}
        assert tbbn.convert(nn.BatchNorm2d(3), "scaled", factor=3).factor == 3.0
        for options, said in (
            ({"factor": 0}, "norm 'scaled': factor must be positive, got 0.0"),
            ({"factor": 9}, "norm 'scaled': factor must be at most 8, got 9.0"),
            ({"factor": "x"}, "norm 'scaled': factor must be a number (default 1.0), got 'x'"),
            ({"mode": 1}, "norm 'scaled': mode must be text (default 'plain'), got 1"),
            ({"affine": 2}, "norm 'scaled': affine must be true or false, got 2"),
            ({"momentum": 2}, "norm 'scaled': momentum must be at most 1, got 2.0"),
            ({"bias": False}, "unknown option of norm 'scaled': 'bias'"),
            ({"device": "cpu"}, "unknown option of norm 'scaled': 'device'"),
        ):
            with pytest.raises(UserError, match=re.escape(said)):
                tbbn.convert(nn.BatchNorm2d(3), "scaled", **options)
            with pytest.raises(UserError, match=re.escape(said)):
                check(tiny(norm__name="scaled", **{f"norm__{name}": value for name, value in options.items()}))


def test_an_annotation_that_cannot_be_read_is_one_line() -> None:
    with temporary(fresh=True):
        limits = Option(help="multiplies the output")

        @tbbn.register_norm("local", "its annotation names a local variable")
        class Local(nn.BatchNorm2d):
            def __init__(self, channels: int, factor: Annotated[float, limits] = 1.0) -> None:
                super().__init__(channels)

        assert limits.help
        with pytest.raises(UserError, match="annotation of 'factor' cannot be read: name 'limits' is not defined; use"):
            tbbn.convert(nn.BatchNorm2d(3), "local")
