"""The crop in one launch against the same as tensor operations (see ``tests/interpreter.py``)."""

from __future__ import annotations

import pytest
import torch
from interpreter import RUNNING, here, interpret, on_device
from torch import Tensor

from tbbn.bench.data import crop
from tbbn.bench.data.augment import Centred, Chain, ResizedCrop, normalise
from tbbn.bench.data.device import DeviceDataset

if RUNNING:
    from tbbn.bench.data.batches import BatchMaker, BatchSpec


@here
def test_the_crop_passes_on_the_interpreter():
    interpret(__file__)


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def stored(n: int, channels: int, height: int, width: int, device: str = "cpu") -> Tensor:
    images = torch.randint(0, 256, (n, channels, height, width), generator=seed(height), dtype=torch.uint8)
    return images.to(device)


def statistics(channels: int, device: str) -> tuple[Tensor, Tensor]:
    mean, std = torch.tensor([0.5, 0.4, 0.3])[:channels], torch.tensor([0.25, 0.2, 0.15])[:channels]
    return mean.to(device), std.to(device)


def check(augment: ResizedCrop, images: Tensor, rows: Tensor, parameters: Tensor, last: bool = False) -> Tensor:
    """The kernel's images, which are those of the tensor operations."""
    device = images.device.type
    memory_format = torch.channels_last if last else torch.contiguous_format
    mean, std = statistics(images.shape[1], device)
    rows, parameters = rows.to(device), parameters.to(device)
    got = crop.fused_crop(augment, images, rows, parameters, mean, std, memory_format)
    want = normalise(augment.apply(images[rows], parameters), mean, std)
    assert got.is_contiguous(memory_format=memory_format) and got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return got


@on_device
def test_without_rows_it_takes_the_images_in_their_order(device):
    augment, images, rows = ResizedCrop(padded=True), stored(5, 2, 20, 20, device), torch.tensor([3, 0, 3])
    parameters = augment.draw(3, seed(), (20, 20)).to(device)
    read = images[rows.to(device)]
    got = crop.fused_crop(augment, read, None, parameters, *statistics(2, device), torch.contiguous_format)
    assert torch.equal(got, check(augment, images, rows, parameters))


@on_device
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize(
    ("size", "side", "channels", "last"),
    [
        ((20, 20), None, 1, False),
        ((28, 28), None, 2, True),
        ((32, 32), None, 3, True),
        ((32, 32), 24, 1, False),
        ((28, 28), 9, 3, True),
        ((20, 28), None, 2, False),
        ((28, 20), 17, 1, True),
        ((20, 20), 33, 1, False),
    ],
    ids=str,
)
def test_the_kernel_crops_as_the_tensor_operations_do(device, size, side, channels, last, padded):
    augment = ResizedCrop(side, padded=padded)
    rows = torch.tensor([4, 0, 2, 2, 1])
    got = check(augment, stored(5, channels, *size, device), rows, augment.draw(5, seed(1), size), last)
    assert got.shape == (5, channels, side or size[0], side or size[1])


@on_device
@pytest.mark.parametrize(("padded", "flip"), [(True, 0.0), (True, 1.0), (False, 1.0)])
def test_boxes_at_the_edges_of_the_image(device, padded, flip):
    # top, left, height, width: all of it, the image, corners, one pixel, padding alone, and beyond it. No padding: all beyond.
    boxes = [[0, 0, 24, 24], [2, 2, 20, 20], [0, 0, 5, 24], [12, 19, 12, 5], [7, 9, 1, 1], [0, 0, 2, 2], [20, 18, 8, 9]]
    parameters = torch.tensor([[*box, flip] for box in boxes], dtype=torch.float32)
    check(ResizedCrop(padded=padded), stored(7, 1, 20, 20, device), torch.arange(7), parameters)


@on_device
def test_the_whole_image_is_the_image(device):
    images = stored(2, 3, 20, 20, device)
    got = check(ResizedCrop(), images, torch.tensor([1, 0]), torch.tensor([[0.0, 0.0, 20.0, 20.0, 0.0]] * 2))
    mean, std = (t.view(-1, 1, 1) for t in statistics(3, device))
    torch.testing.assert_close(got, (images.flip(0) / 255 - mean) / std, rtol=1e-5, atol=1e-5)


@on_device
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_parameters_of_zero_give_a_black_image(device, padded):
    augment = ResizedCrop(padded=padded)
    parameters = torch.cat([torch.zeros(1, 5), augment.draw(1, seed(), (20, 20))])
    got = check(augment, stored(2, 3, 20, 20, device), torch.tensor([0, 1]), parameters)
    mean, std = statistics(3, device)
    torch.testing.assert_close(got[0], (-mean / std).view(-1, 1, 1).expand(3, 20, 20))


@on_device
def test_parameters_may_be_a_part_of_others(device):
    augment, images = ResizedCrop(), stored(3, 1, 20, 20, device)
    wide = torch.cat([augment.draw(3, seed(), (20, 20)), torch.ones(3, 2)], 1)
    assert not wide[:, :5].is_contiguous()
    check(augment, images, torch.arange(3), wide[:, :5])


@on_device
def test_rows_may_be_a_part_of_others(device):
    augment, images = ResizedCrop(), stored(6, 1, 20, 20, device)
    check(augment, images, torch.arange(6)[::2], augment.draw(3, seed(), (20, 20)))


@on_device
def test_the_same_input_gives_the_same_bits(device):
    augment, images = ResizedCrop(padded=True), stored(3, 1, 32, 32, device)
    parameters = augment.draw(3, seed(), (32, 32))
    assert torch.equal(*(check(augment, images, torch.arange(3), parameters) for _ in range(2)))


@on_device
@pytest.mark.parametrize("suited", [True, False])
def test_a_batch_has_the_same_images_by_either_way(device, monkeypatch, suited):
    used = []
    real = crop.fused_crop
    monkeypatch.setattr(crop, "supports", lambda augment, images: suited)
    monkeypatch.setattr(crop, "fused_crop", lambda *args: used.append(1) or real(*args))
    augment, images, rows = (
        ResizedCrop(padded=True),
        stored(6, 3, 20, 20, device),
        torch.tensor([5, 3, 3], device=device),
    )
    mean, std = statistics(3, device)
    data = DeviceDataset(images, torch.zeros(6, dtype=torch.int64, device=device), mean, std, None, torch.channels_last)
    parameters = augment.draw(3, seed(), (20, 20)).to(device)
    maker = BatchMaker(data, augment, augment)
    got = maker.make_batch(BatchSpec(2, 1, 1, 1, 1, 2, True), rows, [parameters]).images
    torch.testing.assert_close(got, normalise(augment.apply(images[rows], parameters), mean, std), rtol=1e-5, atol=1e-5)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert bool(used) == suited


# -- What there is a kernel for ---------------------------------------------------------------------------------------------


class Cuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def on_gpu(images: Tensor) -> Tensor:
    return images.as_subclass(Cuda)


@here
@pytest.mark.parametrize("augment", [ResizedCrop(), ResizedCrop(24, padded=True), ResizedCrop(64)], ids=str)
def test_crops_of_small_stored_images_on_a_gpu_suit(augment, monkeypatch):
    monkeypatch.setattr(crop, "TRITON", True)
    assert crop.supports(augment, on_gpu(stored(2, 3, 32, 32)))
    assert crop.supports(augment, on_gpu(stored(2, 3, 64, 48)))


UNSUITED = {
    "on the CPU": (ResizedCrop(), stored(2, 3, 32, 32)),
    "float": (ResizedCrop(), on_gpu(stored(2, 3, 32, 32).float())),
    "another memory order": (ResizedCrop(), on_gpu(stored(2, 3, 32, 32).to(memory_format=torch.channels_last))),
    "another augmentation": (Centred(), on_gpu(stored(2, 3, 32, 32))),
    "a chain": (Chain((ResizedCrop(),)), on_gpu(stored(2, 3, 32, 32))),
    "high": (ResizedCrop(32), on_gpu(stored(2, 3, 65, 32))),
    "wide": (ResizedCrop(32), on_gpu(stored(2, 3, 32, 65))),
    "large when cropped": (ResizedCrop(65), on_gpu(stored(2, 3, 32, 32))),
}


@here
@pytest.mark.parametrize(("augment", "images"), UNSUITED.values(), ids=UNSUITED)
def test_the_rest_is_left_to_tensor_operations(augment, images, monkeypatch):
    monkeypatch.setattr(crop, "TRITON", True)
    assert not crop.supports(augment, images)


@here
def test_without_triton_nothing_suits(monkeypatch):
    monkeypatch.setattr(crop, "TRITON", False)
    assert not crop.supports(ResizedCrop(), on_gpu(stored(2, 3, 32, 32)))
