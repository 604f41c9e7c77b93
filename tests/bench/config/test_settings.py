"""What each setting says about itself: help, choices, limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tbbn.bench import config as cfg
from tbbn.bench.config import resolve
from tbbn.errors import UserError


def test_every_setting_explains_itself_and_accepts_its_default() -> None:
    for name, setting in cfg.SETTINGS.items():
        assert len(setting.help) > 5 and setting.name == name, name
        assert setting.problem(setting.default) == "", name
    assert not {"data", "memory", "batch", "train", "save", "norm", "method"} & set(cfg.SETTINGS), (
        "sections are no settings"
    )
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
    setting = cfg.Setting(good, "a setting of this test", name="x", kind=type(good), **accepted)
    assert setting.problem(good) == "" and setting.problem(bad) == problem


def test_a_config_changed_by_hand_is_checked_by_the_same_limits() -> None:
    config = resolve()
    cfg.check_settings(config)
    with pytest.raises(UserError, match=r"^train\.lr must be positive, got -1\.0\.$"):
        cfg.check_settings(replace(config, train=replace(config.train, lr=-1.0)))
    with pytest.raises(UserError, match=r"^precision must be fp32, tf32 or bf16, got 'fp64'\. Did you mean"):
        cfg.check_settings(replace(config, precision="fp64"))


FLOAT32 = 3.4e38
# The least and the greatest accepted value; of a float, None where the limit itself is refused.
LIMITS: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, None),
    "threads": (0, 1024),
    "data.size": (0, 4096),
    "data.crop": (0, 4096),
    "data.tasks": (1, 2**20),
    "data.stop_after": (0, 2**20),
    "data.base_classes": (0, 2**20),
    "data.class_order_seed": (-1, 2**32 - 1),
    "data.validation": (0.0, None),
    "data.split": (0.0, None),
    "memory.budget": (0, 2**31),
    "batch.size": (2, 2**20),
    "batch.evaluation": (1, 2**20),
    "train.epochs": (1, 2**20),
    "train.lr": (None, FLOAT32),
    "train.momentum": (0.0, FLOAT32),
    "train.weight_decay": (0.0, FLOAT32),
    "train.gamma": (None, FLOAT32),
    "train.warmup": (0, 2**20),
    "train.scale": (None, 1.0),
    "train.first.epochs": (0, 2**20),
    "train.first.lr": (0.0, FLOAT32),
    "train.first.weight_decay": (-1.0, FLOAT32),
    "train.first.gamma": (0.0, FLOAT32),
    "train.clip_norm": (0.0, FLOAT32),
    "train.clip_value": (0.0, FLOAT32),
}


def test_the_limits_of_every_number() -> None:
    assert {name for name, setting in cfg.SETTINGS.items() if setting.kind in (int, float)} == set(LIMITS)
    for name, (least, most) in LIMITS.items():
        setting = cfg.SETTINGS[name]
        step = 1 if setting.kind is int else 1e-3
        assert least is None or (setting.problem(least) == "" and setting.problem(least - step)), name
        assert most is None or (setting.problem(most) == "" and setting.problem(most * 1.01 + step)), name
        assert setting.kind is int or setting.problem(float("inf")), name
    for name, limit in (("train.lr", 0.0), ("train.gamma", 0.0), ("train.scale", 0.0), ("data.validation", 1.0)):
        assert cfg.SETTINGS[name].problem(limit) and not cfg.SETTINGS[name].problem(abs(limit - 1e-3)), name
    assert cfg.SETTINGS["train.milestones"].problem((0.0, 1.0)) == ""
    assert cfg.SETTINGS["train.milestones"].problem((-0.1,)) and cfg.SETTINGS["train.milestones"].problem((1.1,))


# What a data set without settings of its own is trained with, and all else that is not named here: off, 0 or empty.
DEFAULTS: dict[str, Any] = {
    "protocol": "clean",
    "device": "auto",
    "precision": "fp32",
    "backbone": "small",
    "norm.name": "bn",
    "method.name": "ft",
    "data.name": "digits",
    "data.root": "data",
    "data.download": True,
    "data.unreadable": "fail",
    "data.tasks": 5,
    "data.class_order": "seed",
    "data.class_order_seed": -1,
    "data.stream": "auto",
    "data.validate": "all",
    "data.test": "all",
    "memory.budget": 100,
    "memory.rounding": "floor",
    "memory.selection": "herding",
    "memory.shrink": "truncate",
    "batch.size": 64,
    "batch.ratio": "3:1",
    "batch.length": "longer",
    "batch.last": "short",
    "batch.forward": "joint",
    "batch.current_from": "task",
    "batch.memory_from": "all",
    "batch.augment": "none",
    "batch.evaluation": 500,
    "train.epochs": 20,
    "train.optimizer": "sgd",
    "train.betas": (0.9, 0.999),
    "train.first.weight_decay": -1.0,
    "train.first.schedule": "same",
    "train.lr": 0.1,
    "train.momentum": 0.9,
    "train.weight_decay": 5e-4,
    "train.schedule": "multistep",
    "train.milestones": (0.5, 0.75),
    "train.gamma": 0.1,
    "train.keep": "last",
    "train.scale": 1.0,
    "save.tasks": "small",
}


def test_every_default_is_the_one_written_here() -> None:
    assert {name: setting.default for name, setting in cfg.SETTINGS.items() if setting.default} == DEFAULTS


# Docs and recipes rely on these words; a bound is a promise. Settings without an entry accept anything of their type.
ACCEPTED = {
    "protocol": "clean or paper",
    "seed": "at least 0",
    "precision": "fp32, tf32 or bf16",
    "threads": "0 to 1024",
    "data.unreadable": "fail or skip",
    "data.split": "at least 0 and below 1",
    "data.size": "0 to 4096",
    "data.crop": "0 to 4096",
    "data.tasks": "1 to 1048576",
    "data.stop_after": "0 to 1048576",
    "data.base_classes": "0 to 1048576",
    "data.class_order_seed": "-1 to 4294967295",
    "data.validation": "at least 0 and below 1",
    "data.stream": "auto, yes or no",
    "data.test": "all or whole-batches",
    "data.validate": "all or whole-batches",
    "memory.budget": "0 to 2147483648",
    "memory.rounding": "floor or ceil",
    "memory.selection": "herding, random, entropy, distance or reservoir",
    "memory.shrink": "truncate or reselect",
    "batch.size": "2 to 1048576",
    "batch.length": "longer, current or memory",
    "batch.last": "short or drop",
    "batch.forward": "joint or separate",
    "batch.current_from": "task or union",
    "batch.memory_from": "all or past",
    "batch.evaluation": "1 to 1048576",
    "train.epochs": "1 to 1048576",
    "train.optimizer": "sgd, adam or adamw",
    "train.lr": "positive and at most 3.4e+38",
    "train.momentum": "0 to 3.4e+38",
    "train.betas": "at least 0 and below 1",
    "train.weight_decay": "0 to 3.4e+38",
    "train.schedule": "multistep, cosine or constant",
    "train.warmup": "0 to 1048576",
    "train.milestones": "0 to 1",
    "train.gamma": "positive and at most 3.4e+38",
    "train.clip_norm": "0 to 3.4e+38",
    "train.clip_value": "0 to 3.4e+38",
    "train.keep": "last or best",
    "train.scale": "positive and at most 1",
    "train.first.epochs": "0 to 1048576",
    "train.first.lr": "0 to 3.4e+38",
    "train.first.weight_decay": "-1 to 3.4e+38",
    "train.first.schedule": "same, multistep, cosine or constant",
    "train.first.milestones": "0 to 1",
    "train.first.gamma": "0 to 3.4e+38",
    "save.tasks": "small, all or none",
}


def test_what_every_setting_accepts() -> None:
    found = {name: setting.accepts for name, setting in cfg.SETTINGS.items() if setting.accepts and name != "quirks"}
    assert found == ACCEPTED
