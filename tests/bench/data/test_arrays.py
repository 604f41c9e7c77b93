"""Arrays, tensors and torch Datasets as a data set."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from tbbn.bench.data.loading import load
from tbbn.bench.data.sources.arrays import read_arrays, remember
from tbbn.errors import UserError
from tbbn.plugins import temporary
from tbbn.registry import register_dataset

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 3, 6, 5), dtype=np.uint8)
LABELS = np.arange(20) % 4


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def images_of(data: Any) -> torch.Tensor:
    contents, _ = read_arrays("mine", data)
    assert isinstance(contents.train.images, torch.Tensor)
    return contents.train.images


PAIR = (IMAGES, LABELS)


@pytest.mark.parametrize(
    "part",
    [
        PAIR,
        [IMAGES, LABELS.tolist()],
        (torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
        (IMAGES.transpose(0, 2, 3, 1), LABELS),  # channels last
        (IMAGES.astype(np.float64) / 255, LABELS),
        Rows([(image, int(label)) for image, label in zip(IMAGES, LABELS, strict=True)]),
        TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
    ],
    ids=["arrays", "lists", "tensors", "channels last", "floats", "Dataset", "TensorDataset"],
)
def test_every_form_gives_the_same_bytes(part: Any) -> None:
    contents, (mean, std) = read_arrays("mine", (part, part))
    for part in (contents.train, contents.test):
        assert isinstance(part.images, torch.Tensor) and part.images.dtype == torch.uint8
        assert np.array_equal(part.images.numpy(), IMAGES)
        assert part.labels.tolist() == LABELS.tolist() and part.labels.dtype == torch.long
    assert contents.classes == ("0", "1", "2", "3")
    assert mean == tuple(round(value, 4) for value in (IMAGES / 255).mean((0, 2, 3)).tolist())
    assert std == tuple(round(value, 4) for value in (IMAGES / 255).std((0, 2, 3)).tolist())


def test_grey_images_and_constant_ones() -> None:
    contents, _ = read_arrays("mine", ((IMAGES[:, 0], LABELS), (IMAGES[:, 0], LABELS)))
    assert contents.train.images.shape == (20, 1, 6, 5)
    assert read_arrays("mine", (np.full((10, 4, 4), 51, np.uint8), [0, 1] * 5))[1] == ((0.2,), (1.0,))


@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        ((20, 3, 5, 3), (3, 5, 3)),
        ((20, 6, 5, 3), (3, 6, 5)),
        ((20, 6, 5, 1), (1, 6, 5)),
        ((20, 1, 5, 3), (1, 5, 3)),
        ((20, 6, 5, 4), (6, 5, 4)),
        ((20, 3, 5, 4), (3, 5, 4)),
    ],
)
def test_channels_come_second_unless_only_the_last_axis_can_hold_them(
    shape: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    images = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    found = images_of(((images, LABELS), (images, LABELS))).numpy()
    assert found.shape[1:] == stored
    assert np.array_equal(found, images if shape[1:] == stored else images.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floats_of_any_precision_are_rounded_once(dtype: torch.dtype) -> None:
    values = (torch.arange(256).float() / 255).to(dtype).view(4, 1, 8, 8)
    wanted = (values.double() * 255).round()
    assert torch.equal(images_of(((values, range(4)), (values, range(4)))).double(), wanted)


def test_another_content_shape_or_class_has_another_name() -> None:
    images, labels = np.arange(64, dtype=np.uint8).reshape(8, 2, 4) * 3, [0, 0, 0, 0, 0, 1, 1, 1]
    pair, changed = (images, labels), images.copy()
    changed[7, 1, 3] += 1
    given: list[Any] = [
        (pair, pair),
        ((changed, labels), pair),
        (pair, (changed, labels)),
        ((images, labels[::-1]), pair),
        (pair, (images, labels[::-1])),
        ((images.reshape(8, 4, 2), labels), pair),
        (pair, (images.reshape(8, 4, 2), labels)),
        ((images, ["0" if label else "1" for label in labels]), (images, ["0"] * 8)),
    ]
    sources = [remember(data) for data in given]
    assert len({source.name for source in sources}) == len(given)
    assert all(len(source.name) == len("arrays:") + 16 for source in sources)
    assert sources[0].mean == read_arrays("mine", given[0])[1][0]


def test_images_of_the_wanted_size_are_not_copied() -> None:
    square = np.zeros((20, 6, 6), np.uint8)
    source = remember((square, LABELS))
    assert load(source.name, size=6).train.images is source.train.images


def test_pairs_of_lists_and_of_datasets_are_two_parts() -> None:
    rows = Rows([(image, int(label)) for image, label in zip(IMAGES, LABELS, strict=True)])
    for data in ((PAIR, rows), [rows, PAIR], [[IMAGES, LABELS], PAIR], (rows, rows)):
        contents, _ = read_arrays("mine", data)
        assert len(contents.train.labels) == len(contents.test.labels) == 20
    two = np.zeros((2, 6, 5), np.uint8), np.array([0, 1])  # an array of two images is no pair
    with pytest.raises(UserError, match="mine: no test images"):
        read_arrays("mine", two)


def test_images_of_pil() -> None:
    image = pytest.importorskip("PIL.Image")
    rows = [(image.fromarray(pixels.transpose(1, 2, 0)), int(label)) for pixels, label in zip(*PAIR, strict=True)]
    assert np.array_equal(images_of((Rows(rows), Rows(rows))).numpy(), IMAGES)


def test_without_a_test_part_every_fifth_image_of_a_class_is_held_out() -> None:
    contents, _ = read_arrays("mine", PAIR)
    held_out = [16, 17, 18, 19]  # five images a class: the fifth of each
    assert isinstance(contents.test.images, torch.Tensor)
    assert np.array_equal(contents.test.images.numpy(), IMAGES[held_out])
    assert contents.test.labels.tolist() == [0, 1, 2, 3] and len(contents.train.labels) == 16
    same, _ = read_arrays("mine", TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS)))
    assert torch.equal(same.test.labels, contents.test.labels)


def test_labels_become_ids_in_sorted_order() -> None:
    contents, _ = read_arrays("mine", ((IMAGES[:3], ["dog", "cat", "eel"]), (IMAGES[:1], ["eel"])))
    assert contents.classes == ("cat", "dog", "eel")
    assert contents.train.labels.tolist() == [1, 0, 2] and contents.test.labels.tolist() == [2]
    contents, _ = read_arrays("mine", ((IMAGES[:2], [30, 7]), (IMAGES[:1], [30])))
    assert contents.classes == ("7", "30") and contents.train.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (3, r"must be \(images, labels\), .* got 3"),
        ((IMAGES,), r"must be \(images, labels\)"),
        ((IMAGES, LABELS[:3]), "20 images but 3 labels"),
        ((IMAGES[0, 0], LABELS), r"images must be \(N, H, W\), .* got \(6, 5\)"),
        ((IMAGES.astype(np.int64), LABELS), r"uint8, or floats in \[0, 1\], got torch.int64 from 0 to 255"),
        ((IMAGES * 2.0, LABELS), "got torch.float64 from 0 to 510"),
        ((IMAGES / 255 - 0.25, LABELS), r"got torch.float64 from -0\.25 to 0\.75"),
        ((IMAGES[:, :, :0], LABELS), r"images must be \(N, H, W\), .* got \(20, 3, 0, 5\)"),
        ((IMAGES[:, :0], LABELS), r"got \(20, 0, 6, 5\)"),
        ((IMAGES[:0], LABELS[:0]), r"got \(0, 3, 6, 5\)"),
        ((IMAGES[None], LABELS), r"got \(1, 20, 3, 6, 5\)"),
        ([IMAGES, LABELS, LABELS], r"must be \(images, labels\)"),
        ("ab", r"must be \(images, labels\), .* got 'ab'"),
        ({1: 2, 3: 4}, r"must be \(images, labels\)"),
        (Rows([(IMAGES[0], 0, 1)]), r"pairs \(image, label\)"),
        (Rows([[IMAGES[0]]]), r"pairs \(image, label\)"),
        ((IMAGES / 128, LABELS), r"got torch.float64 from 0 to 1\.99"),
        ((IMAGES / 255 * 1.001, LABELS), r"got torch.float64 from 0 to 1\.001"),
        (((IMAGES > 9).astype(np.int64), LABELS), "got torch.int64 from 0 to 1"),
        (IMAGES, r"must be \(images, labels\), .* got ndarray \(20, 3, 6, 5\)$"),
        (3 * ["x" * 40], r"got \['x{40}', 'x{14}$"),
        ({"a": "one\n  two"}, r"got \{'a': 'one\\n two'\}$"),
        ((IMAGES > 9, LABELS), "got torch.bool from 0 to 1"),
        ((IMAGES, [True] * 20), "labels must be integers or text, got True"),
        ((IMAGES, LABELS / 2), "labels must be integers or text, got 0.0"),
        ((PAIR, (IMAGES[:1], [9])), "test images of class '9', which has no training images"),
        ((IMAGES[:4], [0, 1, 2, 3]), "no test images"),
        (Rows([]), "no images"),
        (Rows([3]), r"pairs \(image, label\), got 3"),
        (Rows([(IMAGES[0], 0), (IMAGES[0, :, 1:], 0)]), r"one size, got \(3, 6, 5\) and \(3, 5, 5\)"),
        ((["a", "b"], [0, 1]), "cannot be converted to a tensor"),
    ],
)
def test_mistakes_are_one_line(data: Any, wanted: str) -> None:
    with pytest.raises(UserError, match=wanted) as error:
        read_arrays("mine", data)
    assert "\n" not in str(error.value) and str(error.value).startswith("mine")


def test_what_was_given_has_a_name_while_somebody_holds_it() -> None:
    source = remember(PAIR)
    assert source.name.startswith("arrays:") and remember((IMAGES.copy(), LABELS)) is source
    other, named = remember((IMAGES, LABELS[::-1])), remember((IMAGES, ["abcd"[label] for label in LABELS]))
    assert len({other.name, named.name, source.name}) == 3
    loaded = load(source.name)
    assert loaded.name == source.name and loaded.train.images is source.train.images
    assert load(source.name, size=8).train.images.shape == (16, 3, 8, 8)
    name = source.name
    del source, loaded
    gc.collect()
    with pytest.raises(
        UserError, match=rf"'{name}' was passed in memory and is no longer available; pass the same data"
    ):
        load(name)


@temporary()
def test_a_data_set_of_ones_own() -> None:
    seen: dict[str, Any] = {}

    @register_dataset("mine", "20 random images")
    def mine(root: Any, size: Any, argument: str = "all") -> Any:
        seen.update(root=str(root), size=size, argument=argument)
        return PAIR, PAIR

    source = load("mine", "here", size=8)
    assert source.name == "mine" and source.train.images.shape == (20, 3, 8, 8)
    assert seen == {"root": "here", "size": 8, "argument": "all"}
    assert load("mine:half").name == "mine:half" and seen["argument"] == "half"
    assert load("mine+mine").classes == tuple(f"mine/{i}" for i in (0, 1, 2, 3)) * 2

    @register_dataset("plain")
    def plain() -> Any:
        return source

    assert load("plain") is source
    with pytest.raises(UserError, match="'plain' takes no argument after a colon, got 'plain:3'"):
        load("plain:3")

    @register_dataset("odd")
    def odd(colour: str) -> Any: ...

    with pytest.raises(UserError, match=r"dataset 'odd' of .*: may take name, root, .*; its 'colour' needs a default"):
        load("odd")
    with pytest.raises(UserError, match="dataset 'folder' needs an argument after a colon: folder:PATH"):
        load("folder")
