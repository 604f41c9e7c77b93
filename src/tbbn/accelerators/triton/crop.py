"""Triton kernel: a random resized crop of stored images and its normalisation, in one launch instead of thirty.

It computes the same as :class:`tbbn.bench.data.augment.ResizedCrop`, which uses tensor operations: one interpolation matrix per
axis.
"""

# mypy: allow-untyped-defs
# Kernel arguments are device pointers and numbers, for which Python has no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbbn.accelerators.triton.launch import dependent_launch, device_of, launch_options


def resized_crop(
    images: Tensor, rows: Tensor | None, parameters: Tensor, mean: Tensor, std: Tensor, size: tuple[int, int], pad: int,
    memory_format: torch.memory_format,
) -> Tensor:  # fmt: skip
    """Crop, resize to ``size`` and normalise ``rows`` (None: all) of the stored images (N, C, H, W): (n, C, h, w) float32.

    ``parameters`` (n, 5) are top, left, height and width of the box in the zero-padded image, and whether to flip.
    """
    _, channels, height, width = images.shape
    shape = (len(parameters), channels, *size)
    out = torch.empty(shape, dtype=torch.float32, device=images.device, memory_format=memory_format)
    blocks = [max(16, triton.next_power_of_2(n)) for n in (height, width, height + 2 * pad, width + 2 * pad, *size)]
    with device_of(images):
        crop[(len(parameters), channels)](
            images, rows if rows is None else rows.contiguous(), parameters.contiguous(), mean, std, out,
            channels, height, width, *size, pad, *out.stride(),
            *blocks, num_warps=4, **launch_options(out),
        )  # fmt: skip
    return out


@triton.jit
def _weights(start, length, flip, pixel, N_IN, N_OUT, OUT: tl.constexpr):
    """Unscaled weights (OUT, pixels) of a padded axis: a triangle around the position of each output, inside the box."""
    out = tl.arange(0, OUT)
    out = tl.where(flip > 0.5, N_OUT - 1 - out, out) * 1.0
    step = length / N_OUT
    inside = pixel * 1.0 - start
    away = (inside[None, :] + 0.5 - (out[:, None] + 0.5) * step) / tl.maximum(step, 1.0)
    weights = tl.maximum(1.0 - tl.abs(away), 0.0)
    return tl.where(((inside >= 0.0) & (inside < length) & (pixel < N_IN))[None, :], weights, 0.0)


@triton.jit
def _matrix(start, length, flip, N_IN, N_OUT, PAD, IN: tl.constexpr, PADDED: tl.constexpr, OUT: tl.constexpr):
    """The matrix (OUT, IN) that resizes the box [start, start + length) of an axis padded on both sides."""
    total = tl.sum(_weights(start, length, flip, tl.arange(0, PADDED), N_IN + 2 * PAD, N_OUT, OUT), 1)
    pixel = tl.arange(0, IN)
    weights = _weights(start, length, flip, pixel + PAD, N_IN + PAD, N_OUT, OUT)
    return weights / tl.maximum(total, 0.25)[:, None]


@triton.jit
def crop(
    images, rows, parameters, mean, std, out, CHANNELS, H, W, OUT_H, OUT_W, PAD, sn, sc, sh, sw,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, PADDED_H: tl.constexpr, PADDED_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Channel ``program_id(1)`` of row ``program_id(0)``: parameters are top, left, height, width, flip."""
    dependent_launch(PDL)
    n, channel = tl.program_id(0), tl.program_id(1)
    top = tl.load(parameters + n * 5)
    left = tl.load(parameters + n * 5 + 1)
    height = tl.load(parameters + n * 5 + 2)
    width = tl.load(parameters + n * 5 + 3)
    flip = tl.load(parameters + n * 5 + 4)
    h, w = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_W)
    row = n.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + n)
    at = images + (row * CHANNELS + channel) * (H * W)
    image = tl.load(at + h[:, None] * W + w[None, :], mask=(h < H)[:, None] & (w < W)[None, :], other=0)
    across = _matrix(left, width, flip, W, OUT_W, PAD, BLOCK_W, PADDED_W, TILE_W) / 255.0
    down = _matrix(top, height, 0.0, H, OUT_H, PAD, BLOCK_H, PADDED_H, TILE_H)
    lines = tl.dot(image.to(tl.float32), tl.trans(across), input_precision="ieee")
    result = tl.dot(down, lines, input_precision="ieee")
    result = (result - tl.load(mean + channel)) / tl.load(std + channel)
    i, j = tl.arange(0, TILE_H), tl.arange(0, TILE_W)
    place = n * sn + channel * sc + i[:, None] * sh + j[None, :] * sw
    tl.store(out + place, result, mask=(i < OUT_H)[:, None] & (j < OUT_W)[None, :])
