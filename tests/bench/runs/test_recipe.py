"""Recipes: names with options, seeds, the ``[sweep]`` table."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tbbn.bench.config.toml import tomllib
from tbbn.bench.runs.recipe import (
    Axes,
    check_sealed,
    parse_choice,
    parse_seeds,
    read_recipe,
    recipe_text,
    split_names,
)
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


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("bn, ,tbbn", ("bn", "tbbn")),
        (" bn ", ("bn",)),
        (" , ", ()),
        ("a(b=1,c=2),d", ("a(b=1,c=2)", "d")),
    ],
)
def test_blanks_between_names_are_no_names(text: str, wanted: tuple[str, ...]) -> None:
    assert split_names(text) == wanted


@pytest.mark.parametrize("text", ["cn(groups = 8)", " cn ( groups=8 , ) ", "cn(groups= 8, )", "cn( ,groups =8)"])
def test_blanks_around_options_and_empty_options_are_ignored(text: str) -> None:
    assert parse_choice("norm", text) == {"norm.name": "cn", "norm.groups": 8}
    assert parse_choice("norm", "cn( )") == parse_choice("norm", "cn()") == {"norm.name": "cn"}


@pytest.mark.parametrize(
    ("text", "seeds"), [("1", (0,)), ("7, ", (7,)), (" 2", (0, 1)), ("3,0", (3, 0)), (" 5 ,6,", (5, 6))]
)
def test_one_seed_is_a_count_too_and_blanks_do_not_matter(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


def test_a_count_of_seeds_has_the_limit_of_a_sweep() -> None:
    assert len(parse_seeds("10000")) == 10_000
    with pytest.raises(UserError, match="10001 runs are more than the 10000 that a sweep may have"):
        parse_seeds("10001")
    assert parse_seeds("10001,") == (10001,), "a seed may be any number"
    with pytest.raises(UserError, match="seeds must be distinct and not negative, got ''"):
        parse_seeds("")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("norms = 'bn'", "sweep.norms must be a list of names, got 'bn'."),
        ("methods = 'ft'", "sweep.methods must be a list of names, got 'ft'."),
        ("methods = [1]", "sweep.methods must be a list of names, got [1]."),
        ("norms = ['bn', 2]", "sweep.norms must be a list of names, got ['bn', 2]."),
        ("seeds = 3", "sweep.seeds must be a list of whole numbers, got 3."),
        ("seeds = ['0']", "sweep.seeds must be a list of whole numbers, got ['0']."),
        ("seeds = [true]", "sweep.seeds must be a list of whole numbers, got [True]."),
        ("seeds = [1.0]", "sweep.seeds must be a list of whole numbers, got [1.0]."),
        ("data = ['digits']", "[sweep] has no option 'data'; it takes: methods, norms, seeds."),
    ],
)
def test_a_sweep_table_of_something_else_is_refused(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"[sweep]\n{line}\n")
    with pytest.raises(UserError) as caught:
        read_recipe(file)
    assert str(caught.value) == f"{file}: {said}"


def test_the_text_of_a_recipe(tmp_path: Path) -> None:
    layers = [
        ("file", {"seed": 3, "train.epochs": 2, "norm.name": "cn", "norm.groups": 8, "method.name": "eeil", "data": "digits"}),
        ("command line", {"norm.eps": 0.5}),
    ]  # fmt: skip
    text = recipe_text(layers, Axes(norms=("cn", "gn", "cn( groups=4 )", "bn( )")))
    above, _, checksum = text.rpartition("# sha256 of the lines above: ")
    assert checksum == f"{hashlib.sha256(above.encode()).hexdigest()}\n"
    assert tomllib.loads(text) == {
        "seed": 3,
        "train": {"epochs": 2},
        "method": {"name": "eeil"},
        "data": {"name": "digits"},
        "norm": {"eps": 0.5},
        # The groups are those of cn, the eps that of every norm; an entry that gets none stays as it was written.
        "sweep": {"norms": ["cn(groups=8)", "gn", "cn( groups=4 )", "bn( )"]},
    }
    (tmp_path / "runs.toml").write_text(text)
    check_sealed(tmp_path / "runs.toml")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"seed = 3\n"])
def test_a_recipe_that_is_no_text_or_has_no_checksum_was_changed(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "runs.toml").write_bytes(content)
    with pytest.raises(UserError, match=r"runs\.toml: was changed or damaged after the sweep wrote it\."):
        check_sealed(tmp_path / "runs.toml")
