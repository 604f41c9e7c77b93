"""Every built-in backbone in numbers that were once written down: what it is made of, and what it computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbbn
from tbbn.bench.models import ProxyHead, backbone
from tbbn.bench.models.resnet import BasicBlock, PadShortcut, ResNet
from tbbn.bench.models.small import SmallNet
from tbbn.plugins import temporary
from tbbn.registry import BACKBONES

Shape = tuple[int, int]  # channels and side of a stage's maps, for images of 40 x 40

# Parameters, the sum of their sizes when they are fresh, the stages, and the mean feature.
KNOWN: dict[str, tuple[int, float, list[Shape], float]] = {
    "small": (56480, 2816.27, [(32, 40), (64, 20), (64, 20)], 0.335257),
    "resnet20": (271824, 15421.6, [(16, 40), (32, 20), (64, 10)], 10.2341),
    "resnet32": (466256, 26107.4, [(16, 40), (32, 20), (64, 10)], 359.149),
    "resnet56": (855120, 47545.6, [(16, 40), (32, 20), (64, 10)], 281451),
    "resnet110": (1730064, 95528.5, [(16, 40), (32, 20), (64, 10)], 6.86963e09),
    "resnet32-podnet": (463504, 25062.3, [(16, 40), (32, 20), (64, 10), (64, 10)], 701.457),
    "resnet18": (11176512, 224530, [(64, 10), (128, 5), (256, 3), (512, 2)], 1.78624),
    "resnet34": (21284672, 440658, [(64, 10), (128, 5), (256, 3), (512, 2)], 77.7776),
    "resnet18-small": (11168832, 224422, [(64, 20), (128, 10), (256, 5), (512, 3)], 4.04887),
    "resnet18-podnet": (11168832, 222502, [(64, 20), (128, 10), (256, 5), (512, 3)], 5.47183),
    "resnet18-lucir": (11176512, 224530, [(64, 10), (128, 5), (256, 3), (512, 2)], 2.00084),
    "resnet18-cifar": (11168832, 109361, [(64, 40), (128, 20), (256, 10), (512, 5)], 0.431318),
    "resnet18-reduced": (1093140, 19787.8, [(20, 40), (40, 20), (80, 10), (160, 5)], 0.462065),
    "shufflenet-v2": (1253604, 51287.5, [(116, 5), (232, 3), (1024, 2)], 0.190376),
    "mobilenet-v2": (2223872, 152629, [(24, 10), (32, 5), (96, 3), (1280, 2)], 0.30448),
    "mnasnet-0.5": (937512, 74187.9, [(16, 10), (24, 5), (48, 3), (1280, 2)], 0.25497),
}


def images(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 40, 40, generator=torch.Generator().manual_seed(1))


def stir_norms(net: nn.Module) -> None:
    """Norms far from the identity, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(7)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight.data, layer.running_var):
                tensor.uniform_(0.5, 1.5, generator=generator)
            for tensor in (layer.bias.data, layer.running_mean):
                tensor.uniform_(-0.5, 0.5, generator=generator)


def test_every_backbone_is_known() -> None:
    assert set(KNOWN) == set(BACKBONES)


@pytest.mark.parametrize("name", KNOWN)
@torch.no_grad()
def test_a_backbone_is_what_it_was(name: str) -> None:
    n_parameters, size, stages, feature = KNOWN[name]
    net = backbone(name, generator=torch.Generator().manual_seed(0)).eval()
    assert sum(p.numel() for p in net.parameters()) == n_parameters
    assert sum(p.abs().double().sum().item() for p in net.parameters()) == pytest.approx(size, rel=1e-4)
    stir_norms(net)
    out = net(images())
    assert [tuple(stage.shape[1:3]) for stage in out.stages] == stages
    assert all(stage.shape[2] == stage.shape[3] for stage in out.stages)
    assert out.pooled.abs().mean().item() == pytest.approx(feature, rel=1e-3)


@pytest.mark.parametrize("name", ["small", "resnet18", "shufflenet-v2", "mobilenet-v2", "mnasnet-0.5"])
@torch.no_grad()
def test_images_of_one_channel_change_the_first_convolution_alone(name: str) -> None:
    one, three = (backbone(name, in_channels=n, generator=torch.Generator().manual_seed(0)) for n in (1, 3))
    shapes = {key: tuple(tensor.shape) for key, tensor in three.state_dict().items()}
    first = next(key for key, shape in shapes.items() if len(shape) == 4)
    out, of, *kernel = shapes[first]
    assert of == 3 and {k: tuple(t.shape) for k, t in one.state_dict().items()} == {**shapes, first: (out, 1, *kernel)}
    assert [tuple(stage.shape[1:3]) for stage in one(images(1)).stages] == KNOWN[name][2]
    # He's normal initialisation, whose size depends on the maps that come out.
    assert one.state_dict()[first].std().item() == pytest.approx(math.sqrt(2 / (out * math.prod(kernel))), rel=0.2)


@pytest.mark.parametrize(("n_in", "n_out"), [(4, 4), (4, 6)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pad", [True, False])
@torch.no_grad()
def test_a_block_has_a_shortcut_of_its_own_where_the_maps_change(n_in: int, n_out: int, stride: int, pad: bool) -> None:
    block = BasicBlock(n_in, n_out, stride=stride, pad_shortcut=pad).eval()
    x = torch.randn(2, n_in, 8, 8)
    assert block(x).shape == (2, n_out, 8 // stride, 8 // stride)
    assert (block.downsample is None) == (n_in == n_out and stride == 1)
    nn.init.zeros_(block.bn2.weight)  # what is left is the shortcut
    left = block(x)
    if block.downsample is None or pad:
        assert torch.equal(left[:, :n_in], x[:, :, ::stride, ::stride]) and not left[:, n_in:].any()
        assert block.downsample is None or isinstance(block.downsample, PadShortcut)
    else:
        assert torch.equal(left, block.downsample(x)) and block.downsample[0].kernel_size == (1, 1)
    assert (block(x, relu=True) >= 0).all() and (block(x) < 0).any()


@torch.no_grad()
def test_the_defaults_of_a_resnet_are_those_of_a_cifar_resnet() -> None:
    made = [
        ResNet((1, 1, 1, 1), (4, 6, 8, 8), **options)  # type: ignore[arg-type]
        for options in (
            {},
            {"in_channels": 3, "strides": (1, 2, 2, 2), "stem": (3, 1), "max_pool": False, "inner_relu": True},
            {"stage_relu": True, "last_relu": True, "no_relu_after": 0, "pad_shortcut": False, "zero_gamma": False},
        )
    ]
    for net in made:
        stir_norms(net)
        net.load_state_dict(made[0].state_dict())
    outputs = [net.eval()(images()) for net in made]
    assert [tuple(stage.shape[1:3]) for stage in outputs[0].stages] == [(4, 40), (6, 20), (8, 10), (8, 5)]
    for out in outputs[1:]:
        assert torch.equal(out.pooled, outputs[0].pooled)
    assert (outputs[0].pooled >= 0).all() and all((stage < 0).any() for stage in outputs[0].stages)


@torch.no_grad()
def test_without_a_generator_a_backbone_has_the_weights_of_seed_0_for_colour_images() -> None:
    one, other = backbone("small"), backbone("small")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        again = SmallNet(3, True)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert (one.eval()(images()).pooled >= 0).all()


def test_a_factory_is_told_what_it_asks_for() -> None:
    asked: list[Any] = []

    def make(in_channels: int, last_relu: bool, image_size: tuple[int, int]) -> nn.Module:
        asked.append((in_channels, last_relu, image_size))
        return nn.Flatten()

    with temporary(fresh=True):
        tbbn.register_backbone("asking", "notes what it is told")(make)
        assert backbone("asking").n_features == 3 * 32 * 32
        assert backbone("asking", in_channels=1, last_relu=False, image_size=(4, 6)).n_features == 24
    assert asked == [(3, True, (32, 32)), (1, False, (4, 6))]


def test_a_classifier_of_proxies_has_ten_for_each_class_and_no_scale() -> None:
    head = ProxyHead(4)
    head.grow(2, torch.Generator().manual_seed(0))
    assert (head.n_proxies, head.scale) == (10, 0.0) and head.weights[0].shape == (2, 10, 4)
