"""How the Triton kernels are launched: the shapes of their tiles, and the arguments of each.

Importing this module imports Triton; import it only where there is a CUDA tensor to use it on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tbbn.accelerators.triton import norm_backward as triton_backward
from tbbn.accelerators.triton import norm_forward as triton_code
from tbbn.accelerators.triton.launch import device_of, turn
from tbbn.nn.plan import Plan

# A tile that holds a channel's whole batch may have this many elements; above it, moments take a launch of their own.
WHOLE_LIMIT = 16384
_PROGRAMS = 256  # about two for each multiprocessor of a large card
_LINE = 128  # bytes of a line of the cache
_RUN = 32  # pixels: eight threads' where they read four at a time, a warp's where they cannot
MOST_PARTS = 16  # of a row: the plan's kernels join them one by one


class _Tile(NamedTuple):
    rows: int
    pixels: int
    channels: int

    @property
    def size(self) -> int:
        return self.rows * self.pixels * self.channels

    @property
    def warps(self) -> int:
        """64 elements for a thread where it has channels side by side, read several at a time; otherwise 32."""
        return max(1, min(16, self.size // 2048)) if self.channels > 1 else max(4, min(16, self.size // 1024))

    def grid(self, rows: int, channels: int, pixels: int) -> tuple[int, int, int]:
        return self.over(rows, channels, -(-pixels // self.pixels))

    def over(self, rows: int, channels: int, parts: int) -> tuple[int, int, int]:
        """Channels first: neighbours in memory are read at the same time."""
        return -(-channels // self.channels), parts, -(-rows // self.rows)


class _Tiles(NamedTuple):
    whole: bool
    sums: _Tile  # of the kernels that sum rows
    apply: _Tile  # of those that apply the plan
    batch: int
    groups: int
    block: int  # channels of a program of the plan
    parts: int = 1  # in which the pixels of a row are summed
    run: int = 1  # neighbouring pixels of a whole tile that threads read together

    @property
    def whole_tile(self) -> tuple[int, int, int, int]:
        rows, pixels, channels = self.apply
        return rows, pixels // self.run, self.run, channels

    @property
    def warps(self) -> int:
        """Of the kernels with a plan; at most 64 elements a thread where a whole tile goes through it."""
        plan = self.batch * self.groups * self.block
        if self.whole:
            return max(4, min(16, max(plan // 1024, min(8, self.apply.size // 1024))))
        return max(4, min(16, plan // 1024)) if plan > 2048 else 1  # where one will do no thread waits for another's


@lru_cache(maxsize=1024)
def _tiles(rows: int, channels: int, pixels: int, groups: int, last: bool, size: int, limit: int) -> _Tiles:
    """Tile shapes: enough programs to fill a card, no tile larger than registers hold, a line of neighbours together."""
    batch, image, wide = _power(rows), _power(pixels), _power(channels)
    # Of channels that lie next to each other a whole tile would take a few bytes here and there: for small tiles only.
    limit = limit // 8 if last else limit
    block = min(8, wide, max(1, limit // (batch * image)), max(2, wide // 32)) if last else 1
    if batch * image * block <= limit and (block > 1 or not last or wide == 1):
        tile = _Tile(batch, image, block)
        run = 1 if last else min(image, _RUN)
        return _Tiles(True, tile, tile, batch, _groups(groups, batch, block), block, run=run)
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
    sums = _Tile(max(1, min(batch, work // (long * block))), long, block)
    short = min(image, work // block)
    apply = _Tile(max(1, min(batch, work // (short * block))), short, block)
    few = max(1, min(wide // 128, 4096 // batch))  # channels of a program of the plan; it takes two groups at least
    return _Tiles(False, sums, apply, batch, _groups(groups, batch, few), few, parts)


def _groups(groups: int, batch: int, block: int) -> int:
    # At least two: of tiles that are one thick in two directions some compilers make code that spills all of them.
    return max(2, min(_power(groups), 8192 // (batch * block)))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Running(NamedTuple):
    mean: Tensor
    var: Tensor
    share: Tensor  # (r,)
    unbiased: Tensor  # (r,)
    momentum: float | Tensor
    batches: Tensor | None  # (), how many were counted
    total: bool


def _pixels(x: Tensor) -> int:
    return x.shape[2:].numel()


def unbiased(plan: Plan, x: Tensor) -> Tensor:
    return plan.per_pixel(_pixels(x)).running_var


def strides_of(x: Tensor) -> tuple[int, int, int] | None:
    """Strides of row, pixel and channel, or None where a tensor is neither contiguous nor channels_last."""
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


def _alike(grad: Tensor, x: Tensor) -> Tensor:
    """``grad`` with its elements in the order of ``x``."""
    if grad.stride() == x.stride():
        return grad
    return torch.empty_like(x).copy_(grad)


def _vector(parameter: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument for a parameter; where there is none, something it will not read."""
    return other if parameter is None else parameter.contiguous()


def gradient_of(parameter: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if parameter is None else like.new_empty(parameter.shape, dtype=parameter.dtype)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor, eps: float,
    running: Running | None = None, relu: bool = False, residual: Tensor | None = None, moments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and group statistics; ``moments`` (2, rows, parts, channels) are those of the rows, where someone has them."""
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
    with device_of(x):
        t = tiles.apply
        if tiles.whole:
            triton_code.whole_forward[(-(-channels // t.channels),)](
                x, y, beside, *given, rows, channels, pixels, groups, *strides, *plan_strides,
                *tiles.whole_tile, tiles.groups, *has, *after, *moved, num_warps=tiles.warps, **turn(x),
            )  # fmt: skip
            return y, mean, var
        factor, offset = gather.new_empty((2, rows, channels)).unbind()
        if moments is None:
            s, parts = tiles.sums, tiles.parts
            part_mean, part_var = _parts(factor, offset, parts, y)
            triton_code.moments[s.over(rows, channels, parts)](
                x, part_mean, part_var, rows, channels, pixels, pixels // parts, *strides, *s, num_warps=s.warps, **turn(x)
            )  # fmt: skip
        else:
            part_mean, part_var = moments.unbind()
            parts = moments.shape[2]
        triton_code.plan_forward[(-(-channels // tiles.block),)](
            x, part_mean, part_var, factor, offset, *given, rows, channels, groups, strides[2], *plan_strides,
            tiles.batch, tiles.block, tiles.groups, parts, moments is not None, *has, *moved, num_warps=tiles.warps, **turn(x),
        )  # fmt: skip
        triton_code.affine[t.grid(rows, channels, pixels)](
            x, y, beside, factor, offset, rows, channels, pixels, *strides, *t, *after, num_warps=t.warps, **turn(x)
        )  # fmt: skip
    return y, mean, var


def fixed(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    relu: bool, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """``relu(batch_norm(x) + residual)`` with statistics that are given."""
    x, strides = _dense(x)
    (rows, channels), pixels = x.shape[:2], _pixels(x)
    t = _tiles(rows, channels, pixels, 1, strides[2] == 1, x.element_size(), 0).apply
    y = torch.empty_like(x)
    beside = x if residual is None else _alike(residual, x)
    with device_of(x):
        triton_code.fixed[t.grid(rows, channels, pixels)](
            x, y, beside, mean, var, _vector(weight, mean), _vector(bias, mean), eps, rows, channels, pixels, *strides,
            *t, weight is not None, bias is not None, relu, residual is not None, num_warps=t.warps, **turn(x),
        )  # fmt: skip
    return y


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, gather: Tensor, scatter: Tensor,
    mean: Tensor, var: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of input, weight and bias; those of a weight or bias that is not there are empty."""
    return all_gradients(grad, x, weight, bias, gather, scatter, mean, var, eps)[:3]


def all_gradients(
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
    dweight, dbias = gradient_of(weight, mean), gradient_of(bias, mean)
    output, relu = (x, False) if y is None else (y, True)
    given = (_vector(weight, mean), gather, scatter, mean, var, dweight, dbias, eps, rows, channels, pixels, groups)
    has = (weight is not None, bias is not None)
    plan_strides = (*gather.stride(), *scatter.stride())
    with device_of(x):
        t = tiles.apply
        if tiles.whole:
            triton_backward.whole_backward[(-(-channels // t.channels),)](
                grad, x, output, dx, dresidual, *given, *strides, *plan_strides,
                *tiles.whole_tile, tiles.groups, *has, relu, residual, num_warps=tiles.warps, **turn(x),
            )  # fmt: skip
            return dx, dweight, dbias, dresidual
        s = tiles.sums
        factor, slope, level = gather.new_empty((3, rows, channels)).unbind()
        part_g, part_gx = _parts(factor, slope, tiles.parts, dx)
        triton_backward.row_sums[s.over(rows, channels, tiles.parts)](
            grad, x, output, mean, part_g, part_gx, rows, channels, pixels, pixels // tiles.parts, *strides, *s, relu,
            num_warps=s.warps, **turn(x),
        )  # fmt: skip
        triton_backward.plan_backward[(-(-channels // tiles.block),)](
            part_g, part_gx, factor, slope, level, *given, *plan_strides,
            tiles.batch, tiles.block, tiles.groups, tiles.parts, *has, num_warps=tiles.warps, **turn(x),
        )  # fmt: skip
        triton_backward.affine_backward[t.grid(rows, channels, pixels)](
            grad, x, output, dx, dresidual, mean, factor, slope, level, rows, channels, pixels, *strides,
            *t, relu, residual, num_warps=t.warps, **turn(x),
        )  # fmt: skip
    return dx, dweight, dbias, dresidual


def _parts(first: Tensor, second: Tensor, parts: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Room for sums over parts of rows, until they become ``first`` and ``second``.

    Of a small ``out``, which is written after that, they would be a good part: they lie in it.
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
