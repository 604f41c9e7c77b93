"""Backbones, growing heads, and the network that combines them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tbbn.bench.models import resnet, torchvision
from tbbn.bench.models.adapter import adapt
from tbbn.bench.models.base import Backbone, Features, seeded_init
from tbbn.bench.models.heads import BiasCorrectedHead, CosineHead, Head, LinearHead, ProxyHead
from tbbn.bench.models.network import Network, Output
from tbbn.bench.models.small import SmallNet
from tbbn.errors import UserError
from tbbn.registry import BACKBONES

__all__ = [
    "Backbone",
    "BiasCorrectedHead",
    "CosineHead",
    "Features",
    "Head",
    "LinearHead",
    "Network",
    "Output",
    "ProxyHead",
    "backbone",
]

_DEPTHS_18, _DEPTHS_34 = (2, 2, 2, 2), (3, 4, 6, 3)

# name: (description, factory that takes in_channels, and last_relu if it can remove the last ReLU)
_BUILT_IN: dict[str, tuple[str, Callable[..., Backbone]]] = {
    "small": ("three conv-norm-ReLU blocks, 32-64-64 channels, for 8 to 32 px", SmallNet),
    "resnet20": ("CIFAR ResNet, 3 x 3 blocks, 16-32-64 channels", partial(resnet.cifar_resnet, 20)),
    "resnet32": ("CIFAR ResNet, 3 x 5 blocks, 16-32-64 channels (the paper's)", partial(resnet.cifar_resnet, 32)),
    "resnet56": ("CIFAR ResNet, 3 x 9 blocks, 16-32-64 channels", partial(resnet.cifar_resnet, 56)),
    "resnet110": ("CIFAR ResNet, 3 x 18 blocks, 16-32-64 channels", partial(resnet.cifar_resnet, 110)),
    "resnet32-podnet": (
        "PODNet's CIFAR ResNet: 5-5-4-1 blocks, no ReLU after the residual sum",
        resnet.podnet_resnet32,
    ),
    "resnet18": ("ImageNet ResNet-18 (the paper's)", partial(resnet.imagenet_resnet, _DEPTHS_18)),
    "resnet34": ("ImageNet ResNet-34", partial(resnet.imagenet_resnet, _DEPTHS_34)),
    "resnet18-small": (
        "ResNet-18 with a 3x3 stem of stride 1 and the max pool",
        partial(resnet.imagenet_resnet, _DEPTHS_18, small_stem=True),
    ),
    "resnet18-podnet": (
        "PODNet's ImageNet ResNet-18: resnet18-small without ReLU at the stage ends",
        partial(resnet.imagenet_resnet, _DEPTHS_18, small_stem=True, podnet=True),
    ),
    "resnet18-lucir": (
        "ResNet-18 as in the paper's LUCIR: no ReLU after stage 3, but after the last stage",
        resnet.lucir_resnet18,
    ),
    "resnet18-cifar": ("ResNet-18 for 32 px: 3x3 stem, no max pool", partial(resnet.cifar_resnet18, 64)),
    "resnet18-reduced": ("resnet18-cifar with 20 to 160 channels (online survey)", partial(resnet.cifar_resnet18, 20)),
    "shufflenet-v2": ("ShuffleNet-V2 x1.0 of torchvision", torchvision.shufflenet_v2),
    "mobilenet-v2": ("MobileNet-V2 of torchvision", torchvision.mobilenet_v2),
    "mnasnet-0.5": ("MnasNet x0.5 of torchvision", torchvision.mnasnet_05),
}


for _name, (_description, _build) in _BUILT_IN.items():
    BACKBONES.register(_name, _build, _description)


def backbone(
    name: str,
    *,
    in_channels: int = 3,
    last_relu: bool = True,
    generator: torch.Generator | None = None,
    image_size: tuple[int, int] = (32, 32),
) -> Backbone:
    """A new backbone with `nn.BatchNorm2d` norms and weights drawn only from `generator`.

    `last_relu=False` removes the ReLU before the pooling, so that features may be negative (LUCIR, PODNet). A registered
    factory gets whichever of `in_channels`, `last_relu` and `image_size` it accepts, and may return any module: see `adapt`.
    """
    BACKBONES.entry(name)
    if in_channels < 1:
        raise UserError(f"backbone {name!r}: in_channels must be at least 1, got {in_channels}.")
    with seeded_init(generator):
        module = BACKBONES.make(name, in_channels=in_channels, last_relu=last_relu, image_size=image_size)
    return adapt(name, module, (in_channels, *image_size))
