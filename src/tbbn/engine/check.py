"""Is this config one that can run? Everything that can be said without training is said here, in one line."""

from __future__ import annotations

import functools
import math

import torch

from tbbn.config import Choice, RunConfig
from tbbn.data import augment
from tbbn.data.batches import LASTS, LENGTHS, parts
from tbbn.data.memory import ExemplarMemory
from tbbn.errors import UserError, choose
from tbbn.methods import Method, method
from tbbn.models import backbone, backbones
from tbbn.norm import convert

SCHEDULES = ("multistep", "cosine", "constant")
PRECISIONS = ("fp32", "tf32", "bf16")


def check(config: RunConfig) -> Method:
    """Raise for the first setting that cannot be; return the method the config names."""
    chosen = method(config.method.name, config.method.dict())
    if config.backbone not in backbones():
        raise choose("backbone", config.backbone, backbones())
    _check_norm(config.backbone, config.norm)
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
    _check_numbers(config)
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


@functools.cache
def _check_norm(name: str, norm: Choice) -> None:
    """Build what the run will build: whether a norm's groups divide the channels only the backbone can tell."""
    try:
        convert(backbone(name), norm.name, **norm.dict())
    except TypeError as error:
        raise UserError(f"norm {norm}: an option has a value of the wrong kind: {error}.") from None


def _check_numbers(config: RunConfig) -> None:
    data, batch, train = config.data, config.batch, config.train
    for key, value, least in (
        ("train.epochs", train.epochs, 1),
        ("data.tasks", data.tasks, 1),
        ("data.stop_after", data.stop_after, 0),
        ("data.size", data.size, 0),
        ("data.crop", data.crop, 0),
        ("batch.size", batch.size, 2),
        ("batch.evaluation", batch.evaluation, 1),
        ("seed", config.seed, 0),
        ("threads", config.threads, 0),
        ("train.momentum", train.momentum, 0),
        ("train.weight_decay", train.weight_decay, 0),
        ("train.clip_norm", train.clip_norm, 0),
        ("train.clip_value", train.clip_value, 0),
    ):
        if not least <= value < math.inf:
            raise UserError(f"{key} must be at least {least}, got {value}.")
    for key, value in (("train.lr", train.lr), ("train.gamma", train.gamma)):
        if not 0 < value < math.inf:
            raise UserError(f"{key} must be positive, got {value}.")
    if not all(0 <= milestone <= 1 for milestone in train.milestones):
        raise UserError(f"train.milestones must be shares of the epochs, from 0 to 1, got {list(train.milestones)}.")


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
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"device {config.device!r} cannot be used here: {reason}. Use 'cpu' or 'auto'.") from None
    return found
