"""Triton kernels of convolutions with few channels: one matrix product per tap, over rows of pixels.

Images are channels_last, ``x[image, row, column, channel]``; pixels are numbered over all images. ``K`` is the number of input
channels, ``N`` of output channels. Sums are float32, in a fixed order.
"""

# mypy: allow-untyped-defs
# Kernel arguments are device pointers and numbers, for which Python has no types.

from __future__ import annotations

import triton
import triton.language as tl

from tbbn.accelerators.triton.launch import dependent_launch


@triton.jit
def convolve(
    x, w, y, added, tile_mean, tile_var, PIXELS,
    IN_H: tl.constexpr, IN_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr, w_in, w_out, w_row, w_column,
    K: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr,
    ADD: tl.constexpr, MOMENTS: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, K_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``y`` from ``x``; with BACK, the gradient of the input from that of the output. ADD adds ``added`` to the result.

    WHOLE says that no tile goes past the last pixel. MOMENTS stores the mean and variance of each channel over this tile, which
    must lie in one image. They are those of the stored values, after rounding.
    """
    dependent_launch(PDL)
    pixel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    out = tl.program_id(1) * N_BLOCK + tl.arange(0, N_BLOCK)
    there = pixel < PIXELS
    image = pixel // (OUT_H * OUT_W)
    row = pixel % (OUT_H * OUT_W) // OUT_W
    column = pixel % OUT_W
    BLOCKS: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    lane = tl.arange(0, K_BLOCK)
    here = x + (pixel * K)[:, None] + lane[None, :]
    weights = w + out[None, :] * w_out + lane[:, None] * w_in
    acc = tl.zeros((TILE, N_BLOCK), tl.float32)
    # Pipelined: the values of the next taps are copied to shared memory during the product of this one.
    for step in tl.range(0, SIZE * SIZE * BLOCKS, num_stages=STAGES):
        tap = step // BLOCKS
        start = step % BLOCKS * K_BLOCK
        down = tap // SIZE - SIZE // 2
        right = tap % SIZE - SIZE // 2
        if BACK:  # the output pixels whose window has this pixel at this tap
            h = row - down
            c = column - right
        else:
            h = row * STRIDE + down
            c = column * STRIDE + right
        good = (h >= 0) & (h < IN_H * (STRIDE if BACK else 1)) & (c >= 0) & (c < IN_W * (STRIDE if BACK else 1))
        if not WHOLE:
            good = good & there
        if STRIDE == 1:  # the same distance for every pixel
            shift = down * IN_W + right
            at_x = here + (start - shift * K if BACK else start + shift * K)
        elif BACK:
            good = good & (h % STRIDE == 0) & (c % STRIDE == 0)
            at_x = x + (((image * IN_H + h // STRIDE) * IN_W + c // STRIDE) * K + start)[:, None] + lane[None, :]
        else:
            at_x = x + (((image * IN_H + h) * IN_W + c) * K + start)[:, None] + lane[None, :]
        at_w = weights + tap // SIZE * w_row + tap % SIZE * w_column + start * w_in
        good = good[:, None]
        k = start + lane
        if K % K_BLOCK == 0:
            a = tl.load(at_x, mask=good, other=0.0)
            b = tl.load(at_w)
        else:
            a = tl.load(at_x, mask=good & (k < K)[None, :], other=0.0)
            b = tl.load(at_w, mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision="ieee" if EXACT else "tf32")
    place = pixel[:, None] * N + out[None, :]
    if ADD:
        acc += tl.load(added + place, mask=there[:, None], other=0.0).to(tl.float32)
    result = acc.to(y.dtype.element_ty)
    tl.store(y + place, result, mask=there[:, None])
    if MOMENTS:
        stored = result.to(tl.float32)
        mean = tl.sum(stored, 0) / TILE
        off = stored - mean[None, :]
        at = tl.program_id(0) * N + out
        tl.store(tile_mean + at, mean)
        tl.store(tile_var + at, tl.sum(off * off, 0) / TILE)


@triton.jit
def weight_sums(
    g, x, part, PIXELS, CHUNK: tl.constexpr,
    IN_H: tl.constexpr, IN_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr,
    EXACT: tl.constexpr, TILE: tl.constexpr, K_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight gradient over CHUNK pixels, ``part[chunk, n, tap, k]``, at one tap or at the three taps of a row."""
    dependent_launch(PDL)
    chunk = tl.program_id(0)
    first = tl.program_id(1) * TAPS
    n = tl.program_id(2) * N_BLOCK + tl.arange(0, N_BLOCK)
    k = tl.arange(0, K_BLOCK)
    wanted = (k < K)[None, :]
    sum0 = tl.zeros((N_BLOCK, K_BLOCK), tl.float32)
    sum1 = tl.zeros((N_BLOCK, K_BLOCK), tl.float32)
    sum2 = tl.zeros((N_BLOCK, K_BLOCK), tl.float32)
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, TILE):
        pixel = start + tl.arange(0, TILE)
        there = pixel < PIXELS
        image = pixel // (OUT_H * OUT_W)
        h = pixel % (OUT_H * OUT_W) // OUT_W * STRIDE + first // SIZE - SIZE // 2
        c = pixel % OUT_W * STRIDE + first % SIZE - SIZE // 2
        up = tl.load(g + pixel[None, :] * N + n[:, None], mask=there[None, :], other=0.0)
        good = there & (h >= 0) & (h < IN_H)
        if STRIDE == 1:
            at = (
                x
                + (pixel * K)[:, None]
                + k[None, :]
                + ((first // SIZE - SIZE // 2) * IN_W + first % SIZE - SIZE // 2) * K
            )
        else:
            at = x + (((image * IN_H + h) * IN_W + c) * K)[:, None] + k[None, :]
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        a = tl.load(at, mask=(good & (c >= 0) & (c < IN_W))[:, None] & wanted, other=0.0)
        sum0 = tl.dot(up, a.to(up.dtype), sum0, input_precision=precision)
        if TAPS == 3:
            a = tl.load(at + K, mask=good[:, None] & wanted, other=0.0)  # the middle tap is always inside the image
            sum1 = tl.dot(up, a.to(up.dtype), sum1, input_precision=precision)
            a = tl.load(at + 2 * K, mask=(good & (c + 2 < IN_W))[:, None] & wanted, other=0.0)
            sum2 = tl.dot(up, a.to(up.dtype), sum2, input_precision=precision)
    at = part + ((chunk * N + n)[:, None] * (SIZE * SIZE) + first) * K + k[None, :]
    tl.store(at, sum0, mask=wanted)
    if TAPS == 3:
        tl.store(at + K, sum1, mask=wanted)
        tl.store(at + 2 * K, sum2, mask=wanted)


@triton.jit
def fold(part, out, SIZE, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr):
    """Sum over chunks."""
    dependent_launch(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, CHUNKS, TOGETHER):
        chunk = start + tl.arange(0, TOGETHER)
        there = (chunk < CHUNKS)[:, None] & (at < SIZE)[None, :]
        acc += tl.sum(tl.load(part + chunk[:, None] * SIZE + at[None, :], mask=there, other=0.0), 0)
    tl.store(out + at, acc, mask=at < SIZE)


# True with TRITON_INTERPRET=1: the kernels then run on the CPU, slowly.
INTERPRETED = not isinstance(fold, triton.runtime.JITFunction)
