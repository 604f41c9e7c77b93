"""The settings of a phase, from the method or else from the run, and the optimiser made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tbbn.bench.config import RunConfig
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.methods import Method, Phase, TaskContext


@dataclass
class _Beginning:
    """The part of a TaskContext that needs no network, for methods to list their phases."""

    number: int
    memory: ExemplarMemory


def known_phases(method: Method, task: int, memory: ExemplarMemory) -> tuple[Phase, ...] | None:
    """The phases of a task (0-based) that begins with this memory, or None if they depend on the network."""
    try:
        return method.phases(cast(TaskContext, _Beginning(task, memory)))
    except Exception:  # a plugin may ask for anything that the context of a task has
        return None


@dataclass(frozen=True)
class PhaseSettings:
    """The settings of a phase, with every None filled in from the run."""

    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    optimizer: str
    betas: tuple[float, ...]
    schedule: str
    warmup: int
    milestones: tuple[float, ...]
    gamma: float
    keep: str

    @classmethod
    def of(cls, config: RunConfig, phase: Phase, task: int) -> PhaseSettings:
        train = config.train.of_task(task)

        def pick(name: str) -> Any:
            own = getattr(phase, name)
            return getattr(train, name) if own is None else own

        epochs = train.scaled(pick("epochs"))
        return cls(
            epochs=epochs,
            lr=pick("lr") * phase.lr_factor,
            momentum=pick("momentum"),
            weight_decay=pick("weight_decay"),
            nesterov=train.nesterov and pick("momentum") > 0,
            optimizer=train.optimizer,
            betas=train.betas,
            schedule=pick("schedule"),
            warmup=0 if phase.epochs is not None else min(int(train.scale * train.warmup), epochs - 1),
            milestones=train.milestones,
            gamma=train.gamma,
            keep=pick("keep"),
        )

    def lr_at(self, epoch: int) -> float:
        if epoch < self.warmup:
            return self.lr * (epoch + 1) / (self.warmup + 1)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * (epoch - self.warmup) / (self.epochs - self.warmup)))
        if self.schedule == "multistep":
            # Rounded up, so that a short run has no milestone before its first step. 1e-9 absorbs the product's rounding error.
            reached = sum(epoch >= math.ceil(m * self.epochs - 1e-9) for m in self.milestones)
            return self.lr * self.gamma**reached
        return self.lr


# Keys of an optimiser's per-parameter state, by their names in a checkpoint.
STATE = {"momentum": "momentum_buffer", "adam_step": "step", "adam_mean": "exp_avg", "adam_square": "exp_avg_sq"}
OptimizerState = Mapping[str, Mapping[str, Tensor]]  # by the names of STATE, then by the parameter's position


def make_optimizer(
    parameters: list[nn.Parameter], settings: PhaseSettings, restored: OptimizerState
) -> torch.optim.Optimizer:
    """The optimiser of these parameters, with the state restored from a checkpoint, if any."""
    device = parameters[0].device
    lr = torch.tensor(settings.lr, device=device) if device.type == "cuda" else settings.lr
    common: dict[str, Any] = {"lr": lr, "weight_decay": settings.weight_decay, "fused": True}
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, momentum=settings.momentum, nesterov=settings.nesterov, **common)
    else:
        adam = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
        first, second = settings.betas
        optimizer = adam(parameters, betas=(first, second), capturable=device.type == "cuda", **common)
    for name, tensors in restored.items():
        for position, saved in tensors.items():
            # In the parameter's memory format, because a fused step reads both in storage order.
            parameter = parameters[int(position)]
            own = torch.empty_like(parameter if saved.dim() else saved).copy_(saved).detach()
            optimizer.state[parameter][STATE[name]] = own
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimiser's state as tensors named ``name.position``, with the names of ``STATE``."""
    parameters = optimizer.param_groups[0]["params"]
    kept = {(name, i): optimizer.state[p].get(key) for name, key in STATE.items() for i, p in enumerate(parameters)}
    return {f"{name}.{i}": tensor for (name, i), tensor in kept.items() if tensor is not None}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place: a captured step reads it
        else:
            group["lr"] = lr


@torch.no_grad()
def all_finite(parameters: list[nn.Parameter]) -> Tensor:
    """Whether every weight is finite, as a tensor on the device. A sum of absolute values is finite only if all are."""
    return torch.stack(torch._foreach_norm(tuple(parameters), 1)).isfinite().all()
