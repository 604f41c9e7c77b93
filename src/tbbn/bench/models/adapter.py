"""Turn any module that maps images to features into a backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tbbn.bench.models.base import Backbone, Features
from tbbn.errors import UserError
from tbbn.registry import BACKBONES


class AdaptedBackbone(Backbone):
    """A module that returns features (N, D), or `Features`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Features:
        made = self.module(images)
        return made if isinstance(made, Features) else Features(made, ())


def adapt(name: str, module: object, shape: tuple[int, ...]) -> Backbone:
    """The module as a backbone. One forward of `shape` (C, H, W) finds its number of features and whether it has stages."""
    if isinstance(module, Backbone):
        return module
    if not isinstance(module, nn.Module):
        raise UserError(f"{BACKBONES.place(name)}: must return a torch.nn.Module, got {type(module).__name__}.")
    body = AdaptedBackbone(module)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            features = body.eval()(torch.zeros(1, *shape, device=device))
    except (RuntimeError, ValueError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = BACKBONES.place(name, error)
        raise UserError(f"{where}: cannot take an image of {'x'.join(map(str, shape))}: {reason}.") from error
    pooled = features.pooled
    if not isinstance(pooled, Tensor) or pooled.dim() != 2 or len(pooled) != 1:
        got = tuple(pooled.shape) if isinstance(pooled, Tensor) else type(pooled).__name__
        raise UserError(f"{BACKBONES.place(name)}: must return features (N, D), got {got} for one image.")
    body.n_features = pooled.shape[1]
    body.has_stages = len(features.stages) > 0
    return body.train()
