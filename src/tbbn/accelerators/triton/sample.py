"""Launches of the kernels for norms with a ``normaliser``, and their autograd functions.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from tbbn.accelerators.triton import sample_kernels
from tbbn.accelerators.triton.launch import device_of, launch_options

_TILE = 2048  # values per step of a program; with twice as many the sums spill


def sample_moments(x: Tensor, parts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` itself, and the mean and biased variance (N, C) of each channel of each sample, in float32.

    ``parts`` (2, N, parts, C), the means and variances of equal parts of every image, save a pass. The gradient of the returned
    ``x`` is added to that of the moments in one pass.
    """
    return _Moments.apply(_dense(x), parts)


def sample_affine(
    x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, *, relu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """``relu((x - center) * scale + shift + residual)``; ``center``, ``scale`` and ``shift`` broadcast to (N, C)."""
    by_row = (t.to(torch.float32).expand(x.shape[:2]) for t in (center, scale, shift))
    if residual is not None:
        residual = residual.to(x.dtype).contiguous(memory_format=_format(x))
    return _Affine.apply(x, *by_row, residual, relu)


def _format(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_format(x))


class _Geometry(NamedTuple):
    """How a kernel walks over a tensor: the arguments that all kernels share, and the grid."""

    sizes: tuple[int, ...]  # pixels, channels, and the strides of samples, channels and pixels
    block_p: int
    block_c: int
    samples: int

    @classmethod
    def of(cls, x: Tensor) -> _Geometry:
        samples, channels, *size = x.shape
        pixels = torch.Size(size).numel()
        last = _format(x) is torch.channels_last
        block_c = min(64, triton.next_power_of_2(channels))
        block_p = min(_TILE // block_c, triton.next_power_of_2(pixels))
        return cls(
            (pixels, channels, channels * pixels, *((1, channels) if last else (pixels, 1))), block_p, block_c, samples
        )

    @property
    def by_sample(self) -> tuple[int, int]:
        """The grid of a kernel that loops over the pixels of a sample."""
        return self.samples, triton.cdiv(self.sizes[1], self.block_c)

    @property
    def by_tile(self) -> tuple[int, int, int]:
        return self.samples, triton.cdiv(self.sizes[0], self.block_p), triton.cdiv(self.sizes[1], self.block_c)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        geometry = _Geometry.of(x)
        if parts is None:
            mean, var = torch.empty((2, *x.shape[:2]), dtype=torch.float32, device=x.device).unbind()
            with device_of(x):
                sample_kernels.moments[geometry.by_sample](
                    x, mean, var, *geometry.sizes, geometry.block_p, geometry.block_c, num_warps=4, **launch_options(x)
                )
        elif parts.shape[2] == 1:
            mean, var = parts[0, :, 0], parts[1, :, 0]
        else:
            between, mean = torch.var_mean(parts[0], 1, unbiased=False)
            var = parts[1].mean(1).add_(between)
        ctx.save_for_backward(x, mean)
        ctx.set_materialize_grads(False)
        return x, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_mean: Tensor | None, grad_var: Tensor | None) -> tuple[Any, None]:
        x, mean = ctx.saved_tensors
        if grad_mean is None and grad_var is None:
            return grad, None
        geometry = _Geometry.of(x)
        grad = torch.zeros_like(x) if grad is None else grad.contiguous(memory_format=_format(x))
        dx = torch.empty_like(x)
        grads = [torch.zeros_like(mean) if g is None else g.contiguous() for g in (grad_mean, grad_var)]
        with device_of(x):
            sample_kernels.add_moments_gradient[geometry.by_tile](
                x, grad, mean.contiguous(), *grads, dx, *geometry.sizes, geometry.block_p, geometry.block_c, num_warps=4,
                **launch_options(x),
            )  # fmt: skip
        return dx, None


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, relu: bool
    ) -> Tensor:
        geometry, y = _Geometry.of(x), torch.empty_like(x)
        center, scale, shift = (_unit_channels(t) for t in (center, scale, shift))
        with device_of(x):
            sample_kernels.affine[geometry.by_tile](
                x, x if residual is None else residual, y, center, scale, shift, *geometry.sizes,
                center.stride(0), scale.stride(0), shift.stride(0), residual is not None, relu,
                geometry.block_p, geometry.block_c, num_warps=4, **launch_options(x),
            )  # fmt: skip
        ctx.save_for_backward(x, y if relu else None, center, scale)
        ctx.adds = residual is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, y, center, scale = ctx.saved_tensors
        geometry = _Geometry.of(x)
        grad = grad.contiguous(memory_format=_format(x))
        dx = torch.empty_like(x)
        shares = ctx.adds and y is not None  # without ReLU the residual's gradient is the output's
        dresidual = torch.empty_like(x) if shares else grad
        dcenter, dscale, dshift = torch.empty((3, *x.shape[:2]), dtype=torch.float32, device=x.device).unbind()
        with device_of(x):
            sample_kernels.affine_back[geometry.by_sample](
                x, x if y is None else y, grad, dx, dresidual, center, scale, dcenter, dscale, dshift, *geometry.sizes,
                center.stride(0), scale.stride(0), shares, y is not None, geometry.block_p, geometry.block_c,
                num_warps=4, **launch_options(x),
            )  # fmt: skip
        return dx, dcenter, dscale, dshift, dresidual if ctx.adds else None, None


def _unit_channels(t: Tensor) -> Tensor:
    """``t`` with contiguous channels; rows may share their values (stride 0)."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()
