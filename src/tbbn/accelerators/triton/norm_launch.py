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
from tbbn.accelerators.triton.replay import Launches, launch

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


@lru_cache(maxsize=4096)
def _strides(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Strides of row, pixel and channel; None if the tensor is neither contiguous nor channels_last."""
    x = torch.empty(0, device="meta").as_strided(shape, stride)
    channels, pixels = shape[1], _pixels(x)
    if x.is_contiguous():
        return (channels, 1, 1) if pixels == 1 else (channels * pixels, 1, pixels)
    if x.dim() > 2 and x.movedim(1, -1).is_contiguous():
        return channels * pixels, channels, 1
    return None


def _dense(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    strides = _strides(x.shape, x.stride())
    if strides is None:
        x = x.contiguous()
        strides = _strides(x.shape, x.stride())
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


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor, eps: float,
    running: Running | None = None, relu: bool = False, residual: Tensor | None = None, moments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and means and variances (2, r, C) of the groups. ``moments`` (2, rows, parts, channels) are used if known."""
    x, strides = _dense(x)
    (rows, channels), pixels, groups = x.shape[:2], _pixels(x), gather.shape[0]
    tiles = tiles_for(rows, channels, pixels, groups, strides[2] == 1, x.element_size(), WHOLE_LIMIT)
    y, stats = torch.empty_like(x), gather.new_empty((2, groups, channels))
    work = scratch = None
    parts = tiles.parts if moments is None else moments.shape[2]
    if not tiles.whole:
        work = gather.new_empty((2, rows, channels))
        scratch = scratch_for(work, parts, y) if moments is None else None
    if residual is not None:
        residual = _strided_like(residual, x)
    weight, bias = _contiguous(weight), _contiguous(bias)
    on_device = running is not None and isinstance(running.momentum, Tensor)
    key = (
        "forward", x.shape, strides, x.dtype, x.device.index, tiles, parts, gather.stride(), scatter.stride(), eps, relu,
        residual is None, moments is None, _type(weight), _type(bias), running is None
        or (running.mean.dtype, on_device or running.momentum, running.batches is None, running.total),
    )  # fmt: skip
    bases = [x, y, residual, weight, bias, gather, scatter, stats, work, scratch, moments]
    if running is not None:
        bases += [running.mean, running.var, running.share, running.unbiased, running.batches]
        if on_device:
            bases.append(running.momentum)  # type: ignore[arg-type]

    def record(launches: Launches) -> None:
        mean, var = stats.unbind()
        *buffers, batches, total = (mean, var, mean, mean, 0.0, None, False) if running is None else running
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
        factor, offset = work.unbind()
        if moments is None:
            s = tiles.sums
            part_mean, part_var = part_sums(work, scratch, parts, y)
            launches.launch(
                norm_forward.moments, s.over(rows, channels, parts),
                x, part_mean, part_var, rows, channels, pixels, pixels // parts, *strides, *s, num_warps=s.warps, **options,
            )  # fmt: skip
        else:
            part_mean, part_var = moments.unbind()
        launches.launch(
            norm_forward.plan_forward, (-(-channels // tiles.block),),
            x, part_mean, part_var, factor, offset, *given, rows, channels, groups, strides[2], *plan_strides,
            tiles.batch, tiles.block, tiles.groups, parts, moments is not None, *has, *tracked, num_warps=tiles.warps, **options,
        )  # fmt: skip
        launches.launch(
            norm_forward.affine, t.grid(rows, channels, pixels),
            x, y, added, factor, offset, rows, channels, pixels, *strides, *t, *after, num_warps=t.warps, **options,
        )  # fmt: skip

    with device_of(x):
        launch(key, bases, record)
    return y, stats


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
    stats: Tensor, eps: float, y: Tensor | None = None, residual: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of input, weight, bias and residual. ``y`` is the output after a ReLU."""
    x, strides = _dense(x)
    grad = _strided_like(grad, x)
    (rows, channels), pixels, groups = x.shape[:2], _pixels(x), gather.shape[0]
    tiles = tiles_for(rows, channels, pixels, groups, strides[2] == 1, x.element_size(), WHOLE_LIMIT)
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if residual else None
    weight = _contiguous(weight)
    dweight = None if weight is None else torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    work = scratch = None
    if not tiles.whole:
        work = gather.new_empty((3, rows, channels))
        scratch = scratch_for(work, tiles.parts, dx)
    key = (
        "backward", x.shape, strides, x.dtype, grad.dtype, x.device.index, tiles, gather.stride(), scatter.stride(), eps,
        y is None, residual, _type(weight), _type(bias),
    )  # fmt: skip
    bases = [grad, x, y, dx, dresidual, weight, dweight, dbias, gather, scatter, stats, work, scratch]

    def record(launches: Launches) -> None:
        mean, var = stats.unbind()
        output, relu = (x, False) if y is None else (y, True)
        extra = dx if dresidual is None else dresidual
        out = (mean if dweight is None else dweight, mean if dbias is None else dbias)
        given = (
            mean if weight is None else weight,
            gather,
            scatter,
            mean,
            var,
            *out,
            eps,
            rows,
            channels,
            pixels,
            groups,
        )
        has = (weight is not None, bias is not None)
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
        s, (factor, slope, level) = tiles.sums, work.unbind()
        part_g, part_gx = part_sums(work, scratch, tiles.parts, dx)
        launches.launch(
            norm_backward.row_sums, s.over(rows, channels, tiles.parts),
            grad, x, output, mean, part_g, part_gx, rows, channels, pixels, pixels // tiles.parts, *strides, *s, relu,
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
            *t, relu, residual, num_warps=t.warps, **options,
        )  # fmt: skip

    with device_of(x):
        launch(key, bases, record)
    return dx, dweight, dbias, dx if dresidual is None else dresidual


def scratch_for(work: Tensor, parts: int, out: Tensor) -> Tensor | None:
    """Memory for sums over parts of rows; None where ``work`` or the memory of ``out`` will do.

    ``out`` is written later. Where it is small, separate scratch would add much to the peak memory.
    """
    _, rows, channels = work.shape
    taken = 8 * rows * parts * channels
    if parts == 1 or taken <= out.nbytes <= 32 * taken:
        return None
    return work.new_empty((2, rows * parts, channels))


def part_sums(work: Tensor, scratch: Tensor | None, parts: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Where the two sums over parts of rows go: see :func:`scratch_for`."""
    if parts == 1:
        return work[0], work[1]
    if scratch is None:
        _, rows, channels = work.shape
        scratch = work.new_empty(0).set_(out.untyped_storage(), 0, (2, rows * parts, channels))  # type: ignore[call-overload]
    return scratch[0], scratch[1]


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _type(parameter: Tensor | None) -> torch.dtype | None:
    return None if parameter is None else parameter.dtype
