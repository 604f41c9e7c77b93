"""Import PyCIL's JSON config as a recipe. PyCIL hard-codes many settings in its model files; those values are here, too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tbbn.bench.data.sources.facts import FACTS
from tbbn.bench.files import read_limited
from tbbn.bench.interchange.imported import Imported, no_counterpart
from tbbn.errors import UserError

METHODS = {"finetune": "ft", "replay": "ft", "icarl": "icarl", "wa": "wa", "bic": "bic", "podnet": "podnet"}
DATA = {"cifar10": "cifar10", "cifar100": "cifar100", "imagenet100": "imagenet100"}
NETWORKS = {
    "resnet32": "resnet32",
    "cosine_resnet32": "resnet32",
    "resnet18": "resnet18",
    "cosine_resnet18": "resnet18",
}
NETWORKS |= {"resnet34": "resnet34"}

_FIRST = {"init_epoch": 200, "init_lr": 0.1, "init_milestones": [60, 120, 170], "init_lr_decay": 0.1}
_FIRST |= {"init_weight_decay": 5e-4}
_LATER = {"lrate": 0.1, "lrate_decay": 0.1, "batch_size": 128, "weight_decay": 2e-4}
# Values in PyCIL's model files, by the keys with which a config may override them.
IN_THE_CODE: dict[str, Mapping[str, Any]] = {
    "finetune": {**_FIRST, **_LATER, "epochs": 80, "milestones": [40, 70]},
    "replay": {**_FIRST, **_LATER, "epochs": 70, "milestones": [30, 50]},
    "icarl": {**_FIRST, **_LATER, "epochs": 170, "milestones": [80, 120]},
    "wa": {**_FIRST, **_LATER, "epochs": 170, "milestones": [60, 100, 140]},
    "bic": {**_LATER, "epochs": 170, "milestones": [60, 100, 140]},
    "podnet": {"epochs": 160, "lrate": 0.1, "batch_size": 128, "weight_decay": 5e-4},  # and a cosine schedule
}
WITHOUT = {
    "prefix": "the folder is chosen when the recipe runs: --out and --name",
    "device": "the device is chosen when the recipe runs: --device cuda:0",
    "num_workers": "images are kept on the device",
}
_LARGEST = 2**20


def import_pycil(file: Path) -> Imported:
    """The recipe for a PyCIL config file."""
    try:
        config = json.loads(read_limited(file, _LARGEST))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a JSON file: {error}.") from None
    if not isinstance(config, dict) or "model_name" not in config:
        raise UserError(f"{file}: not a config of PyCIL; it must have a model_name.")
    model = config["model_name"]
    if not isinstance(model, str) or model not in METHODS:
        raise no_counterpart("PyCIL's model", str(model), METHODS)
    values = {**IN_THE_CODE[model], **config}
    found = Imported()

    def shown(*names: str) -> str:
        where = "" if any(name in config for name in names) else " (in PyCIL's code)"
        return ", ".join(f"{name} = {json.dumps(values[name])}" for name in names) + where

    found.take(shown("model_name"), method__name=METHODS[model])
    try:
        _data(found, values, shown)
        _memory(found, model, values, shown)
        _training(found, model, values, shown)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{file}: {error.args[0]!r} is missing, which PyCIL needs.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(f"{file}: a value has the wrong type ({error}).") from None
    used = {"model_name", "dataset", "init_cls", "increment", "shuffle", "seed", "convnet_type", "memory_size"}
    used |= {"memory_per_class", "fixed_memory", *_FIRST, *_LATER, "epochs", "milestones"}
    for name in config:
        if name not in used:
            found.miss(shown(name), WITHOUT.get(name, "not a key of PyCIL that is known here"))
    return found


def _data(found: Imported, values: Mapping[str, Any], shown: Callable[..., str]) -> None:
    name = values["dataset"]
    if name not in DATA:
        raise no_counterpart("PyCIL's data set", str(name), DATA)
    n_classes = len(FACTS[DATA[name]].train)
    found.take(shown("dataset"), data__name=DATA[name])
    first, step = values["init_cls"], values["increment"]
    sizes = [first, *[step] * ((n_classes - first) // step)]
    if sum(sizes) < n_classes:
        sizes.append(n_classes - sum(sizes))
    base = {} if first == step else {"data__base_classes": first}
    if len(set(sizes[1:])) > 1 or (not base and len(set(sizes)) > 1):
        why = f"PyCIL's last task has {sizes[-1]} classes; here tasks differ by one class at most"
        found.differ(shown("init_cls", "increment"), why, data__tasks=len(sizes), **base)
    else:
        found.take(shown("init_cls", "increment"), data__tasks=len(sizes), **base)
    # NumPy's permutation from the seed, which gives the same order as here.
    found.take(shown("shuffle"), data__class_order="seed" if values["shuffle"] else "natural")
    seeds = values["seed"] if isinstance(values["seed"], list) else [values["seed"]]
    if not seeds or not all(isinstance(seed, int) for seed in seeds):
        raise UserError(f"PyCIL's seed must be a whole number or a list of them, got {json.dumps(values['seed']):.60}.")
    found.take(shown("seed"), seed=seeds[0])
    found.seeds = seeds if len(seeds) > 1 else []
    network = values["convnet_type"]
    if network not in NETWORKS:
        found.miss(shown("convnet_type"), "the data set's default network is used; tbbn list backbones shows all")
    elif network == "cosine_resnet32" and values["model_name"] == "podnet":
        found.take(shown("convnet_type"), backbone="resnet32-podnet")
    elif network.endswith("resnet18") and name.startswith("cifar"):
        found.take(shown("convnet_type"), backbone="resnet18-small")
    else:
        found.take(shown("convnet_type"), backbone=NETWORKS[network])


def _memory(found: Imported, model: str, values: Mapping[str, Any], shown: Callable[..., str]) -> None:
    if model == "finetune":
        found.take("finetune has no memory", memory__budget=0)
        return
    if values.get("fixed_memory"):
        budget = {"memory__budget": values["memory_per_class"], "memory__per_class": True}
        found.take(shown("memory_per_class", "fixed_memory"), **budget)
    else:
        found.take(shown("memory_size"), memory__budget=values["memory_size"])
    found.take("exemplars by herding, rounded down", memory__selection="herding", memory__rounding="floor")
    why = "PyCIL shuffles exemplars into the task's images; here every batch has this ratio of new to old rows"
    found.differ("batches of task and exemplars", why, batch__ratio="3:1")


def _training(found: Imported, model: str, values: Mapping[str, Any], shown: Callable[..., str]) -> None:
    epochs = values["epochs"]
    found.take(shown("epochs"), train__epochs=epochs)
    found.take(shown("lrate"), train__lr=_number(values, "lrate"))
    found.take(shown("weight_decay"), train__weight_decay=_number(values, "weight_decay"))
    found.take(shown("batch_size"), batch__size=values["batch_size"])
    found.take("SGD with momentum 0.9 (in PyCIL's code)", train__momentum=0.9)
    if model == "podnet":
        found.take("a cosine schedule (in PyCIL's code)", train__schedule="cosine")
    else:
        steps = {"train__milestones": _fractions(values["milestones"], epochs), "train__gamma": values["lrate_decay"]}
        found.take(shown("milestones", "lrate_decay"), **steps)
    if "init_epoch" in values:
        first = values["init_epoch"]
        found.take(shown("init_epoch"), train__first__epochs=first)
        found.take(shown("init_lr"), train__first__lr=_number(values, "init_lr"))
        found.take(shown("init_weight_decay"), train__first__weight_decay=_number(values, "init_weight_decay"))
        steps = {"train__first__milestones": _fractions(values["init_milestones"], first)}
        found.take(shown("init_milestones", "init_lr_decay"), **steps, train__first__gamma=values["init_lr_decay"])
    if values["dataset"].startswith("cifar"):
        found.take("shifts, flips and brightness (in PyCIL's code)", batch__augment="shift-brightness")


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if not isinstance(value, int | float):
        raise UserError(f"PyCIL's {name} must be a number, got {json.dumps(value):.60}.")
    return float(value)


def _fractions(milestones: list[int], epochs: int) -> list[float]:
    """The milestones as fractions of the epochs, rounded down because the schedule rounds up to a whole epoch."""
    return [math.floor(1e6 * m / epochs) / 1e6 for m in milestones]
