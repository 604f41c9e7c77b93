"""Task-balanced batch norm on CUDA: the Triton kernels, and the autograd and operator around them.

Forward is three launches: row moments, the plan, the affine pass with what follows it in a residual network. Where one tile
holds all rows and pixels of a channel it is one launch with one read. Backward has the same shape. No atomics and no waiting
for the device: the same input gives the same bits, and a CUDA graph can capture every launch. No program waits for another
of its launch, only for launches before it, so that runs on streams of their own can share a card.

Importing this module imports Triton; import it only where there is a CUDA tensor to use it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tbbn.accelerators.triton import norm_forward as triton_code
from tbbn.accelerators.triton import norm_launch as launches
from tbbn.nn.functional import activated, move, reference
from tbbn.nn.plan import Plan

_MAX_ROWS = 4096
_MAX_PIXELS = 2**22  # above it a grid would have too many programs along an axis
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(x: Tensor, plan: Plan | None) -> bool:
    """Whether the kernels can do this: the PyTorch form does the rest."""
    return (
        (x.is_cuda or (triton_code.INTERPRETED and x.is_cpu))
        and x.dtype in _DTYPES
        and 2 <= x.dim() <= 5
        and 0 < x.numel() < 2**31
        and x.shape[0] <= _MAX_ROWS
        and x.shape[2:].numel() < _MAX_PIXELS
        and (plan is None or plan.blend is None)
    )


def planned_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    eps: float,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float | Tensor = 0.0,
    *,
    batches: Tensor | None = None,
    relu: bool = False,
    residual: Tensor | None = None,
    moments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, group means (r, C) and biased group variances (r, C), as :func:`tbbn.nn.functional.reference` gives them.

    Running statistics, where given, are updated in place, and ``batches`` counted, in the same launch. The output is
    ``relu(norm(x) + residual)``, both being optional. ``moments`` (2, N, parts, C), where they are known, are the means and
    variances of equal parts of every row: they spare a pass.
    """
    if torch.compiler.is_compiling():
        y, mean, var = torch.ops.tbbn.planned_norm(x, weight, bias, plan.gather, plan.scatter, eps)
        if running_mean is not None and running_var is not None:
            _run(running_mean, running_var, mean, var, plan, launches.unbiased(plan, x), momentum)
            if batches is not None:
                batches.add_(1)
        return activated(y, relu, residual), mean, var
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        y, mean, var = planned_norm(
            x, weight, bias, plan, eps, running_mean, running_var, momentum, batches=batches, moments=moments
        )
        return activated(y, relu, residual), mean, var
    if running_mean is None or running_var is None:
        return _Planned.apply(x, weight, bias, residual, plan, eps, None, relu, moments)
    running = launches.Running(
        running_mean, running_var, plan.running, launches.unbiased(plan, x), momentum, batches, plan.total_variance
    )
    result = _Planned.apply(x, weight, bias, residual, plan, eps, running, relu, moments)
    torch.autograd.graph.increment_version((running_mean, running_var))
    return result


@torch.no_grad()
def _run(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, plan: Plan, unbiased: Tensor,
    momentum: float | Tensor,
) -> None:  # fmt: skip
    """What the kernel does to the running statistics, for a compiler to fuse with its neighbours."""
    batch_mean, batch_var = plan.running @ mean, unbiased @ var
    if plan.total_variance:
        batch_var = batch_var + plan.running @ (mean - batch_mean).square()
    move(running_mean, batch_mean, momentum)
    move(running_var, batch_var, momentum)


# -- Autograd: a Function where code runs eagerly or is captured, an operator where it is compiled ---------------------


class _Planned(torch.autograd.Function):
    """The kernels, differentiable; saves the input, (r, C) statistics and, after a ReLU, the output: what batch norm saves."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        plan: Plan,
        eps: float,
        running: launches.Running | None,
        relu: bool,
        moments: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, var = launches.forward(
            x, weight, bias, plan.gather, plan.scatter, eps, running, relu, residual, moments
        )
        ctx.save_for_backward(x, weight, bias, plan.gather, plan.scatter, mean, var, y if relu else None)
        ctx.eps, ctx.relu, ctx.added = eps, relu, residual is not None  # of the residual nothing else is wanted
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        x, weight, bias, gather, scatter, mean, var, y = ctx.saved_tensors
        wanted = ctx.added and ctx.needs_input_grad[3]
        if torch.is_grad_enabled():
            if ctx.relu:
                grad = torch.where(y > 0, grad, 0)
            return (*_differentiable_backward(ctx, grad), grad if wanted else None, None, None, None, None, None)
        # Without a ReLU the residual's gradient is the output's.
        *grads, cut = launches.all_gradients(
            grad, x, weight, bias, gather, scatter, mean, var, ctx.eps, y, wanted and ctx.relu
        )
        through = (cut if ctx.relu else grad) if wanted else None
        return (*_needed(ctx, grads), through, None, None, None, None, None)


def _needed(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False))


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Second derivatives are asked for: differentiate the reference instead."""
    x, weight, bias, gather, scatter = ctx.saved_tensors[:5]
    inputs = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    share = gather[:, 0]  # not read: the reference leaves running statistics to its caller
    rows = x.unsqueeze(2) if x.dim() == 2 else x
    y, _, _ = reference(rows, weight, bias, Plan(x.shape[0], gather, scatter, share, share), ctx.eps)
    y = y.view_as(x)
    grads = iter(torch.autograd.grad(y, inputs, grad, create_graph=True, allow_unused=True))
    return tuple(next(grads) if needed else None for needed in ctx.needs_input_grad[:3])


_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor gather, Tensor scatter, float eps) -> (Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor gather, Tensor scatter, Tensor mean, Tensor var, "
    "float eps) -> (Tensor, Tensor, Tensor)"
)
_norm_op = torch.library.custom_op("tbbn::planned_norm", launches.forward, mutates_args=(), schema=_SCHEMA)
_backward_op = torch.library.custom_op(
    "tbbn::planned_norm_backward", launches.gradients, mutates_args=(), schema=_BACKWARD_SCHEMA
)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x if launches.strides_of(x) is not None else x.contiguous())


@_norm_op.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (gather.shape[0], x.shape[1])
    return _like(x), gather.new_empty(shape), gather.new_empty(shape)


@_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor,
    mean: Tensor, var: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _like(x), launches.gradient_of(weight, mean), launches.gradient_of(bias, mean)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, gather, scatter, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, gather, scatter, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        return (*_differentiable_backward(ctx, grad), None, None, None)
    return (*_needed(ctx, torch.ops.tbbn.planned_norm_backward(grad, *ctx.saved_tensors, ctx.eps)), None, None, None)


_norm_op.register_autograd(_differentiate, setup_context=_save)
