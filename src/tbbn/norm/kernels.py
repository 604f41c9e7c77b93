"""Task-balanced batch norm on CUDA: launches of the Triton kernels, and the autograd and operator around them.

Forward is three launches: row moments, the plan, the affine pass with what follows it in a residual network. Where one tile
holds all rows and pixels of a channel it is one launch with one read. Backward has the same shape. No atomics and no waiting
for the device: the same input gives the same bits, and a CUDA graph can capture every launch. No program waits for another
either: runs on streams of their own can share a card, which batch norm kernels that synchronise their blocks do not survive.

Importing this module imports Triton; import it only where there is a CUDA tensor to use it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tbbn.norm import triton_code
from tbbn.norm.functional import activated, move, reference
from tbbn.norm.plan import Plan

# A tile that holds a channel's whole batch may have this many elements; above it, moments take a launch of their own.
WHOLE_LIMIT = 16384
_MAX_ROWS = 4096
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS = 256  # about two for each multiprocessor of a large card


def available(x: Tensor, plan: Plan | None) -> bool:
    """Whether the kernels can do this: the PyTorch form does the rest."""
    return (
        (x.is_cuda or (triton_code.INTERPRETED and x.is_cpu))
        and x.dtype in _DTYPES
        and 2 <= x.dim() <= 5
        and 0 < x.numel() < 2**31
        and x.shape[0] <= _MAX_ROWS
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, group means (r, C) and biased group variances (r, C), as :func:`tbbn.norm.functional.reference` gives them.

    Running statistics, where given, are updated in place, and ``batches`` counted, in the same launch. With ``relu`` the
    output is ``relu(norm(x) + residual)``, the residual being optional.
    """
    if torch.compiler.is_compiling():
        y, mean, var = torch.ops.tbbn.planned_norm(x, weight, bias, plan.gather, plan.scatter, eps)
        if running_mean is not None and running_var is not None:
            _run(running_mean, running_var, mean, var, plan, _unbiased(plan, x), momentum)
            if batches is not None:
                batches.add_(1)
        return activated(y, relu, residual), mean, var
    if residual is not None and (not relu or residual.dtype != x.dtype or residual.shape != x.shape):
        y, mean, var = planned_norm(x, weight, bias, plan, eps, running_mean, running_var, momentum, batches=batches)
        return activated(y, relu, residual), mean, var
    if running_mean is None or running_var is None:
        return _Planned.apply(x, weight, bias, residual, plan, eps, None, relu)
    running = _Running(
        running_mean, running_var, plan.running, _unbiased(plan, x), momentum, batches, plan.total_variance
    )
    result = _Planned.apply(x, weight, bias, residual, plan, eps, running, relu)
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


# -- Launches ---------------------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    rows: int
    pixels: int
    channels: int

    @property
    def size(self) -> int:
        return self.rows * self.pixels * self.channels

    @property
    def warps(self) -> int:
        """About 32 elements for a thread."""
        return max(4, min(16, self.size // 1024))

    def grid(self, rows: int, channels: int, pixels: int = 1) -> tuple[int, int, int]:
        return -(-rows // self.rows), -(-channels // self.channels), -(-pixels // self.pixels)


class _Tiles(NamedTuple):
    whole: bool
    sums: _Tile  # of the kernels that sum rows
    apply: _Tile  # of those that apply the plan
    batch: int
    groups: int
    block: int  # channels of a program of the plan

    @property
    def warps(self) -> int:
        """Of the kernels with a plan: a whole tile is held all the while, 16 elements a thread."""
        plan = self.batch * self.groups * self.block
        return max(4, min(16, max(plan, 2 * self.apply.size if self.whole else 0) // 1024))


@lru_cache(maxsize=1024)
def _tiles(rows: int, channels: int, pixels: int, groups: int, last: bool, size: int, limit: int) -> _Tiles:
    """Tile shapes: enough programs to fill a card, no tile larger than registers hold, 32 bytes of neighbours together."""
    batch, image, wide = _power(rows), _power(pixels), _power(channels)
    # Of channels that lie next to each other a whole tile would take a few bytes here and there: for small tiles only.
    limit = limit // 8 if last else limit
    block = min(8, wide, max(1, limit // (batch * image)), max(2, wide // 32)) if last else 1
    if batch * image * block <= limit and (block > 1 or not last or wide == 1):
        tile = _Tile(batch, image, block)
        return _Tiles(True, tile, tile, batch, _groups(groups, batch, block), block)
    every = rows * channels * pixels
    work = max(1024, min(4096, _power(every // _PROGRAMS + 1) // 2))
    block = min(wide, 32 // size) if last else 1
    while block > 8 and rows * -(-channels // block) < _PROGRAMS // 2:
        block //= 2
    long = min(image, 8192 // block if last else 4096)
    sums = _Tile(max(1, min(batch, work // (long * block))), long, block)
    short = min(image, work // block)
    apply = _Tile(max(1, min(batch, work // (short * block))), short, block)
    few = min(wide, max(1, channels // 32))  # channels of a program of the plan
    return _Tiles(False, sums, apply, batch, _groups(groups, batch, few), few)


def _groups(groups: int, batch: int, block: int) -> int:
    return max(1, min(_power(groups), 8192 // (batch * block)))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Running(NamedTuple):
    mean: Tensor
    var: Tensor
    share: Tensor  # (r,)
    unbiased: Tensor  # (r,)
    momentum: float | Tensor
    batches: Tensor | None  # (), how many were counted
    total: bool


def _pixels(x: Tensor) -> int:
    return x.shape[2:].numel()


def _unbiased(plan: Plan, x: Tensor) -> Tensor:
    return plan.per_pixel(_pixels(x)).running_var


def _strides(x: Tensor) -> tuple[int, int, int] | None:
    """Strides of row, pixel and channel, or None where a tensor is neither contiguous nor channels_last."""
    channels, pixels = x.shape[1], _pixels(x)
    if x.is_contiguous():
        return (channels, 1, 1) if pixels == 1 else (channels * pixels, 1, pixels)
    if x.dim() > 2 and x.movedim(1, -1).is_contiguous():
        return channels * pixels, channels, 1
    return None


def _dense(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    strides = _strides(x)
    if strides is None:
        x = x.contiguous()
        strides = _strides(x)
        assert strides is not None
    return x, strides


def _alike(grad: Tensor, x: Tensor) -> Tensor:
    """``grad`` with its elements in the order of ``x``."""
    if grad.stride() == x.stride():
        return grad
    return torch.empty_like(x).copy_(grad)


def _vector(parameter: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument for a parameter; where there is none, something it will not read."""
    return other if parameter is None else parameter.contiguous()


def _gradient_of(parameter: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if parameter is None else like.new_empty(parameter.shape, dtype=parameter.dtype)


def _device(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels go to the current device; make it that of ``x``."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor, eps: float,
    running: _Running | None = None, relu: bool = False, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, strides = _dense(x)
    (rows, channels), pixels, groups = x.shape[:2], _pixels(x), gather.shape[0]
    tiles = _tiles(rows, channels, pixels, groups, strides[2] == 1, x.element_size(), WHOLE_LIMIT)
    y = torch.empty_like(x)
    mean, var = gather.new_empty((groups, channels)), gather.new_empty((groups, channels))
    *buffers, batches, total = (mean, var, mean, mean, 0.0, None, False) if running is None else running
    beside = x if residual is None else _alike(residual, x)
    given = (_vector(weight, mean), _vector(bias, mean), gather, scatter, mean, var)
    given = (*given, *buffers, mean if batches is None else batches, eps)
    has = (weight is not None, bias is not None)
    moved = (running is not None, total, isinstance(buffers[4], Tensor), batches is not None)
    after = (relu, residual is not None)
    plan_strides = (*gather.stride(), *scatter.stride())
    with _device(x):
        t = tiles.apply
        if tiles.whole:
            triton_code.whole_forward[(-(-channels // t.channels),)](
                x, y, beside, *given, rows, channels, pixels, groups, *strides, *plan_strides,
                *t, tiles.groups, *has, *after, *moved, num_warps=tiles.warps,
            )  # fmt: skip
            return y, mean, var
        s = tiles.sums
        row_mean, row_var, factor, offset = gather.new_empty((4, rows, channels)).unbind()
        triton_code.moments[s.grid(rows, channels)](
            x, row_mean, row_var, rows, channels, pixels, *strides, *s, num_warps=s.warps
        )  # fmt: skip
        triton_code.plan_forward[(-(-channels // tiles.block),)](
            x, row_mean, row_var, factor, offset, *given, rows, channels, groups, strides[2], *plan_strides,
            tiles.batch, tiles.block, tiles.groups, *has, *moved, num_warps=tiles.warps,
        )  # fmt: skip
        triton_code.affine[t.grid(rows, channels, pixels)](
            x, y, beside, factor, offset, rows, channels, pixels, *strides, *t, *after, num_warps=t.warps
        )  # fmt: skip
    return y, mean, var


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor,
    mean: Tensor, var: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of input, weight and bias; those of a weight or bias that is not there are empty."""
    return _all_gradients(grad, x, weight, bias, gather, scatter, mean, var, eps)[:3]


def _all_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor,
    mean: Tensor, var: Tensor, eps: float, y: Tensor | None = None, residual: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Those and the residual's; ``y`` is the output, where a ReLU made it."""
    x, strides = _dense(x)
    grad = _alike(grad, x)
    (rows, channels), pixels, groups = x.shape[:2], _pixels(x), gather.shape[0]
    tiles = _tiles(rows, channels, pixels, groups, strides[2] == 1, x.element_size(), WHOLE_LIMIT)
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if residual else dx
    dweight, dbias = _gradient_of(weight, mean), _gradient_of(bias, mean)
    output, relu = (x, False) if y is None else (y, True)
    given = (_vector(weight, mean), gather, scatter, mean, var, dweight, dbias, eps, rows, channels, pixels, groups)
    has = (weight is not None, bias is not None)
    plan_strides = (*gather.stride(), *scatter.stride())
    with _device(x):
        t = tiles.apply
        if tiles.whole:
            triton_code.whole_backward[(-(-channels // t.channels),)](
                grad, x, output, dx, dresidual, *given, *strides, *plan_strides, *t, tiles.groups, *has, relu, residual,
                num_warps=tiles.warps,
            )  # fmt: skip
            return dx, dweight, dbias, dresidual
        s = tiles.sums
        row_g, row_gx, factor, slope, level = gather.new_empty((5, rows, channels)).unbind()
        triton_code.row_sums[s.grid(rows, channels)](
            grad, x, output, mean, row_g, row_gx, rows, channels, pixels, *strides, *s, relu, num_warps=s.warps
        )  # fmt: skip
        triton_code.plan_backward[(-(-channels // tiles.block),)](
            row_g, row_gx, factor, slope, level, *given, *plan_strides, tiles.batch, tiles.block, tiles.groups, *has,
            num_warps=tiles.warps,
        )  # fmt: skip
        triton_code.affine_backward[t.grid(rows, channels, pixels)](
            grad, x, output, dx, dresidual, mean, factor, slope, level, rows, channels, pixels, *strides,
            *t, relu, residual, num_warps=t.warps,
        )  # fmt: skip
    return dx, dweight, dbias, dresidual


# -- Autograd: a Function where code runs eagerly or is captured, an operator where it is compiled ---------------------


class _Planned(torch.autograd.Function):
    """The kernels, differentiable; saves the input, (r, C) statistics and, after a ReLU, the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        plan: Plan,
        eps: float,
        running: _Running | None,
        relu: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, var = _forward(x, weight, bias, plan.gather, plan.scatter, eps, running, relu, residual)
        # The residual itself is wanted only where a second derivative is; the graph behind it keeps it alive anyway.
        ctx.save_for_backward(x, weight, bias, plan.gather, plan.scatter, mean, var, y if relu else None, residual)
        ctx.eps, ctx.relu = eps, relu
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        x, weight, bias, gather, scatter, mean, var, y, residual = ctx.saved_tensors
        if torch.is_grad_enabled():
            if ctx.relu:
                grad = torch.where(y > 0, grad, 0)
            through = grad if residual is not None and ctx.needs_input_grad[3] else None
            return (*_differentiable_backward(ctx, grad), through, None, None, None, None)
        wanted = residual is not None and ctx.needs_input_grad[3]
        *grads, through = _all_gradients(grad, x, weight, bias, gather, scatter, mean, var, ctx.eps, y, wanted)
        return (*_needed(ctx, grads), through if wanted else None, None, None, None, None)


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
_norm_op = torch.library.custom_op("tbbn::planned_norm", _forward, mutates_args=(), schema=_SCHEMA)
_backward_op = torch.library.custom_op(
    "tbbn::planned_norm_backward", _gradients, mutates_args=(), schema=_BACKWARD_SCHEMA
)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x if _strides(x) is not None else x.contiguous())


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
    return _like(x), _gradient_of(weight, mean), _gradient_of(bias, mean)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, gather, scatter, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, gather, scatter, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        return (*_differentiable_backward(ctx, grad), None, None, None)
    return (*_needed(ctx, torch.ops.tbbn.planned_norm_backward(grad, *ctx.saved_tensors, ctx.eps)), None, None, None)


_norm_op.register_autograd(_differentiate, setup_context=_save)
