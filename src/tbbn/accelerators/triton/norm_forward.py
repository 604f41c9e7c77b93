"""Triton kernels of the norm's forward pass. Those of the backward pass are in ``norm_backward.py``.

A batch is divided into tiles (ROWS, PIXELS, CHANNELS). ``sb, sp, sc`` are the strides of row, pixel and channel, so one kernel
serves NCHW, channels_last and (N, C). ``B, C, P, R`` are the numbers of rows, channels, pixels and groups. ``gj, gb`` and
``vb, vj`` are the strides of the plan's ``gather`` (r, B) and ``scatter`` (B, r).

All arithmetic is float32 and relative to the channel's first element (the pivot): a large common offset then costs no more
digits than in batch norm. Numbers arrive as float32 from Triton's launcher, as float64 from ``torch.compile``.
"""

# mypy: allow-untyped-defs
# Kernel arguments are device pointers and numbers, for which Python has no types.

from __future__ import annotations

import re

import triton
import triton.language as tl

from tbbn.accelerators.triton.launch import dependent_launch


@triton.jit
def tile(row, pixel, channel, B, C, P, sb, sp, sc):
    """Offsets and mask of the elements of a (ROWS, PIXELS, CHANNELS) tile."""
    offsets = row[:, None, None] * sb + pixel[None, :, None] * sp + channel[None, None, :] * sc
    mask = (row < B)[:, None, None] & (pixel < P)[None, :, None] & (channel < C)[None, None, :]
    return offsets, mask


# Among axes of equal rank, Triton before 3.7 assigns threads to the first one first; since 3.7, to the last one.
ROWS_FIRST = tl.constexpr(tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < (3, 7))


@triton.jit
def whole_tile(channel, B, C, P, sb, sp, sc, BATCH: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr):
    """Rows, offsets and mask of a tile with all rows, their pixels in RUNS runs of RUN neighbours.

    A run is spread over neighbouring threads, and all runs of a row are in the same threads: sums over runs are additions,
    and only the sum inside a run needs shuffles. The axes are (rows, runs, run, channels), or (runs, rows, run, channels).
    The offset of a run is added last and in 64 bits, so that it becomes an immediate of the load instruction.
    """
    row, begin, inner = tl.arange(0, BATCH), tl.arange(0, RUNS) * RUN, tl.arange(0, RUN)
    near = to_pixels(row[:, None]) * sb + inner[None, None, :, None] * sp + channel[None, None, None, :] * sc
    start = _runs(begin)
    offsets = near.to(tl.int64) + (start * sp).to(tl.int64)
    mask = to_pixels((row < B)[:, None]) & (start + inner[None, None, :, None] < P) & (channel < C)[None, None, None, :]
    return row, offsets, mask


@triton.jit
def _runs(t):
    """Values (RUNS,) along the runs of a whole tile."""
    return t[None, :, None, None] if ROWS_FIRST else t[:, None, None, None]


@triton.jit
def over_pixels(t):
    """Sums (BATCH, CHANNELS) of a whole tile."""
    return tl.sum(tl.sum(t, 1 if ROWS_FIRST else 0), 1)


@triton.jit
def to_pixels(t):
    """Values (BATCH, CHANNELS) for all pixels of a whole tile."""
    return t[:, None, None, :] if ROWS_FIRST else t[None, :, None, :]


@triton.jit
def reverse_tile(ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """A program's rows, pixels and channels, in reverse order because the tail is probably still in L2."""
    channel = (tl.num_programs(0) - 1 - tl.program_id(0)) * CHANNELS + tl.arange(0, CHANNELS)
    pixel = (tl.num_programs(1) - 1 - tl.program_id(1)) * PIXELS + tl.arange(0, PIXELS)
    row = (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS + tl.arange(0, ROWS)
    return row, pixel, channel


@triton.jit
def _centred(d, mask, n):
    """Row means of a tile and sums of squares about them, for ``n`` pixels."""
    mean = tl.sum(d, 1) / n
    e = tl.where(mask, d - mean[:, None, :], 0.0)
    return mean, tl.sum(e * e, 1)


@triton.jit
def moments(
    x, part_mean, part_var, B, C, P, SPAN, sb, sp, sc,
    ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mean and variance of every part of every row, SPAN pixels each, relative to the channel's first element."""
    dependent_launch(PDL)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * SPAN
    pivot = tl.load(x + channel * sc, mask=channel < C, other=0.0).to(tl.float32)
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    square = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, SPAN, PIXELS):
        offsets, mask = tile(row, start + tl.arange(0, PIXELS), channel, B, C, SPAN, sb, sp, sc)
        d = tl.load(x + begin * sp + offsets, mask=mask, other=0.0).to(tl.float32) - pivot[None, None, :]
        n = tl.minimum(SPAN - start, PIXELS) * 1.0
        piece, piece_square = _centred(tl.where(mask, d, 0.0), mask, n)
        # Chan's rule merges the moments of this piece with those of the pieces before.
        share = n / (start + n)
        delta = piece - mean
        mean += delta * share
        square += piece_square + delta * delta * (share * start)
    at = (row[:, None] * (P // SPAN) + tl.program_id(1)) * C + channel[None, :]
    there = (row < B)[:, None] & (channel < C)[None, :]
    tl.store(part_mean + at, mean, mask=there)
    tl.store(part_var + at, square / SPAN, mask=there)


@triton.jit
def gain_of(weight, channel, inside, CHANNELS: tl.constexpr, WEIGHT: tl.constexpr):
    gain = tl.full((CHANNELS,), 1.0, tl.float32)
    if WEIGHT:
        gain = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    return gain


@triton.jit
def plan_of(group, known, gather, scatter, row, B, gj, gb, vb, vj):
    """The rows of gather and scatter (GROUPS, BATCH) of some groups; ``known`` says which of these exist."""
    there = known[:, None] & (row < B)[None, :]
    w = tl.load(gather + group[:, None] * gj + row[None, :] * gb, mask=there, other=0.0)
    u = tl.load(scatter + row[None, :] * vb + group[:, None] * vj, mask=there, other=0.0)
    return w, u


@triton.jit
def _forward_plan(
    m, v, row, channel, pivot, alone, weight, bias, gather, scatter, mean, var,
    running_mean, running_var, running, sizes, momentum, batches, eps,
    B, C, P, R, gj, gb, vb, vj,
    BATCH: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RUNNING: tl.constexpr, TOTAL: tl.constexpr, ON_DEVICE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Each row's factor and offset from row moments (BATCH, CHANNELS). Stores group and updates running statistics."""
    inside = channel < C
    gain = gain_of(weight, channel, inside, CHANNELS, WEIGHT)
    factor = tl.zeros((BATCH, CHANNELS), tl.float32)
    offset = tl.zeros((BATCH, CHANNELS), tl.float32)
    batch_mean = tl.zeros((CHANNELS,), tl.float32)
    batch_square = tl.zeros((CHANNELS,), tl.float32)
    batch_var = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, R, GROUPS):
        group = start + tl.arange(0, GROUPS)
        known = group < R
        w, u = plan_of(group, known, gather, scatter, row, B, gj, gb, vb, vj)
        group_mean = tl.sum(w[:, :, None] * m[None, :, :], 1)  # (GROUPS, CHANNELS)
        off = m[None, :, :] - group_mean[:, None, :]
        group_var = tl.sum(w[:, :, None] * (v[None, :, :] + off * off), 1)
        scale = tl.where(known[:, None], tl.rsqrt(group_var + tl.cast(eps, tl.float32)), 0.0) * gain[None, :]
        factor += tl.sum(u[:, :, None] * scale[:, None, :], 0)
        offset -= tl.sum(u[:, :, None] * (scale * group_mean)[:, None, :], 0)
        out = group[:, None] * C + channel[None, :]
        written = known[:, None] & inside[None, :]
        tl.store(mean + out, group_mean + pivot[None, :], mask=written)
        tl.store(var + out, group_var, mask=written)
        if RUNNING:
            share = tl.load(running + group, mask=known, other=0.0)[:, None]
            count = tl.load(sizes + group, mask=known, other=0.0)[:, None] * P
            batch_mean += tl.sum(share * group_mean, 0)
            batch_square += tl.sum(share * group_mean * group_mean, 0)
            batch_var += tl.sum(share * (count / (count - 1)) * group_var, 0)
    if BIAS:
        offset += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if RUNNING:
        if TOTAL:
            batch_var += tl.maximum(batch_square - batch_mean * batch_mean, 0.0)
        if ON_DEVICE:
            step = tl.load(momentum).to(tl.float32)
        else:
            step = tl.cast(momentum, tl.float32)
        old_mean = tl.load(running_mean + channel, mask=inside, other=0.0).to(tl.float32)
        old_var = tl.load(running_var + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(running_mean + channel, old_mean + step * (batch_mean + pivot - old_mean), mask=inside)
        tl.store(running_var + channel, old_var + step * (batch_var - old_var), mask=inside)
        if COUNT:
            tl.store(batches, tl.load(batches, mask=alone, other=0) + 1, mask=alone)
    return factor, offset


@triton.jit
def _store(y, residual, offsets, mask, result, RELU: tl.constexpr, RESIDUAL: tl.constexpr):
    if RESIDUAL:
        result += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + offsets, result, mask=mask)


@triton.jit
def whole_forward(
    x, y, residual, weight, bias, gather, scatter, mean, var,
    running_mean, running_var, running, sizes, momentum, batches, eps,
    B, C, P, R, sb, sp, sc, gj, gb, vb, vj,
    BATCH: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr,
    RUNNING: tl.constexpr, TOTAL: tl.constexpr, ON_DEVICE: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The whole forward pass, for a block of channels whose batch fits one tile."""
    dependent_launch(PDL)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row, offsets, mask = whole_tile(channel, B, C, P, sb, sp, sc, BATCH, RUNS, RUN)
    pivot = tl.load(x + channel * sc, mask=channel < C, other=0.0).to(tl.float32)
    d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - pivot[None, None, None, :]
    m = over_pixels(tl.where(mask, d, 0.0)) / P
    e = tl.where(mask, d - to_pixels(m), 0.0)
    factor, offset = _forward_plan(
        m, over_pixels(e * e) / P, row, channel, pivot, tl.program_id(0) == 0, weight, bias, gather, scatter, mean, var,
        running_mean, running_var, running, sizes, momentum, batches, eps, B, C, P, R, gj, gb, vb, vj,
        BATCH, CHANNELS, GROUPS, WEIGHT, BIAS, RUNNING, TOTAL, ON_DEVICE, COUNT,
    )  # fmt: skip
    _store(y, residual, offsets, mask, d * to_pixels(factor) + to_pixels(offset), RELU, RESIDUAL)


@triton.jit
def merged_parts(
    part_mean, part_var, at, there, C, BATCH: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Mean and variance (BATCH, CHANNELS) of rows from those of their equal PARTS; ``at`` are the offsets of the first parts."""
    m = tl.zeros((BATCH, CHANNELS), tl.float32)
    for part in tl.static_range(PARTS):
        m += tl.load(part_mean + at + part * C, mask=there, other=0.0)
    m /= PARTS
    v = tl.zeros((BATCH, CHANNELS), tl.float32)
    for part in tl.static_range(PARTS):
        v += tl.load(part_var + at + part * C, mask=there, other=0.0)
        if PARTS > 1:
            off = tl.load(part_mean + at + part * C, mask=there, other=0.0) - m
            v += off * off
    return m, v / PARTS


@triton.jit
def plan_forward(
    x, part_mean, part_var, factor, offset, weight, bias, gather, scatter, mean, var,
    running_mean, running_var, running, sizes, momentum, batches, eps,
    B, C, P, R, sc, gj, gb, vb, vj,
    BATCH: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ABSOLUTE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RUNNING: tl.constexpr, TOTAL: tl.constexpr, ON_DEVICE: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The plan alone, once per channel instead of once per tile. Reads the moments of equal PARTS of each row."""
    dependent_launch(PDL)
    row = tl.arange(0, BATCH)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    pivot = tl.load(x + channel * sc, mask=channel < C, other=0.0).to(tl.float32)
    at = row[:, None] * (PARTS * C) + channel[None, :]
    there = (row < B)[:, None] & (channel < C)[None, :]
    m, v = merged_parts(part_mean, part_var, at, there, C, BATCH, CHANNELS, PARTS)
    if ABSOLUTE:
        m -= pivot[None, :]
    a, s = _forward_plan(
        m, v, row, channel, pivot, tl.program_id(0) == 0, weight, bias, gather, scatter, mean, var,
        running_mean, running_var, running, sizes, momentum, batches, eps, B, C, P, R, gj, gb, vb, vj,
        BATCH, CHANNELS, GROUPS, WEIGHT, BIAS, RUNNING, TOTAL, ON_DEVICE, COUNT,
    )  # fmt: skip
    at = row[:, None] * C + channel[None, :]
    tl.store(factor + at, a, mask=there)
    tl.store(offset + at, s, mask=there)


@triton.jit
def affine(
    x, y, residual, factor, offset, B, C, P, sb, sp, sc,
    ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``y = (x - pivot) * A + S`` for a block of rows, channels and pixels."""
    dependent_launch(PDL)
    row, pixel, channel = reverse_tile(ROWS, PIXELS, CHANNELS)
    pivot = tl.load(x + channel * sc, mask=channel < C, other=0.0).to(tl.float32)
    offsets, mask = tile(row, pixel, channel, B, C, P, sb, sp, sc)
    d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - pivot[None, None, :]
    at = row[:, None] * C + channel[None, :]
    there = (row < B)[:, None] & (channel < C)[None, :]
    a = tl.load(factor + at, mask=there, other=0.0)
    s = tl.load(offset + at, mask=there, other=0.0)
    _store(y, residual, offsets, mask, d * a[:, None, :] + s[:, None, :], RELU, RESIDUAL)


@triton.jit
def eval_affine(
    x, y, residual, mean, var, weight, bias, eps, B, C, P, sb, sp, sc,
    ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Batch norm by given statistics, as in eval mode."""
    dependent_launch(PDL)
    row, pixel, channel = reverse_tile(ROWS, PIXELS, CHANNELS)
    inside = channel < C
    centre = tl.load(mean + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.load(var + channel, mask=inside, other=0.0).to(tl.float32) + eps)
    if WEIGHT:
        scale *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    offsets, mask = tile(row, pixel, channel, B, C, P, sb, sp, sc)
    d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - centre[None, None, :]
    result = d * scale[None, None, :]
    if BIAS:
        result += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, None, :]
    _store(y, residual, offsets, mask, result, RELU, RESIDUAL)


# True with TRITON_INTERPRET=1: the kernels then run on the CPU, slowly.
INTERPRETED = not isinstance(moments, triton.runtime.JITFunction)
