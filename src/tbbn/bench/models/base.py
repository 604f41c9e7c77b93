"""What every backbone is and gives back, and how its weights are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Features:
    """What a backbone says about a batch.

    `pooled` is (N, D). `stages` holds one map (N, C, H, W) a stage, taken before the stage's last ReLU: there a
    distillation loss also sees what the ReLU would cut away. The last map, after its ReLU, is the one that is pooled.
    """

    pooled: Tensor
    stages: tuple[Tensor, ...]


class Backbone(nn.Module):
    """Maps images (N, C, H, W) of any size to `Features`; `n_features` is the width D of the pooled vector."""

    n_features: int
    has_stages = True  # whether `Features.stages` holds any map; PODNet and AFC need them

    def forward(self, images: Tensor) -> Features:
        raise NotImplementedError


@contextmanager
def seeded_init(generator: torch.Generator | None) -> Iterator[None]:
    """Draws every weight made inside from one seed taken from `generator`; the global random state is left as it was.

    The layers of torch initialise themselves from the global CPU generator, so that one is lent and given back; no
    other device's generator is touched. Without a generator the seed is 0.
    """
    seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator, device="cpu"))
    # A default device set by the caller would move the draws to that device's generator: the weights would differ.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def kaiming(module: nn.Module) -> None:
    """Draws every convolution of the module from N(0, 2 / fan_out)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def global_average(maps: Tensor) -> Tensor:
    """Mean over the pixels: (N, C, H, W) to (N, C)."""
    return maps.mean((2, 3))
