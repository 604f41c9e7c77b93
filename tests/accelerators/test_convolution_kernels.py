"""The kernels of the convolution against float64: on Triton's interpreter and on a GPU (see ``tests/helpers/interpreter.py``)."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from interpreter import INTERPRETED, RUNNING, apart, equals_itself_captured, here, interpret, needs_gpu, on_device, tf32
from torch import Tensor

if RUNNING:
    from tbbn.accelerators.triton import conv as conv_launch

# Triton's interpreter has no bfloat16 products.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)
BOUNDS = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


@here
def test_the_kernels_pass_on_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def float32_is_exact():
    with tf32(False):
        yield


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


class Case(NamedTuple):
    images: int
    n_in: int
    n_out: int
    height: int
    width: int
    size: int = 3
    stride: int = 1


class Drawn(NamedTuple):
    x: Tensor
    weight: Tensor
    grad: Tensor  # of the output
    shortcut: Tensor  # of the input, from elsewhere


def draw(case: Case, device: str, dtype: torch.dtype = torch.float32, last: bool = True) -> Drawn:
    """Images have too few channels for a gradient."""
    n, n_in, n_out, height, width, size, stride = case
    out = (n, n_out, -(-height // stride), -(-width // stride))
    shapes = ((n, n_in, height, width), (n_out, n_in, size, size), out, (n, n_in, height, width))
    generator = seed(sum(case))
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    if last:
        tensors = [t.contiguous(memory_format=torch.channels_last) for t in tensors]
    x, weight, *grads = tensors
    return Drawn(x.requires_grad_(n_in % 16 == 0), weight.requires_grad_(), *grads)


def exact(x: Tensor, weight: Tensor, stride: int, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of input and weight in float64."""
    inputs = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = F.conv2d(*inputs, stride=stride, padding=weight.shape[2] // 2)
    return (y, *torch.autograd.grad(y, inputs, grad.double()))


CASES = {
    "one tile, not full": Case(2, 16, 16, 9, 7),
    "four pixels in the last tile": Case(2, 3, 16, 13, 10),
    "stride 2, odd sides": Case(3, 16, 32, 11, 9, stride=2),
    "stride 2, even sides": Case(2, 32, 16, 8, 12, stride=2),
    "a tap at a time": Case(2, 48, 32, 5, 4),
    "48 out": Case(2, 3, 48, 4, 3),
    "64 out": Case(2, 3, 64, 9, 9, stride=2),
    "grey": Case(3, 1, 16, 5, 6),
    "20 in": Case(2, 20, 16, 4, 5),
    "one pixel": Case(2, 16, 16, 1, 1, stride=2),
    "1x1": Case(2, 64, 16, 5, 5, 1),
    "1x1, stride 2": Case(3, 16, 64, 7, 6, 1, 2),
    "1x1, 48 to 48": Case(3, 48, 48, 5, 5, 1),
    "two chunks": Case(3, 3, 16, 19, 19),
}


@on_device
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_match_float64(device, case):
    x, weight, grad, shortcut = draw(case, device)
    y, same, _ = conv_launch.convolve(x, weight, case.stride)
    want, want_dx, want_dweight = exact(x, weight, case.stride, grad)
    assert torch.equal(same, x)
    assert apart(y, want) < 1e-6
    if x.requires_grad:
        dx, dweight = torch.autograd.grad((y, same), (x, weight), (grad, shortcut))
        assert apart(dx, want_dx + shortcut.double()) < 1e-6
    else:
        dx, dweight = x, torch.autograd.grad(y, weight, grad)[0]
    assert apart(dweight, want_dweight) < 1e-6
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, dx, dweight))


@on_device
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sums_are_float32_and_rounded_once(device, dtype, stride):
    x, weight, grad, _ = draw(Case(2, 16, 32, 7, 5, stride=stride), device, dtype)
    y = conv_launch.convolve(x, weight, stride)[0]
    got = (y, *torch.autograd.grad(y, (x, weight), grad))
    for a, b in zip(got, exact(x, weight, stride, grad), strict=True):
        assert a.dtype == dtype
        assert apart(a, b) < BOUNDS[dtype]


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_shortcuts_gradient_is_added_before_rounding(device, dtype):
    x, weight, grad, shortcut = draw(Case(2, 16, 16, 5, 4, 1), device, dtype)
    y, same, _ = conv_launch.convolve(x, weight, 1)
    shortcut = shortcut * 100
    dx = torch.autograd.grad((y, same), x, (grad, shortcut))[0]
    assert dx.dtype == dtype
    torch.testing.assert_close(dx, (exact(x, weight, 1, grad)[1] + shortcut.double()).to(dtype), rtol=1e-6, atol=1e-5)


@on_device
def test_more_chunks_of_pixels_than_are_added_at_once(device, monkeypatch):
    monkeypatch.setattr(conv_launch, "TILES_PER_CHUNK", 1)
    x, weight, grad, _ = draw(Case(5, 20, 16, 21, 21, 1), device)  # 35 chunks of 64
    dweight = torch.autograd.grad(conv_launch.convolve(x, weight, 1)[0], weight, grad)[0]
    assert apart(dweight, exact(x, weight, 1, grad)[2]) < 1e-6


@on_device
def test_strides_of_input_weight_and_gradients_do_not_matter(device):
    case = Case(2, 16, 16, 4, 5, stride=2)
    results = []
    for last in (True, False):
        x, weight, grad, shortcut = draw(case, device, last=last)
        y, same, _ = conv_launch.convolve(x, weight, 2)
        results.append((y, *torch.autograd.grad((y, same), (x, weight), (grad, shortcut))))
    assert not x.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_device
def test_gradients_may_be_expanded(device):
    x, weight, _, _ = draw(Case(2, 16, 16, 4, 5, 1), device)
    one, grads = torch.ones((), device=device), []
    for expanded in (True, False):
        outputs = conv_launch.convolve(x, weight, 1)[:2]
        ones = [one.expand_as(t) if expanded else torch.ones_like(t) for t in outputs]
        grads.append(torch.autograd.grad(outputs, (x, weight), ones))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_input_gives_the_same_bits(device, dtype):
    x, weight, grad, shortcut = draw(Case(3, 16, 16, 16, 16, 1), device, dtype)
    runs = []
    for _ in range(2):
        y, same, moments = conv_launch.convolve(x, weight, 1, True)
        runs.append((y, moments, *torch.autograd.grad((y, same), (x, weight), (grad, shortcut))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@on_device
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_images_are_read_in_their_own_type(device, dtype):
    case = Case(2, 3, 16, 7, 6)
    x, weight, grad, _ = draw(case, device)
    weight, grad = weight.detach().to(dtype).requires_grad_(), grad.to(dtype)
    y = conv_launch.convolve(x, weight, 1)[0]
    dweight = torch.autograd.grad(y, weight, grad)[0]
    assert y.dtype == dweight.dtype == dtype
    rounded = conv_launch.convolve(x.to(dtype), weight, 1)[0]
    assert torch.equal(y, rounded)
    assert torch.equal(dweight, torch.autograd.grad(rounded, weight, grad)[0])
    assert apart(dweight, exact(x.to(dtype), weight, 1, grad)[2]) < BOUNDS[dtype]


# -- Moments ------------------------------------------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize(
    ("case", "parts", "dtype"),
    [
        (Case(2, 16, 16, 32, 32, 1), 4, torch.float32),
        (Case(2, 3, 32, 16, 16), 2, torch.float32),
        (Case(2, 16, 16, 31, 31, stride=2), 1, torch.float16),
        (Case(3, 16, 64, 8, 8, 1), 1, torch.float32),
        (Case(2, 16, 48, 8, 64, 1), 2, torch.float16),
    ],
    ids=lambda value: str(tuple(value)) if isinstance(value, Case) else str(value),
)
def test_moments_are_those_of_equal_parts_of_the_stored_output(device, case, parts, dtype):
    x, weight, _, _ = draw(case, device, dtype)
    # A mean far off zero: squares less the square of the mean would lose their digits.
    x = (x.detach() + 100 / (case.n_in * case.size**2)).requires_grad_(x.requires_grad)
    weight = (weight.detach() + 1).requires_grad_()
    y, _, moments = conv_launch.convolve(x, weight, case.stride, True)
    assert moments.shape == (2, case.images, parts, case.n_out) and moments.dtype == torch.float32
    assert not moments.requires_grad
    cut = y.detach().double().flatten(2).unflatten(2, (parts, -1))  # (N, C, parts, pixels of a part)
    assert apart(moments[0], cut.mean(3).transpose(1, 2)) < 1e-6
    assert apart(moments[1], cut.var(3, correction=0).transpose(1, 2)) < 1e-6


@on_device
@pytest.mark.parametrize(
    "case", [Case(2, 16, 16, 15, 17, 1), Case(2, 16, 16, 8, 16, 1), Case(4, 16, 32, 8, 8, 1), Case(2, 16, 64, 9, 8, 1)]
)
def test_there_are_no_moments_where_a_tile_does_not_fit_an_image(device, case):
    x, weight, _, _ = draw(case, device)
    assert conv_launch.convolve(x, weight, case.stride, True)[2] is None


@on_device
def test_there_are_no_moments_of_more_parts_than_a_norm_takes(device):
    for height, parts in ((64, 16), (68, None)):
        x, weight, _, _ = draw(Case(1, 16, 16, height, 64, 1), device)
        moments = conv_launch.convolve(x, weight, 1, True)[2]
        assert (None if moments is None else moments.shape[2]) == parts


@on_device
def test_there_are_no_moments_unless_they_are_asked_for(device):
    x, weight, _, _ = draw(Case(1, 16, 16, 16, 16, 1), device)
    assert conv_launch.convolve(x, weight, 1)[2] is None
    assert conv_launch.convolve(x, weight, 1, True)[2] is not None


# -- What is not needed, and second derivatives ---------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_a_gradient_that_is_not_needed_is_not_computed(device, wanted, monkeypatch):
    x, weight, grad, shortcut = draw(Case(2, 16, 16, 5, 6, 1), device)
    want = exact(x, weight, 1, grad)
    x, weight = x.detach().requires_grad_(wanted == "x"), weight.detach().requires_grad_(wanted == "weight")
    y, same, _ = conv_launch.convolve(x, weight, 1)
    if wanted == "x":
        monkeypatch.setattr(conv_launch, "weight_gradient", None)
        assert apart(torch.autograd.grad((y, same), x, (grad, shortcut))[0], want[1] + shortcut.double()) < 1e-6
    else:
        monkeypatch.setattr(conv_launch, "launch", None)
        assert apart(torch.autograd.grad(y, weight, grad)[0], want[2]) < 1e-6


@on_device
def test_without_gradients_there_is_no_graph(device):
    x, weight, _, _ = draw(Case(1, 16, 16, 3, 3), device)
    with torch.no_grad():
        assert not any(t.requires_grad for t in conv_launch.convolve(x, weight, 1)[:2])


@on_device
@pytest.mark.parametrize("create_graph", [False, True])
def test_if_only_the_returned_input_is_used_its_gradient_passes(device, create_graph):
    x, weight, _, shortcut = draw(Case(2, 16, 16, 3, 4), device, last=False)
    same = conv_launch.convolve(x, weight, 1)[1]
    dx, dweight = torch.autograd.grad(same, (x, weight), shortcut, allow_unused=True, create_graph=create_graph)
    assert torch.equal(dx, shortcut)
    assert dweight is None


def squares(y: Tensor, same: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of the gradients' squares."""
    total = y.square().mean() + same.pow(3).mean()
    first = torch.autograd.grad(total, inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)


@on_device
@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "nchw"])
def test_second_derivatives_are_torchs(device, last):
    x, weight, _, _ = draw(Case(2, 16, 16, 5, 4, stride=2), device, last=last)
    y, same, _ = conv_launch.convolve(x, weight, 2)
    got = squares(y, same, (x, weight))
    inputs = tuple(t.detach().double().requires_grad_() for t in (x, weight))
    want = squares(F.conv2d(*inputs, stride=2, padding=1), inputs[0], inputs)
    for a, b in zip(got, want, strict=True):
        assert apart(a, b) < 1e-5


@on_device
def test_second_derivatives_pass_images_of_another_type(device):
    x, weight, _, _ = draw(Case(2, 3, 16, 5, 4), device)
    weight = weight.detach().half().requires_grad_()

    def curved(y: Tensor, weight: Tensor) -> Tensor:
        first = torch.autograd.grad(y.float().pow(3).mean(), weight, create_graph=True)[0]
        return torch.autograd.grad(first.float().square().sum(), weight)[0]

    inputs = [t.detach().half().double().requires_grad_() for t in (x, weight)]
    want = curved(F.conv2d(*inputs, padding=1), inputs[1])
    assert apart(curved(conv_launch.convolve(x, weight, 1)[0], weight), want) < 5e-3


# -- Types that the kernels do, and a captured convolution ----------------------------------------------------------------


@on_device
@pytest.mark.parametrize("allowed", [True, False])
def test_float32_is_available_where_torch_allows_tf32(device, allowed):
    with tf32(allowed):
        assert conv_launch.available(torch.bfloat16) and conv_launch.available(torch.float16)
        assert conv_launch.available(torch.float32) == allowed
        assert not conv_launch.available(torch.float64)


@pytest.mark.gpu
@needs_gpu
@here
def test_tf32_products_are_as_good_as_tf32():
    x, weight, grad, _ = draw(Case(8, 32, 32, 16, 16), "cuda")
    with tf32(True):
        y = conv_launch.convolve(x, weight, 1)[0]
        got = (y, *torch.autograd.grad(y, (x, weight), grad))
    assert max(apart(a, b) for a, b in zip(got, exact(x, weight, 1, grad), strict=True)) < 1e-3


@pytest.mark.gpu
@needs_gpu
@here
def test_a_captured_convolution_gives_the_bits_of_the_eager_one():
    x, weight, grad, shortcut = draw(Case(64, 16, 16, 32, 32), "cuda", torch.bfloat16)

    def work() -> tuple[Tensor, ...]:
        y, same, moments = conv_launch.convolve(x, weight, 1, True)
        assert moments is not None
        return y, moments, *torch.autograd.grad((y, same), (x, weight), (grad, shortcut))

    assert equals_itself_captured(work)
