from __future__ import annotations

import copy

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from tbbn.bench.models import Backbone, backbone
from tbbn.bench.models.base import seeded_init
from tbbn.bench.models.resnet import BasicBlock, ResNet
from tbbn.bench.vision import torchvision
from tbbn.errors import UserError
from tbbn.registry import BACKBONES

NAMES = sorted(BACKBONES)
LIGHT = [name for name in NAMES if name not in ("resnet34", "resnet110")]  # the class of these two is covered by others
WIDTHS = {
    "small": 64,
    "resnet20": 64,
    "resnet32": 64,
    "resnet56": 64,
    "resnet110": 64,
    "resnet32-podnet": 64,
    "resnet18": 512,
    "resnet34": 512,
    "resnet18-small": 512,
    "resnet18-podnet": 512,
    "resnet18-lucir": 512,
    "resnet18-cifar": 512,
    "resnet18-reduced": 160,
    "shufflenet-v2": 1024,
    "mobilenet-v2": 1280,
    "mnasnet-0.5": 1280,
}
N_STAGES = {"small": 3, "shufflenet-v2": 3, **{f"resnet{n}": 3 for n in (20, 32, 56, 110)}}


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def images(n: int, channels: int, size: int, value: int = 1) -> Tensor:
    return torch.randn(n, channels, size, size, generator=seed(value))


def randomise_norms(net: nn.Module) -> None:
    """Norms far from the identity, so that a forgotten or swapped one shows."""
    generator = seed(7)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight.data, layer.running_var):
                tensor.uniform_(0.5, 1.5, generator=generator)
            for tensor in (layer.bias.data, layer.running_mean):
                tensor.uniform_(-0.5, 0.5, generator=generator)


def n_parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_every_backbone_is_covered_here() -> None:
    assert set(NAMES) == set(WIDTHS)


@pytest.mark.parametrize("name", NAMES)
def test_any_image_size_gives_one_pooled_vector_an_image(name: str) -> None:
    net = backbone(name, generator=seed())
    assert net.n_features == WIDTHS[name]
    for size in (8, 32, 64) if name != "resnet110" else (8, 32):
        out = net(images(2, 3, size))
        assert out.pooled.shape == (2, net.n_features)
        assert len(out.stages) == N_STAGES.get(name, 4)
        assert all(stage.shape[0] == 2 and stage.dim() == 4 for stage in out.stages)
        assert out.stages[-1].shape[1] == net.n_features
    if name == "resnet32":
        assert [tuple(s.shape[1:]) for s in out.stages] == [(16, 64, 64), (32, 32, 32), (64, 16, 16)]


@pytest.mark.parametrize("name", LIGHT)
def test_stages_hold_values_before_the_relu_and_the_last_one_is_pooled(name: str) -> None:
    net = backbone(name, generator=seed()).eval()
    randomise_norms(net)
    out = net(images(3, 3, 32))
    if name != "shufflenet-v2":  # its inner stages end in a shuffle of rectified branches
        assert all((stage < 0).any() for stage in out.stages)
    assert (out.stages[-1] < 0).any()
    rectified = out.stages[-1].clamp(0, 6 if name == "mobilenet-v2" else None)
    torch.testing.assert_close(out.pooled, rectified.flatten(2).mean(2))

    if name == "resnet18-lucir":  # keeps its last ReLU
        return
    raw = backbone(name, last_relu=False, generator=seed()).eval()
    raw.load_state_dict(net.state_dict())
    out = raw(images(3, 3, 32))
    assert (out.pooled < 0).any()
    torch.testing.assert_close(out.pooled, out.stages[-1].flatten(2).mean(2))


@pytest.mark.parametrize("name", ["resnet32", "resnet32-podnet", "resnet18", "resnet18-podnet", "resnet18-reduced"])
@pytest.mark.parametrize("training", [True, False])
def test_later_layers_do_not_write_into_the_stages(name: str, training: bool) -> None:
    net = backbone(name, generator=seed()).train(training)
    assert isinstance(net, ResNet)
    seen: list[Tensor] = []
    for i in range(net.n_stages):
        last = getattr(net, f"layer{i + 1}")[-1]
        last.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    out = net(images(4, 3, 32))
    assert len(seen) == len(out.stages)
    for stage, then in zip(out.stages, seen, strict=True):
        assert torch.equal(stage, then)


@pytest.mark.parametrize("name", LIGHT)
def test_gradients_reach_every_parameter_and_every_stage(name: str) -> None:
    net = backbone(name, generator=seed())
    out = net(images(4, 3, 32))
    for stage in out.stages:
        stage.retain_grad()
    loss = out.pooled.square().sum() + sum(stage.square().mean() for stage in out.stages)
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())
    assert all(stage.grad is not None for stage in out.stages)


@pytest.mark.parametrize("name", LIGHT)
def test_any_number_of_input_channels(name: str) -> None:
    net = backbone(name, in_channels=1, generator=seed())
    assert net(images(2, 1, 16)).pooled.shape == (2, net.n_features)
    first = next(layer for layer in net.modules() if isinstance(layer, nn.Conv2d))
    assert first.in_channels == 1


@pytest.mark.parametrize("name", LIGHT)
def test_weights_come_from_the_generator_alone(name: str) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = backbone(name, generator=seed(5)).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    two = backbone(name, generator=seed(5)).state_dict()
    three = backbone(name, generator=seed(6)).state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], three[key]) for key in one)


def test_two_backbones_of_one_generator_differ() -> None:
    generator = seed()
    one, two = (next(backbone("small", generator=generator).parameters()) for _ in range(2))
    assert not torch.equal(one, two)


def test_seeded_init_draws_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"), seeded_init(seed(3)):
        weight = nn.Linear(4, 4).weight
    with seeded_init(seed(3)):
        assert torch.equal(nn.Linear(4, 4).weight, weight)


@pytest.mark.parametrize("name", ["small", "resnet20", "resnet32-podnet", "resnet18", "shufflenet-v2", "mobilenet-v2"])
def test_channels_last_gives_the_same_features(name: str) -> None:
    net = backbone(name, generator=seed()).double().eval()
    randomise_norms(net)
    x = images(2, 3, 32).double()
    plain = net(x)
    last = net.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last.pooled, plain.pooled)
    for one, two in zip(last.stages, plain.stages, strict=True):
        torch.testing.assert_close(one, two)
        if name != "shufflenet-v2":
            assert one.is_contiguous(memory_format=torch.channels_last)


def cifar_parameters(n: int, in_channels: int = 3) -> int:
    """Parameters of the CIFAR ResNet with n blocks a stage, by hand: kernels, and two numbers a norm channel."""
    total = in_channels * 16 * 9 + 2 * 16
    for width in (16, 32, 64):
        total += 2 * n * (width * width * 9 + 2 * width)
    for narrow, wide in ((16, 32), (32, 64)):
        total -= (wide - narrow) * wide * 9  # the first convolution of the stage reads the narrower map
        total += narrow * wide + 2 * wide  # 1x1 shortcut and its norm
    return total


@pytest.mark.parametrize(("name", "n"), [("resnet20", 3), ("resnet32", 5), ("resnet56", 9), ("resnet110", 18)])
def test_cifar_parameter_count(name: str, n: int) -> None:
    assert n_parameters(backbone(name, generator=seed())) == cifar_parameters(n)


def test_resnet32_has_about_466_thousand_parameters() -> None:
    assert cifar_parameters(5) == 466_256


def test_podnet_resnet32_has_15_blocks_without_shortcut_parameters() -> None:
    net = backbone("resnet32-podnet", generator=seed())
    assert isinstance(net, ResNet)
    assert [len(getattr(net, f"layer{i}")) for i in range(1, 5)] == [5, 5, 4, 1]
    # Without the two 1x1 shortcuts and their norms it is as large as resnet32: 5 + 5 + (4 + 1) blocks.
    assert n_parameters(net) == cifar_parameters(5) - (16 * 32 + 2 * 32) - (32 * 64 + 2 * 64)


@pytest.mark.parametrize("name", ["resnet32-podnet", "resnet18-podnet"])
def test_podnet_blocks_start_as_their_shortcut(name: str) -> None:
    net = backbone(name, generator=seed())
    blocks = [module for module in net.modules() if isinstance(module, BasicBlock)]
    assert all((block.bn2.weight == 0).all() for block in blocks)
    x = images(2, 16 if name == "resnet32-podnet" else 64, 8)
    assert torch.equal(blocks[0](x), x)


@pytest.mark.parametrize(("name", "n"), [("resnet18-cifar", 64), ("resnet18-reduced", 20)])
def test_resnet18_for_cifar_halves_its_maps_three_times(name: str, n: int) -> None:
    net = backbone(name, generator=seed())
    out = net(images(2, 3, 32))
    assert [tuple(s.shape[1:]) for s in out.stages] == [(n, 32, 32), (2 * n, 16, 16), (4 * n, 8, 8), (8 * n, 4, 4)]
    assert all(p.dim() != 4 or p.std() < (1 / p[0].numel()) ** 0.5 for p in net.parameters())  # torch's uniform


def norm(state: dict[str, Tensor], key: str, x: Tensor) -> Tensor:
    parts = [state[f"{key}.{name}"] for name in ("running_mean", "running_var", "weight", "bias")]
    return F.batch_norm(x, *parts)


def reference(state: dict[str, Tensor], x: Tensor, depths: tuple[int, ...], *, podnet: bool) -> Tensor:
    """Eval-mode ResNet written out from its weights: (N, C, H, W) before the last ReLU."""
    x = norm(state, "bn1", F.conv2d(x, state["conv1.weight"], padding=1)).relu()
    for i, depth in enumerate(depths):
        for j in range(depth):
            key = f"layer{i + 1}.{j}"
            if i > 0 and not podnet:
                x = x.relu() if j == 0 else x
            stride = 2 if j == 0 and i in (1, 2) else 1
            y = norm(state, f"{key}.bn1", F.conv2d(x, state[f"{key}.conv1.weight"], stride=stride, padding=1)).relu()
            y = norm(state, f"{key}.bn2", F.conv2d(y, state[f"{key}.conv2.weight"], padding=1))
            if stride == 2 and podnet:
                x = x[:, :, ::2, ::2]
                x = torch.cat([x, torch.zeros_like(x)], dim=1)
            elif stride == 2:
                shortcut = F.conv2d(x, state[f"{key}.downsample.0.weight"], stride=2)
                x = norm(state, f"{key}.downsample.1", shortcut)
            x = x + y
            if not podnet and j < depth - 1:
                x = x.relu()
    return x


@pytest.mark.parametrize("name", ["resnet20", "resnet32-podnet"])
def test_resnet_matches_the_network_written_out(name: str) -> None:
    net = backbone(name, generator=seed()).double().eval()
    randomise_norms(net)
    x = images(2, 3, 16).double()
    depths = (3, 3, 3) if name == "resnet20" else (5, 5, 4, 1)
    expected = reference(dict(net.state_dict()), x, depths, podnet=name == "resnet32-podnet")
    out = net(x)
    torch.testing.assert_close(out.stages[-1], expected)
    torch.testing.assert_close(out.pooled, expected.relu().mean((2, 3)))


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_imagenet_resnet_takes_torchvisions_weights_and_agrees(name: str) -> None:
    with seeded_init(seed(4)):
        theirs = getattr(torchvision().models, name)(weights=None).double()
    theirs.fc = nn.Identity()
    ours = backbone(name, generator=seed()).double()
    randomise_norms(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = images(2, 3, 32).double()
    torch.testing.assert_close(ours(x).pooled, theirs(x))
    torch.testing.assert_close(ours.eval()(x).pooled, theirs.eval()(x))


def test_podnet_resnet18_has_no_relu_at_the_stage_ends() -> None:
    net = backbone("resnet18-podnet", generator=seed()).eval()
    assert isinstance(net, ResNet)
    randomise_norms(net)
    seen: list[Tensor] = []
    net.layer2[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    net.layer2[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    out = net(images(2, 3, 32))
    assert out.stages[0].shape[2:] == (16, 16)  # 3x3/1 stem, then the max pool
    assert torch.equal(seen[0], out.stages[0])
    assert (seen[1] >= 0).all()


def test_lucir_s_resnet18_removes_the_relu_after_stage_3_and_keeps_the_last() -> None:
    """As the paper's code: torchvision's network, the last block of layer3 without its final ReLU."""
    with seeded_init(seed(4)):
        theirs = torchvision().models.resnet18(weights=None).double()
    theirs.fc = nn.Identity()
    randomise_norms(theirs)
    ours = backbone("resnet18-lucir", last_relu=False, generator=seed()).double().eval()
    ours.load_state_dict(theirs.state_dict())

    def without_relu(x: Tensor) -> Tensor:
        block = theirs.layer3[1]
        return x + block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))

    x = images(2, 3, 32).double()
    plain = theirs.eval()(x)
    theirs.layer3[1].forward = without_relu
    out = ours(x)
    torch.testing.assert_close(out.pooled, theirs(x))
    assert not torch.allclose(out.pooled, plain) and (out.pooled >= 0).all() and (out.stages[2] < 0).any()


MOBILE = {"shufflenet-v2": "shufflenet_v2_x1_0", "mobilenet-v2": "mobilenet_v2", "mnasnet-0.5": "mnasnet0_5"}


@pytest.mark.parametrize("name", MOBILE)
def test_mobile_backbone_computes_what_torchvision_does(name: str) -> None:
    with seeded_init(seed(9)):
        theirs: nn.Module = getattr(torchvision().models, MOBILE[name])(weights=None)
    setattr(theirs, "fc" if name == "shufflenet-v2" else "classifier", nn.Identity())
    ours = backbone(name, generator=seed(9))
    for net in (theirs, ours):
        randomise_norms(net)
    # Both networks list their layers in the same order, so the same draws went to the same layers.
    assert n_parameters(ours) == n_parameters(theirs)
    x = images(2, 3, 64)
    torch.testing.assert_close(ours.eval()(x).pooled, theirs.eval()(x))


def test_mnasnet_norms_have_the_default_momentum() -> None:
    norms = [m for m in backbone("mnasnet-0.5", generator=seed()).modules() if isinstance(m, nn.BatchNorm2d)]
    assert {m.momentum for m in norms} == {0.1}


@pytest.mark.parametrize("name", LIGHT)
def test_state_dict_without_metadata_loads_strictly(name: str) -> None:
    net = backbone(name, generator=seed(1))
    plain = dict(copy.deepcopy(net).state_dict())
    other = backbone(name, generator=seed(2))
    other.load_state_dict(plain)
    x = images(2, 3, 16)
    assert torch.equal(net.eval()(x).pooled, other.eval()(x).pooled)


def test_backbone_needs_a_known_name() -> None:
    with pytest.raises(UserError, match=r"unknown backbone 'resnet23'.*Did you mean 'resnet"):
        backbone("resnet23")


def test_backbone_needs_a_channel() -> None:
    with pytest.raises(UserError, match="backbone 'small': in_channels must be at least 1, got 0"):
        backbone("small", in_channels=0)


def test_base_class_has_no_forward() -> None:
    with pytest.raises(NotImplementedError):
        Backbone()(torch.zeros(1))


def test_a_resnet_can_be_traced_and_its_convolutions_replaced():
    network = backbone("resnet20").eval()
    x = torch.randn(2, 3, 32, 32)
    want = network(x).pooled
    assert torch.equal(torch.fx.symbolic_trace(network)(x).pooled, want)
    weight = network.conv1.weight
    network.conv1 = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False)
    network.conv1.weight = weight
    assert torch.equal(network(x).pooled, want)
