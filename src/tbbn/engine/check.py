"""Is this config one that can run? Everything that can be said without training is said here, in one line."""

from __future__ import annotations

import torch
from torch import nn

from tbbn.config import RunConfig
from tbbn.data import augment
from tbbn.data.batches import LASTS, LENGTHS, parts
from tbbn.data.memory import ExemplarMemory
from tbbn.errors import UserError, choose
from tbbn.methods import Method, method
from tbbn.models import backbones
from tbbn.norm import convert

SCHEDULES = ("multistep", "cosine", "constant")
PRECISIONS = ("fp32", "tf32", "bf16")


def check(config: RunConfig) -> Method:
    """Raise for the first setting that cannot be; return the method the config names."""
    chosen = method(config.method.name, config.method.dict())
    if config.backbone not in backbones():
        raise choose("backbone", config.backbone, backbones())
    # 48 channels are divided by every usual number of groups; the backbone's own channels are checked when it is built.
    convert(nn.BatchNorm2d(48), config.norm.name, **{k: v for k, v in config.norm.options if k not in ("groups",)})
    for kind, name, known in (
        ("augmentation", config.batch.augment, augment.augmentations()),
        ("epoch length", config.batch.length, LENGTHS),
        ("last batch", config.batch.last, LASTS),
        ("forward", config.batch.forward, ("joint", "separate")),
        ("source of current rows", config.batch.current_from, ("task", "union")),
        ("test set", config.data.test, ("all", "whole-batches")),
        ("schedule", config.train.schedule, SCHEDULES),
        ("epoch to keep", config.train.keep, ("last", "best")),
        ("precision", config.precision, PRECISIONS),
    ):
        if name not in known:
            raise choose(kind, name, known)
    make_memory(config)
    parts(config.batch.size, ratio(config))
    for key, value, least in (
        ("train.epochs", config.train.epochs, 1),
        ("data.tasks", config.data.tasks, 1),
        ("batch.size", config.batch.size, 2),
        ("batch.evaluation", config.batch.evaluation, 1),
        ("seed", config.seed, 0),
    ):
        if value < least:
            raise UserError(f"{key} must be at least {least}, got {value}.")
    if config.train.lr <= 0:
        raise UserError(f"train.lr must be positive, got {config.train.lr}.")
    if config.train.nesterov and not config.train.momentum:
        raise UserError("train.nesterov needs a momentum; set train.momentum, such as 0.9.")
    if config.train.keep == "best" and not config.data.validation:
        raise UserError("train.keep = 'best' needs a validation split; set data.validation, such as 0.1.")
    if config.data.online and config.train.epochs != 1:
        raise UserError(f"data.online passes over each task once; train.epochs must be 1, got {config.train.epochs}.")
    if config.data.online and config.memory.selection != "reservoir":
        raise UserError(f"data.online needs memory.selection = 'reservoir', got {config.memory.selection!r}.")
    device(config)
    return chosen


def ratio(config: RunConfig) -> tuple[int, int]:
    """``batch.ratio`` as two numbers."""
    try:
        current, memory = (int(part) for part in config.batch.ratio.split(":"))
    except ValueError:
        raise UserError(f"batch.ratio must be two whole numbers such as '3:1', got {config.batch.ratio!r}.") from None
    return current, memory


def make_memory(config: RunConfig) -> ExemplarMemory:
    m = config.memory
    return ExemplarMemory(m.budget, m.per_class, m.rounding, m.selection, m.shrink)


def device(config: RunConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(config.device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device {config.device!r} cannot be used here: {reason} Use 'cpu' or 'auto'.") from None
    return found
