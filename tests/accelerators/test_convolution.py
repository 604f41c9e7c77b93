"""The convolution as a layer: nn.Conv2d bit for bit on the CPU, and networks through its kernels (see helpers/interpreter.py)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import INTERPRETED, RUNNING, apart, here, interpret, on_device, tf32
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import tbbn
from tbbn.accelerators import backend, eager
from tbbn.accelerators.fused import Conv2d, Convolved, conv_moments
from tbbn.bench.models.base import Features, seeded_init
from tbbn.bench.models.resnet import BasicBlock, ResNet
from tbbn.bench.models.small import SmallNet

if RUNNING:
    from tbbn.accelerators.triton import conv as conv_launch
    from tbbn.accelerators.triton import norm as kernels
    from tbbn.accelerators.triton import norm_tiles


@here
def test_the_layer_passes_on_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def float32_is_exact():
    with tf32(False):
        yield


@pytest.fixture
def through(monkeypatch) -> Iterator[list[int | None]]:
    """Convolutions and norms go through the kernels on any device. Gives the number of parts of each norm's moments."""
    parts: list[int | None] = []
    train = kernels._train

    def spied(*args: Any) -> Any:
        *_, moments = args
        parts.append(None if moments is None else moments.shape[2])
        return train(*args)

    def chosen(layer: Conv2d, x: Tensor) -> Any:
        return conv_launch if layer.suits(x) and x.dtype != torch.float64 else None

    if INTERPRETED:  # which is slow per program, however large the program
        tiles = norm_tiles.tiles_for

        def few(*args: Any) -> Any:
            found = tiles(*args)
            large = norm_tiles.Tile(found.batch, 1024, 16)
            return found._replace(sums=large, apply=large, block=16)

        monkeypatch.setattr(norm_tiles, "tiles_for", few)
        monkeypatch.setattr(norm_tiles, "_geometries", {})
    monkeypatch.setattr(Conv2d, "kernels_for", chosen)
    monkeypatch.setattr(kernels, "_train", spied)
    with backend.only(kernels, eager):
        yield parts


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def noise(*shape: int, value: int = 0) -> Tensor:
    return torch.randn(shape, generator=seed(value))


def layer(n_in: int = 16, n_out: int = 16, size: Any = 3, **options: Any) -> Conv2d:
    given = {"padding": size // 2 if isinstance(size, int) else 1, "bias": False, **options}
    with seeded_init(seed()):
        return Conv2d(n_in, n_out, size, **given)


# -- On the CPU, and with hooks ---------------------------------------------------------------------------------------------


@here
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"bias": True}, {"groups": 2}, {"padding": 0}, {"padding_mode": "reflect"}], ids=str
)
def test_on_the_cpu_it_is_nn_conv2d_bit_for_bit(options):
    ours = layer(**options)
    theirs = nn.Conv2d(16, 16, 3, **{"padding": 1, "bias": False, **options})
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = noise(2, 16, 7, 6).requires_grad_()
    out, same, moments = ours.with_moments(x)
    want = theirs(x)
    assert same is x and moments is None
    assert torch.equal(ours(x), want) and torch.equal(out, want)
    ones = torch.ones_like(want)
    grads = [torch.autograd.grad(y, (x, *conv.parameters()), ones) for y, conv in ((out, ours), (want, theirs))]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert repr(ours) == repr(theirs)


HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]


def hooked(conv: Conv2d, hook: str) -> list[str]:
    """The calls of such a hook, from now on."""
    calls: list[str] = []

    def called(*_: Any) -> None:
        calls.append(hook)

    getattr(conv, f"register_{hook}")(called)
    return calls


@here
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("call", [Conv2d.__call__, Conv2d.with_moments], ids=["call", "with_moments"])
def test_hooks_fire_on_the_cpu(call, hook):
    conv = layer()
    calls = hooked(conv, hook)
    result = call(conv, noise(2, 16, 3, 3).requires_grad_())
    (result.out if isinstance(result, Convolved) else result).sum().backward()
    assert calls == [hook]


@on_device
@pytest.mark.parametrize("hook", HOOKS)
def test_a_layer_with_hooks_is_called(device, through, hook):
    conv = layer(size=1).to(device)
    x = noise(2, 16, 16, 16).to(device).requires_grad_()
    assert conv.with_moments(x).moments is not None
    calls = hooked(conv, hook)
    out, same, moments = conv.with_moments(x)
    out.sum().backward()
    assert calls == [hook]
    assert same is x and moments is None
    assert apart(out, F.conv2d(x.double(), conv.weight.double())) < 1e-6


# -- Which convolutions go through the kernels ------------------------------------------------------------------------------


X = torch.empty(2, 16, 6, 5)


@here
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_of_few_channels_suit(size, stride):
    assert layer(size=size, stride=stride).suits(X)
    assert layer(size=size, stride=stride).suits(X.clone().requires_grad_())
    assert layer(64, 48, size, stride=stride).suits(torch.empty(2, 64, 6, 5))
    assert layer(3, 64, size, stride=stride).suits(torch.empty(2, 3, 6, 5))


UNSUITED = {
    "no batch": (X[0], {}),
    "size 5": (X, {"size": 5}),
    "size 1x3": (X, {"size": (1, 3), "padding": (0, 1)}),
    "stride 3": (X, {"stride": 3}),
    "stride 1x2": (X, {"stride": (1, 2)}),
    "no padding": (X, {"padding": 0}),
    "padding by name": (X, {"padding": "same"}),
    "padding of 1x1": (X, {"size": 1, "padding": 1}),
    "mirrored padding": (X, {"padding_mode": "reflect"}),
    "dilation": (X, {"dilation": 2}),
    "groups": (X, {"groups": 2}),
    "bias": (X, {"bias": True}),
    "80 in": (torch.empty(2, 80, 6, 5), {"n_in": 80}),
    "80 out": (X, {"n_out": 80}),
    "20 out": (X, {"n_out": 20}),
    "20 in, with a gradient": (torch.empty(2, 20, 6, 5).requires_grad_(), {"n_in": 20}),
    "no images": (X[:0], {}),
    "no pixels": (X[:, :, :0], {}),
    "many pixels": (torch.empty(2, 16, 256, 257, device="meta"), {}),
}


@here
@pytest.mark.parametrize(("x", "options"), UNSUITED.values(), ids=UNSUITED)
def test_every_other_convolution_is_torchs(x, options):
    assert not layer(**options).suits(x)


@here
def test_as_many_pixels_as_allowed_suit():
    assert layer().suits(torch.empty(2, 16, 256, 256, device="meta"))


class Cuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@on_device
def test_the_kernels_are_chosen_by_device_type_and_tf32(device, monkeypatch):
    conv, x = layer(), noise(2, 16, 4, 4).as_subclass(Cuda)
    assert layer().half().kernels_for(x.half()) is conv_launch
    assert layer().bfloat16().kernels_for(x.bfloat16()) is conv_launch
    assert conv.kernels_for(x) is None
    assert layer().half().kernels_for(x.half()[0]) is None
    assert layer().half().kernels_for(noise(2, 16, 4, 4).half()) is None
    with torch.autocast("cpu", torch.float16):
        assert conv.kernels_for(x) is conv_launch
    with tf32(True):
        assert conv.kernels_for(x) is conv_launch
        assert layer().double().kernels_for(x.double()) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert conv.kernels_for(x) is None


@on_device
def test_autocast_leaves_float64_alone(device):
    conv, x = layer().double(), noise(2, 16, 4, 4).double()
    with torch.autocast("cpu", torch.float16):
        assert nn.Conv2d.forward(conv, x).dtype == torch.float64
        assert conv.kernels_for(x.as_subclass(Cuda)) is None


# -- The layer and networks through the kernels -----------------------------------------------------------------------------


@on_device
def test_moments_come_along_where_the_norm_needs_them(device, through):
    conv, x = layer(size=1).to(device), noise(2, 16, 16, 16).to(device)
    norms = {name: tbbn.convert(nn.BatchNorm2d(16), norm=name).to(device) for name in ("tbbn", "cn", "brn", "in")}
    for name, norm in norms.items():
        trained = conv_moments(conv, x, norm)
        assert trained.moments is not None
        seen = conv_moments(conv, x, norm.eval())
        assert (seen.moments is not None) == (name in ("cn", "in"))  # by the sample in eval mode, too
        assert torch.equal(seen.out, trained.out) and torch.equal(conv(x), trained.out)
    assert conv.with_moments(x, moments=False).moments is None


@on_device
@pytest.mark.parametrize("own", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("n_in", [3, 16], ids=["images", "features"])
def test_autocast_decides_the_type_and_gradients_return_in_the_parameters_own(device, through, own, n_in):
    conv = layer(n_in, size=1, stride=2).to(device, own)
    x, grad = noise(2, n_in, 7, 6).to(device).requires_grad_(n_in == 16), noise(2, 16, 4, 3, value=1).half().to(device)
    with torch.autocast(device, torch.float16):
        out, same, _ = conv.with_moments(x)
        assert torch.equal(conv(x), out)
    assert out.dtype == torch.float16
    assert torch.equal(same, x) and same.dtype == torch.float32  # not what was rounded for the product
    inputs = [t for t in (x, conv.weight) if t.requires_grad]
    got = torch.autograd.grad(out, inputs, grad)
    exact = [t.detach().half().double().requires_grad_() for t in (x, conv.weight)]
    want = F.conv2d(*exact, stride=2)
    assert apart(out, want) < 4e-4
    for a, b, t in zip(got, torch.autograd.grad(want, exact[-len(inputs) :], grad.double()), inputs, strict=True):
        assert a.dtype == t.dtype
        assert apart(a, b) < 4e-4


def conv(layer: Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, layer.weight, stride=layer.stride, padding=layer.padding)


def plain_block(block: BasicBlock, x: Tensor) -> Tensor:
    out = block.bn2(conv(block.conv2, block.bn1(conv(block.conv1, x)).relu()))
    if block.downsample is None:
        return out + x
    shortcut, norm = block.downsample
    return out + norm(conv(shortcut, x))


def plain_resnet(net: ResNet, images: Tensor) -> Features:
    """The network of torch's convolutions, sums and ReLUs, and of its own norms."""
    x, stages = net.bn1(conv(net.conv1, images)).relu(), []
    for i in range(net.n_stages):
        blocks = getattr(net, f"layer{i + 1}")
        for block in blocks[:-1]:
            x = plain_block(block, x).relu()
        stages.append(plain_block(blocks[-1], x))
        x = stages[-1].relu()
    return Features(x.mean((2, 3)), tuple(stages))


def plain_small(net: SmallNet, images: Tensor) -> Features:
    x, stages = images, []
    for i, (layer, norm) in enumerate(zip(net.convs, net.norms, strict=True)):
        stages.append(norm(conv(layer, x)))
        x = stages[-1].relu()
        x = F.max_pool2d(x, 2, ceil_mode=True) if i == 0 else x
    return Features(x.mean((2, 3)), tuple(stages))


def everything(net: nn.Module, out: Features, weights: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, the gradient of every parameter, and running statistics, by name."""
    outputs = (out.pooled, *out.stages)
    sum((y * w.to(y)).sum() for y, w in zip(outputs, weights, strict=True)).backward()
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in net.named_parameters()}
    return found | {name: b for name, b in net.named_buffers() if b.is_floating_point()}


def check(net: ResNet | SmallNet, plain: Any, images: Tensor, balanced: bool) -> None:
    """The network through the kernels in float32 against the plain one in float64."""
    generator = seed(3)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for parameter, low in ((module.weight, 0.5), (module.bias, -0.5)):
                parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + low)
    twin = copy.deepcopy(net).double()
    twin, net = tbbn.convert(twin) if balanced else twin, tbbn.convert(net)
    layout = {"current": len(images) * 3 // 4, "memory": len(images) // 4, "past_tasks": 3}
    with tbbn.balance(net, **layout) if balanced else nullcontext():
        out = net(images)
    with tbbn.balance(twin, **layout) if balanced else nullcontext():
        want_out = plain(twin, images.double())
    weights = [noise(*y.shape, value=i) for i, y in enumerate((out.pooled, *out.stages))]
    got, want = everything(net, out, weights), everything(twin, want_out, weights)
    assert got.keys() == want.keys()
    far = {name: apart(got[name], want[name]) for name in want}
    assert {name: error for name, error in far.items() if not error < 2e-5} == {}


NETWORKS = {
    "two parts": pytest.param((32, 16), 2, (1,), False, [2] * 3, marks=pytest.mark.nightly),
    "one part, balanced": ((16, 16), 4, (2,), True, [1] * 5),
    "no parts, two stages": ((5, 6), 4, (1, 1), False, [None] * 6),
}


@on_device
@pytest.mark.parametrize(("size", "n", "depths", "balanced", "parts"), NETWORKS.values(), ids=NETWORKS)
def test_a_resnet_through_the_kernels_is_the_plain_one_in_float64(
    device, through, monkeypatch, size, n, depths, balanced, parts
):
    monkeypatch.setattr(norm_tiles, "WHOLE_LIMIT", 0)  # so that known moments are used
    with seeded_init(seed()):
        net = ResNet(depths, [16] * len(depths)).to(device)
    check(net, plain_resnet, noise(n, 3, *size).to(device), balanced)
    assert through == parts


@here
def test_pooling_before_the_relu_changes_nothing_in_the_small_network():
    with seeded_init(seed()):
        net = SmallNet().double()
    check(net, plain_small, noise(4, 3, 7, 7).double(), False)


@on_device
def test_under_transforms_the_convolution_is_torchs(device):
    conv, x = layer().half(), noise(2, 16, 4, 4).half().as_subclass(Cuda)
    assert conv.kernels_for(x) is conv_launch
    torch.func.vmap(lambda _: conv.kernels_for(x) is None or pytest.fail("launched"), out_dims=None)(torch.zeros(1))
    with FlopCounterMode(display=False):
        assert conv.kernels_for(x) is None
    assert conv.kernels_for(x.float()) is None  # the weight is half: torch's error, not a silent cast


@on_device
def test_hooks_on_every_module_fire(device, through):
    conv, calls = layer(size=1).to(device), []
    with register_module_forward_hook(lambda module, args, out: calls.append(module)):
        assert conv.with_moments(noise(2, 16, 16, 16).to(device)).moments is None
    assert calls == [conv]


@on_device
def test_moments_are_for_norms_that_take_them(device, through):
    conv, x = layer(size=1).to(device), noise(2, 16, 16, 16).to(device)
    assert conv_moments(conv, x, tbbn.TaskBalancedBatchNorm2d(16)).moments is not None
    assert conv_moments(conv, x, nn.GroupNorm(4, 16)).moments is None
