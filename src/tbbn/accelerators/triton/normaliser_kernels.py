"""Kernels for the small arithmetic of the norms in ``tbbn.nn.comparison``: from moments to the parameters of the affine pass.

They play the role of ``plan_forward`` and ``plan_backward`` in task-balanced batch norm. A batch has few moments, one mean and
variance per row and channel, so a single program holds them all and can sum over the channels of a group and over the rows.

Every norm here is ``y = ((x - center) * inverse + shift) * weight + bias``:

- groups: the center and inverse deviation of a group of channels of a row; with THEN_BATCH followed by batch norm;
- MIXTURE: a mixture of the row's, the layer's and the batch's moments;
- RENORM: the batch's moments, corrected towards the running ones by factors without a gradient;
- TASKS: the batch's moments, weighted by the task of each row; their distance from the running ones is a second result.

BATCH (rows of a tile) and C (channels) are powers of two; B of the rows exist. ``P`` is the number of pixels. All arithmetic is
float32.
"""

# mypy: allow-untyped-defs
# Kernel arguments are device pointers and numbers, for which Python has no types.

from __future__ import annotations

import triton
import triton.language as tl

from tbbn.accelerators.triton.launch import dependent_launch
from tbbn.accelerators.triton.norm_forward import gain_of, merged_parts


@triton.jit
def _over_groups(t, BATCH: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr):
    """The mean over the channels of each group, for every channel (BATCH, C)."""
    SIZE: tl.constexpr = C // GROUPS
    means = tl.sum(tl.reshape(t, (BATCH, GROUPS, SIZE)), 2) / SIZE
    return tl.reshape(tl.broadcast_to(means[:, :, None], (BATCH, GROUPS, SIZE)), (BATCH, C))


@triton.jit
def _grouped(m, v, there, eps, BATCH: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr):
    """Center and inverse deviation of each channel's group; the moments of ``h``, the input in these units."""
    center = _over_groups(m, BATCH, C, GROUPS)
    off = m - center
    inverse = tl.rsqrt(_over_groups(v + off * off, BATCH, C, GROUPS) + eps)
    return center, inverse, tl.where(there, off * inverse, 0.0), tl.where(there, v * inverse * inverse, 0.0)


@triton.jit
def _over_batch(m, v, there, B):
    """Mean and biased variance of each channel over the batch (C,). Rows that do not exist hold zeros."""
    mean = tl.sum(m, 0) / B
    off = tl.where(there, m - mean[None, :], 0.0)
    return mean, tl.sum(v + off * off, 0) / B


@triton.jit
def _softmax(logits):
    """Three weights, from a pointer to their logits."""
    a, b, c = tl.load(logits).to(tl.float32), tl.load(logits + 1).to(tl.float32), tl.load(logits + 2).to(tl.float32)
    top = tl.maximum(a, tl.maximum(b, c))
    a, b, c = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top)
    total = a + b + c
    return a / total, b / total, c / total


@triton.jit
def _store_softmax_gradient(out, a, b, c, da, db, dc):
    """The gradient of three logits from their weights and the gradients of these."""
    mean = a * da + b * db + c * dc
    tl.store(out, a * (da - mean))
    tl.store(out + 1, b * (db - mean))
    tl.store(out + 2, c * (dc - mean))


@triton.jit
def _task_weights(member, logits, row, n_tasks, B, TASKS: tl.constexpr):
    """The weight of each row (BATCH,), and the memberships, shares and concentrations of the tasks that it is made of."""
    task = tl.arange(0, TASKS)
    known = task < n_tasks
    inside = (row < B)[:, None] & known[None, :]
    belongs = tl.load(member + row[:, None] * n_tasks + task[None, :], mask=inside, other=0.0).to(tl.float32)
    counts = tl.sum(belongs, 0)
    prior = tl.where(known, tl.exp(tl.load(logits + task, mask=known, other=0.0).to(tl.float32)), 0.0)
    total = tl.sum(prior + counts, 0)
    per_row = tl.where(counts > 0, 1 / (total * tl.maximum(counts, 1e-30)), 0.0)  # a concentration's share per row
    share = (prior + counts) * per_row
    return tl.sum(belongs * share[None, :], 1), belongs, share, per_row, prior, total


@triton.jit
def _weighted(m, v, w):
    """Mean and variance of each channel over the batch (C,), rows weighted by ``w``."""
    mean = tl.sum(w[:, None] * m, 0)
    off = m - mean[None, :]
    return mean, tl.sum(w[:, None] * (v + off * off), 0)


@triton.jit
def _deviation(var, eps, ON_STD: tl.constexpr):
    if ON_STD:
        sigma = tl.sqrt(var) + eps
    else:
        sigma = tl.sqrt(var + eps)
    return sigma


@triton.jit
def forward(
    x, part_mean, part_var, factor, offset, weight, bias, mean, var, kept, mean_logits, var_logits,
    running_mean, running_var, momentum, batches, eps, r_most, d_most, instance,
    member, n_tasks, rate, penalty, first_rate, decay, strength, B, P, sc,
    BATCH: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ABSOLUTE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, THEN_BATCH: tl.constexpr, MIXTURE: tl.constexpr, RENORM: tl.constexpr,
    ON_STD: tl.constexpr, TASKS: tl.constexpr, RUNNING: tl.constexpr, FIXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Factor and offset of ``y = (x - pivot) * factor + offset``. Stores the moments, and updates running statistics.

    ``instance`` multiplies the variances of rows in a mixture. ``kept`` (2, C) holds a renorm's inverse and shift, or the running
    statistics that a penalty compares with. The logits of tasks are in ``mean_logits``. With FIXED, for groups and mixtures in
    eval mode, the running statistics replace those of the batch, nothing else is stored, and each program has its own BATCH rows.
    """
    dependent_launch(PDL)
    row, channel = tl.program_id(0) * BATCH + tl.arange(0, BATCH), tl.arange(0, C)
    there = (row < B)[:, None]
    at = row[:, None] * C + channel[None, :]
    part = row[:, None] * (PARTS * C) + channel[None, :]
    pivot = tl.load(x + channel * sc).to(tl.float32)
    # Read here what is overwritten below: several threads hold the same channel, and a barrier must lie in between.
    if RUNNING:
        old_mean = tl.load(running_mean + channel).to(tl.float32)
        old_var = tl.load(running_var + channel).to(tl.float32)
        count = tl.load(batches)
    if TASKS > 0:
        old_rate = tl.load(rate).to(tl.float32)
    m, v = merged_parts(part_mean, part_var, part, there, C, BATCH, C, PARTS)
    if not ABSOLUTE:
        m = tl.where(there, m + pivot[None, :], 0.0)
    if not FIXED:
        tl.store(mean + at, m, mask=there)
        tl.store(var + at, v, mask=there)

    n = tl.full((), 1.0, tl.float32) * B * P  # a tensor, even if B is a constant
    shift = tl.zeros((C,), tl.float32)
    if RENORM:
        batch_mean, batch_var = _over_batch(m, v, there, B)
        sigma = _deviation(batch_var, eps, ON_STD)
        old_sigma = _deviation(old_var, eps, ON_STD)
        step = count.to(tl.float32) - 5000
        r_max = tl.minimum(tl.maximum(1 + (r_most - 1) * step / 35000, 1.0), r_most)
        d_max = tl.minimum(tl.maximum(d_most * step / 20000, 0.0), d_most)
        ratio = tl.minimum(tl.maximum(sigma / old_sigma, 1 / r_max), r_max)
        shift = tl.minimum(tl.maximum((batch_mean - old_mean) / old_sigma, -d_max), d_max)
        tl.store(kept + channel, ratio / sigma)
        tl.store(kept + C + channel, shift)
        center = batch_mean[None, :] + tl.zeros((BATCH, C), tl.float32)
        inverse = (ratio / sigma)[None, :] + tl.zeros((BATCH, C), tl.float32)
        new_mean = old_mean + momentum * (batch_mean - old_mean)
        new_sigma = old_sigma + momentum * (sigma - old_sigma)
        if ON_STD:
            new_var = (new_sigma - eps) * (new_sigma - eps)
        else:
            new_var = new_sigma * new_sigma - eps
    elif TASKS > 0:
        w, _, _, _, _, _ = _task_weights(member, mean_logits, row, n_tasks, B, TASKS)
        batch_mean, batch_var = _weighted(m, v, w)
        new_rate = tl.where(old_rate == 0, first_rate, old_rate / (old_rate + decay))
        new_mean = old_mean + new_rate * (batch_mean - old_mean)
        new_var = old_var + new_rate * (batch_var - old_var)
        tl.store(kept + channel, new_mean)
        tl.store(kept + C + channel, new_var)
        far = (batch_mean - new_mean) * (batch_mean - new_mean) + (batch_var - new_var) * (batch_var - new_var)
        tl.store(penalty, strength * tl.sum(far, 0) / C)
        center = batch_mean[None, :] + tl.zeros((BATCH, C), tl.float32)
        inverse = tl.rsqrt(batch_var + eps)[None, :] + tl.zeros((BATCH, C), tl.float32)
    elif MIXTURE:
        v *= instance
        m_row, m_layer, m_batch = _softmax(mean_logits)
        v_row, v_layer, v_batch = _softmax(var_logits)
        layer_mean = tl.sum(m, 1) / C
        off = m - layer_mean[:, None]
        layer_var = tl.sum(v + off * off, 1) / C
        if FIXED:
            batch_mean, batch_var = old_mean, old_var
        else:
            batch_mean, batch_var = _over_batch(m, v, there, B)
        center = m_row * m + m_layer * layer_mean[:, None] + m_batch * batch_mean[None, :]
        inverse = tl.rsqrt(v_row * v + v_layer * layer_var[:, None] + v_batch * batch_var[None, :] + eps)
    else:
        center, inverse, h_mean, h_var = _grouped(m, v, there, eps, BATCH, C, GROUPS)
        if THEN_BATCH:
            if FIXED:
                batch_mean, batch_var = old_mean, old_var
            else:
                batch_mean, batch_var = _over_batch(h_mean, h_var, there, B)
            again = tl.rsqrt(batch_var + eps)
            inverse *= again[None, :]
            shift = -batch_mean * again
    if RUNNING and not FIXED:
        if not RENORM and TASKS == 0:
            new_mean = old_mean + momentum * (batch_mean - old_mean)
            new_var = old_var + momentum * (batch_var * (n / tl.maximum(n - 1, 1.0)) - old_var)
        tl.debug_barrier()
        tl.store(running_mean + channel, new_mean)
        tl.store(running_var + channel, new_var)
        tl.store(batches, count + 1)
        if TASKS > 0:
            tl.store(rate, new_rate)

    gain = gain_of(weight, channel, channel < C, C, WEIGHT)
    scale = inverse * gain[None, :]
    level = shift * gain
    if BIAS:
        level += tl.load(bias + channel).to(tl.float32)
    tl.store(factor + at, scale, mask=there)
    tl.store(offset + at, (pivot[None, :] - center) * scale + level[None, :], mask=there)


@triton.jit
def backward(
    part_g, part_gx, factor, slope, level, weight, mean, var, kept, mean_logits, var_logits,
    dweight, dbias, dmean_logits, dvar_logits, eps, instance, member, n_tasks, max_tasks, dpenalty, strength, B, P,
    BATCH: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, THEN_BATCH: tl.constexpr, MIXTURE: tl.constexpr, RENORM: tl.constexpr,
    ON_STD: tl.constexpr, TASKS: tl.constexpr, MOST_TASKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A, X, K of ``dx = A g + X (x - centre) + K`` from the sums of ``g`` and ``g (x - centre)`` over the pixels of each row.

    The centre of a channel is its mean in the first row, ``mean[0]``.
    """
    dependent_launch(PDL)
    row, channel = tl.arange(0, BATCH), tl.arange(0, C)
    there = (row < B)[:, None]
    at = row[:, None] * C + channel[None, :]
    part = row[:, None] * (PARTS * C) + channel[None, :]
    sum_g = tl.zeros((BATCH, C), tl.float32)
    sum_gx = tl.zeros((BATCH, C), tl.float32)
    for i in tl.static_range(PARTS):
        sum_g += tl.load(part_g + part + i * C, mask=there, other=0.0)
        sum_gx += tl.load(part_gx + part + i * C, mask=there, other=0.0)
    m = tl.load(mean + at, mask=there, other=0.0)
    v = tl.load(var + at, mask=there, other=0.0)
    centre = tl.load(mean + channel)[None, :]
    gain = gain_of(weight, channel, channel < C, C, WEIGHT)
    total_g = tl.sum(sum_g, 0)
    if RENORM:
        batch_mean, batch_var = _over_batch(m, v, there, B)
        inverse, shift = tl.load(kept + channel), tl.load(kept + C + channel)
        total_gx = tl.sum(tl.where(there, sum_gx + (centre - batch_mean[None, :]) * sum_g, 0.0), 0)
        total_gh = inverse * total_gx + shift * total_g
        root = _deviation(batch_var, 0.0 if ON_STD else eps, False)
        # inverse = ratio / sigma, and d sigma / d var = 1 / (2 root); twice the gradient of the variance.
        dvar = -gain * total_gx * inverse / _deviation(batch_var, eps, ON_STD) / root
        dmean = -gain * inverse * total_g
        first = (inverse * gain)[None, :] + tl.zeros((BATCH, C), tl.float32)
        steep = (dvar / (B * P))[None, :] + tl.zeros((BATCH, C), tl.float32)
        flat = (dmean / (B * P))[None, :] + steep * (centre - batch_mean[None, :])
    elif TASKS > 0:
        w, belongs, share, per_row, prior, total = _task_weights(member, mean_logits, row, n_tasks, B, TASKS)
        batch_mean, batch_var = _weighted(m, v, w)
        inverse = tl.rsqrt(batch_var + eps)
        total_gx = tl.sum(tl.where(there, sum_gx + (centre - batch_mean[None, :]) * sum_g, 0.0), 0)
        total_gh = inverse * total_gx
        pull = 2 * strength * tl.load(dpenalty).to(tl.float32) / C
        dvar = -0.5 * gain * inverse * inverse * total_gh + pull * (batch_var - tl.load(kept + C + channel))
        dmean = -gain * inverse * total_g + pull * (batch_mean - tl.load(kept + channel))
        dmean -= 2 * dvar * batch_mean * (1 - tl.sum(w, 0))  # the weights sum to less than 1 if a task is absent
        off = m - batch_mean[None, :]
        dw = tl.sum(dmean[None, :] * m + dvar[None, :] * (v + off * off), 1)
        dshare = tl.sum(belongs * dw[:, None], 0)
        dprior = dshare * per_row - tl.sum(dshare * share, 0) / total
        task, every = tl.arange(0, TASKS), tl.arange(0, MOST_TASKS)
        tl.store(dmean_logits + task, dprior * prior, mask=task < n_tasks)
        tl.store(
            dmean_logits + every, tl.zeros((MOST_TASKS,), tl.float32), mask=(every >= n_tasks) & (every < max_tasks)
        )
        first = (inverse * gain)[None, :] + tl.zeros((BATCH, C), tl.float32)
        steep = w[:, None] * (2 * dvar / P)[None, :]
        flat = w[:, None] * (dmean / P)[None, :] + steep * (centre - batch_mean[None, :])
    elif MIXTURE:
        scaled = v * instance
        m_row, m_layer, m_batch = _softmax(mean_logits)
        v_row, v_layer, v_batch = _softmax(var_logits)
        layer_mean = tl.sum(m, 1) / C
        from_layer = m - layer_mean[:, None]
        layer_var = tl.sum(scaled + from_layer * from_layer, 1) / C
        batch_mean, batch_var = _over_batch(m, scaled, there, B)
        center = m_row * m + m_layer * layer_mean[:, None] + m_batch * batch_mean[None, :]
        inverse = tl.rsqrt(v_row * scaled + v_layer * layer_var[:, None] + v_batch * batch_var[None, :] + eps)
        sum_gh = tl.where(there, inverse * (sum_gx + (centre - center) * sum_g), 0.0)
        total_gh = tl.sum(sum_gh, 0)
        dcenter = -gain[None, :] * inverse * sum_g
        dvar = -0.5 * gain[None, :] * inverse * inverse * sum_gh
        dcenter_layer, dcenter_batch = tl.sum(dcenter, 1), tl.sum(dcenter, 0)
        dvar_layer, dvar_batch = tl.sum(dvar, 1), tl.sum(dvar, 0)
        _store_softmax_gradient(
            dmean_logits, m_row, m_layer, m_batch,
            tl.sum(tl.sum(dcenter * m, 1), 0), tl.sum(dcenter_layer * layer_mean, 0), tl.sum(dcenter_batch * batch_mean, 0),
        )  # fmt: skip
        _store_softmax_gradient(
            dvar_logits, v_row, v_layer, v_batch,
            tl.sum(tl.sum(dvar * scaled, 1), 0), tl.sum(dvar_layer * layer_var, 0), tl.sum(dvar_batch * batch_var, 0),
        )  # fmt: skip
        to_layer, to_batch = (v_layer * dvar_layer / C)[:, None], (v_batch * dvar_batch / B)[None, :]
        dm = (
            m_row * dcenter
            + (m_layer * dcenter_layer / C)[:, None]
            + (m_batch * dcenter_batch / B)[None, :]
            + 2 * to_layer * from_layer
            + 2 * to_batch * (m - batch_mean[None, :])
        )
        first = inverse * gain[None, :]
        steep = 2 * instance * (v_row * dvar + to_layer + to_batch) / P
        flat = dm / P + steep * (centre - m)
    else:
        center, inverse, h_mean, h_var = _grouped(m, v, there, eps, BATCH, C, GROUPS)
        away = centre - center
        sum_gh = tl.where(there, inverse * (sum_gx + away * sum_g), 0.0)
        total_gh = tl.sum(sum_gh, 0)
        # The gradient of h is a g + b + c h, where only batch norm brings b and c.
        a, b, c = gain, tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
        if THEN_BATCH:
            batch_mean, batch_var = _over_batch(h_mean, h_var, there, B)
            again = tl.rsqrt(batch_var + eps)
            total_gh = again * (total_gh - batch_mean * total_g)  # for the output of batch norm
            a *= again
            c = -a * again * total_gh / (B * P)
            b = -a * total_g / (B * P) - c * batch_mean
        # Means over the pixels of each channel: of the gradient of h, and of its product with h.
        dh = a[None, :] * sum_g / P + b[None, :] + c[None, :] * h_mean
        dh_h = a[None, :] * sum_gh / P + b[None, :] * h_mean + c[None, :] * (h_var + h_mean * h_mean)
        first = inverse * a[None, :]
        steep = inverse * inverse * (c[None, :] - _over_groups(dh_h, BATCH, C, GROUPS))
        flat = inverse * (b[None, :] - _over_groups(dh, BATCH, C, GROUPS)) + steep * away
    if WEIGHT:
        tl.store(dweight + channel, total_gh)
    if BIAS:
        tl.store(dbias + channel, total_g)
    tl.store(factor + at, first, mask=there)
    tl.store(slope + at, steep, mask=there)
    tl.store(level + at, flat, mask=there)
