"""The types that the rest of the bench passes around: data sources, their two parts, and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tbbn.bench.data.packed.index import PackedImages

Progress = Callable[[int, int], None]  # called with the number of images done and of all images
UNREADABLE = ("fail", "skip")  # what to do with an image file that cannot be read


@dataclass(frozen=True, eq=False)
class Part:
    """The training or the test part of a data set: images (N, C, H, W) uint8, in memory or packed on disk, and their labels."""

    images: Tensor | PackedImages
    labels: Tensor  # (N,) int64, the data set's own class ids


@dataclass(frozen=True)
class Listing:
    """The image files of one part, and the class id of each."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Source:
    """A whole data set: both parts, the class names in the order of their ids, and channel statistics in [0, 1]."""

    name: str
    train: Part
    test: Part
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    groups: tuple[int, ...] = ()  # in a sequence of data sets, the position of each class's data set
    skipped: tuple[str, ...] = ()  # unreadable image files that were left out


@dataclass(frozen=True, eq=False)
class Batch:
    """A method's loss receives this. Rows [0, n_current) belong to the current task, the others come from the memory."""

    images: Tensor  # (B, C, H, W), augmented and normalised; if several ranks train, only this rank's rows
    labels: Tensor  # (B,) int64, arrival order
    index: Tensor  # (B,) int64 rows of source.train
    n_current: int
    n_memory: int
    n_old_classes: int  # classes learnt before this task
    n_classes: int  # classes learnt up to and including this task

    @property
    def current(self) -> slice:
        return slice(0, self.n_current)

    @property
    def memory(self) -> slice:
        return slice(self.n_current, self.n_current + self.n_memory)
