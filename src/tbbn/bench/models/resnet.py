"""Residual networks: the CIFAR family, the ImageNet family, and the variants of PODNet and of the online survey.

All are one class. Parameters have the names of torchvision's ResNet, so `load_state_dict` can exchange weights with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from tbbn.accelerators.fused import Conv2d, conv_moments, conv_norm, norm_act
from tbbn.bench.models.base import Backbone, Features, global_average, kaiming


def _conv(n_in: int, n_out: int, *, size: int = 3, stride: int = 1) -> Conv2d:
    return Conv2d(n_in, n_out, size, stride=stride, padding=size // 2, bias=False)


class PadShortcut(nn.Module):
    """A shortcut without parameters: strided subsampling, and zeros for the new channels."""

    def __init__(self, n_new: int, stride: int) -> None:
        super().__init__()
        self.n_new = n_new
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.n_new))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the caller chooses whether a ReLU follows the sum."""

    def __init__(self, n_in: int, n_out: int, *, stride: int = 1, pad_shortcut: bool = False) -> None:
        super().__init__()
        self.conv1 = _conv(n_in, n_out, stride=stride)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = _conv(n_out, n_out)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or n_in != n_out:
            if pad_shortcut:
                self.downsample = PadShortcut(n_out - n_in, stride)
            else:
                self.downsample = nn.Sequential(_conv(n_in, n_out, size=1, stride=stride), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor, *, relu: bool = False) -> Tensor:
        out, x, moments = conv_moments(self.conv1, x, self.bn1)
        out, _, moments = conv_moments(self.conv2, norm_act(self.bn1, out, moments=moments), self.bn2)
        if isinstance(self.downsample, nn.Sequential):
            x = conv_norm(self.downsample, x)
        elif self.downsample is not None:
            x = self.downsample(x)
        return norm_act(self.bn2, out, relu=relu, residual=x, moments=moments)


class ResNet(Backbone):
    """A ResNet of basic blocks; stage i has `depths[i]` blocks of `widths[i]` channels.

    Args:
        strides: the stride of each stage's first block.
        stem: kernel and stride of the first convolution.
        max_pool: a 3x3/2 max pool after the stem.
        inner_relu: ReLU after the sum of every block except the last of its stage.
        stage_relu: ReLU between one stage and the next.
        last_relu: ReLU between the last stage and the pooling; LUCIR and PODNet have none.
        no_relu_after: 1-based number of a stage that no ReLU follows; 0 for none.
        pad_shortcut: shortcuts without parameters instead of a 1x1 convolution and a norm.
        zero_gamma: every block starts as the identity (the weight of its last norm is 0).
        kaiming_init: N(0, 2 / fan_out) for the convolutions; otherwise torch's default.
    """

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        *,
        in_channels: int = 3,
        strides: Sequence[int] = (1, 2, 2, 2),
        stem: tuple[int, int] = (3, 1),
        max_pool: bool = False,
        inner_relu: bool = True,
        stage_relu: bool = True,
        last_relu: bool = True,
        no_relu_after: int = 0,
        pad_shortcut: bool = False,
        zero_gamma: bool = False,
        kaiming_init: bool = True,
    ) -> None:
        super().__init__()
        self.n_features = widths[-1]
        self.n_stages = len(depths)
        self.max_pool = max_pool
        self.inner_relu = inner_relu
        self.stage_relu = stage_relu
        self.last_relu = last_relu
        self.no_relu_after = no_relu_after
        size, stride = stem
        self.conv1 = _conv(in_channels, widths[0], size=size, stride=stride)
        self.bn1 = nn.BatchNorm2d(widths[0])
        n_in = widths[0]
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            first = BasicBlock(n_in, width, stride=strides[i], pad_shortcut=pad_shortcut)
            rest = (BasicBlock(width, width) for _ in range(depth - 1))
            self.add_module(f"layer{i + 1}", nn.Sequential(first, *rest))
            n_in = width
        if kaiming_init:
            kaiming(self)
        if zero_gamma:
            for block in self.modules():
                if isinstance(block, BasicBlock):
                    nn.init.zeros_(block.bn2.weight)

    def _stage(self, index: int, x: Tensor) -> Tensor:
        """The output of the stage: the sum of its last block, before any ReLU."""
        blocks = list(getattr(self, f"layer{index + 1}"))
        for block in blocks[:-1]:
            x = block(x, relu=self.inner_relu)
        return blocks[-1](x)

    def forward(self, images: Tensor) -> Features:
        x, _, moments = conv_moments(self.conv1, images, self.bn1)
        x = norm_act(self.bn1, x, moments=moments)
        if self.max_pool:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        stages: list[Tensor] = []
        for i in range(self.n_stages):
            x = self._stage(i, x)
            stages.append(x)
            # Not in place: the map just stored must keep its negative values.
            has_relu = self.last_relu if i == self.n_stages - 1 else self.stage_relu
            if has_relu and i + 1 != self.no_relu_after:
                x = F.relu(x)
        return Features(global_average(x), tuple(stages))


def cifar_resnet(n_layers: int, in_channels: int, last_relu: bool) -> ResNet:
    """The ResNet for 32x32 images with 6n + 2 layers: three stages of n blocks with 16, 32 and 64 channels."""
    n = (n_layers - 2) // 6
    assert n_layers == 6 * n + 2
    return ResNet((n, n, n), (16, 32, 64), in_channels=in_channels, last_relu=last_relu)


def podnet_resnet32(in_channels: int, last_relu: bool) -> ResNet:
    """PODNet's ResNet-32 for CIFAR: 5 + 5 + 4 + 1 blocks, no ReLU after any sum, identity shortcuts.

    The fourth stage keeps 64 channels and the resolution. PODNet itself pools without the last ReLU.
    """
    return ResNet(
        (5, 5, 4, 1),
        (16, 32, 64, 64),
        in_channels=in_channels,
        strides=(1, 2, 2, 1),
        inner_relu=False,
        stage_relu=False,
        last_relu=last_relu,
        pad_shortcut=True,
        zero_gamma=True,
    )


def imagenet_resnet(
    depths: Sequence[int], in_channels: int, last_relu: bool, *, small_stem: bool = False, podnet: bool = False
) -> ResNet:
    """ResNet-18/34 for large images.

    `small_stem` replaces the 7x7/2 convolution by a 3x3/1 one. `podnet` removes the ReLU at the end of every stage and
    starts every block as the identity, as PODNet does on ImageNet.
    """
    return ResNet(
        depths,
        (64, 128, 256, 512),
        in_channels=in_channels,
        stem=(3, 1) if small_stem else (7, 2),
        max_pool=True,
        stage_relu=not podnet,
        last_relu=last_relu,
        zero_gamma=podnet,
    )


def lucir_resnet18(in_channels: int) -> ResNet:
    """LUCIR's ResNet-18 in the paper's code, which removes the ReLU after stage 3 and keeps the last one.

    In a CIFAR ResNet stage 3 is the last stage. Here it is the last but one, so features are never negative.
    """
    return ResNet(
        (2, 2, 2, 2), (64, 128, 256, 512), in_channels=in_channels, stem=(7, 2), max_pool=True, no_relu_after=3
    )


def cifar_resnet18(width: int, in_channels: int, last_relu: bool) -> ResNet:
    """ResNet-18 for 32x32 images, with a 3x3 stem and no max pool; ``width`` is the number of channels of the first stage.

    With width 20 it is the Reduced ResNet-18 of the online survey (Mai et al., 2022).
    """
    widths = tuple(width * 2**stage for stage in range(4))
    return ResNet((2, 2, 2, 2), widths, in_channels=in_channels, last_relu=last_relu, kaiming_init=False)
