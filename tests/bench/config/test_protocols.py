"""What the protocols resolve to, for every data set and method: written out by hand from the authors' papers and programs.

Nothing here is computed from the package's own tables. The paper used CIFAR-100, ImageNet-100 and the five dissimilar data
sets; the others are ours. The clean protocol and online learning follow at the end.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tbbn.bench.config import SETTINGS, flatten, protocols, resolve, to_dict
from tbbn.bench.engine.validate import check
from tbbn.bench.methods import method

# The same in all of them.
EVERYWHERE = {
    "protocol": "paper",
    "quirks": [],
    "plugins": [],
    "seed": 0,
    "device": "auto",
    "precision": "fp32",
    "autotune": False,
    "threads": 0,
    "norm.name": "bn",
    "data.root": "data",
    "data.download": True,
    "data.unreadable": "fail",
    "data.split": 0.0,
    "data.size": 0,
    "data.stop_after": 0,
    "data.base_classes": 0,
    "data.class_order_seed": -1,
    "data.online": False,
    "data.stream": "auto",
    "data.test": "all",
    "data.validate": "all",
    "memory.per_class": False,
    "batch.ratio": "3:1",
    "batch.length": "longer",
    "batch.forward": "joint",
    "batch.current_from": "task",
    "batch.memory_from": "all",
    "batch.evaluation": 500,
    "train.optimizer": "sgd",
    "train.betas": [0.9, 0.999],
    "train.warmup": 0,
    "train.first.epochs": 0,
    "train.first.lr": 0.0,
    "train.first.weight_decay": -1.0,
    "train.first.schedule": "same",
    "train.first.milestones": [],
    "train.first.gamma": 0.0,
    "train.nesterov": False,
    "train.gamma": 0.1,
    "train.scale": 1.0,
    "train.clip_norm": 0.0,
    "save.tasks": "small",
}
# FT, EEIL, LUCIR, SS-IL and all that is compared with them: FACIL's loop.
FACIL = {
    "memory.rounding": "ceil",
    "memory.shrink": "reselect",
    "batch.size": 64,
    "train.lr": 0.1,
    "train.momentum": 0.0,
    "train.weight_decay": 1e-4,
    "train.schedule": "multistep",
    "train.clip_value": 0.0,
}
FACIL_METHODS = ("ft", "eeil", "lucir", "ssil", "joint", "icarl", "bic", "wa", "il2m", "er", "derpp", "balaug")
# data set    backbone tasks budget epochs milestones augment crop class_order selection validation keep last
FACIL_DATA = """
digits         small           5  100  20 .5,.75  none             0 seed  herding 0   last short
synthetic      small          10  100  10 .5,.75  none             0 seed  herding 0.1 best drop
mnist          resnet20        5  200  20 .5,.75  none             0 seed  herding 0.1 best drop
fashion-mnist  resnet20        5  200  20 .5,.75  none             0 seed  herding 0.1 best drop
svhn           resnet20        5  200  20 .5,.75  shift            0 seed  herding 0.1 best drop
cifar10        resnet32        5 2000 160 .5,.75  padded-resized   0 seed  herding 0.1 best drop
cifar100       resnet32       10 2000 160 .5,.75  padded-resized   0 seed  herding 0.1 best drop
stl10          resnet18        5  200 160 .5,.75  shift            0 seed  herding 0.1 best drop
tiny-imagenet  resnet18-small 10 2000 100 .5,.75  shift            0 seed  herding 0.1 best drop
imagenet100    resnet18       10 2000 100 .4,.8   resized        224 icarl random  0.1 best drop
dissimilar     resnet18       10 2000 100 .4,.8   padded-resized   0 seed  herding 0.1 best drop
"""
# PODNet and AFC: their own programs.
POD = {
    "memory.rounding": "floor",
    "memory.shrink": "truncate",
    "train.momentum": 0.9,
    "train.schedule": "cosine",
    "train.clip_value": 5.0,
}
POD_DATA = """
digits         resnet32-podnet  5  100 160 .5,.75  shift-brightness   0 seed  herding 0 last short
synthetic      resnet32-podnet 10  100 160 .5,.75  shift-brightness   0 seed  herding 0 last drop
mnist          resnet32-podnet  5  200 160 .5,.75  shift-brightness   0 seed  herding 0 last drop
fashion-mnist  resnet32-podnet  5  200 160 .5,.75  shift-brightness   0 seed  herding 0 last drop
svhn           resnet32-podnet  5  200 160 .5,.75  shift-brightness   0 seed  herding 0 last drop
cifar10        resnet32-podnet  5 2000 160 .5,.75  shift-brightness   0 seed  herding 0 last drop
cifar100       resnet32-podnet 10 2000 160 .5,.75  shift-brightness   0 seed  herding 0 last drop
stl10          resnet32-podnet  5  200 160 .5,.75  shift-brightness   0 seed  herding 0 last drop
tiny-imagenet  resnet32-podnet 10 2000 160 .5,.75  shift-brightness   0 seed  herding 0 last drop
imagenet100    resnet18-podnet 10 2000  90 .4,.8   resized-brightness 224 icarl herding 0 last drop
dissimilar     resnet32-podnet 10 2000 160 .4,.8   shift-brightness   0 seed  herding 0 last drop
"""
# batch, learning rate, weight decay
POD_TRAINING = {
    ("podnet", "cifar100"): (128, 0.1, 5e-4),
    ("afc", "cifar100"): (128, 0.1, 5e-4),
    ("podnet", "imagenet100"): (64, 0.05, 5e-4),
    ("afc", "imagenet100"): (128, 0.1, 1e-4),
}
_PROXIES = {"n_proxies": 10, "finetune_epochs": 20, "classifier": "proxies", "scale": 0.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "ft": {},
    "eeil": {
        "kd": 1.0,
        "temperature": 2.0,
        "balanced_epochs": 40,
        "balanced_lr_factor": 0.01,
        "skip_newest_head": False,
        "unbalanced_phase": False,
    },
    "lucir": {"less_forget": 5.0, "ranking": 1.0, "margin": 0.5, "top_k": 2, "imprint": False},
    "ssil": {"kd": 1.0, "temperature": 2.0, "kd_last_task_only": False},
    "podnet": {**_PROXIES, "finetune_lr": 0.05, "pod_flat": 1.0, "pod_spatial": 3.0},
    "podnet/imagenet100": {**_PROXIES, "finetune_lr": 0.01, "pod_flat": 10.0, "pod_spatial": 8.0},
    "afc": {**_PROXIES, "finetune_lr": 0.05, "importance_weight": 4.0, "importance_moves_statistics": True},
    "afc/imagenet100": {
        **_PROXIES,
        "finetune_lr": 0.02,
        "importance_weight": 10.0,
        "importance_moves_statistics": True,
    },
    "joint": {},
    "icarl": {"kd": 1.0},
    "bic": {"temperature": 2.0, "held_out": 0.1, "correction_epochs": 200, "offset_penalty": 0.05},
    "wa": {"temperature": 2.0},
    "il2m": {},
    "er": {},
    "derpp": {"alpha": 0.1, "beta": 0.5},
    "balaug": {"views_per_task": 3},
}


def rows(table: str) -> dict[str, dict[str, Any]]:
    found = {}
    for line in table.strip().splitlines():
        name, backbone, tasks, budget, epochs, milestones, augment, crop, order, selection, held_out, keep, last = (
            line.split()
        )
        found[name] = {
            "data.name": name,
            "backbone": backbone,
            "data.tasks": int(tasks),
            "memory.budget": int(budget),
            "train.epochs": int(epochs),
            "train.milestones": [float(m) for m in milestones.split(",")],
            "batch.augment": augment,
            "data.crop": int(crop),
            "data.class_order": order,
            "memory.selection": selection,
            "data.validation": float(held_out),
            "train.keep": keep,
            "batch.last": last,
        }
    return found


DATA = list(rows(FACIL_DATA))


def test_the_tables_have_every_data_set_and_method_that_has_settings() -> None:
    assert set(protocols.DATA) == set(DATA) == set(rows(POD_DATA))
    assert {name.partition("/")[0] for name in OPTIONS} == {*FACIL_METHODS, "podnet", "afc"}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", [*FACIL_METHODS, "podnet", "afc"])
def test_the_paper_config_is_the_one_written_here(name: str, data: str) -> None:
    config = resolve(protocol="paper", data=data, method=name)
    want = {**EVERYWHERE, "method.name": name}
    if name in FACIL_METHODS:
        want |= {**FACIL, **rows(FACIL_DATA)[data]}
    else:
        size, lr, decay = POD_TRAINING.get((name, data), POD_TRAINING[name, "cifar100"])
        want |= {**POD, **rows(POD_DATA)[data], "batch.size": size, "train.lr": lr, "train.weight_decay": decay}
    got = flatten(to_dict(config))
    assert {key: value for key, value in got.items() if key in want} == want
    rest = {key for key in got if key not in want}
    assert all(key.startswith(("norm.", "method.")) for key in rest), rest
    assert asdict(method(name, config.method.dict())) == OPTIONS.get(f"{name}/{data}", OPTIONS[name])


# What the clean protocol has instead, for every method: augmentation and learning rate.
CLEAN = {
    "digits": ("none", 0.05),
    "synthetic": ("none", 0.05),
    "mnist": ("none", 0.1),
    "fashion-mnist": ("none", 0.1),
    "svhn": ("shift", 0.1),
    "cifar10": ("shift", 0.1),
    "cifar100": ("shift", 0.1),
    "stl10": ("shift", 0.1),
    "tiny-imagenet": ("shift", 0.1),
    "imagenet100": ("resized", 0.1),
    "dissimilar": ("shift", 0.1),
}


# EEIL's authors train the balanced phase at a tenth of the rate. AFC's pass over the batches leaves the network as it is.
CLEAN_OPTIONS = {"eeil": {"balanced_lr_factor": 0.1}, "afc": {"importance_moves_statistics": False}}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", ["ft", "podnet", "eeil", "afc", "lucir"])
def test_the_clean_config_is_the_one_written_here(name: str, data: str) -> None:
    want = {**EVERYWHERE, **FACIL, **rows(FACIL_DATA)[data], "protocol": "clean", "method.name": name}
    want |= {"batch.augment": CLEAN[data][0], "train.lr": CLEAN[data][1], "data.validation": 0.0, "train.keep": "last"}
    want |= {"memory.selection": "herding", "memory.rounding": "floor", "memory.shrink": "truncate"}
    want |= {"data.class_order": "seed", "batch.last": "short", "train.momentum": 0.9, "train.weight_decay": 5e-4}
    config = resolve(data=data, method=name)
    got = flatten(to_dict(config))
    assert {key: got[key] for key in want} == want
    assert asdict(method(name, config.method.dict())) == {**OPTIONS[name], **CLEAN_OPTIONS.get(name, {})}


@pytest.mark.parametrize(
    ("name", "second_phase"),
    [
        ("ft", ""),
        ("eeil", "balanced_epochs"),
        ("bic", "correction_epochs"),
        ("podnet", "finetune_epochs"),
        ("afc", "finetune_epochs"),
    ],
)
def test_online_a_task_passes_once_in_every_phase(name: str, second_phase: str) -> None:
    for protocol in ("clean", "paper"):
        config = resolve({"data.online": True, "data.name": "cifar100"}, protocol=protocol, method=name)
        assert (config.train.epochs, config.train.schedule, config.memory.selection) == (1, "constant", "reservoir")
        want = {**OPTIONS[name], **({second_phase: 1} if second_phase else {})}
        want |= CLEAN_OPTIONS.get(name, {}) if protocol == "clean" else {}
        assert asdict(method(name, config.method.dict())) == want


# Quirks.


def test_a_quirk_is_over_the_protocol_and_under_what_is_given() -> None:
    quirk = {"protocol": "paper", "quirks": ["whole-test-batches"]}
    assert resolve(("file", quirk)).data.test == "whole-batches"
    assert resolve(("file", {**quirk, "data.test": "all"})).data.test == "all"


def test_a_quirk_of_one_method_or_norm_leaves_the_others_alone() -> None:
    quirks = ["current-from-union", "no-affine", "channels-per-group", "kd-last-task-only"]
    assert resolve(quirks=quirks, method="eeil").batch.current_from == "union"
    assert resolve(quirks=quirks, method="lucir").batch.current_from == "union"
    assert resolve(quirks=quirks, method="ft").batch.current_from == "task"
    assert str(resolve(quirks=quirks, norm="in").norm) == "in(affine=False)"
    assert str(resolve(quirks=quirks, norm="gn").norm) == "gn(affine=False, channels_per_group=16)"
    assert str(resolve(quirks=quirks, norm="tbbn").norm) == "tbbn"
    assert str(resolve(quirks=quirks, method="ssil").method) == "ssil(kd_last_task_only=True)"
    assert str(resolve(quirks=["skip-newest-head"], method="eeil").method) == "eeil(skip_newest_head=True)"
    assert str(resolve(quirks=["unbalanced-phase"], method="eeil").method) == "eeil(unbalanced_phase=True)"
    assert str(resolve(quirks=["brn-eps-on-std"], norm="brn").norm) == "brn(eps=0.001, eps_on_std=True)"
    assert str(resolve(quirks=["sn-slow-statistics"], norm="sn").norm) == "sn(momentum=0.003, unbiased=True)"
    assert str(resolve(quirks=["sn-zero-variance"], norm="sn").norm) == "sn(zero_variance=True)"
    assert (
        resolve(quirks=["brn-eps-on-std", "sn-slow-statistics"], norm="tbbn").norm.dict()
        == resolve(norm="tbbn").norm.dict()
    )


def test_lucir_s_quirk_on_resnet18_leaves_cifar_s_resnet_and_other_methods_alone() -> None:
    def backbone(data: str, name: str) -> str:
        return resolve(quirks=["relu-after-layer4"], protocol="paper", data=data, method=name).backbone

    assert backbone("imagenet100", "lucir") == backbone("dissimilar", "lucir") == "resnet18-lucir"
    assert backbone("imagenet100", "ft") == "resnet18" and backbone("cifar100", "lucir") == "resnet32"


@pytest.mark.parametrize("name", sorted(protocols.QUIRKS))
def test_every_quirk_can_run(name: str) -> None:
    quirk = protocols.QUIRKS[name]
    norm, method = (quirk.norms or ("bn",))[0], (quirk.methods or ("ft",))[0]
    data = (quirk.data or ("digits",))[0]
    config = check(resolve(quirks=[name], norm=norm, method=method, data=data))
    assert config != replace(resolve(norm=norm, method=method, data=data), quirks=(name,)), "it changes something"


def test_every_table_names_settings_and_has_values_they_accept() -> None:
    tables = [*protocols.DATA.values(), protocols.PAPER, *protocols.PAPER_DATA.values()]
    tables += [*protocols.PAPER_METHOD.values(), *(quirk.values for quirk in protocols.QUIRKS.values())]
    for table in tables:
        for key, value in table.items():
            assert key in SETTINGS or key.startswith(("norm.", "method.")), key
            if key in SETTINGS:
                resolve(("table", {key: value}))  # of the right type and within its limits
