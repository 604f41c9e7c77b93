"""The Triton kernels against float64: on Triton's interpreter and on a GPU (see ``tests/helpers/interpreter.py``)."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpreter import INTERPRETED, RUNNING, apart, equals_itself_captured, here, interpret, needs_gpu, on_device
from planned import EPS, MOMENTUM, buffers, compare, draw, literal, make_plan, triton_norm
from torch import Tensor

import tbbn
from tbbn.nn import functional
from tbbn.nn.plan import Plan

if RUNNING:
    import triton.language as tl

    from tbbn.accelerators.triton import norm as kernels
    from tbbn.accelerators.triton import norm_forward, norm_launch, norm_tiles


@here
def test_the_kernels_pass_on_the_interpreter():
    interpret(__file__)


@here
def test_importing_the_package_does_not_import_triton():
    code = "import sys, tbbn, tbbn.nn.functional; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(params=["rows first", "runs first", "split"] if INTERPRETED else ["whole", "split"])
def whole(request, monkeypatch):
    """Moments from the tile that is normalised, with its axes in either order, or from a launch of their own."""
    if request.param == "split":
        monkeypatch.setattr(norm_tiles, "WHOLE_LIMIT", 0)
    elif INTERPRETED:  # a compiled kernel keeps the value it was compiled with
        monkeypatch.setattr(norm_forward, "ROWS_FIRST", tl.constexpr(request.param == "rows first"))


CASES = {
    "r=2": {"shape": (8, 3, 5, 4), "past": 3},
    "r=4": {"shape": (16, 2, 3, 3), "past": 9},
    "r=4 channels_last": {"shape": (16, 5, 3, 3), "past": 9, "last": True},
    "uneven": {"shape": (11, 2, 3, 3), "past": 2, "current": 8, "rule": "uneven"},
    "(N, C, 1)": {"shape": (16, 19, 1), "past": 9},
    "(N, C, L)": {"shape": (8, 3, 7), "past": 3},
    "(N, C, D, H, W)": {"shape": (8, 2, 2, 3, 3), "past": 3},
    "3d channels_last": {"shape": (8, 3, 2, 3, 2), "past": 3, "last": True},
    "several runs": {"shape": (11, 2, 9, 9), "past": 2, "current": 8, "rule": "uneven"},
    "one channel": {"shape": (8, 1, 4, 4), "past": 3},
    "many channels, no power of two": {"shape": (4, 136, 3, 3), "past": 3, "last": True},
    "768 channels": pytest.param({"shape": (4, 768, 3, 3), "past": 3, "last": True}, marks=pytest.mark.nightly),
}


@on_device
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_gradients_and_running_statistics_match_float64(device, case, whole):
    assert max(compare(device=device, **case)) < 5e-6


@on_device
@pytest.mark.parametrize(("shape", "last"), [((4, 1, 67, 65), False), ((4, 2, 46, 45), True)])
def test_rows_longer_than_a_tile_are_summed_piece_by_piece(device, shape, last):
    assert max(compare(shape, 3, device, current=2, last=last)) < 5e-6


@on_device
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_half_precision_is_rounded_only_at_the_ends(device, dtype, bound, last):
    y, dx, *rest = compare((16, 3, 3, 3), 9, device, dtype=dtype, last=last)
    assert max(y, dx) < bound
    assert max(rest) < 5e-6


@on_device
def test_a_large_offset_costs_no_more_than_in_batch_norm(device, whole):
    shape = (16, 2, 4, 4)
    x = draw(shape, device, offset=1e4)[0].detach()
    plain = apart(F.batch_norm(x, None, None, training=True), F.batch_norm(x.double(), None, None, training=True))
    y, dx, dw, *rest = compare(shape, 9, device, offset=1e4)
    assert y < max(plain, 1e-6)
    assert max(dx, dw) < 1e-3
    assert max(rest) < 1e-6


@on_device
@pytest.mark.parametrize(("with_weight", "with_bias"), [(False, False), (True, False)])
def test_weight_and_bias_may_be_missing(device, with_weight, with_bias):
    x, weight, bias, g = draw((8, 3, 3, 3), device)
    plan = make_plan(6, 2, 3, device)
    y = triton_norm(x, weight if with_weight else None, bias if with_bias else None, plan)
    inputs = [x, weight] if with_weight else [x]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    gain = exact[1] if with_weight else torch.ones_like(weight).double()
    want, _, _ = literal(exact[0], gain, torch.zeros_like(gain), 6, 2)
    assert apart(y, want) < 1e-6
    for a, b in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(want, exact, g.double()), strict=True):
        assert apart(a, b) < 1e-6


@on_device
@pytest.mark.parametrize(
    "options",
    [{"case": 1}, {"case": 2}, {"case": 4}, {"memory": "own"}, {"total_variance": True}, {"kind": "weighted"}],
    ids=str,
)
def test_other_plans_match_the_reference_in_float64(device, options):
    x, weight, bias, g = draw((16, 3, 3, 3), device)
    running = buffers(3, device)
    plan, exact_plan = (make_plan(12, 4, 5, device, dtype, **options) for dtype in (torch.float32, torch.float64))
    y = triton_norm(x, weight, bias, plan, running, torch.tensor(MOMENTUM, device=device))
    _, (mean, var), _ = norm_launch.forward(x, weight, bias, plan.gather, plan.scatter, EPS)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    want, want_mean, want_var = functional.reference(*exact, exact_plan, EPS)
    assert max(apart(y, want), apart(mean, want_mean), apart(var, want_var)) < 1e-6
    counts = exact_plan.sizes * 9
    moved = exact_plan.running @ want_mean
    spread = (exact_plan.running * counts / (counts - 1)) @ want_var
    if options.get("total_variance"):
        spread = spread + exact_plan.running @ (want_mean - moved).square()
    assert apart(running[0], MOMENTUM * moved) < 1e-6
    assert apart(running[1], 1 - MOMENTUM + MOMENTUM * spread) < 1e-6
    for a, b in zip(
        torch.autograd.grad(y, (x, weight, bias), g), torch.autograd.grad(want, exact, g.double()), strict=True
    ):
        assert apart(a, b) < 2e-6


@on_device
def test_memory_order_of_input_and_gradient_does_not_matter(device):
    plan = make_plan(6, 2, 3, device)
    x, weight, bias, _ = draw((8, 3, 4, 4), device)
    odd = torch.empty(4, 8, 4, 3, device=device).permute(1, 3, 0, 2).copy_(x.detach()).requires_grad_()
    assert not odd.is_contiguous() and not odd.is_contiguous(memory_format=torch.channels_last)
    for t in (x, odd):
        triton_norm(t, weight, bias, plan).square().mean((2, 3)).sum().backward()
    grad = x.grad.clone()
    assert apart(odd.grad, grad) < 1e-6
    y = triton_norm(x, weight, bias, plan)
    ones = torch.autograd.grad(y, weight, torch.ones((), device=device).expand(8, 3, 4, 4), retain_graph=True)[0]
    assert torch.equal(ones, torch.autograd.grad(y, weight, torch.ones_like(y))[0])


@on_device
def test_second_derivatives_are_those_of_the_reference(device):
    plan, exact_plan = make_plan(3, 1, 3, device), make_plan(3, 1, 3, device, torch.float64)
    x, weight, bias, g = draw((4, 2, 3), device)

    def penalty(y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        dx, dw = torch.autograd.grad(y, (x, weight), g.to(y.dtype), create_graph=True)
        return list(torch.autograd.grad(dx.square().sum() + dw.square().sum(), (x, weight)))

    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    want = penalty(functional.reference(*exact, exact_plan, EPS)[0], *exact[:2])
    got = penalty(triton_norm(x, weight, bias, plan), x, weight)
    for a, b in zip(got, want, strict=True):
        assert apart(a, b) < 1e-4


@on_device
@pytest.mark.parametrize("rows", [1, 4])
def test_second_derivatives_without_a_plan_are_those_of_batch_norm(device, rows):
    x, weight, bias, g = draw((rows, 3, 4, 4), device)

    def penalty(y: Tensor, x: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad(y, x, g.to(y.dtype), create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    want = penalty(F.batch_norm(exact[0], None, None, *exact[1:], training=True, eps=EPS), exact[0])
    assert apart(penalty(triton_norm(x, weight, bias, None), x), want) < 1e-4


@on_device
def test_updating_the_running_statistics_is_seen_by_autograd(device):
    x, weight, bias, _ = draw((8, 3, 2, 2), device)
    running = buffers(3, device)
    for statistic in running:
        product = (
            statistic * torch.ones(3, device=device, requires_grad=True)
        ).sum()  # keeps the statistic for backward
        triton_norm(x, weight, bias, make_plan(6, 2, 3, device), running)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@on_device
def test_what_the_kernels_cannot_do_is_left_to_other_backends(device):
    plan, x = make_plan(6, 2, 3, device), torch.zeros(8, 3, 2, 2, device=device)

    def supports(x: Tensor, plan: Plan | None) -> bool:
        return kernels.supports(x, None, None, None, None, plan)

    assert supports(x, plan)
    assert not supports(x.double(), plan)
    assert not supports(x[:0], plan)
    assert not supports(x.view(8, 3, 1, 1, 2, 2), plan)
    assert not supports(torch.empty(5000, 1, device=device), plan)
    assert supports(x[:1, :1, :1, :1].expand(1, 1, 2048, 2047), None)
    assert not supports(x[:1, :1, :1, :1].expand(1, 1, 2048, 2048), None)
    assert not supports(x, make_plan(6, 2, 3, device, case=3))
    assert not supports(x[:1, :, :1, :1], None)  # batch norm's own error: one value per channel has no variance


@on_device
def test_a_plan_of_the_whole_batch_is_never_freed(device):
    """A captured CUDA graph reads its plan as long as it is replayed, although nobody else keeps it."""
    kept = weakref.ref(kernels.whole_batch(64, torch.device(device)).gather)
    for n in range(65, 600):
        kernels.whole_batch(n, torch.device(device))
    gc.collect()
    assert kept() is not None


@pytest.mark.gpu
@needs_gpu
@here
def test_adab2n_uses_task_ids_on_a_gpu_as_on_a_cpu_also_captured():
    torch.manual_seed(0)
    images, tasks = torch.randn(64, 16, 4, 4), torch.cat([torch.full((48,), 3), torch.arange(16) % 4 % 3])

    def step(device: str, strength: float) -> Callable[[], list[Tensor]]:
        layer = tbbn.AdaptiveBalancedNorm(16, device=device, strength=strength)
        x, ids = images.to(device, copy=True).requires_grad_(), tasks.to(device)

        def work() -> list[Tensor]:
            with tbbn.balance(layer, current=48, memory=16, past_tasks=3, task_ids=ids):
                y = layer(x)
            loss = y.pow(3).mean() + (tbbn.penalty(layer) if strength else 0)
            return [y, *torch.autograd.grad(loss, (x, layer.task_logits))]

        return work

    for a, b in zip(step("cuda", 0.1)(), step("cpu", 0.1)(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    assert equals_itself_captured(step("cuda", 0.0))  # the penalty depends on the steps before


@pytest.mark.gpu
@needs_gpu
@here
def test_a_captured_layer_gives_the_bits_of_the_eager_one():
    layer = tbbn.TaskBalancedBatchNorm2d(16).cuda()
    x, _, _, g = draw((64, 16, 8, 8), "cuda")
    work = lambda: torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), g)  # noqa: E731
    with tbbn.balance(layer, current=48, memory=16, past_tasks=9):
        assert equals_itself_captured(work)
