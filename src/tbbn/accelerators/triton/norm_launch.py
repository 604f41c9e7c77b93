"""Launches of the norm's kernels: the memory they use, and the arguments of each kernel.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tbbn.accelerators.triton import norm_backward, norm_forward
from tbbn.accelerators.triton.launch import device_of, launch_options
from tbbn.accelerators.triton.norm_tiles import Geometry, geometry_of
from tbbn.accelerators.triton.replay import Launches, record, replayed


class Running(NamedTuple):
    """The running statistics, updated in the forward pass."""

    mean: Tensor
    var: Tensor
    share: Tensor  # (r,), of each group
    sizes: Tensor  # (r,), rows that the unbiased variance of each group counts
    momentum: float | Tensor
    batches: Tensor | None  # (), the number of batches, counted in the same launch
    total: bool  # whether to add the variance between groups


def strided_like(grad: Tensor, x: Tensor) -> Tensor:
    """``grad`` with the strides of ``x``."""
    if grad.stride() == x.stride():
        return grad
    return torch.empty_like(x).copy_(grad)


def _vector(parameter: Tensor | None, other: Tensor) -> Tensor:
    """A parameter as a kernel argument; for None, some tensor that the kernel will not read."""
    return other if parameter is None else parameter.contiguous()


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor, eps: float,
    running: Running | None = None, relu: bool = False, residual: Tensor | None = None, moments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output; means and variances (2, r, C) of the groups; and the tensor from which backward gets the output's sign.

    ``moments`` (2, rows, parts, channels) are used if given.
    """
    groups = gather.shape[0]
    x, geometry = geometry_of(x, groups)
    tiles = geometry.tiles
    y, stats = torch.empty_like(x), gather.new_empty((2, groups, geometry.channels))
    parts = tiles.parts if moments is None else moments.shape[2]
    work = None if tiles.whole else work_for(2, geometry, parts if moments is None else 1, y, gather)
    if residual is not None:
        residual = strided_like(residual, x)
    weight, bias = _contiguous(weight), _contiguous(bias)
    bases = [x, y, residual, weight, bias, gather, scatter, stats, work, moments]
    tracked = None
    if running is not None:
        mean, var, share, sizes, momentum, batches, total = running
        bases += (mean, var, share, sizes, batches)
        on_device = isinstance(momentum, Tensor)
        if isinstance(momentum, Tensor):
            bases.append(momentum)
        tracked = mean.dtype, None if on_device else momentum, batches is None, total
    key = (
        "forward", geometry.number, parts, gather.stride(), scatter.stride(), eps, relu, residual is None, moments is None,
        _type(weight), _type(bias), tracked,
    )  # fmt: skip
    with device_of(x):
        if not replayed(key, bases):
            launches = Launches(bases)
            _forward(launches, x, y, weight, bias, gather, scatter, eps, running, relu, residual, moments,
                     stats, work, geometry, parts)  # fmt: skip
            record(key, launches)
    return y, stats, y if work is None or residual is not None else work[:2]


def _forward(
    launches: Launches, x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor,
    eps: float, running: Running | None, relu: bool, residual: Tensor | None, moments: Tensor | None,
    stats: Tensor, work: Tensor | None, geometry: Geometry, parts: int,
) -> None:  # fmt: skip
    strides, tiles, rows, channels, pixels, _ = geometry
    groups, (mean, var) = gather.shape[0], stats.unbind()
    *buffers, batches, total = (mean, var, mean, mean, 0.0, None, False) if running is None else running
    on_device = running is not None and isinstance(running.momentum, Tensor)
    added = x if residual is None else residual
    given = (mean if weight is None else weight, mean if bias is None else bias, gather, scatter, mean, var)
    given = (*given, *buffers, mean if batches is None else batches, eps)
    has = (weight is not None, bias is not None)
    tracked = (running is not None, total, on_device, batches is not None)
    after = (relu, residual is not None)
    plan_strides = (*gather.stride(), *scatter.stride())
    options, t = launch_options(x), tiles.apply
    if tiles.whole:
        launches.launch(
            norm_forward.whole_forward, (-(-channels // t.channels),),
            x, y, added, *given, rows, channels, pixels, groups, *strides, *plan_strides,
            *tiles.whole_tile, tiles.groups, *has, *after, *tracked, num_warps=tiles.warps, **options,
        )  # fmt: skip
        return
    assert work is not None
    factor, offset = work[:2].unbind()
    if moments is None:
        s = tiles.sums
        part_mean, part_var = part_sums(2, work, parts, y)
        launches.launch(
            norm_forward.moments, s.over(rows, channels, parts),
            x, part_mean, part_var, rows, channels, pixels, pixels // parts, *strides, *s, num_warps=s.warps, **options,
        )  # fmt: skip
    else:
        part_mean, part_var = moments.unbind()
    launches.launch(
        norm_forward.plan_forward, (-(-channels // tiles.block),),
        x, part_mean, part_var, factor, offset, *given, rows, channels, pixels, groups, strides[2], *plan_strides,
        tiles.batch, tiles.block, tiles.groups, parts, moments is not None, *has, *tracked, num_warps=tiles.warps, **options,
    )  # fmt: skip
    launches.launch(
        norm_forward.affine, t.grid(rows, channels, pixels),
        x, y, added, factor, offset, rows, channels, pixels, *strides, *t, *after, num_warps=t.warps, **options,
    )  # fmt: skip


def eval_forward(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    relu: bool, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """``relu(batch_norm(x) + residual)`` by given statistics."""
    x, (strides, tiles, rows, channels, pixels, _) = geometry_of(x, 1, limit=0)
    t = tiles.apply
    y = torch.empty_like(x)
    added = x if residual is None else strided_like(residual, x)
    options = launch_options(x)
    with device_of(x):
        norm_forward.eval_affine[t.grid(rows, channels, pixels)](
            x, y, added, mean, var, _vector(weight, mean), _vector(bias, mean), eps, rows, channels, pixels, *strides,
            *t, weight is not None, bias is not None, relu, residual is not None, num_warps=t.warps, **options,
        )  # fmt: skip
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor,
    stats: Tensor, eps: float, y: Tensor | None = None, residual: bool = False, table: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of input, weight, bias and residual. ``y`` is the output after a ReLU or, with ``table``, the last result of
    :func:`forward`."""
    x, geometry = geometry_of(x, gather.shape[0])
    tiles = geometry.tiles
    grad = strided_like(grad, x)
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if residual else None
    weight = _contiguous(weight)
    dweight = None if weight is None else torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    work = None if tiles.whole else work_for(3, geometry, tiles.parts, dx, gather)
    bases = [grad, x, y, dx, dresidual, weight, dweight, dbias, gather, scatter, stats, work]
    key = (
        "backward", geometry.number, grad.dtype, gather.stride(), scatter.stride(), eps, y is None, residual, table,
        _type(weight), _type(bias),
    )  # fmt: skip
    with device_of(x):
        if not replayed(key, bases):
            launches = Launches(bases)
            _backward(launches, grad, x, y, dx, dresidual, weight, dweight, dbias, gather, scatter, stats, eps,
                      table, work, geometry)  # fmt: skip
            record(key, launches)
    return dx, dweight, dbias, dx if dresidual is None else dresidual


def _backward(
    launches: Launches, grad: Tensor, x: Tensor, y: Tensor | None, dx: Tensor, dresidual: Tensor | None,
    weight: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, gather: Tensor, scatter: Tensor, stats: Tensor,
    eps: float, table: bool, work: Tensor | None, geometry: Geometry,
) -> None:  # fmt: skip
    strides, tiles, rows, channels, pixels, _ = geometry
    groups, (mean, var) = gather.shape[0], stats.unbind()
    output, relu = (x, False) if y is None else (y, True)
    residual, extra = dresidual is not None, dx if dresidual is None else dresidual
    given = (
        mean if weight is None else weight, gather, scatter, mean, var,
        mean if dweight is None else dweight, mean if dbias is None else dbias, eps, rows, channels, pixels, groups,
    )  # fmt: skip
    has = (weight is not None, dbias is not None)
    plan_strides = (*gather.stride(), *scatter.stride())
    options, t = launch_options(x), tiles.apply
    if tiles.whole:
        launches.launch(
            norm_backward.whole_backward, (-(-channels // t.channels),),
            grad, x, output, dx, extra, *given, *strides, *plan_strides,
            *tiles.whole_tile, tiles.groups, *has, relu, residual, num_warps=tiles.warps, **options,
        )  # fmt: skip
        return
    assert work is not None
    s, (factor, slope, level) = tiles.sums, work[:3].unbind()
    part_g, part_gx = part_sums(3, work, tiles.parts, dx)
    launches.launch(
        norm_backward.row_sums, s.over(rows, channels, tiles.parts),
        grad, x, output, mean, part_g, part_gx, rows, channels, pixels, pixels // tiles.parts, *strides, *s, relu, table,
        num_warps=s.warps, **options,
    )  # fmt: skip
    launches.launch(
        norm_backward.plan_backward, (-(-channels // tiles.block),),
        part_g, part_gx, factor, slope, level, *given, *plan_strides,
        tiles.batch, tiles.block, tiles.groups, tiles.parts, *has, num_warps=tiles.warps, **options,
    )  # fmt: skip
    launches.launch(
        norm_backward.affine_backward, t.grid(rows, channels, pixels),
        grad, x, output, dx, extra, mean, factor, slope, level, rows, channels, pixels, *strides,
        *t, relu, table, residual, num_warps=t.warps, **options,
    )  # fmt: skip


def work_for(tables: int, geometry: Geometry, parts: int, out: Tensor, like: Tensor) -> Tensor:
    """Scratch buffer for ``tables`` tables of values per row and channel, followed by two tables of sums over parts of rows.

    The sums need no memory of their own if there is one part, or if they go into ``out``, which is written later. They do unless
    ``out`` is too small or so large that separate scratch hardly adds to the peak memory.
    """
    _, _, rows, channels, _, _ = geometry
    taken = 8 * rows * parts * channels
    sums = 0 if parts == 1 or taken <= out.nbytes <= 32 * taken else 2 * parts
    return like.new_empty((tables + sums, rows, channels))


def part_sums(tables: int, work: Tensor, parts: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """The buffers of the two sums over parts of rows: see :func:`work_for`."""
    if parts == 1:
        return work[0], work[1]
    _, rows, channels = work.shape
    if len(work) > tables:
        one, two = work[tables:].view(2, rows * parts, channels)
    else:
        one, two = work.new_empty(0).set_(out.untyped_storage(), 0, (2, rows * parts, channels))  # type: ignore[call-overload]
    return one, two


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _type(parameter: Tensor | None) -> torch.dtype | None:
    return None if parameter is None else parameter.dtype
