"""Facts about the published data sets that need none of their files: the images of each class, and their shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    train: tuple[int, ...]  # images of each class, in the order of the class ids
    test: tuple[int, ...]
    shape: tuple[int, int, int]  # channels, height and width as stored
    note: str = ""  # which of these numbers are estimates


FACTS = {
    "cifar10": Facts((5000,) * 10, (1000,) * 10, (3, 32, 32)),
    "cifar100": Facts((500,) * 100, (100,) * 100, (3, 32, 32)),
    "mnist": Facts(
        (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
        (1, 28, 28),
    ),
    "fashion-mnist": Facts((6000,) * 10, (1000,) * 10, (1, 28, 28)),
    "svhn": Facts(
        (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
        (3, 32, 32),
    ),
    "stl10": Facts((500,) * 10, (800,) * 10, (3, 96, 96)),
    "tiny-imagenet": Facts((500,) * 200, (50,) * 200, (3, 64, 64)),
    "imagenet100": Facts(
        (1300,) * 100,
        (50,) * 100,
        (3, 256, 256),
        "images and steps are estimates, with 1300 training images of each class; ImageNet has 732 to 1300",
    ),
}
