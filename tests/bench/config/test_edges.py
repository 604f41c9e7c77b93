"""Settings at the edges of what is allowed, and what errors repeat of those beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tbbn.bench.config import NormChoice, parse_value, read_toml, resolve, to_toml
from tbbn.bench.config.options import BATCH_NORM, default_options
from tbbn.bench.config.resolve import nearest_setting
from tbbn.bench.config.toml import tomllib
from tbbn.errors import UserError


def said(**settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve(("here", {key.replace("__", "."): value for key, value in settings.items()}))
    return str(caught.value)


@pytest.mark.parametrize("length", [198, 199, 300])
def test_an_error_repeats_two_hundred_letters_of_a_value(length: int) -> None:
    text = "x" * length
    shown = repr(text) if length == 198 else f"{repr(text)[:200]}..."
    assert said(seed=text) == f"here: seed must be a whole number (default 0), got {shown}."


def test_an_unknown_setting_of_more_than_two_hundred_letters_is_cut_and_has_no_hint() -> None:
    assert said(**{"x" * 201: 1}) == f"here: unknown setting {repr('x' * 201)[:200]}...."
    assert said(**{"x" * 200: 1}).startswith(f"here: unknown setting {'x' * 200!r}; ")


@pytest.mark.parametrize("number", [0xD800, 0xDBFF, 0xDFFF])
def test_half_of_a_sign_is_refused_and_its_neighbours_are_not(number: int) -> None:
    assert said(data__root=f"a{chr(number)}b").startswith("here: data.root must be text in UTF-8, got 'a")
    assert said(norm__odd=chr(number)).startswith("here: norm.odd must be text in UTF-8, got ")
    for other in ("\ud7ff", "\ue000"):
        assert resolve(("here", {"data.root": f"a{other}b"})).data.root == f"a{other}b"


def test_signs_that_a_terminal_acts_on_are_written_as_numbers() -> None:
    text = to_toml({"a": "x\u202e\x7f\uffff\U000e0001\U00010000"})
    assert text == 'a = "x\\u202e\\u007f\\uffff\\U000e0001𐀀"\n'
    assert tomllib.loads(text) == {"a": "x\u202e\x7f\uffff\U000e0001\U00010000"}


def test_a_config_file_has_a_mebibyte_at_most(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    start = b"seed = 3\n#"
    file.write_bytes(start.ljust(2**20, b"x"))
    assert read_toml(file) == {"seed": 3}
    file.write_bytes(start.ljust(2**20 + 1, b"x"))
    with pytest.raises(UserError, match=r"a\.toml: larger than 1048576 bytes, so not a config file\.$"):
        read_toml(file)


def test_a_choice_is_what_its_name_and_options_are_whatever_its_defaults_were() -> None:
    one = NormChoice("gn", (("groups", 8),))
    other = NormChoice("gn", (("groups", 8),), (("groups", 4),))
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other) and {one: 1}[other] == 1
    assert one != NormChoice("gn") and one != NormChoice("in", (("groups", 8),))


def test_norms_inherit_the_options_of_torchs_batch_norm_where_the_backbone_is_built_in() -> None:
    assert BATCH_NORM == {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}
    assert default_options("norm", "bn", backbone="small") == default_options("norm", "bn") == BATCH_NORM
    assert default_options("norm", "bn", backbone="elsewhere") == {}
    assert default_options("norm", "elsewhere", backbone="small") == {}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(10**400, float("inf")), (-(10**400), float("-inf")), (3, 3.0), (-3, -3.0), (0, 0.0)],
)
def test_a_whole_number_becomes_a_float_where_the_default_is_one(value: int, wanted: float) -> None:
    (found,) = [v for o, v in resolve({"norm": {"name": "bn", "eps": value}}).norm.options if o == "eps"]
    assert found == wanted and type(found) is float


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("seed", "3", 3),
        ("seed", "x", "x"),
        ("train.lr", "1e-3", 1e-3),
        ("train.nesterov", "TRUE", True),
        ("train.nesterov", "False", False),
        ("data.root", "true", "true"),  # text stays text
        ("data.root", "3", "3"),
        ("quirks", " a, ,b ", ("a", "b")),
        ("quirks", "1,2", ("1", "2")),
        ("train.milestones", "0.5, 1,x", (0.5, 1, "x")),
        ("train.milestones", "", ()),
        ("norm.groups", "8", 8),
        ("norm.groups", "a", "a"),
        ("norm.flag", "true", True),
    ],
)
def test_a_value_of_the_command_line_has_the_type_of_its_setting(key: str, text: str, wanted: Any) -> None:
    found = parse_value(key, text)
    assert found == wanted and type(found) is type(wanted)


def test_the_nearest_setting_is_that_of_the_same_last_word() -> None:
    assert nearest_setting("Epochs") == "train.epochs" and nearest_setting("weight-decay") == "train.weight_decay"
    assert nearest_setting("nothing-like-it") == ""


@pytest.mark.parametrize(
    ("key", "begins", "ends"),
    [
        ("epochs", "here: unknown setting 'epochs'; choose one of: protocol, ", "Did you mean 'train.epochs'?"),
        ("optim", "here: unknown setting 'optim'; choose one of: protocol, ", "Did you mean 'train.optimizer'?"),
        ("sead", "here: unknown setting 'sead'; choose one of: protocol, ", "Did you mean 'seed'?"),
        ("zzzzzz", "here: unknown setting 'zzzzzz'; choose one of: protocol, ", "backbone."),
        ("trian.epochs", "here: unknown section 'trian'; choose one of: data, ", "Did you mean 'train'?"),
        ("zzzzzz.epochs", "here: unknown section 'zzzzzz'; choose one of: data, ", "method."),
        ("train.epoch", "here: [train] has no option 'epoch'; choose one of: epochs, ", "Did you mean 'epochs'?"),
        ("train.first.gama", "here: [train.first] has no option 'gama'; choose one of: ", "Did you mean 'gamma'?"),
        ("train.zzzzzz", "here: [train] has no option 'zzzzzz'; choose one of: epochs, ", "."),
        (
            "train.first",
            "here: train.first is a section, not a setting; write [train.first] and its ",
            "settings below.",
        ),
    ],
)
def test_an_unknown_name_is_named_with_those_that_are_known_and_the_nearest(key: str, begins: str, ends: str) -> None:
    found = said(**{key: 3})
    assert found.startswith(begins) and found.endswith(ends)
    assert ("Did you mean" in found) == ("Did you mean" in ends)


def test_a_wrong_choice_is_named_with_the_nearest() -> None:
    assert said(protocol="papr").endswith("got 'papr'. Did you mean 'paper'?")
    assert said(protocol="zzzzzz").endswith("got 'zzzzzz'.")
    assert said(quirks=["no-affine", "no-afine"]).endswith("got ['no-affine', 'no-afine']. Did you mean 'no-affine'?")
