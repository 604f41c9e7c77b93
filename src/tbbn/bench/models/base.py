"""The interface of a backbone, and how its weights are initialised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from tbbn.errors import UserError


@dataclass(frozen=True)
class Features:
    """A backbone's output for a batch.

    `pooled` is (N, D). `stages` has one map (N, C, H, W) per stage, taken before the stage's last ReLU, so that a
    distillation loss also sees the negative values. The last map, after its ReLU, is the one that is pooled.
    """

    pooled: Tensor
    stages: tuple[Tensor, ...]


class MissingStages(UserError):
    """A method used stages that it was not given. The engine adds the method's name and line."""


class _NoStages:
    """Stands where there are no stages. An empty tuple would make every distillation of them zero, without a word."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def _refuse(self, *_: object) -> NoReturn:
        raise MissingStages(self.reason)

    __len__ = __iter__ = __getitem__ = __contains__ = __reversed__ = __add__ = __radd__ = _refuse


def no_stages(reason: str) -> tuple[Tensor, ...]:
    """A value for ``stages`` where there are none: using it raises :class:`MissingStages` with this sentence."""
    return cast(Any, _NoStages(reason))


def joined_stages(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The stages of a batch from those of its two parts."""
    if isinstance(first, _NoStages):
        return first
    return tuple(torch.cat(pair) for pair in zip(first, second, strict=True))


FEATURES_ONLY = no_stages(
    "stages are used, but the backbone returns features only; choose one that returns its stages."
)


class Backbone(nn.Module):
    """Maps images (N, C, H, W) of any size to `Features`; `n_features` is the width D of the pooled vector."""

    n_features: int
    has_stages = True  # whether `Features.stages` holds any map; PODNet and AFC need them

    def forward(self, images: Tensor) -> Features:
        raise NotImplementedError


@contextmanager
def seeded_init(generator: torch.Generator | None) -> Iterator[None]:
    """Initialise every layer made inside the block from one seed drawn from `generator` (0 without one).

    torch's layers draw from the global CPU generator, which is seeded here and restored afterwards. No other device's generator
    is touched.
    """
    seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator, device="cpu"))
    # On the CPU even if the caller has set another default device, whose generator would give different weights.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def kaiming(module: nn.Module) -> None:
    """Initialise every convolution of the module from N(0, 2 / fan_out)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def global_average(maps: Tensor) -> Tensor:
    """Mean over the pixels: (N, C, H, W) to (N, C)."""
    return maps.mean((2, 3))
