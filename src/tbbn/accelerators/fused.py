"""A convolution that is `nn.Conv2d`, and on a GPU, in bf16, fp16 or tf32 and where channels are few, has kernels of its own.

cuDNN's tiles are made for many channels: at the 16 to 64 of a CIFAR network it takes two to four times as long. What is gained
beside: the convolution hands the first pass of the norm after it along, and adds a shortcut's gradient to its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tbbn.accelerators.native.binding import intercepted
from tbbn.accelerators.triton import TRITON
from tbbn.nn.modules import PlannedNorm

_MOST_CHANNELS = 64
_MOST_PIXELS = 2**17  # of a batch; above it cuDNN has enough to do


class Convolved(NamedTuple):
    """What a convolution gives to a block: its output, its input again, and the output's moments if they came along.

    What is done with ``again`` sends its gradient through the convolution, which adds it to its own in the same pass.
    """

    out: Tensor
    again: Tensor
    moments: Tensor | None  # (2, N, parts, C): means and variances of equal parts of every image


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`, faster where it can be."""

    def forward(self, x: Tensor) -> Tensor:
        kernels = self._kernels(x)
        return super().forward(x) if kernels is None else self._launched(kernels, x, False).out

    def convolved(self, x: Tensor, *, moments: bool = True) -> Convolved:
        """The convolution and what rides along with it: moments in training, if they are wanted and the kernels can."""
        kernels = self._kernels(x)
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        if kernels is None or any(hooks) or _has_any_global_hook():
            return Convolved(self(x), x, None)
        return self._launched(kernels, x, moments and self.training)

    def _launched(self, kernels: Any, x: Tensor, moments: bool) -> Convolved:
        weight = self.weight.to(_computed_in(x))
        if x.dtype == weight.dtype or not x.requires_grad:  # images are turned as they are read
            return Convolved(*kernels.convolve(x, weight, self.stride[0], moments))
        out, _, found = kernels.convolve(x.to(weight.dtype), weight, self.stride[0], moments)
        return Convolved(out, x, found)  # the input itself, not what was rounded for the product

    def _kernels(self, x: Tensor) -> Any:
        """The module of kernels, if this is a case for them; its import imports Triton."""
        if not (isinstance(x, Tensor) and x.is_cuda and TRITON and self._suits(x)):
            return None
        if torch.compiler.is_compiling() or intercepted():
            return None
        from tbbn.accelerators.triton import conv as convolution_kernels

        dtype = _computed_in(x)
        same = torch.is_autocast_enabled(x.device.type) or self.weight.dtype == dtype  # otherwise torch's own error
        return convolution_kernels if same and convolution_kernels.available(dtype) else None

    def _suits(self, x: Tensor) -> bool:
        middle = self.kernel_size[0] // 2
        return (
            x.dim() == 4
            and self.kernel_size in ((1, 1), (3, 3))
            and self.stride in ((1, 1), (2, 2))
            and self.padding == (middle, middle)
            and self.padding_mode == "zeros"
            and self.dilation == (1, 1)
            and self.groups == 1
            and self.bias is None
            and max(self.in_channels, self.out_channels) <= _MOST_CHANNELS
            and self.out_channels % 16 == 0
            and (self.in_channels % 16 == 0 or not x.requires_grad)
            and 0 < x.shape[0] * x.shape[2] * x.shape[3] <= _MOST_PIXELS
        )


def convolved(conv: nn.Module, x: Tensor, norm: nn.Module) -> Convolved:
    """Any convolution in front of a norm, with moments where the norm takes them."""
    if isinstance(conv, Conv2d):
        return conv.convolved(x, moments=isinstance(norm, PlannedNorm))
    return Convolved(conv(x), x, None)


def _computed_in(x: Tensor) -> torch.dtype:
    """The type in which autocast would have it."""
    device = x.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast else x.dtype
