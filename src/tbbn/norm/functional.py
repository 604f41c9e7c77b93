"""The three steps of task-balanced batch norm: moments, the plan, one affine pass.

    m[b], q[b]      mean and mean square of row b over its pixels, per channel
    mean[j], var[j] statistics of group j: gather @ m, and gather @ q - mean^2
    y[b] = x[b] * A[b] + S[b],   A = scatter @ (weight * inv),  S = bias - scatter @ (weight * inv * mean)

Nothing of size (r, B, C, H, W) exists; the backward pass has the same shape: two row sums, the transposed plan, one pass.
``reference`` says the same in differentiable tensor code. It is what ``torch.compile`` traces and what gives second
derivatives; ``_Planned`` is the fast eager form of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tbbn.norm.plan import Plan

# Mean squares lose digits when a channel's mean is large against its spread. Where this multiple of the squared mean exceeds
# the mean square (the mean is about 3 standard deviations off zero), the moments are taken of centred values instead.
_OFF_CENTRE = 1.1


def task_balanced_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise ``x`` (N, C, ...) by a plan; update the running statistics in place, if given.

    Statistics are computed in float32 (float64 for float64 input), whatever the input's type.
    """
    if x.shape[0] != plan.rows:
        raise ValueError(f"task_balanced_batch_norm: the plan covers {plan.rows} rows but the input has {x.shape[0]}.")
    if plan.gather.device != x.device or plan.gather.dtype != statistics_dtype(x):
        plan = plan.to(x.device, statistics_dtype(x))
    if torch.compiler.is_compiling():
        y, mean, var = reference(x, weight, bias, plan, eps)
    else:
        y, mean, var = _Planned.apply(x, weight, bias, plan, eps)
    if running_mean is not None and running_var is not None:
        pixels = x[0, 0].numel() if x.dim() > 2 else 1
        with torch.no_grad():
            update_running(running_mean, running_var, mean, var, plan, pixels, momentum)
    return y


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    plan: Plan,
    pixels: int,
    momentum: float | Tensor,
) -> None:
    """Move the running statistics towards the groups' average; the variance stored is the unbiased one, as in batch norm."""
    batch_mean = torch.mv(mean.T, plan.running)  # (C,)
    batch_var = torch.mv(var.T, plan.per_pixel(pixels).running_var)
    if plan.total_variance:
        batch_var += torch.mv((mean - batch_mean).square().T, plan.running)
    running_mean.lerp_(batch_mean.to(running_mean.dtype), momentum)
    running_var.lerp_(batch_var.to(running_var.dtype), momentum)


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, group means (r, C) and biased group variances (r, C), in differentiable tensor code."""
    rows, dim = as_rows(x.to(statistics_dtype(x)))
    centre = rows.detach().mean((0, dim))  # (C,)
    rows = rows - centre.unsqueeze(2 - dim)
    row_mean, row_square = rows.mean(dim), rows.square().mean(dim)  # (B, C)
    mean = plan.gather @ row_mean  # (r, C), off the centre
    var = (plan.gather @ row_square - mean.square()).clamp_min(0)
    used_mean, used_var = (mean, var) if plan.blend is None else (plan.blend @ mean, plan.blend @ var)
    scale = (used_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    shift = -used_mean * scale
    if bias is not None:
        shift = shift + bias.to(scale.dtype)
    y = rows * (plan.scatter @ scale).unsqueeze(dim) + (plan.scatter @ shift).unsqueeze(dim)
    return from_rows(y, dim, x.shape).to(x.dtype), (mean + centre).detach(), var.detach()


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """``x`` as (B, pixels, C) or (B, C, pixels), whichever is a view, and the dimension of the pixels."""
    channels_last = x.dim() == 2 or (not x.is_contiguous() and x.movedim(1, -1).is_contiguous())
    return (_rows(x, 1), 1) if channels_last else (_rows(x, 2), 2)


def _rows(x: Tensor, dim: int) -> Tensor:
    if dim == 2:
        return x.contiguous().flatten(2)
    return x.unsqueeze(1) if x.dim() == 2 else x.movedim(1, -1).contiguous().flatten(1, -2)


def from_rows(rows: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """Undo :func:`as_rows`; the memory format is the one the rows came from."""
    if dim == 2:
        return rows.view(shape)
    return rows.squeeze(1) if len(shape) == 2 else rows.unflatten(1, shape[2:]).movedim(-1, 1)


class _Planned(torch.autograd.Function):
    """``reference`` with hand-written passes over the activations; saves the input and (r, C) statistics, nothing else.

    Channels of two kinds travel side by side as (., 2C) so that each use of the plan is one small product: on a CPU the
    layer's time is half passes over activations and half the number of calls.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, dim = as_rows(x if x.dtype == plan.gather.dtype else x.to(plan.gather.dtype))
        per_pixel = plan.per_pixel(rows.shape[dim])
        y = torch.mul(rows, rows)
        sums, centre = torch.cat([rows.sum(dim), y.sum(dim)], 1), None  # (B, 2C)
        mean, square = per_pixel.gather.mm(sums).chunk(2, 1)  # (r, C) each
        # On a GPU the question "is any channel off centre?" would wait for the device: centre always.
        if rows.is_cuda or torch.sub(square, mean.square().mul_(_OFF_CENTRE)).amin().item() < 0:
            centre = sums.chunk(2, 1)[0].mean(0).div_(rows.shape[dim])  # (C,)
            rows = rows - centre.unsqueeze(2 - dim)
            sums = torch.cat([rows.sum(dim), torch.mul(rows, rows, out=y).sum(dim)], 1)
            mean, square = per_pixel.gather.mm(sums).chunk(2, 1)
        var = torch.addcmul(square, mean, mean, value=-1)
        if centre is not None:
            var.clamp_min_(0)
        used_mean, used_var = (mean, var) if plan.blend is None else (plan.blend @ mean, plan.blend @ var)
        inv = torch.add(used_var, eps).rsqrt_()
        scale = inv if weight is None else inv * weight
        if bias is None:
            shift = torch.mul(used_mean, scale).neg_()
        else:
            shift = torch.addcmul(bias if bias.dtype == scale.dtype else bias.to(scale), used_mean, scale, value=-1)
        factor, offset = plan.scatter.mm(torch.cat([scale, shift], 1)).unsqueeze(dim).chunk(2, 3 - dim)
        _affine(rows, factor, offset, dim, out=y)
        ctx.save_for_backward(x, weight, bias, used_mean, inv, scale, centre)
        ctx.plan, ctx.eps = plan, eps
        if centre is not None:
            mean = mean + centre
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return from_rows(y, dim, x.shape).to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        if torch.is_grad_enabled():  # second derivatives are asked for: differentiate the reference instead
            return (*_differentiable_backward(ctx, grad), None, None)
        x, weight, bias, mean, inv, scale, centre = ctx.saved_tensors
        plan, (need_x, need_weight, need_bias) = ctx.plan, ctx.needs_input_grad[:3]
        rows, dim = as_rows(x.to(plan.gather.dtype))
        per_pixel = plan.per_pixel(rows.shape[dim])
        g = _rows(grad.to(plan.gather.dtype), dim)
        if centre is not None:
            rows = rows - centre.unsqueeze(2 - dim)
        dx = torch.mul(g, rows)
        row_g = g.sum(dim)
        sum_g, sum_gx = per_pixel.scatter_back.mm(torch.cat([row_g, dx.sum(dim)], 1)).chunk(2, 1)  # (r, C) each
        spread = torch.addcmul(sum_gx, mean, sum_g, value=-1).mul_(inv)  # sums of g * normalised x
        grad_weight = spread.sum(0).to(weight.dtype) if need_weight else None
        grad_bias = row_g.sum(0).to(bias.dtype) if need_bias else None
        if not need_x:
            return None, grad_weight, grad_bias, None, None
        slope = spread.mul_(scale).mul_(inv)  # minus twice the gradient of the variance
        level = torch.mul(scale, sum_g)  # minus the gradient of the mean
        if plan.blend is not None:  # gradients return through the average to the groups; so must their means
            slope, level = plan.blend.T @ slope, plan.blend.T @ level
            mean = per_pixel.gather.mm(rows.sum(dim))
        level.addcmul_(slope, mean, value=-1)
        back = per_pixel.gather_back.mm(torch.cat([slope, level], 1))  # (B, 2C)
        slope, level = back.unsqueeze(dim).chunk(2, 3 - dim)  # (B, 1, C) or (B, C, 1)
        _affine(g, plan.scatter.mm(scale).unsqueeze(dim), level, dim, out=dx)
        dx.addcmul_(rows, slope)
        return from_rows(dx, dim, x.shape).to(x.dtype), grad_weight, grad_bias, None, None


def _affine(rows: Tensor, factor: Tensor, offset: Tensor, dim: int, *, out: Tensor) -> None:
    """``rows * factor + offset`` in the form that is fastest for the layout: one pass does not vectorise over (B, C, 1)."""
    if dim == 1:
        torch.addcmul(offset, rows, factor, out=out)
    else:
        torch.mul(rows, factor, out=out).add_(offset)


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors[:3]
    needs = ctx.needs_input_grad[:3]
    inputs = [t for t, needed in zip((x, weight, bias), needs, strict=True) if needed]
    y, _, _ = reference(x, weight, bias, ctx.plan, ctx.eps)
    grads = iter(torch.autograd.grad(y, inputs, grad, create_graph=True, allow_unused=True))
    return tuple(next(grads) if needed else None for needed in needs)
