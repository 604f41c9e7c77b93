"""The norm in tensor operations with a hand-written backward: the backend for any device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tbbn.nn.functional import reference, statistics_dtype, update_average
from tbbn.nn.plan import Plan

# Mean squares lose digits if the mean is large relative to the spread. Below this ratio of variance to squared mean (the mean is
# more than 3 standard deviations from zero) the mean of the memory rows is subtracted first. These are in every group, so no
# group's mean is far from theirs relative to its spread.
_OFF_CENTRE = 0.1


def supports(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
) -> bool:  # fmt: skip
    return plan is not None and not x.is_meta


def norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
    momentum: float | Tensor, eps: float, batches: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert plan is not None
    if x.dim() == 2:
        given = (x.unsqueeze(2), running_mean, running_var, weight, bias, plan, momentum, eps, batches)
        return norm(*given).squeeze(2)
    if batches is not None:
        batches.add_(1)
    plan = plan.to(x.device, statistics_dtype(x))
    device = x.device.type
    if torch.is_autocast_enabled(device):  # autocast's matrix products would round the statistics
        with torch.autocast(device, enabled=False):
            return _EagerNorm.apply(x, weight, bias, plan, eps, running_mean, running_var, momentum)
    return _EagerNorm.apply(x, weight, bias, plan, eps, running_mean, running_var, momentum)


def activate(y: Tensor, relu: bool, residual: Tensor | None) -> Tensor:
    """``relu(y + residual)``, in place because no norm needs its output for its gradient."""
    if residual is not None:
        y += residual
    return y.relu_() if relu else y


class PerPixel(NamedTuple):
    """A plan's matrices for rows of a given number of pixels."""

    gather: Tensor  # (r, B), turns row sums into group means
    shared: Tensor  # (B,), turns row sums into the mean of the rows that are in all groups
    gather_back: Tensor  # (B, r), minus the transpose of gather
    scatter_back: Tensor  # (r, B)
    unbiased: Tensor  # (r,), shares in the running variance, times the factor n / (n - 1) of the unbiased variance


def per_pixel(plan: Plan, pixels: int) -> PerPixel:
    """The :class:`PerPixel` of a plan, made once for each image size and kept with the plan."""
    cached: dict[int, PerPixel] = plan.__dict__.setdefault("_per_pixel", {})
    found = cached.get(pixels)
    if found is None:
        # Made on the CPU and copied: other CUDA streams must not read a result that this stream is still computing.
        device, dtype = plan.gather.device, plan.gather.dtype
        plan = plan.to(torch.device("cpu"), dtype)
        counts, shared = plan.sizes * pixels, plan.gather.amin(0)
        made = PerPixel(
            gather=plan.gather / pixels,
            shared=shared / (shared.sum() * pixels),
            gather_back=(plan.gather.t() / -pixels).contiguous(),
            scatter_back=plan.scatter.t().contiguous(),
            unbiased=plan.running * counts / (counts - 1),
        )
        found = cached[pixels] = PerPixel(*(t.to(device) for t in made))
    return found


class _EagerNorm(torch.autograd.Function):
    """Saves the input and a few values per channel.

    On a CPU half of the time is the overhead of calls, whatever their size, and a small call right after a pass over activations
    finds cold caches. So passes are grouped with passes and small calls with small calls, products with the plan include the
    bias, results overwrite what is no longer needed, and activations are never reshaped.
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
        gather, shared, _, _, unbiased = per_pixel(plan, pixels)
        y, centre = torch.mul(rows, rows), None
        row_sum, row_square = rows.sum(dims), y.sum(dims)  # (B, C)
        mean = gather.mm(row_sum)  # (r, C)
        var = gather.mm(row_square).addcmul_(mean, mean, value=-1)
        # On a GPU, testing whether any channel is off centre would be a host sync: there the centre is always subtracted.
        # NaN counts as off centre: squares may overflow although the values do not.
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
        _update_running(running_mean, running_var, mean, var, plan, unbiased, momentum, centre)
        _affine(rows, factor.view(shape), offset.view(shape), out=y)
        group_mean = None if plan.blend is None else mean
        ctx.save_for_backward(x, weight, bias, used_mean, inv, scale, factor, centre, group_mean)
        ctx.plan, ctx.eps = plan, eps
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_autocast_enabled(grad.device.type):
            with torch.autocast(grad.device.type, enabled=False):
                return _EagerNorm.backward(ctx, grad)
        x, weight, bias, mean, inv, scale, factor, centre, group_mean = ctx.saved_tensors
        if torch.is_grad_enabled():
            needs = ctx.needs_input_grad[:3]
            return *reference_gradients(grad, x, weight, bias, ctx.plan, ctx.eps, needs), None, None, None, None, None
        plan, dtype = ctx.plan, ctx.plan.gather.dtype
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows, g = x if x.dtype == dtype else x.to(dtype), grad if grad.dtype == dtype else grad.to(dtype)
        dims, shape, pixels = _geometry(x)
        scaled = per_pixel(plan, pixels)
        if centre is not None:
            rows = rows - centre.view(shape[1:])
        dx = torch.mul(g, rows)
        row_g, row_gx = g.sum(dims), dx.sum(dims)  # (B, C)
        sum_g, sum_gx = scaled.scatter_back.mm(row_g), scaled.scatter_back.mm(row_gx)  # (r, C)
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
        slope, level = scaled.gather_back.mm(slope), scaled.gather_back.mm(level)  # (B, C)
        _affine(g, factor.view(shape), level.view(shape), out=dx)
        dx.addcmul_(rows, slope.view(shape))
        return dx if dx.dtype == x.dtype else dx.to(x.dtype), grad_weight, grad_bias, None, None, None, None, None


def reference_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, eps: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias through the reference, for second derivatives, which no backend implements."""
    inputs = [t for t, needed in zip((x, weight, bias), needs, strict=True) if needed and t is not None]
    y = reference(x, weight, bias, plan.to(x.device, statistics_dtype(x)), eps)[0]
    grads = iter(torch.autograd.grad(y, inputs, grad, create_graph=True, allow_unused=True))
    return tuple(next(grads) if needed else None for needed in needs)


def _update_running(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, plan: Plan, unbiased: Tensor,
    momentum: float | Tensor, centre: Tensor | None,
) -> None:  # fmt: skip
    """Move the running statistics towards the average over groups. ``mean`` is relative to ``centre`` (C,), if given."""
    if running_mean is None or running_var is None:
        return
    batch_mean, batch_var = torch.mv(mean.t(), plan.running), torch.mv(var.t(), unbiased)  # (C,)
    if plan.total_variance:
        batch_var += torch.mv((mean - batch_mean).square().t(), plan.running)
    if centre is not None:
        batch_mean += centre
    update_average(running_mean, batch_mean, momentum)
    update_average(running_var, batch_var, momentum)


def _geometry(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The dimensions of the pixels, the shape (B, C, 1, ...) of a value per row and channel, the number of pixels."""
    b, c, *size = x.shape
    pixels = 1
    for n in size:
        pixels *= n
    return tuple(range(2, x.dim())), (b, c) + (1,) * len(size), pixels


def _affine(rows: Tensor, factor: Tensor, offset: Tensor, *, out: Tensor) -> None:
    """``rows * factor + offset``. The single call is vectorised only in channels_last."""
    if rows.stride(1) == 1:
        torch.addcmul(offset, rows, factor, out=out)
    else:
        torch.mul(rows, factor, out=out).add_(offset)
