"""Batches assembled from drawn rows, compared with one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tbbn.bench.data.batches import BatchMaker, BatchSpec
from tbbn.bench.data.device import DeviceDataset
from tbbn.bench.data.sampling import IndexBlock


@dataclass(frozen=True)
class Add:
    """An augmentation by hand: adds its parameter, a number above ``base``, to every pixel."""

    base: float

    def draw(self, n: int, generator: torch.Generator, size: tuple[int, int]) -> Tensor:
        return self.base + torch.rand(n, 1, generator=generator)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        return images.float() / 255 + parameters[:, :, None, None]


def maker() -> BatchMaker:
    images = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(10, 3, 4, 4).contiguous()
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 4.0])
    data = DeviceDataset(images, 100 + torch.arange(10), mean, std, None, torch.channels_last)
    return BatchMaker(data, Add(0.0), Add(5.0))


def spec(views: int = 1, has_layout: bool = True) -> BatchSpec:
    return BatchSpec(2, 1, views, past_tasks=3, n_old_classes=4, n_classes=6, has_layout=has_layout)


BLOCK = IndexBlock(torch.tensor([[7, 3, 1], [5, 5, 9]]), 2, 1)


@pytest.mark.parametrize("views", [1, 3])
def test_a_batch_is_its_rows_one_by_one_and_further_views_follow_augmented_strongly(views: int) -> None:
    made = maker()
    block = made.draw(BLOCK, spec(views), torch.Generator().manual_seed(0))
    assert block.steps == 2 and block.index[:, :3].equal(BLOCK.index)
    for step, memory_row in ((0, 1), (1, 9)):
        inputs = [values[step] for values in block.parameters]
        batch = made.make_batch(block.spec, block.index[step], inputs)
        rows = [*BLOCK.index[step].tolist(), *[memory_row] * (views - 1)]
        assert batch.index.tolist() == rows and batch.labels.tolist() == [100 + row for row in rows]
        assert (batch.n_current, batch.n_memory, batch.n_old_classes, batch.n_classes) == (2, views, 4, 6)
        added = torch.cat(inputs)[:, 0].tolist()
        assert all(value < 1 for value in added[:3]) and all(value > 5 for value in added[3:])
        for image, row, value in zip(batch.images, rows, added, strict=True):
            for channel, (mean, std) in enumerate(((0.1, 1.0), (0.2, 2.0), (0.3, 4.0))):
                assert image[channel].flatten().tolist() == pytest.approx([(row / 255 + value - mean) / std] * 16)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)


def test_a_mixed_batch_counts_all_rows_as_current() -> None:
    made = maker()
    block = made.draw(BLOCK, spec(has_layout=False), torch.Generator().manual_seed(0))
    batch = made.make_batch(block.spec, block.index[0], [values[0] for values in block.parameters])
    assert (batch.n_current, batch.n_memory, len(batch.images)) == (3, 0, 3)


def test_the_same_generator_draws_the_same_block() -> None:
    one, other = (maker().draw(BLOCK, spec(2), torch.Generator().manual_seed(4)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))
