"""The norm in compiled code for a GPU: its kernels on Triton's interpreter, and compiled networks on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interpreter import RUNNING, apart, here, interpret, needs_gpu, on_device
from planned import EPS, MOMENTUM, compare, draw, make_plan
from torch import nn

import tbbn
from tbbn.nn import functional

if RUNNING:
    from tbbn.accelerators.triton import compiled


@here
def test_the_kernels_pass_on_the_interpreter():
    interpret(__file__)


def norm(x, weight, bias, plan, running=(None, None), momentum=MOMENTUM, batches=None, relu=False):
    assert not relu  # the compiler adds it
    return compiled.norm(x, *running, weight, bias, plan, momentum, EPS, batches)


CASES = {
    "r=2": {"shape": (8, 3, 5, 4), "past": 3},
    "parts of rows": {"shape": (16, 2, 8, 8), "past": 9},
    "channels_last": {"shape": (16, 5, 3, 4), "past": 9, "last": True},
    "uneven": {"shape": (11, 2, 3, 3), "past": 2, "current": 8, "rule": "uneven"},
    "(N, C, 1)": {"shape": (16, 19, 1), "past": 9},
    "(N, C, D, H, W)": {"shape": (8, 2, 2, 3, 3), "past": 3},
}


@on_device
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_gradients_and_running_statistics_match_float64(device, case):
    assert max(compare(device=device, norm=norm, **case)) < 5e-6


@on_device
def test_half_precision_is_rounded_only_at_the_ends(device):
    y, dx, *rest = compare((16, 3, 4, 4), 9, device, dtype=torch.bfloat16, last=True, norm=norm)
    assert max(y, dx) < 8e-3
    assert max(rest) < 5e-6


@on_device
def test_a_large_offset_costs_no_more_than_in_batch_norm(device):
    x = draw((16, 2, 4, 4), device, offset=1e4)[0].detach()
    plain = apart(F.batch_norm(x, None, None, training=True), F.batch_norm(x.double(), None, None, training=True))
    y, dx, dw, *rest = compare((16, 2, 4, 4), 9, device, offset=1e4, norm=norm)
    assert y < max(plain, 1e-6)
    assert max(dx, dw) < 1e-3
    assert max(rest) < 1e-6


@on_device
def test_what_is_missing_is_left_out_and_the_batch_is_counted(device):
    x, _, _, g = draw((8, 3), device)
    plan = make_plan(6, 2, 3, device)
    mean, var, batches = torch.zeros(3, device=device), torch.ones(3, device=device), torch.tensor(4, device=device)
    y = norm(x, None, None, plan, (mean, var), torch.tensor(1.0, device=device), batches)
    assert batches == 5
    exact = x.detach().double().requires_grad_()
    want, want_mean, _ = functional.reference(exact, None, None, make_plan(6, 2, 3, device, torch.float64), EPS)
    assert max(apart(y, want), apart(mean, want_mean.mean(0))) < 1e-6
    assert apart(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(want, exact, g.double())[0]) < 2e-6
    norm(x, None, None, plan, (None, None), batches=batches)
    assert batches == 6


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)]
    return tbbn.convert(nn.Sequential(*layers)).cuda()


def train(call, model, rows=(16, 16, 16)):
    seen = []
    for step, n in enumerate(rows):
        x = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(step)).cuda() + 1
        model.zero_grad()
        with tbbn.balance(model, current=n - 4, memory=4, past_tasks=9, rule="uneven"):
            y = call(x)
        y.pow(2).mean().backward()
        seen += [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    return [*seen, *model.buffers()]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures an empty one first
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_network_trains_as_the_eager_one(mode):
    torch._dynamo.reset()
    model, plain = network(), network()
    got = train(torch.compile(model, fullgraph=True, mode=mode), model)
    for a, b in zip(got, train(plain, plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@needs_gpu
def test_a_batch_of_another_size_needs_no_graph_each():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, plain, rows = network(), network(), (16, 13, 15, 12, 16)
    counter = CompileCounterWithBackend("aot_eager")
    got = train(torch.compile(model, fullgraph=True, backend=counter), model, rows)
    for a, b in zip(got, train(plain, plain, rows), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert counter.frame_count <= 3
