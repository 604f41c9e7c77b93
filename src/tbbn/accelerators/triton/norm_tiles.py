"""How the norm's kernels divide a batch: tile shapes and strides, cached by the shape of the input."""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        """Warps of the kernels that evaluate the plan; at most 64 elements per thread of a whole tile."""
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
    # At least two: for tiles with extent one along two axes some compilers generate code that spills all registers.
    return max(2, min(_power(groups), 8192 // (batch * block)))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


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


class Geometry(NamedTuple):
    """The launch parameters that follow from the shape of an input."""

    strides: tuple[int, int, int]  # of row, pixel and channel
    tiles: Tiles
    rows: int
    channels: int
    pixels: int
    number: int  # unique; a short key for recorded launches


_geometries: dict[tuple[Any, ...], Geometry] = {}
_numbers = count()
_MOST = 4096  # geometries kept


def geometry_of(x: Tensor, groups: int, limit: int | None = None) -> tuple[Tensor, Geometry]:
    """``x``, made contiguous if the kernels do not support its strides, and its cached geometry.

    ``limit`` replaces ``WHOLE_LIMIT``; with 0 no tile is whole.
    """
    limit = WHOLE_LIMIT if limit is None else limit
    key = (x.shape, x.stride(), x.dtype, x.device, groups, limit)
    found = _geometries.get(key)
    if found is None:
        strides = _strides(x.shape, x.stride())
        if strides is None:
            return geometry_of(x.contiguous(), groups, limit)
        (rows, channels), pixels = x.shape[:2], _pixels(x)
        tiles = tiles_for(rows, channels, pixels, groups, strides[2] == 1, x.element_size(), limit)
        if len(_geometries) >= _MOST:
            _geometries.clear()
        found = _geometries[key] = Geometry(strides, tiles, rows, channels, pixels, next(_numbers))
    return x, found
