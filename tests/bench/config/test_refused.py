"""A config that cannot run is refused in one line before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import tbbn
from tbbn.bench.config import resolve
from tbbn.bench.engine.validate import check, check_used
from tbbn.bench.methods import Phase
from tbbn.bench.methods.ft import FineTune
from tbbn.errors import UserError
from tbbn.plugins import temporary


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ({"backbone": "resnet31"}, r"unknown backbone 'resnet31'; .*Did you mean 'resnet3\d'\?"),
        ({"norm.name": "tbn"}, r"unknown norm 'tbn'; .*Did you mean 'tbbn'\?"),
        ({"norm.name": "gn", "norm.group": 8}, r"unknown option of norm 'gn': 'group'; .*Did you mean 'groups'\?"),
        ({"norm.name": "gn", "norm.groups": 7}, r"gn: groups=7 does not divide 32 channels"),
        ({"norm.name": "gn", "norm.groups": "x"}, r"^norm 'gn': groups must be a whole number \(default 16\), got 'x'"),
        ({"norm.groups": 8}, r"unknown option of norm 'bn': 'groups'"),
        ({"norm.name": "tbbn", "norm.sync": True}, r"unknown option of norm 'tbbn': 'sync'"),
        ({"norm.name": "gn", "norm.skip": "x"}, r"unknown option of norm 'gn': 'skip'"),
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
        ({"train.keep": "best"}, r"train\.keep = 'best' needs validation images"),
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

    with pytest.raises(UserError, match=line) as caught:
        check(resolve(("here", layer)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "others"),
    [
        ("train.momentum", {}),
        ("train.betas", {"train.optimizer": "adam"}),
        ("train.milestones", {}),
        ("train.gamma", {"train.schedule": "cosine", "train.first.schedule": "multistep"}),
        ("train.milestones", {"train.schedule": "multistep", "train.first.schedule": "cosine"}),
    ],
)
def test_a_setting_that_the_run_reads_may_be_asked_for(asked: str, others: dict[str, Any]) -> None:
    check_used([asked], [resolve(("test", others))])


LUCIR: dict[str, Any] = {"quirks": ["relu-after-layer4"], "method.name": "lucir", "protocol": "paper"}


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({**LUCIR, "data.name": "tiny-imagenet"}, "it is for method lucir and data set imagenet100 or dissimilar"),
        ({**LUCIR, "data.name": "imagenet100", "backbone": "resnet34"}, "and sets backbone = 'resnet18-lucir'"),
        ({"quirks": ["no-affine"], "norm.name": "tbbn"}, r"'no-affine' changes none .* for norm in or gn, and sets"),
        ({"quirks": ["whole-test-batches"], "data.test": "all"}, "for any run, and sets data.test = 'whole-batches'"),
    ],
)
def test_a_quirk_that_changes_no_run_is_refused(others: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_used([], [resolve(("test", others))])


VALIDATED: dict[str, Any] = {"protocol": "paper", "data.name": "cifar100"}
QUIRK: dict[str, Any] = {"quirks": ["whole-validation-batches"]}
LAST, JOINT = "train.keep = 'last'", "method 'joint', which validates on all tasks so far"


@pytest.mark.parametrize(
    ("others", "reason"),
    [({"train.keep": "last"}, LAST), ({"method.name": "joint"}, JOINT), ({"protocol": "clean"}, LAST)],
)
def test_whole_validation_batches_are_refused_where_no_epoch_is_chosen_by_them(
    others: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_used(["quirks"], [resolve(("test", VALIDATED | QUIRK | others))])
    assert str(caught.value) == (
        "the quirk 'whole-validation-batches' changes none of these runs: "
        f"data.validate has no effect with {reason}; leave it out."
    )
    with pytest.raises(UserError) as caught:
        check_used(["data.validate"], [resolve(("test", {**VALIDATED, **others, "data.validate": "whole-batches"}))])
    assert str(caught.value) == f"data.validate has no effect with {reason}; leave one of them out."


def test_whole_validation_batches_may_be_for_one_run_of_several() -> None:
    given = [QUIRK, {"data.validate": "whole-batches"}]
    for settings, asked in zip(given, ("quirks", "data.validate"), strict=True):
        of = [resolve(("test", {**VALIDATED, **settings, "method.name": name})) for name in ("joint", "podnet", "ft")]
        check_used([asked], of)
        with pytest.raises(UserError, match=r"changes none of these runs|has no effect"):
            check_used([asked], of[:2])


def test_a_quirk_may_be_for_one_run_of_several() -> None:
    of = [resolve(("test", {"quirks": ["no-affine"], "norm.name": norm})) for norm in ("tbbn", "gn")]
    check_used([], of)
    check_used([], [resolve(("test", {**LUCIR, "data.name": "imagenet100"}))])


ONCE: dict[str, Any] = {"train.epochs": 1, "train.scale": 0.1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (ONCE, "train.scale = 0.1 shortens nothing: every phase of method 'ft' has 1 epoch"),
        ({"train.epochs": 4, "train.scale": 0.9}, "every phase of method 'ft' has 4 epochs"),
        (
            {**ONCE, "train.scale": 0.9, "train.first.epochs": 3, "method.name": "lucir"},
            "method 'lucir' has 1 or 3 epochs",
        ),
        ({**ONCE, "method.name": "eeil", "memory.budget": 0}, "every phase of method 'eeil' has 1 epoch"),
        ({**ONCE, "method.name": "eeil", "data.stop_after": 1}, "every phase of method 'eeil' has 1 epoch"),
    ],
)
def test_a_scale_that_shortens_no_phase_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_used([], [resolve(("test", {"train.epochs": 4, "train.scale": 0.5})), resolve(("test", settings))])
    assert said in str(caught.value) and str(caught.value).endswith("; leave the scale out.")


def test_a_scale_that_shortens_one_phase_is_taken() -> None:
    for settings in (
        {"train.epochs": 4, "train.scale": 0.8},
        {**ONCE, "train.first.epochs": 8},
        {**ONCE, "method.name": "eeil"},  # its second phases are longer
        {**ONCE, "train.scale": 1.0},
    ):
        check_used([], [resolve(("test", settings))])


def test_phases_of_a_plugin_are_checked_before_they_are_scaled() -> None:
    """They may ask for anything of the context, and may be no phases at all."""

    def with_phases(made: Callable[[Any], Any]) -> None:
        with temporary():
            kind = type("Mine", (FineTune,), {"phases": lambda self, context: made(context), "__module__": "elsewhere"})
            tbbn.register_method("mine")(dataclass(frozen=True)(kind))
            check_used([], [resolve(("test", {"train.epochs": 4, "train.scale": 0.5, "method.name": "mine"}))])

    with_phases(lambda context: (Phase(epochs=8 if context.number and context.memory.labels.max() else 4),))
    with_phases(lambda context: (Phase(epochs={"a class": 1}[context.task]),))
    for wrong in (Phase(), (), "train"):
        with pytest.raises(UserError, match=r"^method 'mine' of .*: phases must return Phases, such as \(Phase\(\),\)"):
            with_phases(lambda context, wrong=wrong: wrong)
