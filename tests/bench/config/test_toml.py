"""A config to TOML and back, bit for bit."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbbn.bench import config as cfg
from tbbn.bench.config import flatten, read_toml, resolve, to_dict, to_toml
from tbbn.bench.config.toml import tomllib
from tbbn.errors import UserError
from tbbn.registry import BACKBONES, METHODS, NORMS


def test_short_forms_in_a_file() -> None:
    text = 'norm = "gn"\nmethod = "eeil"\ndata = "cifar10"\nseed = 3\n[train]\nepochs = 2\n'
    flat = flatten(tomllib.loads(text))
    assert flat == {"norm.name": "gn", "method.name": "eeil", "data.name": "cifar10", "seed": 3, "train.epochs": 2}


def test_options_of_a_norm_and_a_method_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[norm]\nname = "gn"\ngroups = 8\n[method]\nname = "eeil"\nkd = 0.5\n')
    config = resolve((str(file), read_toml(file)))
    assert str(config.norm) == "gn(groups=8)" and str(config.method) == "eeil(kd=0.5)"


KNOWN = {"norm.name": sorted(NORMS), "method.name": sorted(METHODS), "backbone": sorted(BACKBONES)}
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.floats(allow_nan=False)
option = st.one_of(
    st.booleans(), st.integers(-9, 9), numbers, text, st.lists(st.integers(-9, 9), max_size=3), st.just([["a"], []])
)


def values_of(setting: cfg.Setting) -> st.SearchStrategy[Any]:
    """Any value the setting accepts."""
    if setting.choices:
        one: st.SearchStrategy[Any] = st.sampled_from(setting.choices)
    elif setting.kind is bool:
        one = st.booleans()
    elif setting.kind is int:
        least = -(2**40) if setting.least is None else int(setting.least)
        one = st.integers(least, 2**40 if setting.most is None else int(setting.most))
    elif setting.kind in (float, tuple[float, ...]):
        low, high = setting.above if setting.least is None else setting.least, setting.below
        high = setting.most if high is None else high
        one = st.floats(low, high, exclude_min=setting.least is None, exclude_max=setting.below is not None)
    else:
        one = text
    return st.lists(one, max_size=4, unique=True).map(tuple) if isinstance(setting.default, tuple) else one


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    """Any values of any of the settings, and options of norm and method."""
    found = {name: draw(values_of(setting)) for name, setting in cfg.SETTINGS.items() if draw(st.booleans())}
    for key in draw(st.lists(st.sampled_from([*KNOWN]), unique=True)):  # names that are known have options
        found[key] = draw(st.sampled_from(KNOWN[key]))
    for choice in cfg.CHOICES:
        options = draw(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), option, max_size=3))
        found |= {f"{choice}.{key}": value for key, value in options.items() if key != "name"}
    return found


@settings(max_examples=40, deadline=None)
@given(layers())
def test_a_config_written_as_toml_is_read_back_as_it_was(layer: dict[str, Any]) -> None:
    config = resolve(("test", layer))
    written = to_toml(config)
    assert resolve(("file", flatten(tomllib.loads(written)))) == config
    assert (
        flatten(to_dict(config)) == flatten(tomllib.loads(written)) == flatten(json.loads(json.dumps(to_dict(config))))
    )
    assert to_toml(resolve(tomllib.loads(written))) == written
    assert all(sign.isprintable() or sign == "\n" for sign in written), "a terminal would act on it"
    for key, value in layer.items():
        if key.partition(".")[0] in cfg.SECTIONS:
            assert functools.reduce(getattr, key.split("."), config) == value


def test_every_setting_is_written_out() -> None:
    tree = tomllib.loads(to_toml(resolve()))
    options = {f"{chosen.kind}.{option}" for chosen in (resolve().norm, resolve().method) for option in chosen.dict()}
    assert set(flatten(tree)) == set(cfg.SETTINGS) | options


def test_a_config_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.toml: no such config file\.$"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(UserError, match=r"is a folder, not a TOML file\.$"):
        read_toml(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(UserError, match=r"broken\.toml: not a TOML file: "):
        read_toml(broken)
    with pytest.raises(UserError, match=r"^/dev/zero: larger than 1048576 bytes, so not a config file\.$"):
        read_toml("/dev/zero")
    with pytest.raises(UserError, match=r"broken\.toml/x: cannot be read: Not a directory\.$"):
        read_toml(broken / "x")
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"broken\.toml: not a TOML file: "):
        read_toml(broken)
