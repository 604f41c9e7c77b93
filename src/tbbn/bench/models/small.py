"""A small convolutional network for images of 8 to 32 pixels: the default backbone for digits."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from tbbn.accelerators.fused import Conv2d
from tbbn.bench.models.base import Backbone, Features, global_average, kaiming


class SmallNet(Backbone):
    """Three blocks of 3x3 convolution, norm and ReLU with 32, 64 and 64 channels; a max pool after the first."""

    n_features = 64

    def __init__(self, in_channels: int = 3, last_relu: bool = True) -> None:
        super().__init__()
        self.last_relu = last_relu
        widths = (in_channels, 32, 64, self.n_features)
        pairs = list(pairwise(widths))
        self.convs = nn.ModuleList(Conv2d(n_in, n_out, 3, padding=1, bias=False) for n_in, n_out in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n_out) for _, n_out in pairs)
        kaiming(self)

    def forward(self, images: Tensor) -> Features:
        x = images
        stages: list[Tensor] = []
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if i == 1:
                x = F.max_pool2d(x, 2, ceil_mode=True)  # before the ReLU, which commutes with it: fewer pixels
            if i > 0:
                x = F.relu(x)
            x = norm(conv(x))
            stages.append(x)
        return Features(global_average(F.relu(x) if self.last_relu else x), tuple(stages))
