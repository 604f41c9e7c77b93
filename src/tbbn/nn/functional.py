"""The three steps of task-balanced batch norm: moments, the plan, one affine pass.

    m[b], q[b]      mean and mean square of row b over its pixels, per channel
    mean[j], var[j] statistics of group j: gather @ m, and gather @ q - mean^2
    y[b] = x[b] * A[b] + S[b],   A = scatter @ (weight * inv),  S = bias - scatter @ (weight * inv * mean)

Nothing of size (r, B, C, H, W) exists; the backward pass has the same shape: two row sums, the transposed plan, one pass.
``reference`` says the same in differentiable tensor code. It is what ``torch.compile`` traces and what gives second
derivatives; ``_Planned`` is the fast eager form of it, and
:mod:`tbbn.accelerators.native.binding` a compiled one for CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tbbn.accelerators.native import binding as native
from tbbn.accelerators.triton import TRITON
from tbbn.errors import UserError
from tbbn.nn.plan import Plan

# Mean squares lose digits when a mean is large against its spread. Where a variance is below this multiple of the squared mean
# (the mean is more than 3 standard deviations off zero), values are first taken relative to the mean of the memory rows: these
# are part of every group, so no group's mean is far from theirs against its spread.
_OFF_CENTRE = 0.1


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
        raise UserError(f"task_balanced_batch_norm: the plan covers {plan.rows} rows but the input has {x.shape[0]}.")
    if x.dim() == 2:
        y = task_balanced_batch_norm(x.unsqueeze(2), running_mean, running_var, weight, bias, plan, momentum, eps)
        return y.squeeze(2)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        done = native.planned_norm(x, running_mean, running_var, weight, bias, plan, momentum, eps)
        if done is not None:
            return done
    device = x.device.type
    if torch.is_autocast_enabled(device):  # its matrix products would round the statistics
        with torch.autocast(device, enabled=False):
            return task_balanced_batch_norm(x, running_mean, running_var, weight, bias, plan, momentum, eps)
    plan = plan.to(x.device, statistics_dtype(x))
    kernels = cuda_kernels(x, plan)
    if kernels is not None:
        return kernels.planned_norm(x, weight, bias, plan, eps, running_mean, running_var, momentum)[0]
    if not compiling:
        return _Planned.apply(x, weight, bias, plan, eps, running_mean, running_var, momentum)
    y, mean, var = reference(x, weight, bias, plan, eps)
    with torch.no_grad():
        _update_running(running_mean, running_var, mean, var, plan, x[0, 0].numel(), momentum)
    return y


def cuda_kernels(x: Tensor, plan: Plan | None) -> Any:
    """The module of CUDA kernels, where they can do this; its import imports Triton."""
    if not (x.is_cuda and TRITON):
        return None
    from tbbn.accelerators.triton import norm as kernels

    return kernels if kernels.available(x, plan) else None


def activated(y: Tensor, relu: bool, residual: Tensor | None) -> Tensor:
    """What follows a norm in a residual network, written over the norm's output: no norm needs it for its gradient."""
    if residual is not None:
        y += residual
    return y.relu_() if relu else y


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _update_running(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    var: Tensor,
    plan: Plan,
    pixels: int,
    momentum: float | Tensor,
    centre: Tensor | None = None,  # (C,), what the means are relative to
) -> None:
    """Move the running statistics towards the groups' average; the variance stored is the unbiased one, as in batch norm."""
    if running_mean is None or running_var is None:
        return
    shares, shares_var = plan.running, plan.per_pixel(pixels).running_var
    batch_mean, batch_var = torch.mv(mean.t(), shares), torch.mv(var.t(), shares_var)  # (C,)
    if plan.total_variance:
        batch_var += torch.mv((mean - batch_mean).square().t(), shares)
    if centre is not None:
        batch_mean += centre
    move(running_mean, batch_mean, momentum)
    move(running_var, batch_var, momentum)


def move(running: Tensor, towards: Tensor, momentum: float | Tensor) -> None:
    """An exponential average in place, computed in the type of the new value."""
    if isinstance(momentum, Tensor):
        momentum = momentum.to(towards.dtype)
    if running.dtype == towards.dtype:
        running.lerp_(towards, momentum)
    else:
        running.copy_(running.to(towards.dtype).lerp_(towards, momentum))


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, group means (r, C) and biased group variances (r, C), in differentiable tensor code."""
    dims, shape = tuple(range(2, x.dim())), (*x.shape[:2], *[1] * (x.dim() - 2))
    rows = x.to(plan.gather.dtype)
    centre = rows.detach().mean(dims).t() @ plan.per_pixel(1).shared  # (C,)
    rows = rows - centre.view(1, *shape[1:])
    mean = plan.gather @ rows.mean(dims)  # (r, C), off the centre
    var = (plan.gather @ rows.square().mean(dims) - mean.square()).clamp_min(0)
    used_mean, used_var = (mean, var) if plan.blend is None else (plan.blend @ mean, plan.blend @ var)
    scale = (used_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    shift = -used_mean * scale
    if bias is not None:
        shift = shift + bias.to(scale.dtype)
    y = rows * (plan.scatter @ scale).view(shape) + (plan.scatter @ shift).view(shape)
    return y.to(x.dtype), (mean + centre).detach(), var.detach()


class _Planned(torch.autograd.Function):
    """``reference`` with hand-written passes over the activations; saves the input and a few values per channel.

    On a CPU half of the layer's time is the number of calls, whatever their size, and a small call after a pass over
    activations finds the caches cold: hence passes beside passes and small calls beside small calls, products with the plan
    that take the bias along, results written over what is no longer needed, and no reshaping of activations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
        eps: float,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float | Tensor,
    ) -> Tensor:
        dtype = plan.gather.dtype
        rows = x if x.dtype == dtype else x.to(dtype)
        dims, shape, pixels = _geometry(x)
        gather, shared = plan.per_pixel(pixels)[:2]
        y, centre = torch.mul(rows, rows), None
        row_sum, row_square = rows.sum(dims), y.sum(dims)  # (B, C)
        mean = gather.mm(row_sum)  # (r, C)
        var = gather.mm(row_square).addcmul_(mean, mean, value=-1)
        # On a GPU the question "is any channel off centre?" would wait for the device: centre always.
        # Not-a-number counts as yes: squares may overflow where the values themselves do not.
        if not (x.is_cpu and torch.addcmul(var, mean, mean, value=-_OFF_CENTRE).min().item() >= 0):
            centre = torch.mv(row_sum.t(), shared)  # (C,)
            rows = rows - centre.view(shape[1:])
            mean = gather.mm(rows.sum(dims))
            var = gather.mm(torch.mul(rows, rows, out=y).sum(dims)).addcmul_(mean, mean, value=-1).clamp_min_(0)
        used_mean, used_var = (mean, var) if plan.blend is None else (plan.blend.mm(mean), plan.blend.mm(var))
        inv = torch.add(used_var, eps).rsqrt_()
        scale = inv if weight is None else inv * weight
        shift = torch.mul(used_mean, scale)
        factor = plan.scatter.mm(scale)  # (B, C)
        if bias is None:
            offset = plan.scatter.mm(shift.neg_())
        else:
            offset = torch.addmm(bias if bias.dtype == dtype else bias.to(dtype), plan.scatter, shift, alpha=-1)
        _update_running(running_mean, running_var, mean, var, plan, pixels, momentum, centre)
        _affine(rows, factor.view(shape), offset.view(shape), out=y)
        group_mean = None if plan.blend is None else mean
        ctx.save_for_backward(x, weight, bias, used_mean, inv, scale, factor, centre, group_mean)
        ctx.plan, ctx.eps = plan, eps
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_autocast_enabled(grad.device.type):
            with torch.autocast(grad.device.type, enabled=False):
                return _Planned.backward(ctx, grad)
        if torch.is_grad_enabled():  # second derivatives are asked for: differentiate the reference instead
            return _differentiable_backward(ctx, grad)
        x, weight, bias, mean, inv, scale, factor, centre, group_mean = ctx.saved_tensors
        plan, dtype = ctx.plan, ctx.plan.gather.dtype
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows, g = x if x.dtype == dtype else x.to(dtype), grad if grad.dtype == dtype else grad.to(dtype)
        dims, shape, pixels = _geometry(x)
        per_pixel = plan.per_pixel(pixels)
        if centre is not None:
            rows = rows - centre.view(shape[1:])
        dx = torch.mul(g, rows)
        row_g, row_gx = g.sum(dims), dx.sum(dims)  # (B, C)
        sum_g, sum_gx = per_pixel.scatter_back.mm(row_g), per_pixel.scatter_back.mm(row_gx)  # (r, C)
        spread = sum_gx.addcmul_(mean, sum_g, value=-1).mul_(inv)  # sums of g * normalised x
        grad_weight = spread.sum(0).to(weight.dtype) if need_weight else None
        grad_bias = row_g.sum(0).to(bias.dtype) if need_bias else None
        if not need_x:
            return None, grad_weight, grad_bias, None, None, None, None, None
        slope = spread.mul_(inv).mul_(scale)  # minus twice the gradient of the variance
        level = sum_g.mul_(scale)  # minus the gradient of the mean
        if plan.blend is not None:  # gradients return through the average to the groups
            slope, level, mean = plan.blend.t().mm(slope), plan.blend.t().mm(level), group_mean
        level.addcmul_(slope, mean, value=-1)
        slope, level = per_pixel.gather_back.mm(slope), per_pixel.gather_back.mm(level)  # (B, C)
        _affine(g, factor.view(shape), level.view(shape), out=dx)
        dx.addcmul_(rows, slope.view(shape))
        return dx if dx.dtype == x.dtype else dx.to(x.dtype), grad_weight, grad_bias, None, None, None, None, None


def _geometry(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The dimensions of the pixels, the shape (B, C, 1, ...) of a value per row and channel, the number of pixels."""
    b, c, *size = x.shape
    pixels = 1
    for n in size:
        pixels *= n
    return tuple(range(2, x.dim())), (b, c) + (1,) * len(size), pixels


def _affine(rows: Tensor, factor: Tensor, offset: Tensor, *, out: Tensor) -> None:
    """``rows * factor + offset``; the single call vectorises only where channels lie next to each other in memory."""
    if rows.stride(1) == 1:
        torch.addcmul(offset, rows, factor, out=out)
    else:
        torch.mul(rows, factor, out=out).add_(offset)


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors[:3]
    needs = ctx.needs_input_grad[:3]
    inputs = [t for t, needed in zip((x, weight, bias), needs, strict=True) if needed]
    y, _, _ = reference(x, weight, bias, ctx.plan, ctx.eps)
    grads = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return *(next(grads) if needed else None for needed in needs), None, None, None, None, None
