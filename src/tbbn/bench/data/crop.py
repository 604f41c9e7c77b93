"""Use the Triton kernel for random resized crops of small images on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tbbn.accelerators.triton import TRITON
from tbbn.bench.data.augment import Augment, ResizedCrop

_LARGEST_SIDE = 64  # larger interpolation matrices do not fit a program of the kernel


def supports(augment: Augment, images: Tensor) -> bool:
    """Whether `fused_crop` takes this augmentation of these stored images (N, C, H, W). Does not import Triton."""
    if not (TRITON and images.is_cuda and isinstance(augment, ResizedCrop)):
        return False
    size = (images.shape[2], images.shape[3])
    fits = max(*size, *augment.output_size(size)) <= _LARGEST_SIDE
    return fits and images.dtype == torch.uint8 and images.is_contiguous()


def fused_crop(
    augment: Augment,
    images: Tensor,
    rows: Tensor | None,
    parameters: Tensor,
    mean: Tensor,
    std: Tensor,
    memory_format: torch.memory_format,
) -> Tensor:
    """The rows (None: all) of the stored images, augmented and normalised, in one kernel launch: (n, C, h, w) float32."""
    from tbbn.accelerators.triton import crop

    assert isinstance(augment, ResizedCrop)
    size = (images.shape[2], images.shape[3])
    return crop.resized_crop(
        images, rows, parameters, mean, std, augment.output_size(size), augment.pad(size), memory_format
    )
