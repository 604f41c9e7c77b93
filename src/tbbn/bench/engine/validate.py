"""Is this config one that can run? Everything that can be said without training is said here, in one line."""

from __future__ import annotations

import functools
import math

import torch

from tbbn.bench.config import Choice, RunConfig, check_settings
from tbbn.bench.data.batches import parts
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.data.scenario import Scenario
from tbbn.bench.data.types import Source
from tbbn.bench.engine.evaluate import evaluated_rows
from tbbn.bench.engine.plugins import load_plugins
from tbbn.bench.engine.setup import device_of, image_shape, memory_of, method_of, ratio_of
from tbbn.bench.methods import Method
from tbbn.bench.models import backbone
from tbbn.errors import UserError
from tbbn.nn import convert
from tbbn.registry import AUGMENTATIONS, BACKBONES, BUILT_IN, NORMS


def check(config: RunConfig) -> None:
    """Raise for the first setting that cannot run."""
    check_settings(config)
    load_plugins(config)
    method = method_of(config)
    AUGMENTATIONS.entry(config.batch.augment)
    if BACKBONES.entry(config.backbone).origin == BUILT_IN:  # another may need the size of the images
        _check_network(config, method, (3, 32, 32))
    memory_of(config)
    parts(config.batch.size, ratio_of(config))
    if config.train.nesterov and not config.train.momentum:
        raise UserError("train.nesterov needs a momentum; set train.momentum, such as 0.9.")
    if config.train.keep == "best" and not config.data.validation:
        raise UserError("train.keep = 'best' needs a validation split; set data.validation, such as 0.1.")
    if config.data.online and config.train.epochs != 1:
        raise UserError(f"data.online passes over each task once; train.epochs must be 1, got {config.train.epochs}.")
    if config.data.online and config.memory.selection != "reservoir":
        raise UserError(f"data.online needs memory.selection = 'reservoir', got {config.memory.selection!r}.")
    if config.data.online and config.batch.current_from != "task":
        raise UserError(f"data.online needs batch.current_from = 'task', got {config.batch.current_from!r}.")
    device_of(config)


# The options of norms that torch takes as they come; whether anything can be trained with them is found out below.
_NORM_NUMBERS = {"eps": (1e-30, 1e30), "momentum": (0, 1), "max_tasks": (1, 2**20)}


def _check_network(config: RunConfig, method: Method, shape: tuple[int, int, int]) -> None:
    has_stages, max_tasks = _try_network(
        config.backbone, config.norm, shape, BACKBONES.get(config.backbone), NORMS.get(config.norm.name)
    )
    if method.needs_stages and not has_stages:
        raise UserError(
            f"method {config.method.name!r} needs a backbone that returns its stages; {config.backbone!r} returns features only."
        )
    n_tasks = min(config.data.tasks, config.data.stop_after or config.data.tasks)
    if n_tasks > max_tasks:
        raise UserError(f"norm {config.norm}: max_tasks must be at least the {n_tasks} tasks, got {max_tasks}.")


@functools.cache
def _try_network(name: str, norm: Choice, shape: tuple[int, int, int], *registered: object) -> tuple[bool, float]:
    """Build what the run will build, and forward two images: whether groups divide the channels only the backbone can tell.

    Returns whether the backbone has stages, and how many tasks the norm can tell apart. `registered` is what the names stand
    for: a name may be registered anew, and the cache must notice.
    """
    options = norm.dict()
    for option, (least, most) in _NORM_NUMBERS.items():
        value = options.get(option, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise UserError(f"norm {norm}: {option} must be a number from {least} to {most}, got {value!r}.")
    try:
        body = backbone(name, in_channels=shape[0], image_size=shape[1:])
        has_stages = body.has_stages
        # In training, on a CPU, two images: what else an option may break, it breaks here.
        convert(body, norm.name, **options).train()(torch.zeros(2, *shape))
    except TypeError as error:
        raise UserError(f"norm {norm}: an option has a value of the wrong kind: {error}.") from None
    except (ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"norm {norm}: cannot train with these options: {reason}.") from error
    return has_stages, min((getattr(layer, "max_tasks", math.inf) for layer in body.modules()), default=math.inf)


def check_data(config: RunConfig, method: Method, memory: ExemplarMemory, scenario: Scenario, source: Source) -> None:
    """Raise if the data cannot give what the config asks for: test images, validation images or exemplars."""
    if BACKBONES.entry(config.backbone).origin != BUILT_IN:
        _check_network(config, method, image_shape(config, source))
    for task in scenario.tasks:
        evaluated_rows(config, task)
        if config.train.keep == "best" and not len(task.validation):
            raise UserError(
                f"train.keep = 'best': no validation images are left in task {task.number + 1}; raise data.validation "
                f"above {config.data.validation}, or keep the last epoch."
            )
    check_memory(method, memory, scenario, source)


def check_memory(method: Method, memory: ExemplarMemory, scenario: Scenario, source: Source) -> None:
    """Whether the exemplars asked for can be had; a budget in all is a limit, one for each class is a demand."""
    if not method.uses_memory or not memory.budget:
        return
    memory.quota(scenario.n_classes)  # too small for the classes is an error now, not when the last of them arrive
    if memory.per_class:
        rows = torch.cat([task.train for task in scenario.tasks])
        counts = torch.bincount(scenario.train_labels[rows].cpu(), minlength=scenario.n_classes)
        counts = counts[: scenario.tasks[-1].classes.stop]
        if memory.budget > int(counts.min()):
            scarce = source.classes[scenario.class_order[int(counts.argmin())]]
            raise UserError(
                f"memory.budget must be at most {int(counts.min())} for each class, the training images of class "
                f"{scarce!r}, got {memory.budget}; or make it a total: memory.per_class = false."
            )
