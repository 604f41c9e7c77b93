"""The Triton backend: task-balanced batch norm on CUDA, with the ReLU and the residual of a residual network.

Forward is three launches: row moments, the plan, the affine pass with ReLU and residual. If one tile holds all rows and pixels of
a channel, forward is one launch that reads the input once. Backward has the same structure. There are no atomics and no host
syncs: the same input gives the same bits, and a CUDA graph can capture every launch. No program waits for another program of its
launch, so runs on several streams can share a GPU.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tbbn.accelerators.eager import activate, reference_gradients
from tbbn.accelerators.triton import norm_forward, norm_launch
from tbbn.nn.plan import Plan, one_group

_MAX_ROWS = 4096
_MAX_PIXELS = 2**22  # beyond this a grid would have too many programs along an axis
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
) -> bool:  # fmt: skip
    if not (x.is_cuda or (norm_forward.INTERPRETED and x.is_cpu)) or x.dtype not in _DTYPES or not 2 <= x.dim() <= 5:
        return False
    rows, channels, size = x.shape[0], x.shape[1], x.numel()
    return (
        0 < size < 2**31
        and rows <= _MAX_ROWS
        and size < _MAX_PIXELS * rows * channels
        # With a single value per channel batch norm raises its own error.
        and (size > channels if plan is None else plan.blend is None)
    )


def norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
    momentum: float | Tensor, eps: float, batches: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _train(x, running_mean, running_var, weight, bias, plan, momentum, eps, batches, False, None, None)


def norm_act(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
    momentum: float | Tensor, eps: float, batches: Tensor | None = None, *,
    relu: bool, residual: Tensor | None, moments: Tensor | None = None, training: bool = True,
) -> Tensor:  # fmt: skip
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):  # the kernels cannot add it
        y = norm_act(
            x, running_mean, running_var, weight, bias, plan, momentum, eps, batches,
            relu=False, residual=None, moments=moments, training=training,
        )  # fmt: skip
        return activate(y, relu, residual)
    if not training:
        assert running_mean is not None and running_var is not None
        return norm_launch.eval_forward(x, running_mean, running_var, weight, bias, eps, relu, residual)
    return _train(x, running_mean, running_var, weight, bias, plan, momentum, eps, batches, relu, residual, moments)


def _train(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
    momentum: float | Tensor, eps: float, batches: Tensor | None,
    relu: bool, residual: Tensor | None, moments: Tensor | None,
) -> Tensor:  # fmt: skip
    plan = whole_batch(x.shape[0], x.device) if plan is None else plan.to(x.device, torch.float32)
    if running_mean is None or running_var is None:
        if batches is not None:
            batches.add_(1)
        return _apply(x, weight, bias, residual, plan, eps, None, relu, moments)
    running = norm_launch.Running(
        running_mean, running_var, plan.running, plan.sizes, momentum, batches, plan.total_variance
    )
    y = _apply(x, weight, bias, residual, plan, eps, running, relu, moments)
    torch.autograd.graph.increment_version((running_mean, running_var))
    return y


@cache
def whole_batch(rows: int, device: torch.device) -> Plan:
    """Batch norm as a plan: one group of all rows. Never freed: a CUDA graph may still read it."""
    return one_group(rows).to(device, torch.float32)


class _TritonNorm(torch.autograd.Function):
    """Saves the input, (r, C) statistics and, for a ReLU, the output: what batch norm saves."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        plan: Plan,
        eps: float,
        running: norm_launch.Running | None,
        relu: bool,
        moments: Tensor | None,
    ) -> Tensor:
        y, stats, sign = norm_launch.forward(
            x, weight, bias, plan.gather, plan.scatter, eps, running, relu, residual, moments
        )
        ctx.save_for_backward(x, weight, bias, stats, sign if relu else None)
        ctx.plan, ctx.eps, ctx.relu, ctx.has_residual = plan, eps, relu, residual is not None
        ctx.table = relu and sign is not y
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats, sign = ctx.saved_tensors
        needs = ctx.needs_input_grad
        need_residual = ctx.has_residual and needs[3]
        if torch.is_grad_enabled():  # for second derivatives
            if ctx.relu:
                grad = torch.where((_output(x, sign) if ctx.table else sign) > 0, grad, 0)
            given = reference_gradients(grad, x, weight, bias, ctx.plan, ctx.eps, needs[:3])
            return *given, grad if need_residual else None, None, None, None, None, None
        dx, dweight, dbias, dresidual = norm_launch.backward(
            grad,
            x,
            weight,
            bias,
            ctx.plan.gather,
            ctx.plan.scatter,
            stats,
            ctx.eps,
            sign,
            need_residual and ctx.relu,
            ctx.table,
        )
        if not ctx.relu:
            dresidual = grad
        return (
            dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None,
            dresidual if need_residual else None, None, None, None, None, None,
        )  # fmt: skip


def _output(x: Tensor, table: Tensor) -> Tensor:
    """Recompute the norm's output from the factors and offsets of its affine pass."""
    rows = x.reshape(*x.shape[:2], -1).float()
    factor, offset = table.unsqueeze(3).unbind()
    return ((rows - rows[:1, :, :1]) * factor + offset).view(x.shape)


# Function.apply without its functorch check: backends are not used under functorch.
_apply = super(torch.autograd.Function, _TritonNorm).apply
