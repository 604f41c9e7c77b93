"""Layers, TOML in and out, and every one-line error of the config."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbbn.bench import config as cfg
from tbbn.bench.config import RunConfig, flatten, parse_value, protocols, read_toml, resolve, to_dict, to_toml
from tbbn.bench.config.toml import tomllib
from tbbn.errors import UserError
from tbbn.registry import BACKBONES, METHODS, NORMS, Option, temporary


def resolved(**settings: Any) -> RunConfig:
    return resolve(("test", {key.replace("__", "."): value for key, value in settings.items()}))


# Layers.


def test_without_layers_it_is_the_digits_default() -> None:
    config = resolve()
    assert (config.data.name, config.backbone, config.protocol) == ("digits", "small", "clean")
    assert (str(config.method), str(config.norm)) == ("ft", "bn")
    assert config.train.lr == 0.05  # what suits the digits, over the field's 0.1


def test_what_suits_a_data_set_is_over_the_defaults() -> None:
    config = resolved(data__name="cifar100")
    assert (config.backbone, config.memory.budget, config.data.tasks) == ("resnet32", 2000, 10)
    assert (config.train.epochs, config.batch.augment, config.train.momentum) == (160, "shift", 0.9)


def test_options_after_a_colon_do_not_hide_what_suits_the_data_set() -> None:
    assert resolved(data__name="synthetic:4x12x4x8").data.tasks == resolved(data__name="synthetic").data.tasks == 10


def test_the_paper_protocol_is_what_the_authors_ran() -> None:
    config = resolved(data__name="cifar100", protocol="paper")
    train, memory, batch = config.train, config.memory, config.batch
    assert (train.lr, train.momentum, train.weight_decay, train.keep) == (0.1, 0.0, 1e-4, "best")
    assert (config.data.validation, memory.rounding, memory.selection) == (0.1, "ceil", "herding")
    assert (batch.size, batch.ratio, batch.last, batch.length) == (64, "3:1", "drop", "longer")
    assert batch.augment == "padded-resized"
    assert train.epochs == 160  # of the data set, kept


def test_the_paper_protocol_has_settings_of_its_own_for_a_data_set() -> None:
    assert resolved(data__name="imagenet100", protocol="paper").memory.selection == "random"
    assert resolved(data__name="cifar100", protocol="paper").memory.selection == "herding"


def test_podnet_and_afc_have_their_own_settings_in_the_paper_protocol_alone() -> None:
    paper = resolved(data__name="cifar100", protocol="paper", method__name="podnet")
    assert (paper.batch.size, paper.backbone, paper.train.schedule) == (128, "resnet32-podnet", "cosine")
    assert (paper.train.momentum, paper.train.keep, paper.memory.rounding) == (0.9, "last", "floor")
    clean = resolved(data__name="cifar100", method__name="podnet")
    assert (clean.batch.size, clean.backbone, clean.train.schedule) == (64, "resnet32", "multistep")


def test_a_method_may_have_settings_for_one_data_set() -> None:
    config = resolved(data__name="imagenet100", protocol="paper", method__name="podnet")
    assert str(config.method) == "podnet(finetune_lr=0.01, pod_flat=10, pod_spatial=8)"
    assert (config.batch.size, config.train.lr, config.train.epochs) == (64, 0.05, 90)
    assert resolved(data__name="cifar100", protocol="paper", method__name="podnet").method.dict()["pod_flat"] == 1.0


def test_a_quirk_is_over_the_protocol_and_under_what_is_given() -> None:
    quirk = {"protocol": "paper", "quirks": ["whole-test-batches"]}
    assert resolve(("file", quirk)).data.test == "whole-batches"
    assert resolve(("file", {**quirk, "data.test": "all"})).data.test == "all"


def test_a_quirk_of_one_method_or_norm_leaves_the_others_alone() -> None:
    quirks = ["current-from-union", "no-affine", "channels-per-group", "kd-last-task-only"]
    assert resolved(quirks=quirks, method__name="eeil").batch.current_from == "union"
    assert resolved(quirks=quirks, method__name="ft").batch.current_from == "task"
    assert str(resolved(quirks=quirks, norm__name="in").norm) == "in(affine=False)"
    assert str(resolved(quirks=quirks, norm__name="gn").norm) == "gn(affine=False, channels_per_group=16)"
    assert str(resolved(quirks=quirks, norm__name="tbbn").norm) == "tbbn"
    assert str(resolved(quirks=quirks, method__name="ssil").method) == "ssil(kd_last_task_only=True)"
    assert str(resolved(quirks=["skip-newest-head"], method__name="eeil").method) == "eeil(skip_newest_head=True)"
    assert str(resolved(quirks=["unbalanced-phase"], method__name="eeil").method) == "eeil(unbalanced_phase=True)"


def test_every_quirk_can_run() -> None:
    from tbbn.bench.engine.validate import check

    for name, quirk in protocols.QUIRKS.items():
        norm, method = (quirk.norms or ("bn",))[0], (quirk.methods or ("ft",))[0]
        config = resolved(quirks=[name], norm__name=norm, method__name=method)
        check(config)
        tree = flatten(to_dict(config))
        assert all(tree[key] == value for key, value in quirk.values.items()), name


def test_every_default_of_data_protocol_and_method_names_a_setting() -> None:
    tables = [*protocols.DATA.values(), protocols.PAPER, *protocols.PAPER_DATA.values()]
    tables += [*protocols.PAPER_METHOD.values(), *(quirk.values for quirk in protocols.QUIRKS.values())]
    for table in tables:
        for key, value in table.items():
            assert key in cfg.SETTINGS or key.startswith(("norm.", "method.")), key
            if key in cfg.SETTINGS:
                resolve(("table", {key: value}))  # of the right type and within its limits


def test_a_later_layer_is_over_an_earlier_one() -> None:
    file = ("run.toml", {"train.epochs": 3, "train.lr": 0.2, "protocol": "paper"})
    config = resolve(file, ("command line", {"train.epochs": 4}))
    assert (config.train.epochs, config.train.lr, config.train.momentum) == (4, 0.2, 0.0)


def test_online_is_a_single_pass_with_a_reservoir_unless_told_otherwise() -> None:
    config = resolved(data__online=True)
    assert (config.train.epochs, config.memory.selection, config.train.schedule) == (1, "reservoir", "constant")
    assert resolved(data__online=True, train__schedule="cosine").train.schedule == "cosine"
    assert resolved(data__online=False).memory.selection == "herding"


def test_a_config_cannot_be_changed_and_is_its_own_key() -> None:
    config = resolved(norm__name="gn", norm__groups=[4, 8])
    with pytest.raises(FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert {config: 1}[resolved(norm__name="gn", norm__groups=[4, 8])] == 1


def test_a_label_says_method_norm_and_their_options() -> None:
    config = resolved(norm__name="cn", norm__groups=8, method__name="eeil", method__kd=2.0)
    assert config.label == "eeil(kd=2) + cn(groups=8)"


def test_a_label_leaves_out_the_options_that_other_settings_bring_along() -> None:
    online = resolved(data__online=True, method__name="eeil", method__kd=2.0)
    assert str(online.method) == "eeil(balanced_epochs=1, kd=2)" and online.label == "eeil(kd=2) + bn"
    assert resolved(method__name="eeil", method__balanced_epochs=1).label == "eeil(balanced_epochs=1) + bn"
    given = resolved(data__online=True, method__name="eeil", method__balanced_epochs=3)
    assert given.label == "eeil(balanced_epochs=3) + bn"
    assert resolved(quirks=["no-affine"], norm__name="in").label == "ft + in"
    paper = resolved(data__name="imagenet100", protocol="paper", method__name="podnet", method__pod_flat=1.0)
    assert paper.label == "podnet(pod_flat=1) + bn"


# TOML.


def test_short_forms_in_a_file() -> None:
    text = 'norm = "gn"\nmethod = "eeil"\ndata = "cifar10"\nseed = 3\n[train]\nepochs = 2\n'
    flat = flatten(tomllib.loads(text))
    assert flat == {"norm.name": "gn", "method.name": "eeil", "data.name": "cifar10", "seed": 3, "train.epochs": 2}


def test_options_of_a_norm_and_a_method_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[norm]\nname = "gn"\ngroups = 8\n[method]\nname = "eeil"\nkd = 0.5\n')
    config = resolve((str(file), read_toml(file)))
    assert str(config.norm) == "gn(groups=8)" and str(config.method) == "eeil(kd=0.5)"


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.floats(allow_nan=False)
option = st.one_of(st.booleans(), st.integers(-9, 9), numbers, text, st.lists(st.integers(-9, 9), max_size=3))


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
    assert flatten(to_dict(config)) == flatten(tomllib.loads(written))
    for key, value in layer.items():
        section, _, name = key.partition(".")
        if section in cfg.SECTIONS:
            assert getattr(getattr(config, section), name) == value


def test_every_setting_is_written_out() -> None:
    tree = tomllib.loads(to_toml(resolve()))
    options = {f"{chosen.kind}.{option}" for chosen in (resolve().norm, resolve().method) for option in chosen.dict()}
    assert set(flatten(tree)) == set(cfg.SETTINGS) | options


def test_every_setting_explains_itself_and_accepts_its_default() -> None:
    for name, setting in cfg.SETTINGS.items():
        assert len(setting.help) > 5 and setting.name == name, name
        assert setting.problem(setting.default) == "", name
    assert cfg.SETTINGS["seed"].line == "seed of all random numbers"
    assert cfg.SETTINGS["train.keep"].line.endswith(" (last, best)")


def test_the_choices_are_those_of_the_code_that_reads_them() -> None:
    from tbbn.bench.data import device, loading, memory, sampling, selection

    choices = {name: set(setting.choices) for name, setting in cfg.SETTINGS.items()}
    assert choices["batch.length"] == set(sampling.EPOCH_LENGTHS) and choices["batch.last"] == set(
        sampling.LAST_BATCHES
    )
    assert choices["memory.rounding"] == set(memory.ROUNDINGS) and choices["memory.shrink"] == set(memory.SHRINKS)
    assert choices["memory.selection"] == set(selection.SELECTIONS)
    assert choices["data.stream"] == set(device.STREAMING) and choices["data.unreadable"] == set(loading.UNREADABLE)


@pytest.mark.parametrize(
    ("accepted", "good", "bad", "problem"),
    [
        ({"above": 0}, 1e-300, 0.0, "must be positive"),
        ({"above": 2}, 2.1, 2, "must be above 2"),
        ({"least": 1}, 1, 0, "must be at least 1"),
        ({"most": 4}, 4, 5, "must be at most 4"),
        ({"below": 1}, 0.99, 1.0, "must be below 1"),
        ({"least": 0}, 0.0, float("nan"), "must be at least 0"),
        ({"least": 0, "most": 1}, (0.0, 1.0), (0.5, 80.0), "entries must be at most 1"),
        ({"choices": ("a", "b")}, "b", "c", "must be a or b"),
        ({"choices": ("a", "b")}, (), ("a", "c"), "entries must be a or b"),
    ],
)
def test_a_setting_says_what_is_wrong_with_a_value(accepted: dict[str, Any], good: Any, bad: Any, problem: str) -> None:
    setting = cfg.Setting("x", type(good), good, "a setting of this test", **accepted)
    assert setting.problem(good) == "" and setting.problem(bad) == problem


# Options of norms and methods: all of them are in the config.


def test_every_option_is_in_the_config_with_its_default() -> None:
    config = resolved(method__name="eeil", method__kd=2, norm__name="brn", norm__r_max=2)
    assert config.method.dict() == {
        "balanced_epochs": 40,
        "balanced_lr_factor": 0.01,
        "kd": 2.0,
        "skip_newest_head": False,
        "temperature": 2.0,
        "unbalanced_phase": False,
    }
    assert (
        config.norm.dict() | {"d_max": 5.0, "eps_on_std": False, "momentum": 0.01, "r_max": 2.0} == config.norm.dict()
    )
    table = tomllib.loads(to_toml(config))
    assert table["method"] == {"name": "eeil", **config.method.dict()}
    assert table["norm"] == {"name": "brn", **config.norm.dict()}


OWN = {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}
NORM_OPTIONS: dict[str, dict[str, Any]] = {
    "bn": OWN,
    "in": {"eps": 1e-5, "affine": True},
    "gn": {"eps": 1e-5, "affine": True, "groups": 16, "channels_per_group": 0},
    "sn": {**OWN, "unbiased": False},
    "brn": {**OWN, "momentum": 0.01, "r_max": 3.0, "d_max": 5.0, "eps_on_std": False},
    "cn": {**OWN, "groups": 16},
    "tbbn": {
        **OWN,
        "rule": "paper",
        "case": 0,
        "memory": "averaged",
        "total_variance": False,
        "output_statistics": False,
    },
    "adab2n": {**OWN, "max_tasks": 100, "kappa": 1.0, "strength": 0.1},
    "weighted": OWN,
}


def test_every_option_of_every_norm_is_in_the_config() -> None:
    assert {name: resolve(norm=name).norm.dict() for name in NORMS} == NORM_OPTIONS
    assert all(resolve(norm=name).label == f"ft + {name}" for name in NORMS)


def test_the_backbones_of_the_package_have_the_batch_norm_that_configs_write() -> None:
    from torch.nn import BatchNorm2d

    from tbbn.bench.models import backbone

    for name in BACKBONES:
        layers = [layer for layer in backbone(name).modules() if isinstance(layer, BatchNorm2d)]
        assert layers and all({option: getattr(layer, option) for option in OWN} == OWN for layer in layers), name


def test_another_backbone_keeps_the_batch_norm_it_has() -> None:
    with temporary():
        BACKBONES.decorator("mine")(lambda in_channels: None)
        config = resolve(backbone="mine", norm="brn")
        assert config.norm.dict() == {"momentum": 0.01, "r_max": 3.0, "d_max": 5.0, "eps_on_std": False}
        given = resolve(backbone="mine", norm={"name": "tbbn", "eps": 1})
        assert type(given.norm.dict()["eps"]) is float and given.label == "ft + tbbn(eps=1)"


def test_configs_that_mean_the_same_are_equal_and_write_the_same_bytes() -> None:
    short = resolved(method__name="eeil", method__kd=2)
    long = resolved(method__name="eeil", method__temperature=2, method__kd=2.0, method__balanced_epochs=40)
    assert short == long and hash(short) == hash(long) and to_toml(short) == to_toml(long)
    assert str(long.method) == "eeil(kd=2)"


def test_a_later_default_does_not_change_what_an_old_config_means(monkeypatch: pytest.MonkeyPatch) -> None:
    old = resolve(method="eeil")
    written = tomllib.loads(to_toml(old))
    changed = {**METHODS.options("eeil"), "kd": Option(7.0), "temperature": Option(9.0), "new": Option(3)}
    monkeypatch.setattr(METHODS, "options", lambda name: changed)
    now = resolve(written)
    assert now.method.dict() == {**old.method.dict(), "new": 3}
    assert now.label == "eeil(kd=1, temperature=2) + bn"
    assert resolve(method="eeil").method.dict()["kd"] == 7.0


# The config in a record of schema 2: options were written only where they were set.
SCHEMA_2 = """
{"protocol": "paper", "quirks": [], "seed": 0, "device": "cuda", "precision": "bf16", "autotune": false, "threads": 0,
 "backbone": "resnet32-podnet", "norm": {"name": "tbbn"}, "method": {"name": "podnet", "pod_flat": 2.0},
 "data": {"name": "cifar100", "root": "data", "download": true, "unreadable": "fail", "size": 0, "crop": 0, "tasks": 10,
  "stop_after": 0, "base_classes": 0, "class_order": "seed", "class_order_seed": -1, "validation": 0.0, "online": false,
  "stream": "auto", "test": "all"},
 "memory": {"budget": 2000, "per_class": false, "rounding": "floor", "selection": "herding", "shrink": "truncate"},
 "batch": {"size": 128, "ratio": "3:1", "length": "longer", "last": "drop", "forward": "joint", "current_from": "task",
  "memory_from": "all", "augment": "shift-brightness", "evaluation": 500},
 "train": {"epochs": 160, "lr": 0.1, "momentum": 0.9, "nesterov": false, "weight_decay": 0.0005, "schedule": "cosine",
  "milestones": [0.5, 0.75], "gamma": 0.1, "clip_norm": 0.0, "clip_value": 5.0, "keep": "last"},
 "save": {"tasks": "none"}}
"""


def test_a_config_from_before_options_were_written_is_read_with_todays_defaults() -> None:
    old = resolve(("record", json.loads(SCHEMA_2)))
    today = {"protocol": "paper", "data": "cifar100", "norm": "tbbn", "method": "podnet", "method.pod_flat": 2}
    assert old == resolve(today, {"device": "cuda", "precision": "bf16", "save.tasks": "none"})
    assert old.label == "podnet(pod_flat=2) + tbbn"


def test_the_options_of_an_unknown_name_are_kept_as_they_are_until_its_plugin_is_there() -> None:
    config = resolve(method={"name": "mine", "b": 2, "a": [1, [2]]}, norm={"name": "frn", "threshold": 1})
    assert config.method.options == (("a", (1, (2,))), ("b", 2)) and config.norm.options == (("threshold", 1),)
    assert config.label == "mine(a=(1, (2,)), b=2) + frn(threshold=1)"
    assert resolve(tomllib.loads(to_toml(config))) == config
    with temporary():
        METHODS.register("mine", object(), "for this test", {"b": Option(1.0), "c": Option("x")})
        assert cfg.complete(config).method.options == (("a", (1, (2,))), ("b", 2.0), ("c", "x"))
        assert cfg.complete(config) == resolve(tomllib.loads(to_toml(config)))


def test_an_option_too_large_for_a_float_is_infinite() -> None:
    from tbbn.bench.engine.validate import check

    config = resolved(method__name="eeil", method__kd=10**400)
    with pytest.raises(UserError, match=r"eeil\.kd must be at least 0 and finite, got inf"):
        check(config)


# The command line's values.


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("train.epochs", "3", 3),
        ("train.lr", "1e-3", 1e-3),
        ("train.lr", "1", 1),
        ("train.lr", "nan", pytest.approx(float("nan"), nan_ok=True)),
        ("train.milestones", "0.4, 0.8", (0.4, 0.8)),
        ("quirks", "no-affine,whole-test-batches", ("no-affine", "whole-test-batches")),
        ("quirks", "", ()),
        ("data.online", "True", True),
        ("data.class_order", "3", "3"),
        ("norm.groups", "8", 8),
        ("norm.affine", "false", False),
        ("method.rule", "paper", "paper"),
    ],
)
def test_a_value_is_read_by_the_type_of_its_setting(key: str, written: str, value: Any) -> None:
    assert parse_value(key, written) == value


# Errors: one line each.


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ({"trian.epochs": 1}, r"^here: unknown section 'trian'; choose one of: .*train.*\. Did you mean 'train'\?$"),
        ({"sed": 1}, r"^here: unknown setting 'sed'; choose one of: .*\. Did you mean 'seed'\?$"),
        ({"train.epoch": 1}, r"^here: \[train\] has no option 'epoch'; .*Did you mean 'epochs'\?$"),
        ({"train": 1}, r"^here: train is a section, not a setting; write \[train\] and its settings below\.$"),
        ({"norm": 3}, r"^here: norm\.name must be a name \(default 'bn'\), got 3\.$"),
        ({"train": {"epochs": {"x": 1}}}, r"^here: \[train\] has no option 'epochs\.x'; .*Did you mean 'epochs'\?$"),
        ({3: 1}, r"^here: unknown setting '3'"),
        ({"train.lr": 10**400}, r"^here: train\.lr must be a number \(default 0\.1\), got 1000*\.\.\.\.$"),
        ({"x" * 10**7: 1}, r"^here: unknown setting 'x{199}\.\.\.\.$"),
        ({"train.keep": "x" * 10**7}, r"^here: train\.keep must be last or best, got 'x{199}\.\.\.\.$"),
        ({"train.lr": -1}, r"^here: train\.lr must be positive, got -1\.0\.$"),
        ({"train.epochs": "3"}, r"^here: train\.epochs must be a whole number \(default 20\), got '3'\.$"),
        ({"train.epochs": 3.0}, r"^here: train\.epochs must be a whole number .*got 3\.0\.$"),
        ({"train.epochs": True}, r"^here: train\.epochs must be a whole number .*got True\.$"),
        ({"train.lr": "fast"}, r"^here: train\.lr must be a number \(default 0\.1\), got 'fast'\.$"),
        ({"train.lr": True}, r"^here: train\.lr must be a number"),
        ({"data.online": 1}, r"^here: data\.online must be true or false \(default False\), got 1\.$"),
        ({"data.name": 3}, r"^here: data\.name must be text \(default 'digits'\), got 3\.$"),
        (
            {"train.milestones": 0.5},
            r"^here: train\.milestones must be a list of numbers \(default \[0\.5, 0\.75\]\), got 0\.5\.$",
        ),
        ({"train.milestones": ["a"]}, r"^here: train\.milestones must be a list"),
        ({"quirks": "no-affine"}, r"^here: quirks must be a list"),
        ({"norm.name": 3}, r"^here: norm\.name must be a name \(default 'bn'\), got 3\.$"),
        ({"method.name": ["ft"]}, r"^here: method\.name must be a name"),
        ({"protocol": "papr"}, r"^here: protocol must be clean or paper, got 'papr'\. Did you mean 'paper'\?$"),
        (
            {"quirks": ["noaffine"]},
            r"^here: quirks entries must be .* or .*, got \['noaffine'\]\. Did you mean 'no-affine'\?$",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_with_the_nearest_right_name(layer: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        resolve(("here", layer))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "shown"),
    [("ft", "'ft'"), (("here", "ft"), r"\('here', 'ft'\)"), ((1, {}, 2), r"\(1, \{\}, 2\)"), (None, "None")],
)
def test_a_layer_that_is_no_mapping_is_one_line(layer: Any, shown: str) -> None:
    with pytest.raises(UserError, match=rf"^resolve takes mappings such as .*, or pairs .*, got {shown}\.$"):
        resolve(layer)


def test_the_natural_calls_of_resolve_mean_the_same() -> None:
    want = resolve(("here", {"method.name": "eeil", "norm.name": "gn", "norm.groups": 8, "train.epochs": 3}))
    assert resolve({"method.name": "eeil", "norm.name": "gn", "norm.groups": 8, "train.epochs": 3}) == want
    assert resolve({"method": "eeil", "norm": {"name": "gn", "groups": 8}, "train": {"epochs": 3}}) == want
    assert resolve({"train.epochs": 2}, method="eeil", norm={"name": "gn", "groups": 8}, train={"epochs": 3}) == want
    with pytest.raises(UserError, match=r"^settings: train\.epochs must be a whole number"):
        resolve({"train.epochs": "3"})


def test_a_config_changed_by_hand_is_checked_by_the_same_limits() -> None:
    config = resolve()
    cfg.check_settings(config)
    with pytest.raises(UserError, match=r"^train\.lr must be positive, got -1\.0\.$"):
        cfg.check_settings(replace(config, train=replace(config.train, lr=-1.0)))
    with pytest.raises(UserError, match=r"^precision must be fp32, tf32 or bf16, got 'fp64'\. Did you mean"):
        cfg.check_settings(replace(config, precision="fp64"))


def test_a_whole_number_will_do_for_a_number() -> None:
    value = resolved(train__lr=1).train.lr
    assert value == 1.0 and type(value) is float


def test_a_config_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.toml: no such config file\.$"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(UserError, match=r"is a folder, not a TOML file\.$"):
        read_toml(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(UserError, match=r"broken\.toml: not a TOML file: "):
        read_toml(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"broken\.toml: not a TOML file: "):
        read_toml(broken)


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ({"backbone": "resnet31"}, r"unknown backbone 'resnet31'; .*Did you mean 'resnet3\d'\?"),
        ({"norm.name": "tbn"}, r"unknown norm 'tbn'; .*Did you mean 'tbbn'\?"),
        ({"norm.name": "gn", "norm.group": 8}, r"unknown option of norm 'gn': 'group'; .*Did you mean 'groups'\?"),
        ({"norm.name": "gn", "norm.groups": 7}, r"gn: groups=7 does not divide 32 channels"),
        ({"norm.name": "gn", "norm.groups": "x"}, r"^norm gn\(groups=x\): an option has a value of the wrong type"),
        ({"norm.groups": 8}, r"unknown option of norm 'bn': 'groups'"),
        ({"method.name": "eil"}, r"unknown method 'eil'; .*Did you mean 'eeil'\?"),
        ({"method.name": "eeil", "method.kdd": 1}, r"unknown option of method 'eeil': 'kdd'; .*Did you mean 'kd'\?"),
        ({"method.kd": 1}, r"'ft' takes no options, got 'kd'"),
        ({"batch.augment": "shft"}, r"unknown augmentation 'shft'; .*Did you mean 'shift'\?"),
        ({"batch.length": "long"}, r"batch\.length must be .* or .*, got 'long'\. Did you mean 'longer'\?"),
        ({"batch.last": "keep"}, r"batch\.last must be short or drop, got 'keep'"),
        (
            {"batch.forward": "seperate"},
            r"batch\.forward must be joint or separate, got 'seperate'\. Did you mean 'separate'\?",
        ),
        ({"batch.current_from": "memory"}, r"batch\.current_from must be task or union, got 'memory'"),
        ({"data.test": "al"}, r"data\.test must be all or whole-batches, got 'al'\. Did you mean 'all'\?"),
        ({"train.schedule": "cosin"}, r"train\.schedule must be .* or .*, got 'cosin'\. Did you mean 'cosine'\?"),
        ({"train.keep": "first"}, r"train\.keep must be last or best, got 'first'"),
        ({"precision": "fp64"}, r"precision must be fp32, tf32 or bf16, got 'fp64'"),
        ({"memory.rounding": "up"}, r"memory\.rounding must be floor or ceil, got 'up'"),
        ({"memory.selection": "herd"}, r"memory\.selection must be .* or .*, got 'herd'\. Did you mean 'herding'\?"),
        ({"memory.budget": -1}, r"memory\.budget must be at least 0, got -1"),
        ({"batch.ratio": "3/1"}, r"batch\.ratio must be two whole numbers such as '3:1', got '3/1'"),
        ({"batch.ratio": "3:0"}, r"both parts of the ratio must be at least 1, got 3:0"),
        ({"train.epochs": 0}, r"train\.epochs must be at least 1, got 0"),
        ({"data.tasks": 0}, r"data\.tasks must be at least 1, got 0"),
        ({"batch.size": 1}, r"batch\.size must be at least 2, got 1"),
        ({"batch.evaluation": 0}, r"batch\.evaluation must be at least 1"),
        ({"seed": -1}, r"seed must be at least 0, got -1"),
        ({"threads": -1}, r"threads must be at least 0"),
        ({"train.momentum": -0.5}, r"train\.momentum must be at least 0, got -0\.5"),
        ({"train.weight_decay": float("inf")}, r"train\.weight_decay must be at most 3\.4e\+38, got inf"),
        ({"train.lr": 0.0}, r"train\.lr must be positive, got 0\.0"),
        ({"train.lr": float("nan")}, r"train\.lr must be positive, got nan"),
        ({"train.gamma": -1.0}, r"train\.gamma must be positive"),
        ({"train.milestones": [80.0, 120.0]}, r"train\.milestones entries must be at most 1, got \[80"),
        ({"train.nesterov": True, "train.momentum": 0.0}, r"train\.nesterov needs a momentum"),
        ({"train.keep": "best"}, r"train\.keep = 'best' needs a validation split"),
        ({"data.online": True, "train.epochs": 2}, r"data\.online passes over each task once; .*got 2"),
        ({"data.online": True, "memory.selection": "random"}, r"data\.online needs memory\.selection = 'reservoir'"),
        ({"data.online": True, "batch.current_from": "union"}, r"data\.online needs batch\.current_from = 'task'"),
        ({"batch.memory_from": "old"}, r"batch\.memory_from must be all or past, got 'old'"),
        ({"save.tasks": "some"}, r"save\.tasks must be small, all or none, got 'some'"),
        (
            {"device": "gpu"},
            r"unknown device 'gpu'; use 'cuda' for a GPU, 'cpu' or 'auto'\.",
        ),
    ],
)
def test_what_cannot_run_is_one_line_before_anything_is_done(layer: dict[str, Any], line: str) -> None:
    from tbbn.bench.engine.validate import check

    with pytest.raises(UserError, match=line) as caught:
        check(resolve(("here", layer)))
    assert "\n" not in str(caught.value)


def test_the_recipes_of_the_package_can_run() -> None:
    from tbbn.bench.engine.validate import check
    from tbbn.bench.runs.recipe import parse_choice
    from tbbn.paper import describe, recipes

    assert "demo" in recipes()
    for path in recipes().values():
        values = read_toml(path)
        sweep = {key: values.pop(key) for key in list(values) if key.startswith("sweep.")}
        assert describe(path)
        for method in sweep.get("sweep.methods", ["ft"]):
            for norm in sweep.get("sweep.norms", ["bn"]):
                check(
                    resolve((str(path), values), ("axes", parse_choice("method", method) | parse_choice("norm", norm)))
                )
