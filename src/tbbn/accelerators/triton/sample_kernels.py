"""Kernels for norms with their own ``(x - center) * scale + shift`` for each channel of each sample.

Center, scale and shift have a value per sample and channel, like the moments they come from. A program works on a block of
channels of one sample, in either memory format.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from tbbn.accelerators.triton.launch import dependent_launch


@triton.jit
def moments(
    X, MEAN, VAR, pixels, channels, x_n, x_c, x_p, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    """Mean and biased variance of each channel of each sample. The second loop reads the values from the cache."""
    dependent_launch(PDL)
    n, c = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    base = X + n.to(tl.int64) * x_n + c[None, :] * x_c
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, pixels, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(base + p * x_p, mask=(p < pixels) & (c < channels)[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / pixels
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, pixels, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)[:, None]
        inside = (p < pixels) & (c < channels)[None, :]
        x = tl.load(base + p * x_p, mask=inside, other=0.0).to(tl.float32)
        away = tl.where(inside, x - mean[None, :], 0.0)
        total += away * away
    tl.store(MEAN + n * channels + c, mean, mask=c < channels)
    tl.store(VAR + n * channels + c, tl.sum(total, 0) / pixels, mask=c < channels)


@triton.jit
def add_moments_gradient(
    X, GRAD, MEAN, GRAD_MEAN, GRAD_VAR, DX, pixels, channels, x_n, x_c, x_p,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``dx = grad + (grad_mean + 2 (x - mean) grad_var) / pixels``."""
    dependent_launch(PDL)
    n, c = tl.program_id(0), tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    at = n.to(tl.int64) * x_n + p * x_p + c[None, :] * x_c
    inside = (p < pixels) & (c < channels)[None, :]
    row = n * channels + c
    mean = tl.load(MEAN + row, mask=c < channels, other=0.0)
    level = tl.load(GRAD_MEAN + row, mask=c < channels, other=0.0) / pixels
    slope = tl.load(GRAD_VAR + row, mask=c < channels, other=0.0) * 2 / pixels
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DX + at, grad + level[None, :] + (x - mean[None, :]) * slope[None, :], mask=inside)


@triton.jit
def affine(
    X, RESIDUAL, Y, CENTER, SCALE, SHIFT, pixels, channels, x_n, x_c, x_p, center_n, scale_n, shift_n,
    ADD: tl.constexpr, RELU: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``y = relu((x - center) * scale + shift + residual)``."""
    dependent_launch(PDL)
    n, c = tl.program_id(0), tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    at = n.to(tl.int64) * x_n + p * x_p + c[None, :] * x_c
    inside = (p < pixels) & (c < channels)[None, :]
    center = tl.load(CENTER + n * center_n + c, mask=c < channels, other=0.0)
    scale = tl.load(SCALE + n * scale_n + c, mask=c < channels, other=0.0)
    shift = tl.load(SHIFT + n * shift_n + c, mask=c < channels, other=0.0)
    y = (tl.load(X + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * scale[None, :] + shift[None, :]
    if ADD:
        y += tl.load(RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # NaN stays
    tl.store(Y + at, y, mask=inside)


@triton.jit
def affine_back(
    X, Y, GRAD, DX, DRESIDUAL, CENTER, SCALE, DCENTER, DSCALE, DSHIFT, pixels, channels, x_n, x_c, x_p, center_n, scale_n,
    ADD: tl.constexpr, RELU: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All gradients of :func:`affine` in one pass. One program computes each sum, so the same input gives the same bits."""
    dependent_launch(PDL)
    n, c = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start_at = n.to(tl.int64) * x_n + c[None, :] * x_c
    center = tl.load(CENTER + n * center_n + c, mask=c < channels, other=0.0)
    scale = tl.load(SCALE + n * scale_n + c, mask=c < channels, other=0.0)
    sum_g = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    sum_gx = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, pixels, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)[:, None]
        at, inside = start_at + p * x_p, (p < pixels) & (c < channels)[None, :]
        g = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(tl.load(Y + at, mask=inside, other=0.0).to(tl.float32) <= 0, 0.0, g)
        if ADD:
            tl.store(DRESIDUAL + at, g, mask=inside)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        sum_g += g
        sum_gx += g * (x - center[None, :])
        tl.store(DX + at, g * scale[None, :], mask=inside)
    total = tl.sum(sum_g, 0)
    row = n * channels + c
    tl.store(DSHIFT + row, total, mask=c < channels)
    tl.store(DCENTER + row, -total * scale, mask=c < channels)
    tl.store(DSCALE + row, tl.sum(sum_gx, 0), mask=c < channels)
