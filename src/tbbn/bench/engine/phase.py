"""The settings of a phase, from the method or else from the run; and the optimiser made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tbbn.bench.config import RunConfig
from tbbn.bench.methods import Phase


@dataclass(frozen=True)
class PhaseSettings:
    """The settings of a phase, all filled in."""

    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    schedule: str
    milestones: tuple[float, ...]
    gamma: float
    keep: str

    @classmethod
    def of(cls, config: RunConfig, phase: Phase) -> PhaseSettings:
        train = config.train

        def pick(name: str) -> Any:
            own = getattr(phase, name)
            return getattr(train, name) if own is None else own

        return cls(
            epochs=pick("epochs"),
            lr=pick("lr") * phase.lr_factor,
            momentum=pick("momentum"),
            weight_decay=pick("weight_decay"),
            nesterov=train.nesterov and pick("momentum") > 0,
            schedule=pick("schedule"),
            milestones=train.milestones,
            gamma=train.gamma,
            keep=pick("keep"),
        )

    def lr_at(self, epoch: int) -> float:
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
        if self.schedule == "multistep":
            # Rounded up: a short run must not reach a milestone before its first step. 1e-9 absorbs the error of the product.
            reached = sum(epoch >= math.ceil(m * self.epochs - 1e-9) for m in self.milestones)
            return self.lr * self.gamma**reached
        return self.lr


def make_optimizer(
    parameters: list[nn.Parameter], settings: PhaseSettings, momentum_buffers: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """SGD over these parameters, with momentum buffers restored from a checkpoint, keyed by position."""
    device = parameters[0].device
    optimizer = torch.optim.SGD(
        parameters,
        lr=torch.tensor(settings.lr, device=device) if device.type == "cuda" else settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
        fused=True,
    )
    for position, buffer in momentum_buffers.items():
        # In the parameter's memory format: the fused SGD step reads both in storage order.
        parameter = parameters[int(position)]
        optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffer).detach()
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place: a captured step reads it
        else:
            group["lr"] = lr


@torch.no_grad()
def all_finite(parameters: list[nn.Parameter]) -> Tensor:
    """Whether every weight is finite, as a tensor on the device. A sum of absolute values is finite only if all terms are."""
    return torch.stack(torch._foreach_norm(tuple(parameters), 1)).isfinite().all()
