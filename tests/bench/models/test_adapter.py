"""Modules from anywhere as backbones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tinyrun import tiny
from torch import Tensor, nn

from tbbn.bench.engine import run
from tbbn.bench.models import Features, backbone
from tbbn.errors import UserError
from tbbn.plugins import temporary
from tbbn.registry import register_backbone


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with temporary():
        yield


def flat(in_channels: int, image_size: tuple[int, int]) -> nn.Module:
    """A network that takes images of one size only."""
    pixels = in_channels * image_size[0] * image_size[1]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 12), nn.BatchNorm1d(12), nn.ReLU())


class Staged(nn.Module):
    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_channels, 6, 3), nn.BatchNorm2d(6)

    def forward(self, images: Tensor) -> Features:
        maps = self.norm(self.conv(images))
        return Features(maps.relu().mean((2, 3)), (maps,))


class Loud(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        raise ValueError("\n  out of tune\nfrom here to there\n")


def test_features_are_counted_and_weights_come_from_the_seed() -> None:
    register_backbone("flat", "one layer")(flat)
    first, second = (backbone("flat", in_channels=1, image_size=(8, 6)) for _ in range(2))
    assert first.n_features == 12 and not first.has_stages and first.training
    images = torch.rand(4, 1, 8, 6)
    assert torch.equal(first(images).pooled, second(images).pooled) and first(images).stages == ()
    other = backbone("flat", in_channels=1, image_size=(8, 6), generator=torch.Generator().manual_seed(1))
    assert not torch.equal(first(images).pooled, other(images).pooled)


def test_a_module_may_return_its_stages() -> None:
    register_backbone("staged")(Staged)
    body = backbone("staged", in_channels=1)
    assert body.has_stages and body.n_features == 6 and body(torch.zeros(2, 1, 8, 8)).stages[0].shape == (2, 6, 6, 6)


def test_a_module_needs_no_parameters() -> None:
    register_backbone("pixels", "the image itself")(nn.Flatten)
    assert backbone("pixels", in_channels=1, image_size=(8, 6)).n_features == 48


@pytest.mark.parametrize(
    ("factory", "wanted"),
    [
        (lambda: 3, r"must return a torch\.nn\.Module, got int"),
        (lambda: nn.Conv2d(3, 4, 3), r"must return features \(N, D\), got \(1, 4, 30, 30\) for one image"),
        (lambda: nn.Linear(5, 5), "cannot take an image of 3x32x32: mat1 and mat2 shapes"),
        (Loud, r"cannot take an image of 3x32x32: out of tune\.$"),
        (lambda depth: nn.Flatten(), "may take in_channels, last_relu, image_size; its 'depth' needs a default"),
    ],
)
def test_mistakes_are_one_line(factory: Any, wanted: str) -> None:
    register_backbone("odd")(factory)
    with pytest.raises(UserError, match=rf"^backbone 'odd' of .*, test_adapter\.py line \d+: {wanted}") as error:
        backbone("odd")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("norm", "method"), [("bn", "ft"), ("tbbn", "lucir"), ("tbbn", "er")])
def test_a_run_with_a_backbone_of_ones_own(norm: str, method: str) -> None:
    register_backbone("flat", "one layer")(flat)
    record = run(tiny(backbone="flat", norm__name=norm, method__name=method))
    assert record.status == "finished" and len(record.accuracy) == 3


def test_a_method_that_needs_stages_says_so() -> None:
    register_backbone("flat")(flat)
    with pytest.raises(UserError, match=r"^method 'podnet' needs a backbone that returns its stages; 'flat' returns"):
        run(tiny(backbone="flat", method__name="podnet"))
    register_backbone("staged")(Staged)
    assert run(tiny(backbone="staged", method__name="podnet")).status == "finished"


def test_an_augmentation_of_ones_own_must_be_one() -> None:
    from tbbn.bench.data.augment import augmentation
    from tbbn.registry import register_augmentation

    register_augmentation("odd")(lambda: 3)
    with pytest.raises(
        UserError, match=r"augmentation 'odd' of .*: a int has no 'n_parameters', which an augmentation needs"
    ):
        augmentation("odd")
