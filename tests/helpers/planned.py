"""Batches for the norm's Triton kernels, and their errors against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from interpreter import RUNNING, apart
from torch import Tensor

from tbbn.nn.plan import Layout, Plan, PlanOptions

if RUNNING:
    from tbbn.accelerators.triton import norm as kernels

EPS, MOMENTUM = 1e-5, 0.1


def literal(x: Tensor, weight: Tensor, bias: Tensor, current: int, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the current rows, repeat the memory rows, normalise each split, average the copies; and running statistics."""
    past = torch.arange(current, len(x), device=x.device)
    y, means, variances = torch.zeros_like(x), [], []
    for j in range(r):
        rows = torch.cat([torch.arange(j, current, r, device=x.device), past])
        out = F.batch_norm(x[rows], None, None, weight, bias, training=True, eps=EPS)
        share = torch.where(rows < current, 1.0, 1 / r).to(x).view(-1, *[1] * (x.dim() - 1))
        y = y.index_add(0, rows, out * share)
        flat = x[rows].transpose(0, 1).flatten(1).detach()
        means.append(flat.mean(1))
        variances.append(flat.var(1))
    mean, var = torch.stack(means).mean(0), torch.stack(variances).mean(0)
    return y, MOMENTUM * mean, 1 - MOMENTUM + MOMENTUM * var


def make_plan(n_current: int, n_memory: int, past: int, device: str, dtype=torch.float32, **options) -> Plan:
    plan = Layout(n_current, n_memory, past).plan(PlanOptions(**options), torch.device(device), dtype)
    assert plan is not None
    return plan


def triton_norm(
    x, weight, bias, plan, running=(None, None), momentum=MOMENTUM, relu=False, residual=None, moments=None
):
    """The Triton backend, called by the protocol."""
    return kernels.norm_act(
        x, *running, weight, bias, plan, momentum, EPS, relu=relu, residual=residual, moments=moments
    )  # fmt: skip


def draw(shape, device, dtype=torch.float32, offset=1.0, last=False) -> list[Tensor]:
    """Input, weight, bias, gradient."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 2 + offset
    weight, bias = torch.rand(shape[1], generator=generator) + 0.5, torch.randn(shape[1], generator=generator)
    g = torch.randn(shape, generator=generator)
    x, g = x.to(device, dtype), g.to(device, dtype)
    if last:
        fmt = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x, g = x.to(memory_format=fmt), g.to(memory_format=fmt)
    return [x.requires_grad_(), weight.to(device).requires_grad_(), bias.to(device).requires_grad_(), g]


def buffers(channels: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.zeros(channels, device=device), torch.ones(channels, device=device)


def compare(
    shape,
    past,
    device,
    current=None,
    dtype=torch.float32,
    offset=1.0,
    last=False,
    rule="paper",
    relu=False,
    norm=triton_norm,
):
    """Errors of output, gradients of input, weight and bias, running mean and variance against the literal form in float64."""
    current = current or shape[0] * 3 // 4
    plan = make_plan(current, shape[0] - current, past, device, rule=rule)
    x, weight, bias, g = draw(shape, device, dtype, offset, last)
    running = buffers(shape[1], device)
    y = norm(x, weight, bias, plan, running, relu=relu)
    assert y.dtype == dtype and y.stride() == x.stride()
    got = (y, *torch.autograd.grad(y, (x, weight, bias), g), *running)
    assert got[1].dtype == dtype and got[1].stride() == x.stride()
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y, *running_exact = literal(*exact, current, plan.gather.shape[0])
    y = F.relu(y) if relu else y
    want = (y, *torch.autograd.grad(y, exact, g.double()), *running_exact)
    return [apart(a, b) for a, b in zip(got, want, strict=True)]
