"""Tables of defaults that depend on other settings: the data set, the paper protocol, online learning, quirks.

Each table maps dotted names (``train.epochs``) to values. A run's own settings override them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]

# By data set, under both protocols.
_CIFAR = {
    "backbone": "resnet32",
    "memory.budget": 2000,
    "data.tasks": 10,
    "train.epochs": 160,
    "batch.augment": "shift",
}
_IMAGENET = {
    **_CIFAR,
    "backbone": "resnet18",
    "train.epochs": 100,
    "train.milestones": (0.4, 0.8),
    "batch.augment": "resized",
    "data.crop": 224,
}
_SMALL = {"backbone": "resnet20", "memory.budget": 200, "data.tasks": 5, "train.epochs": 20, "batch.augment": "none"}
DATA: dict[str, Values] = {
    "digits": {"train.epochs": 20, "train.lr": 0.05},
    "synthetic": {"train.epochs": 10, "data.tasks": 10, "memory.budget": 100, "train.lr": 0.05},
    "mnist": _SMALL,
    "fashion-mnist": _SMALL,
    "svhn": {**_SMALL, "batch.augment": "shift"},
    "cifar10": {**_CIFAR, "data.tasks": 5},
    "cifar100": _CIFAR,
    "stl10": {**_CIFAR, "data.tasks": 5, "backbone": "resnet18", "memory.budget": 200},
    "tiny-imagenet": {**_CIFAR, "backbone": "resnet18-small", "train.epochs": 100},
    "imagenet100": _IMAGENET,
    "dissimilar": {
        **_CIFAR,
        "backbone": "resnet18",
        "train.epochs": 100,
        "train.milestones": (0.4, 0.8),
    },
}

# The paper protocol: the settings that the authors actually ran.
PAPER: Values = {
    "data.validation": 0.1,
    "memory.rounding": "ceil",
    "memory.shrink": "reselect",
    "batch.last": "drop",
    "train.lr": 0.1,
    "train.momentum": 0.0,
    "train.weight_decay": 1e-4,
    "train.keep": "best",
}
PAPER_DATA: dict[str, Values] = {
    "digits": {
        "data.validation": 0.0,
        "train.keep": "last",
        "batch.last": "short",
    },  # too few images to hold some out
    "cifar10": {"batch.augment": "padded-resized"},
    "cifar100": {"batch.augment": "padded-resized"},
    "dissimilar": {"batch.augment": "padded-resized"},
    "imagenet100": {"memory.selection": "random", "data.class_order": "icarl"},  # the same order for every seed
}
# PODNet and AFC were run in their own programs; here with batches of 96 + 32.
_POD: Values = {
    "backbone": "resnet32-podnet",
    "data.validation": 0.0,
    "memory.rounding": "floor",
    "memory.selection": "herding",
    "memory.shrink": "truncate",
    "batch.size": 128,
    "batch.augment": "shift-brightness",
    "train.epochs": 160,
    "train.momentum": 0.9,
    "train.weight_decay": 5e-4,
    "train.schedule": "cosine",
    "train.clip_value": 5.0,
    "train.keep": "last",
}
PAPER_METHOD: dict[str, Values] = {
    "eeil": {"method.balanced_lr_factor": 0.01},
    "podnet": _POD,
    "afc": {**_POD, "method.importance_moves_statistics": True},
    "podnet/imagenet100": {
        "backbone": "resnet18-podnet",
        "batch.size": 64,
        "batch.augment": "resized-brightness",
        "train.epochs": 90,
        "train.lr": 0.05,
        "method.pod_spatial": 8.0,
        "method.pod_flat": 10.0,
        "method.finetune_lr": 0.01,
    },
    "afc/imagenet100": {
        "backbone": "resnet18-podnet",
        "batch.augment": "resized-brightness",
        "train.epochs": 90,
        "train.weight_decay": 1e-4,
        "method.importance_weight": 10.0,
        "method.finetune_lr": 0.02,
    },
}
# Online learning makes a single pass over a task. A second phase also makes one pass, over the stored or held-out rows.
ONLINE: Values = {"train.epochs": 1, "memory.selection": "reservoir", "train.schedule": "constant"}
ONLINE_METHOD: dict[str, Values] = {
    "eeil": {"method.balanced_epochs": 1},
    "bic": {"method.correction_epochs": 1},
    "podnet": {"method.finetune_epochs": 1},
    "afc": {"method.finetune_epochs": 1},
}
# torch's defaults, because the learning rates above are for SGD.
OPTIMIZER: dict[str, Values] = {
    "sgd": {},
    "adam": {"train.lr": 1e-3, "train.weight_decay": 0.0},
    "adamw": {"train.lr": 1e-3, "train.weight_decay": 0.01},
}
OPTIMIZERS = tuple(OPTIMIZER)
PROTOCOLS = ("clean", "paper")


@dataclass(frozen=True)
class Quirk:
    """An error of the released code, expressed as settings, so that the record shows it.

    ``norms``, ``methods`` and ``data`` limit the runs that it applies to; other runs of a sweep are not affected.
    """

    line: str
    values: Values
    norms: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    data: tuple[str, ...] = ()

    def applies(self, norm: str, method: str, data: str) -> bool:
        pairs = ((norm, self.norms), (method, self.methods), (data, self.data))
        return all(name in (names or (name,)) for name, names in pairs)


QUIRKS: dict[str, Quirk] = {
    "current-from-union": Quirk(
        "current rows are drawn from the new task and the memory together (EEIL and LUCIR)",
        {"batch.current_from": "union"},
        methods=("eeil", "lucir"),
    ),
    "whole-test-batches": Quirk(
        "a short last batch of each task's test set is not evaluated",
        {"data.test": "whole-batches"},
    ),
    "whole-validation-batches": Quirk(
        "a short last batch of each task's validation images, sorted by class, is not used (CIFAR-100: 448 of 500)",
        {"data.validate": "whole-batches"},
    ),
    "no-affine": Quirk(
        "instance norm and group norm have no affine parameters",
        {"norm.affine": False},
        norms=("in", "gn"),
    ),
    "channels-per-group": Quirk(
        "group norm has 16 channels per group instead of 16 groups",
        {"norm.channels_per_group": 16},
        norms=("gn",),
    ),
    "brn-eps-on-std": Quirk(
        "batch renormalisation adds 1e-3 to the standard deviation instead of eps to the variance",
        {"norm.eps_on_std": True, "norm.eps": 1e-3},
        norms=("brn",),
    ),
    "sn-slow-statistics": Quirk(
        "switchable norm keeps 0.997 of its running statistics at each step, and its instance variance is unbiased",
        {"norm.momentum": 0.003, "norm.unbiased": True},
        norms=("sn",),
    ),
    "sn-zero-variance": Quirk(
        "the running variance of switchable norm starts at 0 instead of 1",
        {"norm.zero_variance": True},
        norms=("sn",),
    ),
    "relu-after-layer4": Quirk(
        "LUCIR on ResNet-18 removes the ReLU after stage 3 and keeps the last one",
        {"backbone": "resnet18-lucir"},
        methods=("lucir",),
        data=("imagenet100", "dissimilar"),
    ),
    "kd-last-task-only": Quirk(
        "SS-IL distils only the head of the last task",
        {"method.kd_last_task_only": True},
        methods=("ssil",),
    ),
    "skip-newest-head": Quirk(
        "EEIL's first phase does not distil the newest past head",
        {"method.skip_newest_head": True},
        methods=("eeil",),
    ),
    "unbalanced-phase": Quirk(
        "EEIL's second phase draws current rows from the memory, the task and the memory again",
        {"method.unbalanced_phase": True},
        methods=("eeil",),
    ),
}


@functools.cache
def implied(
    protocol: str, data: str, norm: str, method: str, quirks: tuple[str, ...], online: bool, optimizer: str
) -> Values:
    """The defaults that these settings imply; later tables override earlier ones."""
    tables: list[Values] = [DATA.get(data.split(":")[0], {})]
    if protocol == "paper":
        tables += [
            PAPER,
            PAPER_DATA.get(data, {}),
            PAPER_METHOD.get(method, {}),
            PAPER_METHOD.get(f"{method}/{data}", {}),
        ]
    for quirk in quirks:
        if QUIRKS[quirk].applies(norm, method, data):
            tables.append(QUIRKS[quirk].values)
    if online:
        tables += [ONLINE, ONLINE_METHOD.get(method, {})]
    tables.append(OPTIMIZER[optimizer])
    return {key: value for layer in tables for key, value in layer.items()}
