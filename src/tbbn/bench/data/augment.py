"""Augmentation of whole batches: parameters are drawn first, on the CPU, then applied as tensor code on any device.

`draw` returns one row of parameters per image, so that an epoch is drawn at once and a captured step only reads them. `apply`
is a pure function of images and parameters: no random numbers, no loop over images, no data-dependent shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tbbn.bench.data.colour import Brightness, ColourJitter, Greyscale
from tbbn.errors import UserError
from tbbn.registry import AUGMENTATIONS

_ATTEMPTS = 10  # crop boxes tried before the fallback, as in torchvision's RandomResizedCrop


class Augment(Protocol):
    """A random image transform: `draw` samples its parameters, `apply` carries it out."""

    @property
    def n_parameters(self) -> int:
        """Parameters per image."""
        ...

    def draw(self, n: int, generator: Generator, size: tuple[int, int]) -> Tensor:
        """Parameters (n, n_parameters) float32 on the CPU, for `n` images of `size` (height, width)."""
        ...

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        """Augmented images (N, C, h, w) float32 in [0, 1]; the input is uint8 or float in [0, 1].

        The parameters (N, n_parameters) are on the device of the images.
        """
        ...


@dataclass(frozen=True)
class Centred:
    """The image, or its centre of side `crop`; with `flip`, mirrored left to right with probability one half."""

    flip: bool = False
    crop: int | None = None

    @property
    def n_parameters(self) -> int:
        return int(self.flip)

    def draw(self, n: int, generator: Generator, size: tuple[int, int]) -> Tensor:
        return _coins(n, generator) if self.flip else torch.zeros(n, 0)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        images = centre_crop(images, self.crop)
        if self.flip:
            columns = torch.arange(images.shape[3], device=images.device)
            columns = torch.where(parameters > 0.5, images.shape[3] - 1 - columns, columns)  # (N, W)
            images = images.gather(3, columns[:, None, None, :].expand(images.shape))
        return as_float(images)


@dataclass(frozen=True)
class Shift:
    """Zero-padding, a random window of the original size (or of side `crop`), and a flip. Parameters: top, left, flip.

    The window is torchvision's `RandomCrop(size, padding)`. `pad` defaults to `padding(size)`.
    """

    crop: int | None = None
    pad: int | None = None
    n_parameters = 3

    def draw(self, n: int, generator: Generator, size: tuple[int, int]) -> Tensor:
        pad = padding(size) if self.pad is None else self.pad
        free = [side + 2 * pad - (self.crop or side) for side in size]
        if min(free) < 0:
            raise UserError(
                f"shift: a crop of {self.crop} needs larger images than {size[0]}x{size[1]}; lower the crop"
            )
        corners = [torch.randint(0, n_free + 1, (n, 1), generator=generator) for n_free in free]
        return torch.cat([*corners, _coins(n, generator)], 1)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        n, channels, height, width = images.shape
        pad = padding((height, width)) if self.pad is None else self.pad
        out_height, out_width = self.crop or height, self.crop or width
        padded = F.pad(images, (pad, pad, pad, pad))
        top, left, flip = parameters.long().unsqueeze(2).unbind(1)  # each (N, 1)
        rows = top + torch.arange(out_height, device=images.device)  # (N, h)
        columns = torch.arange(out_width, device=images.device)
        columns = left + torch.where(flip > 0, out_width - 1 - columns, columns)  # (N, w)
        index = (rows.unsqueeze(2) * padded.shape[3] + columns.unsqueeze(1)).flatten(1).unsqueeze(1)
        index = index.expand(n, channels, -1)
        return as_float(padded.flatten(2).gather(2, index).view(n, channels, out_height, out_width))


@dataclass(frozen=True)
class ResizedCrop:
    """A box of random area and aspect ratio, resized, and a flip. Parameters: top, left, height, width, flip.

    Boxes are drawn like torchvision's `RandomResizedCrop`, on the zero-padded image if `padded`. The resize is PIL's
    bilinear one, which averages when it shrinks: two matrix products, with one matrix per image and axis. The padding is
    never stored; its columns of the matrices are left out.
    """

    crop: int | None = None
    padded: bool = False
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    n_parameters = 5

    def draw(self, n: int, generator: Generator, size: tuple[int, int]) -> Tensor:
        pad = self.pad(size)
        height, width = size[0] + 2 * pad, size[1] + 2 * pad
        uniform = torch.rand(n, 2, _ATTEMPTS, generator=generator)
        area = height * width * (self.scale[0] + uniform[:, 0] * (self.scale[1] - self.scale[0]))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = torch.exp(low + uniform[:, 1] * (high - low))
        widths, heights = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()  # (n, attempts)
        valid = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        first = valid.int().argmax(1, keepdim=True)  # the first maximum
        found = valid.any(1)
        corner = torch.rand(n, 2, generator=generator)
        boxes = []
        for lengths, whole, fallback, u in zip(
            (heights, widths), (height, width), self._fallback(height, width), corner.unbind(1), strict=True
        ):
            length = torch.where(found, lengths.gather(1, first).squeeze(1), torch.tensor(float(fallback)))
            start = torch.minimum((u * (whole - length + 1)).floor(), whole - length)
            boxes.append((torch.where(found, start, torch.tensor(float((whole - fallback) // 2))), length))
        (top, box_height), (left, box_width) = boxes
        return torch.cat([torch.stack([top, left, box_height, box_width], 1), _coins(n, generator)], 1)

    def pad(self, size: tuple[int, int]) -> int:
        """Pixels of zero-padding on each side of images of `size` (height, width)."""
        return padding(size) if self.padded else 0

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        return (self.crop, self.crop) if self.crop else size

    def _fallback(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the largest centred box of an allowed aspect ratio."""
        if width < height * self.ratio[0]:
            return round(width / self.ratio[0]), width
        if width > height * self.ratio[1]:
            return height, round(height * self.ratio[1])
        return height, width

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        n, channels, height, width = images.shape
        pad, (out_height, out_width) = self.pad((height, width)), self.output_size((height, width))
        top, left, box_height, box_width, flip = parameters.unbind(1)
        upright = torch.zeros_like(flip)
        if height == width:  # process both axes in the same operations: on a GPU each operation costs a launch
            start, length = parameters[:, :2].reshape(-1), parameters[:, 2:4].reshape(-1)
            both = _resize_matrix(start, length, width, out_width, pad, torch.stack([upright, flip], 1).view(-1))
            vertical, horizontal = both.unflatten(0, (n, 2)).unbind(1)
        else:
            vertical = _resize_matrix(top, box_height, height, out_height, pad, upright)  # (N, h, H)
            horizontal = _resize_matrix(left, box_width, width, out_width, pad, flip)  # (N, w, W)
        if not images.is_floating_point():
            horizontal = horizontal / 255
        # In half precision the error would exceed that of PIL's rounding.
        with torch.autocast(images.device.type, enabled=False):
            rows = images.float().reshape(n, channels * height, width) @ horizontal.transpose(1, 2)
            return vertical.unsqueeze(1) @ rows.unflatten(1, (channels, height))


@dataclass(frozen=True)
class Chain:
    """Several augmentations in sequence; their parameters are concatenated."""

    parts: tuple[Augment, ...]

    @property
    def n_parameters(self) -> int:
        return sum(part.n_parameters for part in self.parts)

    def draw(self, n: int, generator: Generator, size: tuple[int, int]) -> Tensor:
        return torch.cat([part.draw(n, generator, size) for part in self.parts], 1)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        columns = parameters.split([part.n_parameters for part in self.parts], 1)
        for part, own in zip(self.parts, columns, strict=True):
            images = part.apply(images, own)
        return images


_BUILT_IN: dict[str, tuple[str, Callable[[int | None], Augment]]] = {
    "none": ("the image unchanged", lambda crop: Centred(crop=crop)),
    "flip": ("horizontal flip", lambda crop: Centred(flip=True, crop=crop)),
    "shift": ("zero-pad by an eighth, random window of the original size, flip", lambda crop: Shift(crop)),
    "padded-resized": (
        "zero-pad by an eighth, random resized crop, flip: the paper's code on 32x32",
        lambda crop: ResizedCrop(crop, padded=True),
    ),
    "resized": ("random resized crop, flip: ImageNet", lambda crop: ResizedCrop(crop)),
    "strong": (
        "random resized crop of area 0.2 to 1, flip, colour jitter, greyscale: the BalAug experiment",
        lambda crop: Chain((ResizedCrop(crop, scale=(0.2, 1.0)), ColourJitter(), Greyscale())),
    ),
    "resized-brightness": (
        "random resized crop, flip, brightness jitter: PODNet's ImageNet",
        lambda crop: Chain((ResizedCrop(crop), Brightness())),
    ),
    "shift-brightness": (
        "shift and brightness jitter: PODNet's CIFAR",
        lambda crop: Chain((Shift(crop), Brightness())),
    ),
}


for _name, (_line, _make) in _BUILT_IN.items():
    AUGMENTATIONS.register(_name, _make, _line)


def augmentation(name: str, *, crop: int | None = None) -> Augment:
    """The augmentation of that name; `crop` is the side of its output, by default the images keep their size."""
    AUGMENTATIONS.entry(name)
    if crop is not None and crop < 1:
        raise UserError(f"augmentation {name!r}: crop must be a positive number of pixels, got {crop}")
    made: Augment = AUGMENTATIONS.make(name, crop=crop)
    for part in ("n_parameters", "draw", "apply"):
        if not hasattr(made, part):
            raise UserError(
                f"{AUGMENTATIONS.place(name)}: a {type(made).__name__} has no {part!r}, which an augmentation needs"
            )
    return made


def padding(size: tuple[int, int]) -> int:
    """Pixels of zero-padding on each side: an eighth of the shorter side, 4 for 32x32 and 1 for 8x8."""
    return max(1, min(size) // 8)


def as_float(images: Tensor) -> Tensor:
    """Images as float32 in [0, 1]: uint8 is divided by 255, float is unchanged."""
    return images.float() if images.is_floating_point() else images.to(torch.float32).div_(255)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Images (N, C, H, W) minus `mean` (C,), divided by `std` (C,)."""
    return (images - mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


def centre_crop(images: Tensor, crop: int | None) -> Tensor:
    """The central square of side `crop`, like torchvision's `CenterCrop`; the whole image without `crop`."""
    height, width = images.shape[-2:]
    if crop is None:
        return images
    if crop > min(height, width):
        raise UserError(f"centre crop: images must be at least {crop}x{crop}, got {height}x{width}; lower the crop")
    top, left = round((height - crop) / 2), round((width - crop) / 2)
    return images[..., top : top + crop, left : left + crop]


def evaluation_view(images: Tensor, *, crop: int | None = None) -> Tensor:
    """Images for evaluation: the centre of side `crop`, or the whole image, as float32 in [0, 1]."""
    return as_float(centre_crop(images, crop))


def _coins(n: int, generator: Generator) -> Tensor:
    """Fair coins (n, 1), float32."""
    return torch.randint(0, 2, (n, 1), generator=generator).float()


def _resize_matrix(start: Tensor, length: Tensor, n_in: int, n_out: int, pad: int, flip: Tensor) -> Tensor:
    """Matrices (N, n_out, n_in) that resize the box [start, start + length) of a padded axis to n_out pixels.

    Output pixel i is centred at (i + 1/2) * length / n_out of the box. It averages the pixels of the box under a triangle
    whose half-width is one input pixel when the box is enlarged, one output pixel when it is shrunk.
    """
    pixels = torch.arange(n_in + 2 * pad, device=start.device)
    outputs = torch.arange(n_out, device=start.device).unsqueeze(1)
    start, length = start[:, None, None], length[:, None, None]
    outputs = torch.where(flip[:, None, None] > 0.5, n_out - 1 - outputs, outputs)
    step = length / n_out
    inside = pixels - start  # position in the box, (N, 1, n_in + 2 pad)
    weights = (1 - ((inside + 0.5 - (outputs + 0.5) * step) / step.clamp(min=1)).abs()).clamp_(min=0)
    weights = weights * ((inside >= 0) & (inside < length))
    # The weights of a real box sum to at least one half; the clamp makes all-zero parameters a black image, not NaN.
    weights = weights / weights.sum(2, keepdim=True).clamp(min=0.25)
    return weights[:, :, pad : pad + n_in]
