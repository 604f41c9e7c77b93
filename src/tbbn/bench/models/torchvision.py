"""Mobile backbones of torchvision, untrained and without classifier, divided into stages of one resolution each.

The dropout before the classifier of MobileNet-V2 and MnasNet goes with it: its masks would be the only random numbers of a run
that are drawn during a step. The paper's code keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from tbbn.bench.models.base import Backbone, Features, global_average


class StagedBackbone(Backbone):
    """A stem, a sequence of stages, and the activation before the pooling.

    The last stage ends with the norm before the activation. The other stages of these architectures end with a linear
    bottleneck or a channel shuffle, not with a ReLU, so their maps are simply their outputs.
    """

    def __init__(self, stem: nn.Module, stages: Sequence[nn.Module], activation: nn.Module, n_features: int) -> None:
        super().__init__()
        self.n_features = n_features
        self.stem = stem
        self.stages = nn.ModuleList(stages)
        self.activation = activation

    def forward(self, images: Tensor) -> Features:
        x = self.stem(images)
        maps: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return Features(global_average(self.activation(x)), tuple(maps))


def _first_conv(module: nn.Module, in_channels: int) -> None:
    """Make the first convolution of a stem accept `in_channels`, initialised like the one it replaces."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d):
            if layer.in_channels != in_channels:
                size, stride, padding = layer.kernel_size, layer.stride, layer.padding
                conv = nn.Conv2d(in_channels, layer.out_channels, size, stride, padding, bias=False)  # type: ignore[arg-type]
                nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
                module.set_submodule(name, conv)
            return


def shufflenet_v2(in_channels: int, last_relu: bool) -> Backbone:
    """ShuffleNet-V2 x1.0 (Ma et al., 2018): strides 8, 16 and 32; 1024 features."""
    from tbbn.bench.vision import torchvision

    net = torchvision().models.shufflenet_v2_x1_0()
    stem = nn.Sequential(net.conv1, net.maxpool)
    _first_conv(stem, in_channels)
    conv, norm, _ = net.conv5
    stages = (net.stage2, net.stage3, nn.Sequential(*net.stage4, conv, norm))
    return StagedBackbone(stem, stages, _activation(nn.ReLU, last_relu), conv.out_channels)


def mobilenet_v2(in_channels: int, last_relu: bool) -> Backbone:
    """MobileNet-V2 (Sandler et al., 2018): strides 4, 8, 16 and 32; 1280 features."""
    from tbbn.bench.vision import torchvision

    blocks = list(torchvision().models.mobilenet_v2().features)
    stem = nn.Sequential(*blocks[:2])
    _first_conv(stem, in_channels)
    conv, norm, _ = blocks[18]
    ends = (blocks[2:4], blocks[4:7], blocks[7:14], [*blocks[14:18], conv, norm])
    stages = [nn.Sequential(*stage) for stage in ends]
    return StagedBackbone(stem, stages, _activation(nn.ReLU6, last_relu), conv.out_channels)


def mnasnet_05(in_channels: int, last_relu: bool) -> Backbone:
    """MnasNet x0.5 (Tan et al., 2019): strides 4, 8, 16 and 32; 1280 features.

    torchvision's norms have a momentum of 0.0003, meant for millions of steps: running statistics would lag a task by thousands
    of steps. Here they get torch's default momentum, as in the paper's code.
    """
    from tbbn.bench.vision import torchvision

    layers = list(torchvision().models.mnasnet0_5().layers)
    stem = nn.Sequential(*layers[:8])
    _first_conv(stem, in_channels)
    conv, norm = layers[14:16]
    ends = (layers[8:9], layers[9:10], layers[10:12], [*layers[12:14], conv, norm])
    stages = [nn.Sequential(*stage) for stage in ends]
    net = StagedBackbone(stem, stages, _activation(nn.ReLU, last_relu), conv.out_channels)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 0.1
    return net


def _activation(relu: Callable[[], nn.Module], last_relu: bool) -> nn.Module:
    return relu() if last_relu else nn.Identity()
