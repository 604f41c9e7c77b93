"""Check a config and its data before training. Every error is one line."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from tbbn.bench.config import QUIRKS, Choice, RunConfig, check_settings, complete, flatten, to_dict
from tbbn.bench.data.augment import augmentation
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.data.sampling import batch_layout
from tbbn.bench.data.scenario import Scenario
from tbbn.bench.data.types import Source
from tbbn.bench.engine.evaluate import evaluated_rows
from tbbn.bench.engine.phase import known_phases
from tbbn.bench.engine.plugins import load_needed_plugins
from tbbn.bench.engine.setup import device_of, image_shape, memory_of, method_of, ratio_of
from tbbn.bench.methods import Method
from tbbn.bench.methods.contract import checked_phases
from tbbn.bench.models import backbone
from tbbn.errors import UserError
from tbbn.nn import convert, is_balanced
from tbbn.nn.convert import is_norm
from tbbn.options import checked_options
from tbbn.registry import AUGMENTATIONS, BACKBONES, BUILT_IN, NORMS


def check(config: RunConfig) -> RunConfig:
    """Raise for the first setting that cannot run. Loads plugins, but no data. Returns the config with all plugin options."""
    check_settings(config)
    load_needed_plugins(config)
    config = complete(config)
    method = method_of(config)
    AUGMENTATIONS.entry(config.batch.augment)
    if BACKBONES.entry(config.backbone).origin == BUILT_IN:  # a plugin's may depend on the image size
        _check_network(config, method, (3, 32, 32))
    memory_of(config)
    batch_layout(config.batch.size, ratio_of(config))
    _check_training(config)
    if config.train.keep == "best" and not config.data.validation:
        raise UserError("train.keep = 'best' needs validation images; set data.validation, such as 0.1.")
    if config.data.online:
        _check_online(config)
    device_of(config)
    return config


def check_used(asked: Collection[str], configs: Sequence[RunConfig]) -> None:
    """Raise for settings that the user gave explicitly but that no run with these configs would read."""
    for name in configs[0].quirks:
        taken = [config for config in configs if _takes_effect(name, config)]
        if not taken:
            raise UserError(_without_effect(name))
        reasons = [_unread(setting, taken) for setting in QUIRKS[name].values]
        if all(reasons):
            raise UserError(f"the quirk {name!r} changes none of these runs: {reasons[0]}; leave it out.")
    for name in asked:
        if reason := _unread(name, configs):
            raise UserError(f"{reason}; leave one of them out.")
    for config in configs:
        _check_scale(config)
    train = configs[0].train
    schedules = {train.schedule, train.of_task(0).schedule}
    unused = {
        "train.momentum": (train.optimizer != "sgd", f"train.optimizer = {train.optimizer!r}"),
        "train.betas": (train.optimizer == "sgd", "train.optimizer = 'sgd'"),
        "train.milestones": ("multistep" not in schedules, f"train.schedule = {train.schedule!r}"),
        "train.gamma": ("multistep" not in schedules, f"train.schedule = {train.schedule!r}"),
    }
    for name, (is_unused, reason) in unused.items():
        if name in asked and is_unused:
            raise UserError(f"{name} has no effect with {reason}; leave one of them out.")


def _check_scale(config: RunConfig) -> None:
    """Raise if ``train.scale`` leaves every phase as long as it is: results would be marked as those of a shorter run."""
    train = config.train
    if train.scale == 1:
        return
    method, memory = method_of(config), memory_of(config)
    n_exemplars = min(memory.budget, 1) if method.uses_memory else 0
    full = replace(memory, index=torch.arange(n_exemplars), labels=torch.arange(n_exemplars))
    epochs = set[int]()
    for task in range(min(config.data.learnt_tasks, 2)):  # the first, and one with a memory
        phases = known_phases(method, task, full if task else memory)
        if phases is None:
            return
        phases = checked_phases(config.method.name, method, phases)
        own = train.of_task(task).epochs
        epochs |= {own if phase.epochs is None else phase.epochs for phase in phases}
    if all(train.scaled(n) == n for n in epochs):
        counts = " or ".join(map(str, sorted(epochs)))
        raise UserError(
            f"train.scale = {train.scale:g} shortens nothing: every phase of method {config.method.name!r} has {counts} "
            f"epoch{'' if counts == '1' else 's'}; leave the scale out."
        )


def _validate_unread(config: RunConfig) -> str:
    """Why the run would not read ``data.validate``."""
    if config.train.keep != "best":
        return f"train.keep = {config.train.keep!r}"
    return f"method {config.method.name!r}, which validates on all tasks so far" if method_of(config).all_data else ""


_READERS = {"data.validate": _validate_unread}  # for settings that not every run reads: why a run does not


def _unread(name: str, configs: Sequence[RunConfig]) -> str:
    """Why no run reads this setting; empty if one does."""
    reasons = [_READERS[name](config) if name in _READERS else "" for config in configs]
    return f"{name} has no effect with {reasons[0]}" if all(reasons) else ""


def _takes_effect(quirk: str, config: RunConfig) -> bool:
    """Whether the quirk applies to this run and no other setting overrides it."""
    known, values = QUIRKS[quirk], flatten(to_dict(config))
    applies = known.applies(config.norm.name, config.method.name, config.data.name)
    return applies and all(values.get(key) == value for key, value in known.values.items())


def _without_effect(quirk: str) -> str:
    known = QUIRKS[quirk]
    limits = (("norm", known.norms), ("method", known.methods), ("data set", known.data))
    of = " and ".join(f"{kind} {' or '.join(names)}" for kind, names in limits if names) or "any run"
    sets = ", ".join(f"{key} = {value!r}" for key, value in known.values.items())
    return f"the quirk {quirk!r} changes none of these runs: it is for {of}, and sets {sets}; leave it out, or set that yourself."


def _check_training(config: RunConfig) -> None:
    train = config.train
    if train.nesterov and not train.momentum:
        raise UserError("train.nesterov needs a momentum; set train.momentum, such as 0.9.")
    if train.nesterov and train.optimizer != "sgd":
        raise UserError(f"train.nesterov is for SGD; leave it out with train.optimizer = {train.optimizer!r}.")
    if len(train.betas) != 2:
        raise UserError(f"train.betas must be two numbers, such as 0.9,0.999, got {list(train.betas)}.")
    for epochs in {train.epochs, train.of_task(0).epochs}:
        if train.warmup and train.warmup >= epochs:
            raise UserError(f"train.warmup must be below the {epochs} epochs of a task, got {train.warmup}.")


def _check_online(config: RunConfig) -> None:
    for name, epochs in (("epochs", config.train.epochs), ("first.epochs", config.train.of_task(0).epochs)):
        if epochs != 1:
            raise UserError(f"data.online passes over each task once; train.{name} must be 1, got {epochs}.")
    if config.memory.selection != "reservoir":
        raise UserError(f"data.online needs memory.selection = 'reservoir', got {config.memory.selection!r}.")
    if config.batch.current_from != "task":
        raise UserError(f"data.online needs batch.current_from = 'task', got {config.batch.current_from!r}.")


def _check_network(config: RunConfig, method: Method, shape: tuple[int, int, int]) -> None:
    registered = BACKBONES.get(config.backbone), NORMS.get(config.norm.name)
    found = _try_network(config.backbone, config.norm, shape, *registered)
    if method.needs_stages and not found.has_stages:
        raise UserError(
            f"method {config.method.name!r} needs a backbone that returns its stages; {config.backbone!r} returns features only."
        )
    n_tasks = config.data.learnt_tasks
    if n_tasks > found.max_tasks:
        raise UserError(f"norm {config.norm}: max_tasks must be at least the {n_tasks} tasks, got {found.max_tasks}.")
    if found.takes_layout and config.batch.forward == "separate":
        raise UserError(
            f"norm {config.norm} needs the whole batch in one forward; set batch.forward = 'joint', got 'separate'."
        )


class _Network(NamedTuple):
    has_stages: bool  # whether the backbone returns the maps of its stages
    takes_layout: bool  # whether a norm takes the layout of a batch
    max_tasks: float  # the number of tasks that the norms can tell apart


@functools.cache
def _try_network(name: str, norm: Choice, shape: tuple[int, int, int], *registered: object) -> _Network:
    """Build the backbone with the norm and forward two images. Nothing else shows that, say, groups divide the channels.

    ``registered`` holds the values of the two names, so that the cache misses if a name is registered again.
    """
    images = torch.zeros(2, *shape)
    with BACKBONES.blame(name):
        body = backbone(name, in_channels=shape[0], image_size=shape[1:]).train()
        if BACKBONES.entry(name).origin != BUILT_IN:
            made = tuple(body(images).pooled.shape)  # with plain batch norm, so a failure here is not the norm's
            if made != (2, body.n_features):
                raise UserError(
                    f"{BACKBONES.place(name)}: must return features (2, {body.n_features}) for two images, got {made}."
                )
    has_stages = body.has_stages
    replaces = NORMS.get(norm.name) is not NORMS.get("bn")
    if replaces and not any(map(is_norm, body.modules())):
        raise UserError(
            f"norm {norm.name!r} replaces batch norms, and backbone {name!r} has none; norm 'bn' trains it as it is."
        )
    try:
        with NORMS.blame(norm.name):
            # Without this check `convert` would take `sync` and `skip`, which are not options of a norm, as its own arguments.
            options = checked_options(f"norm {norm.name!r}", NORMS.options(norm.name), norm.dict())
            _watch_norms(convert(body, norm.name, **options).train(), norm.name)(images)
    except TypeError as error:
        raise UserError(f"norm {norm}: an option has a value of the wrong type: {error}.") from None
    except (ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"norm {norm}: cannot train with these options: {reason}.") from error
    max_tasks = min(getattr(layer, "max_tasks", math.inf) for layer in body.modules())
    return _Network(has_stages, is_balanced(body), max_tasks)


def _watch_norms(network: nn.Module, norm: str) -> nn.Module:
    """Make the network raise if a layer of a plugin's norm returns anything but a tensor of its input's shape."""
    if NORMS.entry(norm).origin == BUILT_IN:
        return network
    value = NORMS.get(norm)

    def look(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        if not isinstance(output, torch.Tensor) or output.shape != inputs[0].shape:
            got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            where = NORMS.place(norm, type(layer).forward)
            raise UserError(f"{where}: forward must return a tensor {tuple(inputs[0].shape)}, as it got, not {got}.")

    for layer in network.modules():
        if isinstance(layer, value):
            layer.register_forward_hook(look)
    return network


def check_data(config: RunConfig, method: Method, memory: ExemplarMemory, scenario: Scenario, source: Source) -> None:
    """Raise if the data does not have what the config needs: test images, validation images, exemplars."""
    if BACKBONES.entry(config.backbone).origin != BUILT_IN:
        _check_network(config, method, image_shape(config, source))
    if AUGMENTATIONS.entry(config.batch.augment).origin != BUILT_IN:
        _try_augmentation(config, source)
    holds_out = method.holdout() and method.uses_memory and memory.budget
    for task in scenario.tasks:
        evaluated_rows(config, task)
        if holds_out and task.number and len(task.train) <= len(task.classes):
            raise UserError(
                f"method {config.method}: holds out an image of each class, which leaves task {task.number + 1} without "
                f"training images (it has {len(task.train)} images of {len(task.classes)} classes); lower data.validation."
            )
        least = config.batch.size if config.data.validate == "whole-batches" and not method.all_data else 1
        if config.train.keep == "best" and len(task.validation) < least:
            few = (
                f"{len(task.validation)} validation images, fewer than a batch of {least},"
                if least > 1
                else "no validation images"
            )
            raise UserError(
                f"train.keep = 'best': {few} are left in task {task.number + 1}; raise data.validation "
                f"above {config.data.validation}, or keep the last epoch."
            )
    check_memory(method, memory, scenario, source)


def _try_augmentation(config: RunConfig, source: Source) -> None:
    """Augment a few images. Raises for results that a step would silently accept, such as images in [0, 255]."""
    name, n = config.batch.augment, 3
    shape = tuple(source.train.images.shape[1:])
    images = torch.linspace(0, 255, n * math.prod(shape)).view(n, *shape).to(torch.uint8)
    with AUGMENTATIONS.blame(name):
        made = augmentation(name, crop=config.data.crop or None)
        drawn = [made.draw(n, torch.Generator().manual_seed(0), (shape[1], shape[2])) for _ in range(2)]
        _check_tensor(f"{AUGMENTATIONS.place(name)}: draw", drawn[0], (n, made.n_parameters))
        if not torch.equal(*drawn):
            raise UserError(
                f"{AUGMENTATIONS.place(name)}: draw must use only its generator for random numbers; two generators with the "
                "same seed gave different results."
            )
        views = made.apply(images, drawn[0])
        _check_tensor(f"{AUGMENTATIONS.place(name)}: apply", views, (n, *image_shape(config, source)))
    low, high = (float(limit) for limit in views.aminmax())
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # rounding may exceed the range a little; NaN fails the test
        raise UserError(f"{AUGMENTATIONS.place(name)}: apply must return images in [0, 1], got {low:g} to {high:g}.")


def _check_tensor(what: str, made: object, shape: tuple[int, ...]) -> None:
    wanted = f"a float32 tensor {shape}"
    if not isinstance(made, torch.Tensor):
        raise UserError(f"{what} must return {wanted}, got {type(made).__name__}.")
    if made.dtype != torch.float32 or made.shape != shape or made.device.type != "cpu":
        dtype = str(made.dtype).removeprefix("torch.")
        raise UserError(f"{what} must return {wanted} on the CPU, got {dtype} {tuple(made.shape)} on {made.device}.")


def check_memory(method: Method, memory: ExemplarMemory, scenario: Scenario, source: Source) -> None:
    """Raise if the budget gives less than one exemplar per class or, if it is per class, exceeds a class's images."""
    if not method.uses_memory or not memory.budget:
        return
    memory.quota(scenario.n_classes)  # raises if it is too small for all classes
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
