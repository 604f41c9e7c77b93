"""Recipes: names with options, seeds, the ``[sweep]`` table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tbbn.bench.runs.recipe import Axes, parse_choice, parse_seeds, read_recipe, split_names
from tbbn.errors import UserError


def test_names_are_split_at_commas_outside_brackets() -> None:
    assert split_names("bn, cn(groups=8,eps=1e-5),tbbn,") == ("bn", "cn(groups=8,eps=1e-5)", "tbbn")


def test_a_choice_with_options() -> None:
    assert parse_choice("norm", "cn(groups=8, affine=false)") == {
        "norm.name": "cn",
        "norm.groups": 8,
        "norm.affine": False,
    }
    assert parse_choice("method", "ft") == {"method.name": "ft"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cn(groups=8", r"norm must look like name or name\(option=value\), got 'cn\(groups=8'\."),
        ("cn(8)", r"norm 'cn': options must look like option=value, got '8'\."),
        ("cn(=8)", r"norm 'cn': options must look like option=value, got '=8'\."),
    ],
)
def test_a_choice_that_cannot_be_read_is_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        parse_choice("norm", text)


def test_seeds_are_a_count_or_a_list() -> None:
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("0, 5") == (0, 5)
    assert parse_seeds("7,") == (7,)


@pytest.mark.parametrize("text", ["x", "1,x", "1.5"])
def test_seeds_that_are_not_numbers(text: str) -> None:
    with pytest.raises(
        UserError, match=rf"^--seeds takes a count or a list: 3, or 0,1,2 \(one seed: '7,'\); got '{text}'\."
    ):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["1,1", "-1,2", ","])
def test_seeds_that_repeat_or_are_negative(text: str) -> None:
    with pytest.raises(UserError, match=r"--seeds takes .*; seeds must be distinct and not negative, got"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["0", "-1"])
def test_a_count_of_seeds_is_at_least_one(text: str) -> None:
    with pytest.raises(UserError, match=rf"--seeds takes .*; a count must be at least 1, got '{text}'\."):
        parse_seeds(text)


def test_a_comma_makes_one_seed_a_list() -> None:
    assert parse_seeds("0,") == (0,)


def test_a_recipe_is_settings_and_axes(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('norm = "gn"\n[train]\nepochs = 2\n[sweep]\nmethods = ["ft", "er"]\nseeds = [0, 3]\n')
    values, axes = read_recipe(file)
    assert values == {"norm.name": "gn", "train.epochs": 2}
    assert axes == Axes(methods=("ft", "er"), seeds=(0, 3))
