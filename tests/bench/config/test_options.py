"""Options of norms and methods: a config has them all, defaults included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tbbn.bench.config import RunConfig, complete, resolve, to_toml
from tbbn.bench.config.toml import tomllib
from tbbn.bench.engine.validate import check
from tbbn.errors import UserError
from tbbn.options import Option
from tbbn.plugins import temporary
from tbbn.registry import BACKBONES, METHODS, NORMS


def resolved(**settings: Any) -> RunConfig:
    return resolve(("test", {key.replace("__", "."): value for key, value in settings.items()}))


def test_every_option_is_in_the_config_with_its_default() -> None:
    config = resolved(method__name="eeil", method__kd=2, norm__name="brn", norm__r_max=2)
    assert config.method.dict() == {
        "balanced_epochs": 40,
        "balanced_lr_factor": 0.1,
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
    "sn": {**OWN, "unbiased": False, "zero_variance": False},
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
        METHODS.register("mine", object, "for this test", {"b": Option(1.0), "c": Option("x")})
        assert complete(config).method.options == (("a", (1, (2,))), ("b", 2.0), ("c", "x"))
        assert complete(config) == resolve(tomllib.loads(to_toml(config)))


def test_an_option_too_large_for_a_float_is_infinite() -> None:
    config = resolved(method__name="eeil", method__kd=10**400)
    with pytest.raises(UserError, match="method 'eeil': kd must be finite, got inf"):
        check(config)


def test_options_beside_a_name_do_not_go_to_another_norm_or_method() -> None:
    file = {"norm": {"name": "cn", "groups": 8, "eps": 0.1}, "method": {"name": "eeil", "kd": 2}}
    assert resolve(file, norm="tbbn").label == "eeil(kd=2) + tbbn"
    assert resolve(file, norm="cn").label == "eeil(kd=2) + cn(eps=0.1, groups=8)"
    assert resolve(file, norm={"name": "gn", "groups": 4}, method="ft").label == "ft + gn(groups=4)"
    assert resolve(file, {"norm": "bn"}, {"norm": "cn"}).label == "eeil(kd=2) + cn"
    assert resolve(file, {"norm.groups": 4}, norm="gn").label == "eeil(kd=2) + gn(groups=4)"
    assert resolve({"norm.eps": 0.1}, norm="tbbn").label == "ft + tbbn(eps=0.1)", "without a name it is for any"
    assert (
        resolve(tomllib.loads(to_toml(resolve(norm="tbbn", method="eeil"))), norm="gn", method="ft").label == "ft + gn"
    )


PLUGIN = """
from dataclasses import dataclass
import tbbn
from tbbn.bench.methods.ft import FineTune

@tbbn.register_method("mine", "fine-tuning with options")
@dataclass(frozen=True)
class Mine(FineTune):
    strength: float = 0.5
    rounds: int = 3
"""


def test_a_plugin_named_in_the_settings_brings_its_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    layer = {"plugins": [str(tmp_path / "mine.py")], "method": {"name": "mine", "strength": 2}, "device": "cpu"}
    with temporary():
        config = check(resolve(layer))
        assert config.method.options == (("rounds", 3), ("strength", 2.0)) and str(config.method) == "mine(strength=2)"
        written = to_toml(config)
        assert resolve(tomllib.loads(written)) == config
    assert "mine" not in METHODS
    assert resolve(tomllib.loads(written)) == config, "a reader does not need the plugin"
