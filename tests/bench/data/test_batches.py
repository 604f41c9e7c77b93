"""Batches on the CPU: the rows, views and labels that a spec asks for, augmented by what was drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tbbn.bench import seeds
from tbbn.bench.data.augment import Centred, Shift, normalise
from tbbn.bench.data.batches import BatchMaker, BatchSpec
from tbbn.bench.data.device import DeviceDataset
from tbbn.bench.data.sampling import IndexBlock
from tbbn.bench.data.types import Batch


def maker() -> BatchMaker:
    images = torch.randint(0, 256, (9, 3, 8, 8), generator=seeds.generator(0, "images")).to(torch.uint8)
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.1, 0.2, 0.3])
    data = DeviceDataset(images, torch.arange(9) // 3, mean, std, None, torch.channels_last)
    return BatchMaker(data, Shift(), Centred(flip=True))


def expected(m: BatchMaker, rows: torch.Tensor, augment: Shift | Centred, parameters: torch.Tensor) -> torch.Tensor:
    """Row by row, from the whole set."""
    images = [augment.apply(m.data.images[i : i + 1], p[None]) for i, p in zip(rows.tolist(), parameters, strict=True)]
    return normalise(torch.cat(images), m.data.mean, m.data.std)


def test_a_batch_knows_its_current_and_memory_rows() -> None:
    batch = Batch(torch.zeros(6, 1, 2, 2), torch.arange(6), 10 + torch.arange(6), 4, 2, n_old_classes=2, n_classes=4)
    assert batch.labels[batch.current].tolist() == [0, 1, 2, 3]
    assert batch.index[batch.memory].tolist() == [14, 15]


def test_a_batch_holds_its_rows_augmented_and_normalised() -> None:
    m, index = maker(), torch.tensor([[7, 8, 0], [6, 7, 4]])
    spec = BatchSpec(2, 1, 1, past_tasks=1, n_old_classes=2, n_classes=3, has_layout=True)
    block = m.draw(IndexBlock(index, 2, 1), spec, seeds.generator(0, "draw"))
    drawn = m.augment.draw(6, seeds.generator(0, "draw"), (8, 8)).view(2, 3, -1)
    assert block.steps == 2 and torch.equal(block.index, index) and torch.equal(block.parameters[0], drawn)
    batch = m.make_batch(spec, block.index[1], [p[1] for p in block.parameters])
    assert torch.equal(batch.images, expected(m, index[1], m.augment, drawn[1]))
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.tolist() == [2, 2, 1] and torch.equal(batch.index, index[1])
    assert (batch.n_current, batch.n_memory, batch.n_old_classes, batch.n_classes) == (2, 1, 2, 3)


def test_further_views_of_memory_rows_follow_and_are_strongly_augmented() -> None:
    m, index = maker(), torch.tensor([[8, 0, 3]])
    spec = BatchSpec(1, 2, 3, past_tasks=2, n_old_classes=2, n_classes=3, has_layout=True)
    block = m.draw(IndexBlock(index, 1, 2), spec, seeds.generator(0, "draw"))
    assert block.index.tolist() == [[8, 0, 3, 0, 3, 0, 3]]
    generator = seeds.generator(0, "draw")
    plain, strong = m.augment.draw(3, generator, (8, 8)), m.strong.draw(4, generator, (8, 8))
    batch = m.make_batch(spec, block.index[0], [p[0] for p in block.parameters])
    assert torch.equal(batch.images[:3], expected(m, index[0], m.augment, plain))
    assert torch.equal(batch.images[3:], expected(m, torch.tensor([0, 3, 0, 3]), m.strong, strong))
    assert batch.n_current == 1 and batch.n_memory == 6


def test_a_mixed_batch_has_no_memory_rows() -> None:
    m = maker()
    spec = BatchSpec(3, 0, 1, past_tasks=1, n_old_classes=1, n_classes=3, has_layout=False)
    block = m.draw(IndexBlock(torch.tensor([[0, 4, 8]]), 3, 0), spec, seeds.generator(0, "draw"))
    batch = m.make_batch(spec, block.index[0], [p[0] for p in block.parameters])
    assert (batch.n_current, batch.n_memory) == (3, 0) and batch.labels.tolist() == [0, 1, 2]


def test_images_on_the_device_need_no_prefetch() -> None:
    m = maker()
    spec = BatchSpec(3, 0, 1, past_tasks=0, n_old_classes=0, n_classes=3, has_layout=True)
    rows, images = torch.tensor([5, 1, 1]), m.data.images
    assert isinstance(images, torch.Tensor)
    parameters = m.augment.draw(3, seeds.generator(0, "draw"), (8, 8))
    assert torch.equal(m.data.gather(rows, [parameters]), images[rows])
    assert list(zip(range(3), m.data.prefetch(rows.split(1)), strict=False)) == [(i, []) for i in range(3)]
    batch = m.make_batch(spec, rows, [parameters])
    assert torch.equal(batch.images, expected(m, rows, m.augment, parameters))


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize(
    "rows", [[0], [2], [1, 2], [0, 2], [0, 1, 2], [2, 3], [0, 3, 4, 6], [3, 4, 5, 6], list(range(7))], ids=str
)
def test_a_part_of_a_batch_has_the_images_of_the_whole(rows: list[int], views: int) -> None:
    """As where several ranks share a batch; labels and layout are the whole batch's."""
    if max(rows) > 2 and views == 1:
        return  # there are three rows
    m, index = maker(), torch.tensor([[8, 0, 3]])
    spec = BatchSpec(1, 2, views, past_tasks=2, n_old_classes=2, n_classes=3, has_layout=True)
    block = m.draw(IndexBlock(index, 1, 2), spec, seeds.generator(0, "draw"))
    inputs = [p[0] for p in block.parameters]
    whole, part = (m.make_batch(spec, block.index[0], inputs, r) for r in (None, torch.tensor(rows)))
    assert torch.equal(part.images, whole.images[rows])
    assert torch.equal(part.labels, whole.labels) and torch.equal(part.index, whole.index)
    assert (part.n_current, part.n_memory) == (whole.n_current, whole.n_memory) == (1, 2 * views)


def test_what_a_spec_says_of_its_rows() -> None:
    spec = BatchSpec(5, 2, 3, past_tasks=1, n_old_classes=1, n_classes=2, has_layout=True)
    assert (spec.layout, spec.base_rows, spec.extra_rows) == ((5, 6), 7, 4)
    mixed = BatchSpec(5, 2, 1, past_tasks=1, n_old_classes=1, n_classes=2, has_layout=False)
    assert (mixed.layout, mixed.base_rows, mixed.extra_rows) == ((7, 0), 7, 0)


def test_an_evaluated_image_is_its_centre_normalised() -> None:
    m = maker()
    for crop in (None, 4):
        data = replace(m.data, crop=crop)
        seen = data.evaluation_images(torch.tensor([2, 7]), [])
        raw = m.data.images[[2, 7]] if crop is None else m.data.images[[2, 7], :, 2:6, 2:6]
        assert torch.equal(seen, normalise(raw / 255, data.mean, data.std))
        assert seen.is_contiguous(memory_format=torch.channels_last)
