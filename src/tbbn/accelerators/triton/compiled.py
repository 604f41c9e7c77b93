"""The norm in code that ``torch.compile`` compiles for a GPU.

The compiler generates the passes over the activations and fuses them with the operations around the norm. Between the passes the
plan is evaluated: five small kernels as tensor operations; here one launch of the Triton backend's kernel, in forward and in
backward.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tbbn.accelerators.triton import norm_backward, norm_forward
from tbbn.accelerators.triton.norm import supports as supported_by_kernels
from tbbn.accelerators.triton.norm_tiles import MOST_PARTS, Tiles, tiles_for
from tbbn.nn.functional import reference, update_running
from tbbn.nn.plan import Plan

_SUMS = 2**16  # the least number of sums in a pass, if parts can provide it
_GROUPS = 16  # groups of a tile if their number is unknown at compile time


def supports(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
) -> bool:  # fmt: skip
    return plan is not None and supported_by_kernels(x, running_mean, running_var, weight, bias, plan)


def norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
    momentum: float | Tensor, eps: float, batches: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert plan is not None
    plan = plan.to(x.device, torch.float32)
    return _norm(
        x, running_mean, running_var, weight, bias, plan.gather, plan.scatter, plan.running, plan.sizes, plan.anchor,
        plan.total_variance, momentum, eps, batches,
    )  # fmt: skip


@torch.compiler.allow_in_graph
def _norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    gather: Tensor, scatter: Tensor, share: Tensor, sizes: Tensor, anchor: Tensor, total_variance: bool,
    momentum: float | Tensor, eps: float, batches: Tensor | None,
) -> Tensor:  # fmt: skip
    """:func:`norm` with only tensors and numbers as arguments, as a call in a graph requires."""
    if isinstance(x.shape[0], torch.SymInt):  # the kernels' tiles hold all rows: their number must be known
        if batches is not None:
            batches.add_(1)
        plan = Plan(x.shape[0], gather, scatter, share, sizes, anchor, total_variance=total_variance)
        y, mean, var = reference(x, weight, bias, plan, eps)
        update_running(running_mean, running_var, mean, var, plan, x.shape[2:].numel(), momentum)
        return y
    running: tuple[Any, ...] | None = None
    if running_mean is not None and running_var is not None:
        running = (running_mean, running_var, share, sizes, momentum, batches, total_variance)
    elif batches is not None:
        batches.add_(1)
    return _CompiledNorm.apply(x, weight, bias, gather, scatter, eps, running)


class _CompiledNorm(torch.autograd.Function):
    """The steps of the Triton backend, with its numbers: relative to the channel's first element, or its first group's mean."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor, eps: float,
        running: tuple[Any, ...] | None,
    ) -> Tensor:  # fmt: skip
        given = x.float()
        parts = _in_parts(given)
        # Relative to the part's first pixel, one pass gives both moments without cancellation.
        first = parts[..., 0]  # (B, parts, C)
        near = parts - first.unsqueeze(3)
        mean = near.mean(3)
        part_var = near.square().mean(3) - mean.square()
        factor, offset, mean, var = _plan_forward(
            first.contiguous(),
            mean + (first - first[:1, :1]),
            part_var,
            weight,
            bias,
            gather,
            scatter,
            eps,
            running,
            _pixels(x),
        )
        ctx.save_for_backward(x, weight, bias, gather, scatter, mean, var)
        ctx.eps = eps
        y = (given - _to_pixels(first[:1, 0], x)) * _to_pixels(factor, x) + _to_pixels(offset, x)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, gather, scatter, mean, var = ctx.saved_tensors
        g, near = grad.float(), x.float() - _to_pixels(mean[:1], x)
        part_g, part_gx = _in_parts(g).sum(3), _in_parts(g * near).sum(3)
        factor, slope, level, dweight, dbias = _plan_backward(
            part_g, part_gx, weight, bias, gather, scatter, mean, var, ctx.eps, _pixels(x)
        )
        dx = g * _to_pixels(factor, x) + (near * _to_pixels(slope, x) + _to_pixels(level, x))
        needs = ctx.needs_input_grad
        return (
            dx.to(x.dtype) if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None,
            None, None, None, None,
        )  # fmt: skip


def _pixels(x: Tensor) -> int:
    return x.shape[2:].numel()


def _to_pixels(values: Tensor, x: Tensor) -> Tensor:
    """View values per row and channel so that they broadcast over the pixels of ``x``."""
    return values.view(*values.shape, *[1 for _ in x.shape[2:]])


def _in_parts(x: Tensor) -> Tensor:
    """``x`` as (B, parts, C, pixels of a part). With too few sums the compiler would compute them in two kernels."""
    (rows, channels), pixels, parts = x.shape[:2], _pixels(x), 1
    if not isinstance(pixels, torch.SymInt):
        while parts < MOST_PARTS and rows * channels * parts < _SUMS and pixels % (2 * parts) == 0:
            parts *= 2
    return x.reshape(rows, channels, parts, pixels // parts).transpose(1, 2)


def _plan_forward(
    first: Tensor, part_mean: Tensor, part_var: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor,
    scatter: Tensor, eps: float, running: tuple[Any, ...] | None, pixels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Factor and offset (B, C) of each row, mean and variance (r, C) of each group."""
    (rows, parts, channels), groups = part_mean.shape, gather.shape[0]
    factor, offset = gather.new_empty((rows, channels)), gather.new_empty((rows, channels))
    mean, var = gather.new_empty((groups, channels)), gather.new_empty((groups, channels))
    running_mean, running_var, share, sizes, momentum, batches, total = running or (
        mean,
        var,
        mean,
        mean,
        0.0,
        None,
        False,
    )
    tiles = _tiles(rows, channels, groups)
    _launch(
        norm_forward.plan_forward, (-(-channels // tiles.block),),
        first, part_mean, part_var, factor, offset, mean if weight is None else weight, mean if bias is None else bias,
        gather, scatter, mean, var, running_mean, running_var, share, sizes, momentum, mean if batches is None else batches,
        eps, rows, channels, pixels, groups, 1, *gather.stride(), *scatter.stride(), tiles.batch, tiles.block, tiles.groups,
        parts, False, weight is not None, bias is not None, running is not None, total, isinstance(momentum, Tensor),
        batches is not None, False, num_warps=tiles.warps,
    )  # fmt: skip
    return factor, offset, mean, var


def _plan_backward(
    part_g: Tensor, part_gx: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor,
    mean: Tensor, var: Tensor, eps: float, pixels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """A, X and K (B, C) of ``dx = A g + X (x - centre) + K`` for each row, and the gradients of weight and bias."""
    (rows, parts, channels), groups = part_g.shape, gather.shape[0]
    factor, slope, level = (gather.new_empty((rows, channels)) for _ in range(3))
    dweight = None if weight is None else torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    tiles = _tiles(rows, channels, groups)
    _launch(
        norm_backward.plan_backward, (-(-channels // tiles.block),),
        part_g, part_gx, factor, slope, level, mean if weight is None else weight, gather, scatter, mean, var,
        mean if dweight is None else dweight, mean if dbias is None else dbias, eps, rows, channels, pixels, groups,
        *gather.stride(), *scatter.stride(), tiles.batch, tiles.block, tiles.groups, parts, weight is not None,
        bias is not None, False, num_warps=tiles.warps,
    )  # fmt: skip
    return factor, slope, level, dweight, dbias


def _tiles(rows: int, channels: int, groups: int | torch.SymInt) -> Tiles:
    return tiles_for(rows, channels, 1, _GROUPS if isinstance(groups, torch.SymInt) else groups, False, 4, 0)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel in a way that ``torch.compile`` captures; the interpreter's kernels are called directly."""
    (kernel if norm_forward.INTERPRETED else torch.library.wrap_triton(kernel))[grid](*arguments, **options)
