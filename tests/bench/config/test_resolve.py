"""Layers of settings to a config: what is over what, natural calls, and one-line errors."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from tbbn.bench.config import RunConfig, parse_value, resolve
from tbbn.errors import UserError


def resolved(**settings: Any) -> RunConfig:
    return resolve(("test", {key.replace("__", "."): value for key, value in settings.items()}))


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


def test_the_natural_calls_of_resolve_mean_the_same() -> None:
    want = resolve(("here", {"method.name": "eeil", "norm.name": "gn", "norm.groups": 8, "train.epochs": 3}))
    assert resolve({"method.name": "eeil", "norm.name": "gn", "norm.groups": 8, "train.epochs": 3}) == want
    assert resolve({"method": "eeil", "norm": {"name": "gn", "groups": 8}, "train": {"epochs": 3}}) == want
    assert resolve({"train.epochs": 2}, method="eeil", norm={"name": "gn", "groups": 8}, train={"epochs": 3}) == want
    with pytest.raises(UserError, match=r"^settings: train\.epochs must be a whole number"):
        resolve({"train.epochs": "3"})


def test_a_whole_number_will_do_for_a_number() -> None:
    value = resolved(train__lr=1).train.lr
    assert value == 1.0 and type(value) is float


# The command line's values.


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("train.epochs", "3", 3),
        ("train.lr", "1e-3", 1e-3),
        ("train.lr", "1", 1),
        ("train.lr", "nan", pytest.approx(float("nan"), nan_ok=True)),
        ("train.milestones", "0.4, 0.8", (0.4, 0.8)),
        ("quirks", "no-affine, whole-test-batches ,", ("no-affine", "whole-test-batches")),
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
