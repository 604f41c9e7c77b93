"""Launches of the norm's kernels: tile shapes, and the arguments of each kernel.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tbbn.accelerators.triton import norm_backward, norm_forward
from tbbn.accelerators.triton.launch import device_of, launch_options

# The most elements of a tile that holds a channel's whole batch. Above it, moments are a launch of their own.
WHOLE_LIMIT = 16384
_PROGRAMS = 256  # about two per multiprocessor of a large GPU
_LINE = 128  # bytes of a cache line
_RUN = 32  # pixels: of 8 threads that read 4 at a time, or of a warp that reads one at a time
MOST_PARTS = 16  # of a row: the plan kernels merge them one by one


class Tile(NamedTuple):
    rows: int
    pixels: int
    channels: int

    @property
    def size(self) -> int:
        return self.rows * self.pixels * self.channels

    @property
    def warps(self) -> int:
        """64 elements per thread if channels are contiguous and read in vectors, otherwise 32."""
        return max(1, min(16, self.size // 2048)) if self.channels > 1 else max(4, min(16, self.size // 1024))

    def grid(self, rows: int, channels: int, pixels: int) -> tuple[int, int, int]:
        return self.over(rows, channels, -(-pixels // self.pixels))

    def over(self, rows: int, channels: int, parts: int) -> tuple[int, int, int]:
        """Channels vary fastest: neighbours in memory are read at the same time."""
        return -(-channels // self.channels), parts, -(-rows // self.rows)


class Tiles(NamedTuple):
    whole: bool
    sums: Tile  # for kernels that sum rows
    apply: Tile  # for kernels that apply the plan
    batch: int
    groups: int
    block: int  # channels per program of the plan kernels
    parts: int = 1  # parts of a row that are summed separately
    run: int = 1  # neighbouring pixels of a whole tile that threads read together

    @property
    def whole_tile(self) -> tuple[int, int, int, int]:
        rows, pixels, channels = self.apply
        return rows, pixels // self.run, self.run, channels

    @property
    def warps(self) -> int:
        """Of the kernels that evaluate the plan; at most 64 elements per thread of a whole tile."""
        plan = self.batch * self.groups * self.block
        if self.whole:
            return max(4, min(16, max(plan // 1024, min(8, self.apply.size // 1024))))
        return max(4, min(16, plan // 1024)) if plan > 2048 else 1  # a single warp needs no barriers


@lru_cache(maxsize=1024)
def tiles_for(rows: int, channels: int, pixels: int, groups: int, last: bool, size: int, limit: int) -> Tiles:
    """Tile shapes: enough programs to fill a GPU, no tile larger than the registers, whole cache lines."""
    batch, image, wide = _power(rows), _power(pixels), _power(channels)
    # In channels_last a whole tile reads only a few bytes of each cache line: worth it for small tiles only.
    limit = limit // 8 if last else limit
    block = min(8, wide, max(1, limit // (batch * image)), max(2, wide // 32)) if last else 1
    if batch * image * block <= limit and (block > 1 or not last or wide == 1):
        tile = Tile(batch, image, block)
        run = 1 if last else min(image, _RUN)
        return Tiles(True, tile, tile, batch, _groups(groups, batch, block), block, run=run)
    every = rows * channels * pixels
    work = max(1024, min(4096, _power(every // _PROGRAMS + 1) // 2))
    block = min(wide, _LINE // size) if last else 1
    wanted = max(_PROGRAMS, min(4 * _PROGRAMS, every // 8192))
    parts, span = 1, pixels
    while (
        parts < MOST_PARTS and rows * -(-channels // block) * parts < wanted and span % 2 == 0 and span * block > 1024
    ):
        parts, span = 2 * parts, span // 2
    long = min(_power(span), 8192 // block if last else 4096)
    sums = Tile(max(1, min(batch, work // (long * block))), long, block)
    short = min(image, work // block)
    apply = Tile(max(1, min(batch, work // (short * block))), short, block)
    few = max(1, min(wide // 128, 4096 // batch))  # channels per program of the plan kernels
    return Tiles(False, sums, apply, batch, _groups(groups, batch, few), few, parts)


def _groups(groups: int, batch: int, block: int) -> int:
    # At least two: for tiles with extent one in two directions some compilers generate code that spills everything.
    return max(2, min(_power(groups), 8192 // (batch * block)))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Running(NamedTuple):
    """The running statistics, updated in the forward pass."""

    mean: Tensor
    var: Tensor
    share: Tensor  # (r,), of each group in the mean
    unbiased: Tensor  # (r,), in the variance, with the factor n / (n - 1)
    momentum: float | Tensor
    batches: Tensor | None  # (), the number of batches, counted in the same launch
    total: bool  # whether to add the variance between groups


def _pixels(x: Tensor) -> int:
    return x.shape[2:].numel()


def strides_of(x: Tensor) -> tuple[int, int, int] | None:
    """Strides of row, pixel and channel; None if the tensor is neither contiguous nor channels_last."""
    channels, pixels = x.shape[1], _pixels(x)
    if x.is_contiguous():
        return (channels, 1, 1) if pixels == 1 else (channels * pixels, 1, pixels)
    if x.dim() > 2 and x.movedim(1, -1).is_contiguous():
        return channels * pixels, channels, 1
    return None


def _dense(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    strides = strides_of(x)
    if strides is None:
        x = x.contiguous()
        strides = strides_of(x)
        assert strides is not None
    return x, strides


def _strided_like(grad: Tensor, x: Tensor) -> Tensor:
    """``grad`` with the strides of ``x``."""
    if grad.stride() == x.stride():
        return grad
    return torch.empty_like(x).copy_(grad)


def _vector(parameter: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument for a parameter; for None, some tensor that the kernel will not read."""
    return other if parameter is None else parameter.contiguous()


def gradient_of(parameter: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if parameter is None else like.new_empty(parameter.shape, dtype=parameter.dtype)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor, eps: float,
    running: Running | None = None, relu: bool = False, residual: Tensor | None = None, moments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, group means and group variances. ``moments`` (2, rows, parts, channels) of the rows are used if known."""
    x, strides = _dense(x)
    (rows, channels), pixels, groups = x.shape[:2], _pixels(x), gather.shape[0]
    tiles = tiles_for(rows, channels, pixels, groups, strides[2] == 1, x.element_size(), WHOLE_LIMIT)
    y = torch.empty_like(x)
    mean, var = gather.new_empty((groups, channels)), gather.new_empty((groups, channels))
    *buffers, batches, total = (mean, var, mean, mean, 0.0, None, False) if running is None else running
    added = x if residual is None else _strided_like(residual, x)
    given = (_vector(weight, mean), _vector(bias, mean), gather, scatter, mean, var)
    given = (*given, *buffers, mean if batches is None else batches, eps)
    has = (weight is not None, bias is not None)
    tracked = (running is not None, total, isinstance(buffers[4], Tensor), batches is not None)
    after = (relu, residual is not None)
    plan_strides = (*gather.stride(), *scatter.stride())
    options = launch_options(x)
    with device_of(x):
        t = tiles.apply
        if tiles.whole:
            norm_forward.whole_forward[(-(-channels // t.channels),)](
                x, y, added, *given, rows, channels, pixels, groups, *strides, *plan_strides,
                *tiles.whole_tile, tiles.groups, *has, *after, *tracked, num_warps=tiles.warps, **options,
            )  # fmt: skip
            return y, mean, var
        factor, offset = gather.new_empty((2, rows, channels)).unbind()
        if moments is None:
            s, parts = tiles.sums, tiles.parts
            part_mean, part_var = scratch(factor, offset, parts, y)
            norm_forward.moments[s.over(rows, channels, parts)](
                x, part_mean, part_var, rows, channels, pixels, pixels // parts, *strides, *s, num_warps=s.warps, **options
            )  # fmt: skip
        else:
            part_mean, part_var = moments.unbind()
            parts = moments.shape[2]
        norm_forward.plan_forward[(-(-channels // tiles.block),)](
            x, part_mean, part_var, factor, offset, *given, rows, channels, groups, strides[2], *plan_strides,
            tiles.batch, tiles.block, tiles.groups, parts, moments is not None, *has, *tracked, num_warps=tiles.warps, **options,
        )  # fmt: skip
        norm_forward.affine[t.grid(rows, channels, pixels)](
            x, y, added, factor, offset, rows, channels, pixels, *strides, *t, *after, num_warps=t.warps, **options
        )  # fmt: skip
    return y, mean, var


def eval_forward(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    relu: bool, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """``relu(batch_norm(x) + residual)`` by given statistics."""
    x, strides = _dense(x)
    (rows, channels), pixels = x.shape[:2], _pixels(x)
    t = tiles_for(rows, channels, pixels, 1, strides[2] == 1, x.element_size(), 0).apply
    y = torch.empty_like(x)
    added = x if residual is None else _strided_like(residual, x)
    options = launch_options(x)
    with device_of(x):
        norm_forward.eval_affine[t.grid(rows, channels, pixels)](
            x, y, added, mean, var, _vector(weight, mean), _vector(bias, mean), eps, rows, channels, pixels, *strides,
            *t, weight is not None, bias is not None, relu, residual is not None, num_warps=t.warps, **options,
        )  # fmt: skip
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor,
    mean: Tensor, var: Tensor, eps: float, y: Tensor | None = None, residual: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of input, weight, bias and residual; empty for a missing weight or bias. ``y`` is the output after a ReLU."""
    x, strides = _dense(x)
    grad = _strided_like(grad, x)
    (rows, channels), pixels, groups = x.shape[:2], _pixels(x), gather.shape[0]
    tiles = tiles_for(rows, channels, pixels, groups, strides[2] == 1, x.element_size(), WHOLE_LIMIT)
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if residual else dx
    dweight, dbias = gradient_of(weight, mean), gradient_of(bias, mean)
    output, relu = (x, False) if y is None else (y, True)
    given = (_vector(weight, mean), gather, scatter, mean, var, dweight, dbias, eps, rows, channels, pixels, groups)
    has = (weight is not None, bias is not None)
    plan_strides = (*gather.stride(), *scatter.stride())
    options = launch_options(x)
    with device_of(x):
        t = tiles.apply
        if tiles.whole:
            norm_backward.whole_backward[(-(-channels // t.channels),)](
                grad, x, output, dx, dresidual, *given, *strides, *plan_strides,
                *tiles.whole_tile, tiles.groups, *has, relu, residual, num_warps=tiles.warps, **options,
            )  # fmt: skip
            return dx, dweight, dbias, dresidual
        s = tiles.sums
        factor, slope, level = gather.new_empty((3, rows, channels)).unbind()
        part_g, part_gx = scratch(factor, slope, tiles.parts, dx)
        norm_backward.row_sums[s.over(rows, channels, tiles.parts)](
            grad, x, output, mean, part_g, part_gx, rows, channels, pixels, pixels // tiles.parts, *strides, *s, relu,
            num_warps=s.warps, **options,
        )  # fmt: skip
        norm_backward.plan_backward[(-(-channels // tiles.block),)](
            part_g, part_gx, factor, slope, level, *given, *plan_strides,
            tiles.batch, tiles.block, tiles.groups, tiles.parts, *has, num_warps=tiles.warps, **options,
        )  # fmt: skip
        norm_backward.affine_backward[t.grid(rows, channels, pixels)](
            grad, x, output, dx, dresidual, mean, factor, slope, level, rows, channels, pixels, *strides,
            *t, relu, residual, num_warps=t.warps, **options,
        )  # fmt: skip
    return dx, dweight, dbias, dresidual


def scratch(first: Tensor, second: Tensor, parts: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Scratch for sums over parts of rows, before they become ``first`` and ``second``.

    For a small ``out``, which is written later, separate scratch would add much to the peak memory: reuse its storage.
    """
    if parts == 1:
        return first, second
    shape = (2, first.shape[0] * parts, first.shape[1])
    taken, there = 8 * first.numel() * parts, out.numel() * out.element_size()
    if there < taken or there > 32 * taken:
        both = first.new_empty(shape)
    else:
        both = first.new_empty(0).set_(out.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    one, two = both.unbind()
    return one, two
