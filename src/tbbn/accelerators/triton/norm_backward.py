"""Triton kernels of the norm's backward pass. Argument names are those of ``norm_forward.py``.

All arithmetic is float32 and relative to the mean of the channel's first group (the centre).

A ReLU after the norm stops the gradient where its output ``y`` is zero. With TABLE, ``y`` points to the factors and offsets of
the forward's affine pass instead (2, B, C), from which the sign is recomputed: this reads less memory than the output.
"""

# mypy: allow-untyped-defs
# Kernel arguments are device pointers and numbers, for which Python has no types.

from __future__ import annotations

import triton
import triton.language as tl

from tbbn.accelerators.triton.launch import dependent_launch
from tbbn.accelerators.triton.norm_forward import (
    gain_of,
    over_pixels,
    plan_of,
    reverse_tile,
    tile,
    to_pixels,
    whole_tile,
)


@triton.jit
def _upstream(g, y, offsets, mask, RELU: tl.constexpr):
    """The gradient that reaches the affine pass: zero where the ReLU after it was inactive."""
    up = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        up = tl.where(tl.load(y + offsets, mask=mask, other=0.0) > 0, up, 0.0)
    return up


@triton.jit
def _affine_of(table, x, row, channel, B, C, sc, TABLE: tl.constexpr):
    """The factor and offset of each row and channel (ROWS, 1, CHANNELS) in the forward pass, and its pivot."""
    factor, offset, pivot = 0.0, 0.0, 0.0
    if TABLE:
        at = row[:, None] * C + channel[None, :]
        there = (row < B)[:, None] & (channel < C)[None, :]
        factor = tl.load(table + at, mask=there, other=0.0)[:, None, :]
        offset = tl.load(table + B * C + at, mask=there, other=0.0)[:, None, :]
        pivot = tl.load(x + channel * sc, mask=channel < C, other=0.0).to(tl.float32)[None, None, :]
    return factor, offset, pivot


@triton.jit
def _load_rows(
    g, x, y, dresidual, centre, factor, offset, pivot, offsets, mask,
    RELU: tl.constexpr, TABLE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """:func:`_load_tile`; with TABLE, the sign of the output is recomputed instead of read."""
    if TABLE:
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
        up = tl.where((value - pivot) * factor + offset > 0, up, 0.0)
        d = value - centre
    else:
        up, d = _load_tile(g, x, y, dresidual, centre, offsets, mask, RELU, RESIDUAL)
    return up, d


@triton.jit
def _load_tile(
    g, x, y, dresidual, centre, offsets, mask, RELU: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """A tile's inputs of the backward pass: the upstream gradient (also stored as the residual's) and ``x - centre``."""
    up = _upstream(g, y, offsets, mask, RELU)
    if RESIDUAL:
        tl.store(dresidual + offsets, up, mask=mask)
    return up, tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - centre


@triton.jit
def row_sums(
    g, x, y, mean, part_g, part_gx, B, C, P, SPAN, sb, sp, sc,
    ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr, TABLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sums of ``g`` and of ``g * (x - centre)`` over every part of every row; the centre is the first group's mean."""
    dependent_launch(PDL)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * SPAN * sp
    centre = tl.load(mean + channel, mask=channel < C, other=0.0)
    sum_g = tl.zeros((ROWS, CHANNELS), tl.float32)
    sum_gx = tl.zeros((ROWS, CHANNELS), tl.float32)
    factor, offset, pivot = _affine_of(y, x, row, channel, B, C, sc, TABLE)
    for start in range(0, SPAN, PIXELS):
        offsets, mask = tile(row, start + tl.arange(0, PIXELS), channel, B, C, SPAN, sb, sp, sc)
        up, d = _load_rows(
            g, x, y, g, centre[None, None, :], factor, offset, pivot, begin + offsets, mask, RELU, TABLE, False
        )
        sum_g += tl.sum(up, 1)
        sum_gx += tl.sum(up * d, 1)
    at = (row[:, None] * (P // SPAN) + tl.program_id(1)) * C + channel[None, :]
    there = (row < B)[:, None] & (channel < C)[None, :]
    tl.store(part_g + at, sum_g, mask=there)
    tl.store(part_gx + at, sum_gx, mask=there)


@triton.jit
def _backward_plan(
    all_g, all_gx, row, channel, centre, weight, gather, scatter, mean, var, dweight, dbias, eps,
    B, C, P, R, gj, gb, vb, vj,
    BATCH: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The transposed plan: from row sums (BATCH, CHANNELS) to A, X, K of ``dx = A g + X (x - centre) + K`` for each row."""
    inside = channel < C
    gain = gain_of(weight, channel, inside, CHANNELS, WEIGHT)
    factor = tl.zeros((BATCH, CHANNELS), tl.float32)
    slope = tl.zeros((BATCH, CHANNELS), tl.float32)
    level = tl.zeros((BATCH, CHANNELS), tl.float32)
    grad_weight = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, R, GROUPS):
        group = start + tl.arange(0, GROUPS)
        known = group < R
        w, u = plan_of(group, known, gather, scatter, row, B, gj, gb, vb, vj)
        saved = group[:, None] * C + channel[None, :]
        valid = known[:, None] & inside[None, :]
        off = tl.load(mean + saved, mask=valid, other=0.0) - centre[None, :]
        inv = tl.rsqrt(tl.load(var + saved, mask=valid, other=0.0) + tl.cast(eps, tl.float32))
        inv = tl.where(known[:, None], inv, 0.0)
        scale = inv * gain[None, :]
        sum_g = tl.sum(u[:, :, None] * all_g[None, :, :], 1)  # (GROUPS, CHANNELS)
        sum_gx = tl.sum(u[:, :, None] * all_gx[None, :, :], 1)
        spread = (sum_gx - off * sum_g) * inv  # sums of g * normalised x
        grad_weight += tl.sum(tl.where(known[:, None], spread, 0.0), 0)
        fall = spread * scale * inv  # minus twice the gradient of the group's variance
        drift = scale * sum_g - fall * off  # minus the gradient of its mean, at the centre
        factor += tl.sum(u[:, :, None] * scale[:, None, :], 0)
        slope -= tl.sum(w[:, :, None] * fall[:, None, :], 0)
        level -= tl.sum(w[:, :, None] * drift[:, None, :], 0)
    if WEIGHT:
        tl.store(dweight + channel, grad_weight, mask=inside)
    if BIAS:
        tl.store(dbias + channel, tl.sum(all_g, 0), mask=inside)
    return factor, slope / P, level / P


@triton.jit
def whole_backward(
    g, x, y, dx, dresidual, weight, gather, scatter, mean, var, dweight, dbias, eps,
    B, C, P, R, sb, sp, sc, gj, gb, vb, vj,
    BATCH: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The whole backward pass, for a block of channels whose batch fits one tile."""
    dependent_launch(PDL)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row, offsets, mask = whole_tile(channel, B, C, P, sb, sp, sc, BATCH, RUNS, RUN)
    centre = tl.load(mean + channel, mask=channel < C, other=0.0)
    up, d = _load_tile(g, x, y, dresidual, centre[None, None, None, :], offsets, mask, RELU, RESIDUAL)
    factor, slope, level = _backward_plan(
        over_pixels(up), over_pixels(up * d), row, channel, centre, weight, gather, scatter, mean, var, dweight, dbias, eps,
        B, C, P, R, gj, gb, vb, vj, BATCH, CHANNELS, GROUPS, WEIGHT, BIAS,
    )  # fmt: skip
    tl.store(dx + offsets, up * to_pixels(factor) + (d * to_pixels(slope) + to_pixels(level)), mask=mask)


@triton.jit
def plan_backward(
    part_g, part_gx, factor, slope, level, weight, gather, scatter, mean, var, dweight, dbias, eps,
    B, C, P, R, gj, gb, vb, vj,
    BATCH: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Only the transposed plan, once per channel. Reads the sums over PARTS of each row."""
    dependent_launch(PDL)
    row = tl.arange(0, BATCH)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    at = row[:, None] * (PARTS * C) + channel[None, :]
    there = (row < B)[:, None] & (channel < C)[None, :]
    all_g = tl.zeros((BATCH, CHANNELS), tl.float32)
    all_gx = tl.zeros((BATCH, CHANNELS), tl.float32)
    for part in tl.static_range(PARTS):
        all_g += tl.load(part_g + at + part * C, mask=there, other=0.0)
        all_gx += tl.load(part_gx + at + part * C, mask=there, other=0.0)
    centre = tl.load(mean + channel, mask=channel < C, other=0.0)
    a, b, c = _backward_plan(
        all_g, all_gx, row, channel, centre, weight, gather, scatter, mean, var, dweight, dbias, eps,
        B, C, P, R, gj, gb, vb, vj, BATCH, CHANNELS, GROUPS, WEIGHT, BIAS,
    )  # fmt: skip
    at = row[:, None] * C + channel[None, :]
    tl.store(factor + at, a, mask=there)
    tl.store(slope + at, b, mask=there)
    tl.store(level + at, c, mask=there)


@triton.jit
def affine_backward(
    g, x, y, dx, dresidual, mean, factor, slope, level, B, C, P, sb, sp, sc,
    ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr, TABLE: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``dx = A g + X (x - centre) + K`` for a block of rows, channels and pixels."""
    dependent_launch(PDL)
    row, pixel, channel = reverse_tile(ROWS, PIXELS, CHANNELS)
    centre = tl.load(mean + channel, mask=channel < C, other=0.0)
    offsets, mask = tile(row, pixel, channel, B, C, P, sb, sp, sc)
    past_factor, past_offset, pivot = _affine_of(y, x, row, channel, B, C, sc, TABLE)
    up, d = _load_rows(
        g, x, y, dresidual, centre[None, None, :], past_factor, past_offset, pivot, offsets, mask, RELU, TABLE, RESIDUAL
    )
    at = row[:, None] * C + channel[None, :]
    there = (row < B)[:, None] & (channel < C)[None, :]
    a = tl.load(factor + at, mask=there, other=0.0)
    b = tl.load(slope + at, mask=there, other=0.0)
    c = tl.load(level + at, mask=there, other=0.0)
    tl.store(dx + offsets, up * a[:, None, :] + (d * b[:, None, :] + c[:, None, :]), mask=mask)
