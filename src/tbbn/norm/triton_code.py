"""The kernels of task-balanced batch norm, in Triton's language.

A batch is cut into tiles (ROWS, PIXELS, CHANNELS); the strides ``sb, sp, sc`` of row, pixel and channel say where they lie,
so one kernel serves NCHW, channels_last and (N, C). ``B, C, P, R`` count rows, channels, pixels and groups; ``gj, gb`` and
``vb, vj`` are the strides of the plan's ``gather`` (r, B) and ``scatter`` (B, r).

Everything is float32 inside, and relative to the channel's first element (forward) or its first group's mean (backward): a
large common offset costs no more digits than in batch norm.
"""

# mypy: allow-untyped-defs
# The arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(row, pixel, channel, B, C, P, sb, sp, sc):
    """Offsets and mask of the elements of a (ROWS, PIXELS, CHANNELS) tile."""
    offsets = row[:, None, None] * sb + pixel[None, :, None] * sp + channel[None, None, :] * sc
    mask = (row < B)[:, None, None] & (pixel < P)[None, :, None] & (channel < C)[None, None, :]
    return offsets, mask


@triton.jit
def _centred(d, mask, n):
    """Row means of a tile and sums of squares about them, for ``n`` pixels."""
    mean = tl.sum(d, 1) / n
    e = tl.where(mask, d - mean[:, None, :], 0.0)
    return mean, tl.sum(e * e, 1)


@triton.jit
def moments(
    x, row_mean, row_var, B, C, P, sb, sp, sc, ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Mean and variance of every row over its pixels, relative to the channel's first element."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pivot = tl.load(x + channel * sc, mask=channel < C, other=0.0).to(tl.float32)
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    square = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, P, PIXELS):
        offsets, mask = _tile(row, start + tl.arange(0, PIXELS), channel, B, C, P, sb, sp, sc)
        d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - pivot[None, None, :]
        n = tl.minimum(P - start, PIXELS) * 1.0
        part, part_square = _centred(tl.where(mask, d, 0.0), mask, n)
        # Chan's rule joins the moments of this piece to those of the pieces before.
        share = n / (start + n)
        delta = part - mean
        mean += delta * share
        square += part_square + delta * delta * (share * start)
    at = row[:, None] * C + channel[None, :]
    there = (row < B)[:, None] & (channel < C)[None, :]
    tl.store(row_mean + at, mean, mask=there)
    tl.store(row_var + at, square / P, mask=there)


@triton.jit
def normalise(
    x, y, row_mean, row_var, weight, bias, gather, scatter, mean, var,
    running_mean, running_var, running, unbiased, momentum, eps,
    B, C, P, R, sb, sp, sc, gj, gb, vb, vj,
    ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, BATCH: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, ONCE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RUNNING: tl.constexpr, TOTAL: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """The plan of a block of channels, then ``y = (x - pivot) * A + S`` for a block of its rows.

    WHOLE: the tile is the whole batch, and the moments are taken of it. ONCE: one tile covers all pixels.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    first = (tl.program_id(0) == 0) & inside  # the one program that writes what belongs to a channel
    pivot = tl.load(x + channel * sc, mask=inside, other=0.0).to(tl.float32)
    if ONCE:  # ask for the data before working on the plan
        offsets, mask = _tile(row, tl.arange(0, PIXELS), channel, B, C, P, sb, sp, sc)
        d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - pivot[None, None, :]
        d = tl.where(mask, d, 0.0)
    every = tl.arange(0, BATCH)
    if WHOLE:
        m, square = _centred(d, mask, P * 1.0)
        v = square / P
    else:
        at = every[:, None] * C + channel[None, :]
        there = (every < B)[:, None] & inside[None, :]
        m = tl.load(row_mean + at, mask=there, other=0.0)
        v = tl.load(row_var + at, mask=there, other=0.0)
    gain = tl.full((CHANNELS,), 1.0, tl.float32)
    if WEIGHT:
        gain = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    factor = tl.zeros((ROWS, CHANNELS), tl.float32)
    offset = tl.zeros((ROWS, CHANNELS), tl.float32)
    batch_mean = tl.zeros((CHANNELS,), tl.float32)
    batch_square = tl.zeros((CHANNELS,), tl.float32)
    batch_var = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, R, GROUPS):
        group = start + tl.arange(0, GROUPS)
        known = group < R
        w = tl.load(gather + group[:, None] * gj + every[None, :] * gb,
                    mask=known[:, None] & (every < B)[None, :], other=0.0)  # fmt: skip
        group_mean = tl.sum(w[:, :, None] * m[None, :, :], 1)  # (GROUPS, CHANNELS)
        off = m[None, :, :] - group_mean[:, None, :]
        group_var = tl.sum(w[:, :, None] * (v[None, :, :] + off * off), 1)
        scale = tl.where(known[:, None], tl.rsqrt(group_var + eps), 0.0) * gain[None, :]
        u = tl.load(scatter + row[:, None] * vb + group[None, :] * vj,
                    mask=(row < B)[:, None] & known[None, :], other=0.0)  # fmt: skip
        factor += tl.sum(u[:, :, None] * scale[None, :, :], 1)
        offset -= tl.sum(u[:, :, None] * (scale * group_mean)[None, :, :], 1)
        out = group[:, None] * C + channel[None, :]
        written = known[:, None] & first[None, :]
        tl.store(mean + out, group_mean + pivot[None, :], mask=written)
        tl.store(var + out, group_var, mask=written)
        if RUNNING:
            share = tl.load(running + group, mask=known, other=0.0)[:, None]
            batch_mean += tl.sum(share * group_mean, 0)
            batch_square += tl.sum(share * group_mean * group_mean, 0)
            batch_var += tl.sum(tl.load(unbiased + group, mask=known, other=0.0)[:, None] * group_var, 0)
    if BIAS:
        offset += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if RUNNING:
        if TOTAL:
            batch_var += tl.maximum(batch_square - batch_mean * batch_mean, 0.0)
        if ON_DEVICE:
            step = tl.load(momentum).to(tl.float32)
        else:
            step = momentum
        old_mean = tl.load(running_mean + channel, mask=first, other=0.0).to(tl.float32)
        old_var = tl.load(running_var + channel, mask=first, other=0.0).to(tl.float32)
        tl.store(running_mean + channel, old_mean + step * (batch_mean + pivot - old_mean), mask=first)
        tl.store(running_var + channel, old_var + step * (batch_var - old_var), mask=first)
    if ONCE:
        tl.store(y + offsets, d * factor[:, None, :] + offset[:, None, :], mask=mask)
    else:
        for start in range(0, P, PIXELS):
            offsets, mask = _tile(row, start + tl.arange(0, PIXELS), channel, B, C, P, sb, sp, sc)
            d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - pivot[None, None, :]
            tl.store(y + offsets, d * factor[:, None, :] + offset[:, None, :], mask=mask)


@triton.jit
def row_sums(
    g, x, mean, row_g, row_gx, B, C, P, sb, sp, sc, ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Sums of ``g`` and of ``g * (x - centre)`` over every row's pixels; the centre is the first group's mean."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    centre = tl.load(mean + channel, mask=channel < C, other=0.0)
    sum_g = tl.zeros((ROWS, CHANNELS), tl.float32)
    sum_gx = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, P, PIXELS):
        offsets, mask = _tile(row, start + tl.arange(0, PIXELS), channel, B, C, P, sb, sp, sc)
        up = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - centre[None, None, :]
        sum_g += tl.sum(up, 1)
        sum_gx += tl.sum(up * d, 1)
    at = row[:, None] * C + channel[None, :]
    there = (row < B)[:, None] & (channel < C)[None, :]
    tl.store(row_g + at, sum_g, mask=there)
    tl.store(row_gx + at, sum_gx, mask=there)


@triton.jit
def backward(
    g, x, dx, row_g, row_gx, weight, gather, scatter, mean, var, dweight, dbias, eps,
    B, C, P, R, sb, sp, sc, gj, gb, vb, vj,
    ROWS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, BATCH: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, ONCE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The transposed plan of a block of channels, then ``dx = A g + X (x - centre) + K`` for a block of its rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    first = (tl.program_id(0) == 0) & inside
    centre = tl.load(mean + channel, mask=inside, other=0.0)
    if ONCE:
        offsets, mask = _tile(row, tl.arange(0, PIXELS), channel, B, C, P, sb, sp, sc)
        up = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - centre[None, None, :]
    every = tl.arange(0, BATCH)
    if WHOLE:
        all_g = tl.sum(up, 1)  # (BATCH, CHANNELS)
        all_gx = tl.sum(up * d, 1)
    else:
        at = every[:, None] * C + channel[None, :]
        there = (every < B)[:, None] & inside[None, :]
        all_g = tl.load(row_g + at, mask=there, other=0.0)
        all_gx = tl.load(row_gx + at, mask=there, other=0.0)
    gain = tl.full((CHANNELS,), 1.0, tl.float32)
    if WEIGHT:
        gain = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    factor = tl.zeros((ROWS, CHANNELS), tl.float32)
    slope = tl.zeros((ROWS, CHANNELS), tl.float32)
    level = tl.zeros((ROWS, CHANNELS), tl.float32)
    grad_weight = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, R, GROUPS):
        group = start + tl.arange(0, GROUPS)
        known = group < R
        saved = group[:, None] * C + channel[None, :]
        valid = known[:, None] & inside[None, :]
        off = tl.load(mean + saved, mask=valid, other=0.0) - centre[None, :]
        group_var = tl.load(var + saved, mask=valid, other=0.0)
        inv = tl.where(known[:, None], tl.rsqrt(group_var + eps), 0.0)
        scale = inv * gain[None, :]
        back = tl.load(scatter + every[None, :] * vb + group[:, None] * vj,
                       mask=known[:, None] & (every < B)[None, :], other=0.0)  # fmt: skip
        sum_g = tl.sum(back[:, :, None] * all_g[None, :, :], 1)  # (GROUPS, CHANNELS)
        sum_gx = tl.sum(back[:, :, None] * all_gx[None, :, :], 1)
        spread = (sum_gx - off * sum_g) * inv  # sums of g * normalised x
        grad_weight += tl.sum(tl.where(known[:, None], spread, 0.0), 0)
        fall = spread * scale * inv  # minus twice the gradient of the group's variance
        drift = scale * sum_g - fall * off  # minus the gradient of its mean, at the centre
        rows_known = (row < B)[:, None] & known[None, :]
        u = tl.load(scatter + row[:, None] * vb + group[None, :] * vj, mask=rows_known, other=0.0)
        w = tl.load(gather + row[:, None] * gb + group[None, :] * gj, mask=rows_known, other=0.0)
        factor += tl.sum(u[:, :, None] * scale[None, :, :], 1)
        slope -= tl.sum(w[:, :, None] * fall[None, :, :], 1)
        level -= tl.sum(w[:, :, None] * drift[None, :, :], 1)
    if WEIGHT:
        tl.store(dweight + channel, grad_weight, mask=first)
    if BIAS:
        tl.store(dbias + channel, tl.sum(all_g, 0), mask=first)
    slope = slope / P
    level = level / P
    if ONCE:
        out = up * factor[:, None, :] + (d * slope[:, None, :] + level[:, None, :])
        tl.store(dx + offsets, out, mask=mask)
    else:
        for start in range(0, P, PIXELS):
            offsets, mask = _tile(row, start + tl.arange(0, PIXELS), channel, B, C, P, sb, sp, sc)
            up = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - centre[None, None, :]
            out = up * factor[:, None, :] + (d * slope[:, None, :] + level[:, None, :])
            tl.store(dx + offsets, out, mask=mask)


# True where the environment asks for Triton's interpreter: the kernels then run on the CPU, slowly.
INTERPRETED = not isinstance(moments, triton.runtime.JITFunction)
