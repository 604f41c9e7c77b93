"""From stored images to a network's input in one launch, for small images on a GPU.

The same as tensor operations takes thirty, each of which costs its launch and little else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tbbn.accelerators.triton import TRITON
from tbbn.bench.data.augment import Augment, ResizedCrop, padding

_LARGEST = 64  # side: larger matrices do not fit a program


def suits(augment: Augment, images: Tensor) -> bool:
    """Whether there is a kernel for this augmentation of these images (N, C, H, W)."""
    return (
        TRITON
        and images.is_cuda
        and images.dtype == torch.uint8
        and images.is_contiguous()
        and isinstance(augment, ResizedCrop)
        and max(*images.shape[2:], augment.crop or 0) <= _LARGEST
    )


def cropped(
    augment: Augment, images: Tensor, rows: Tensor | None, parameters: Tensor, mean: Tensor, std: Tensor,
    memory_format: torch.memory_format,
) -> Tensor:  # fmt: skip
    """The rows (None: all) of the stored images, augmented by their parameters and normalised: (n, C, h, w) float32."""
    from tbbn.accelerators.triton import crop as crop_kernel
    from tbbn.accelerators.triton.launch import device_of, launch_options

    assert isinstance(augment, ResizedCrop)
    _, channels, height, width = images.shape
    size = (augment.crop or height, augment.crop or width)
    pad = padding((height, width)) if augment.padded else 0
    out = torch.empty(
        (len(parameters), channels, *size), dtype=torch.float32, device=images.device, memory_format=memory_format
    )
    blocks = [_power(n) for n in (height, width, height + 2 * pad, width + 2 * pad, *size)]
    with device_of(images):
        crop_kernel.crop[(len(parameters), channels)](
            images, rows if rows is None else rows.contiguous(), parameters.contiguous(), mean, std, out,
            channels, height, width, *size, pad, *out.stride(),
            *blocks, num_warps=4, **launch_options(out),
        )  # fmt: skip
    return out


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())
