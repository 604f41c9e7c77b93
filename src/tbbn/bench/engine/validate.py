"""Is this config one that can run? Everything that can be said without training is said here, in one line."""

from __future__ import annotations

import functools
import math

import torch

from tbbn.bench.config import Choice, RunConfig, check_settings
from tbbn.bench.data import loading
from tbbn.bench.data.batches import parts
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.data.scenario import Scenario
from tbbn.bench.methods import Method, method
from tbbn.bench.models import backbone
from tbbn.errors import UserError
from tbbn.nn import convert
from tbbn.registry import AUGMENTATIONS, BACKBONES


def check(config: RunConfig) -> Method:
    """Raise for the first setting that cannot be; return the method the config names."""
    check_settings(config)
    chosen = method(config.method.name, config.method.dict())
    BACKBONES.entry(config.backbone)
    AUGMENTATIONS.entry(config.batch.augment)
    max_tasks = _check_norm(config.backbone, config.norm)
    make_memory(config)
    parts(config.batch.size, ratio(config))
    n_tasks = min(config.data.tasks, config.data.stop_after or config.data.tasks)
    if n_tasks > max_tasks:
        raise UserError(f"norm {config.norm}: max_tasks must be at least the {n_tasks} tasks, got {max_tasks}.")
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
    device(config)
    return chosen


# The options of norms that torch takes as they come; whether anything can be trained with them is found out below.
_NORM_NUMBERS = {"eps": (1e-30, 1e30), "momentum": (0, 1), "max_tasks": (1, 2**20)}


@functools.cache
def _check_norm(name: str, norm: Choice) -> float:
    """Build what the run will build, and train a step: whether groups divide the channels only the backbone can tell.

    Returns the tasks that the norm can tell apart.
    """
    options = norm.dict()
    for option, (least, most) in _NORM_NUMBERS.items():
        value = options.get(option, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise UserError(f"norm {norm}: {option} must be a number from {least} to {most}, got {value!r}.")
    try:
        body = convert(backbone(name), norm.name, **options)
        # In training, on a CPU, two images: what else an option may break, it breaks here.
        body.train()(torch.zeros(2, 3, 32, 32))
    except TypeError as error:
        raise UserError(f"norm {norm}: an option has a value of the wrong kind: {error}.") from None
    except (ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"norm {norm}: cannot train with these options: {reason}.") from error
    return min((getattr(layer, "max_tasks", math.inf) for layer in body.modules()), default=math.inf)


def ratio(config: RunConfig) -> tuple[int, int]:
    """``batch.ratio`` as two numbers."""
    try:
        current, memory = (int(part) for part in config.batch.ratio.split(":"))
    except ValueError:
        raise UserError(f"batch.ratio must be two whole numbers such as '3:1', got {config.batch.ratio!r}.") from None
    return current, memory


def load_source(config: RunConfig, *, download: bool | None = None) -> loading.Source:
    """The data set of a config, with images as large as the config wants to see."""
    data = config.data
    try:
        source = loading.load(
            data.name,
            data.root,
            download=data.download if download is None else download,
            size=data.size or None,
            unreadable=data.unreadable,
        )
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise UserError(f"{data.name}: its images do not fit in memory; set a smaller data.size.") from error
    height, width = source.train.images.shape[2:]
    if data.crop > min(height, width):
        raise UserError(
            f"data.crop must be at most {min(height, width)}, images being {height}x{width}, got {data.crop}."
        )
    return source


def check_memory(method: Method, memory: ExemplarMemory, scenario: Scenario, source: loading.Source) -> None:
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


def make_memory(config: RunConfig) -> ExemplarMemory:
    m = config.memory
    return ExemplarMemory(m.budget, m.per_class, m.rounding, m.selection, m.shrink)


def device(config: RunConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(config.device)
    except RuntimeError:
        ways = "'cuda' for a GPU, 'cpu' or 'auto'"
        raise UserError(f"unknown device {config.device!r}; use {ways}.") from None
    try:
        if found.type == "meta":
            raise RuntimeError("tensors there hold no numbers")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"device {config.device!r} cannot be used here: {reason}. Use 'cpu' or 'auto'.") from None
    return found
