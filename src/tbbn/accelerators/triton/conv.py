"""Launches of the convolution kernels, and their autograd function.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from tbbn.accelerators.triton import conv_kernels
from tbbn.accelerators.triton.launch import device_of, launch_options
from tbbn.accelerators.triton.norm_tiles import MOST_PARTS

_TILE = 4096  # output values per program of a convolution
_STAGES = 3  # pipeline stages of a convolution
TILES_PER_CHUNK = 8  # tiles of pixels per program that sums weight gradients
# Measured warps and pipeline stages of that program, by input channels. More warps would repeat each other's products.
_SUMS = {16: (1, 3), 32: (2, 2), 64: (4, 3)}


def available(dtype: torch.dtype) -> bool:
    """Whether tensor cores take this type. In full float32 they do not, and cuDNN is faster."""
    return (dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and not _exact(dtype))) and _modern()


@cache
def _modern() -> bool:
    """Whether the GPU has tensor cores for bfloat16 and tf32."""
    return conv_kernels.INTERPRETED or torch.cuda.get_device_capability() >= (8, 0)


def convolve(x: Tensor, weight: Tensor, stride: int, moments: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """The convolution of ``x`` (N, C, H, W) padded by half of the kernel size; ``x`` itself; and moments, if tiles allow it.

    Computed in the type of the weight; an ``x`` of another type must not require a gradient. Gradients of the returned ``x`` are
    added to its own in the same pass. Moments (2, N, parts, C) are the means and variances of equal parts of every output image.
    """
    assert not x.requires_grad or (x.dtype == weight.dtype and x.shape[1] % 16 == 0)
    # Outside the autograd function, so that second derivatives reach the saved tensors.
    return _Convolution.apply(_channels_last(x), _channels_last(weight), stride, moments)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: int, moments: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        ctx.set_materialize_grads(False)
        size = [-(-side // stride) for side in x.shape[2:]]
        out, found = launch(x, weight, (len(x), weight.shape[0], *size), stride, moments=moments)
        if found is not None:
            ctx.mark_non_differentiable(found)
        return out, x, found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, shortcut: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if grad is None:
            return shortcut, None, None, None
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # second derivatives: torch's own backward supports them
            pad = [weight.shape[2] // 2] * 2
            dx, dweight = torch.ops.aten.convolution_backward(
                grad, x.to(weight.dtype), weight, None, [ctx.stride] * 2, pad, [1, 1], False, [0, 0], 1,
                [*needs[:2], False],
            )[:2]  # fmt: skip
            return dx if shortcut is None or dx is None else dx + shortcut, dweight, None, None
        grad = _channels_last(grad)
        dx = launch(grad, weight, tuple(x.shape), ctx.stride, back=True, added=shortcut)[0] if needs[0] else None
        return dx, weight_gradient(grad, x, weight, ctx.stride) if needs[1] else None, None, None


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _divisor(n: int, most: int) -> int:
    """The largest power of two that divides ``n``, at least 16 and at most ``most``."""
    return max(16, min(most, n & -n))


def _exact(dtype: torch.dtype) -> bool:
    """Whether torch's setting for convolutions asks for full float32 products instead of tf32."""
    if dtype != torch.float32:
        return False
    try:
        return not torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set through torch's newer API: the older one then raises
        return torch.backends.cudnn.conv.fp32_precision != "tf32"  # type: ignore[attr-defined]


def launch(
    x: Tensor, weight: Tensor, shape: tuple[int, ...], stride: int, *, back: bool = False,
    added: Tensor | None = None, moments: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    images, n_out, out_h, out_w = shape
    _, n_in, in_h, in_w = x.shape
    y = torch.empty(shape, dtype=weight.dtype, device=x.device, memory_format=torch.channels_last)
    block = _divisor(n_out, 64)
    tile = _TILE // block
    pixels, found = images * out_h * out_w, None
    if moments and out_h * out_w % tile == 0 and out_h * out_w <= MOST_PARTS * tile:
        found = torch.empty((2, images, out_h * out_w // tile, n_out), dtype=torch.float32, device=x.device)
    mean, var = (y, y) if found is None else found.unbind()
    strides = weight.stride() if back else (weight.stride(1), weight.stride(0), *weight.stride()[2:])
    with device_of(x):
        conv_kernels.convolve[(triton.cdiv(pixels, tile), n_out // block)](
            x, weight, y, y if added is None else _channels_last(added), mean, var, pixels, in_h, in_w, out_h, out_w, *strides,
            n_in, n_out, weight.shape[2], stride, back, added is not None, found is not None, _exact(weight.dtype),
            pixels % tile == 0, tile, _divisor(n_in, 128 // weight.element_size()), block, _STAGES, num_warps=4,
            **launch_options(x),
        )  # fmt: skip
    return y, found


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    images, n_out, out_h, out_w = grad.shape
    _, n_in, in_h, in_w = x.shape
    size, pixels = weight.shape[2], images * out_h * out_w
    k_block, n_block = max(16, triton.next_power_of_2(n_in)), _divisor(n_out, 64)
    tile = max(64, 2048 // k_block)
    chunks = triton.cdiv(pixels, TILES_PER_CHUNK * tile)
    # Three taps share one read of the gradient if three sums fit into the registers.
    taps = size if k_block * n_block <= 1024 else 1
    warps, stages = _SUMS[k_block] if n_in % 16 == 0 else (8, 2)  # images are read value by value: many registers
    part = torch.empty((chunks, weight.numel()), dtype=torch.float32, device=x.device)
    out = torch.empty_like(weight, memory_format=torch.channels_last)
    options = launch_options(x)
    with device_of(x):
        conv_kernels.weight_sums[(chunks, size * size // taps, n_out // n_block)](
            grad, x, part, pixels, TILES_PER_CHUNK * tile, in_h, in_w, out_h, out_w,
            n_in, n_out, size, stride, taps, _exact(weight.dtype), tile, k_block, n_block, num_warps=warps, num_stages=stages,
            **options,
        )  # fmt: skip
        conv_kernels.fold[(triton.cdiv(weight.numel(), 64),)](
            part, out, weight.numel(), chunks, 64, 32, num_warps=4, **options
        )
    return out
