"""Colour augmentations of float images in [0, 1], with parameters per image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

_CONTRAST, _SATURATION, _HUE = 1, 2, 3  # columns of the factors; brightness is 0


@dataclass(frozen=True)
class Brightness:
    """All channels times a factor from [1 - strength, 1 + strength]. One parameter: the factor."""

    strength: float = 63 / 255  # PODNet's recipes
    n_parameters = 1

    def draw(self, n: int, generator: Generator, size: tuple[int, int]) -> Tensor:
        return _factors(n, generator, self.strength)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        return (images * parameters[:, :, None, None]).clamp_(0, 1)


@dataclass(frozen=True)
class Greyscale:
    """Every channel replaced by the luminance, with the given probability. One parameter: 1 if replaced, else 0."""

    probability: float = 0.2
    n_parameters = 1

    def draw(self, n: int, generator: Generator, size: tuple[int, int]) -> Tensor:
        return (torch.rand(n, 1, generator=generator) < self.probability).float()

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        return torch.where(parameters[:, :, None, None] > 0.5, luminance(images), images)


@dataclass(frozen=True)
class ColourJitter:
    """torchvision's `ColorJitter`: brightness, contrast, saturation and hue in random order, with the given probability.

    Parameters: which of the four comes first, second, third, fourth; then their four factors (1, 1, 1, 0 if the image is
    left unchanged).
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    probability: float = 0.8
    n_parameters = 8

    def draw(self, n: int, generator: Generator, size: tuple[int, int]) -> Tensor:
        order = torch.rand(n, 4, generator=generator).argsort(1).float()
        blends = [_factors(n, generator, strength) for strength in (self.brightness, self.contrast, self.saturation)]
        turn = (2 * torch.rand(n, 1, generator=generator) - 1) * self.hue
        applied = torch.rand(n, 1, generator=generator) < self.probability
        factors = torch.where(applied, torch.cat([*blends, turn], 1), torch.tensor([1.0, 1.0, 1.0, 0.0]))
        return torch.cat([order, factors], 1)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        # The hue costs most, so it is turned once for the whole batch. Up to three blends come before it and up to three
        # after it; a blend that is not due at its position has factor 1.
        order, factors = parameters[:, :4].long(), parameters[:, 4:]
        passed = (order == _HUE).cumsum(1)
        ones = torch.ones_like(factors[:, 0])
        for slot in (0, 1, 2):
            factor = torch.where(passed[:, slot] == 0, _pick(factors, order[:, slot]), ones)
            images = _blend(images, order[:, slot], factor)
        images = turn_hue(images, factors[:, _HUE])
        for slot in (1, 2, 3):
            due = (passed[:, slot] == 1) & (order[:, slot] != _HUE)
            images = _blend(images, order[:, slot], torch.where(due, _pick(factors, order[:, slot]), ones))
        return images


def luminance(images: Tensor) -> Tensor:
    """Luma (N, 1, H, W) of RGB images (ITU-R 601 weights, rounded as in torchvision); the mean of other channels."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.split(1, 1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """RGB images (N, 3, H, W) with the hue of each turned by the fraction `turn` (N,) of the colour circle.

    Images with other channels are returned unchanged.
    """
    if images.shape[1] != 3:
        return images
    red, green, blue = images.unbind(1)
    value, lowest = images.amax(1), images.amin(1)
    chroma = value - lowest
    divisor = chroma.clamp(min=1e-12)  # grey: the numerators are 0 too
    hue = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = hue + 6 * turn[:, None, None]  # in sixths of the circle
    channels = []
    for offset in (5, 3, 1):
        distance = (hue + offset).remainder(6)
        channels.append(value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1))
    return torch.stack(channels, 1)


def _blend(images: Tensor, kind: Tensor, factor: Tensor) -> Tensor:
    """Each image blended with black, its mean grey or its own grey, by `kind` (N,); factor 1 leaves it unchanged."""
    grey = luminance(images)
    kind = kind[:, None, None, None]
    base = (kind == _SATURATION) * grey + (kind == _CONTRAST) * grey.mean((1, 2, 3), keepdim=True)
    return torch.lerp(base, images, factor[:, None, None, None]).clamp_(0, 1)


def _pick(factors: Tensor, kind: Tensor) -> Tensor:
    return factors.gather(1, kind.unsqueeze(1)).squeeze(1)


def _factors(n: int, generator: Generator, strength: float) -> Tensor:
    """Factors (n, 1), uniform in [1 - strength, 1 + strength] but never negative."""
    low = max(0.0, 1 - strength)
    return low + torch.rand(n, 1, generator=generator) * (1 + strength - low)
