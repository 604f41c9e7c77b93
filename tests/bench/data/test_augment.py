"""Each augmentation against torchvision's per-image transform on the same parameters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tbbn.bench.data import colour
from tbbn.bench.data.augment import Augment, ResizedCrop, Shift, augmentation, evaluation_view, normalise, padding
from tbbn.bench.vision import torchvision
from tbbn.errors import UserError
from tbbn.registry import AUGMENTATIONS

NAMES = ["none", "flip", "shift", "padded-resized", "resized", "strong", "resized-brightness", "shift-brightness"]
functional = torchvision().transforms.functional
transforms = torchvision().transforms


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photographs(n: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    """Noise under smooth colour, with black and white patches: edges for the resize, extremes for the colour."""
    smooth = torch.rand(n, channels, 4, 4, generator=generator(1))
    images = torch.nn.functional.interpolate(smooth, (height, width), mode="bilinear")
    images = images + 0.3 * torch.randn(images.shape, generator=generator(2))
    images[:, :, :3, :4] = 0
    images[:, :, 5:8, -6:] = 1
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


def pil(image: Tensor):
    return functional.to_pil_image(image)


def tensor(image) -> Tensor:
    return functional.pil_to_tensor(image).float() / 255


def mirrored(image: Tensor, flip: Tensor) -> Tensor:
    return image.flip(-1) if flip else image


@pytest.mark.parametrize("size", [(32, 32), (8, 8), (12, 20)])
def test_shift_matches_pad_crop_and_flip(size: tuple[int, int]) -> None:
    images = photographs(24, height=size[0], width=size[1])
    shift = augmentation("shift")
    parameters = shift.draw(24, generator(), size)
    pad = {(32, 32): 4, (8, 8): 1, (12, 20): 1}[size]
    expected = [
        mirrored(functional.crop(functional.pad(image, [pad]), int(top), int(left), *size), flip)
        for image, (top, left, flip) in zip(images, parameters, strict=True)
    ]
    assert torch.equal(shift.apply(images, parameters), torch.stack(expected).float() / 255)


def test_shift_to_a_smaller_crop_matches_torchvision() -> None:
    images = photographs(8, height=20, width=24)
    shift = Shift(crop=16, pad=2)
    parameters = shift.draw(8, generator(), (20, 24))
    expected = [
        mirrored(functional.crop(functional.pad(image, [2]), int(top), int(left), 16, 16), flip)
        for image, (top, left, flip) in zip(images, parameters, strict=True)
    ]
    assert torch.equal(shift.apply(images, parameters), torch.stack(expected).float() / 255)
    assert parameters[:, 0].max() <= 8
    assert parameters[:, 1].max() <= 12


def test_shift_draws_every_place_equally_often() -> None:
    parameters = augmentation("shift").draw(9000, generator(), (32, 32))
    for column in (0, 1):
        counts = parameters[:, column].long().bincount(minlength=9)
        assert counts.shape == (9,)
        assert (counts - 1000).abs().max() < 150


@pytest.mark.parametrize(
    ("size", "crop", "padded"),
    [((32, 32), None, True), ((32, 32), None, False), ((40, 52), 24, False), ((8, 8), None, True)],
)
def test_resized_crop_matches_pil(size: tuple[int, int], crop: int | None, padded: bool) -> None:
    images = photographs(40, height=size[0], width=size[1])
    resized = augmentation("padded-resized" if padded else "resized", crop=crop)
    parameters = resized.draw(40, generator(), size)
    pad = padding(size) if padded else 0
    out = [crop, crop] if crop else list(size)
    expected = []
    for image, (*box, flip) in zip(images, parameters, strict=True):
        cut = functional.resized_crop(functional.pad(pil(image), [pad]), *(int(side) for side in box), size=out)
        expected.append(mirrored(tensor(cut), flip))
    # PIL rounds to 8 bits after each of its two passes: up to half a step from the second, up to half from the first.
    assert (resized.apply(images, parameters) - torch.stack(expected)).abs().max() < 1.01 / 255


def test_resized_crop_matches_the_antialiased_float_resize() -> None:
    images = photographs(16) / 255
    resized = augmentation("padded-resized")
    parameters = resized.draw(16, generator(), (32, 32))
    expected = []
    for image, (*box, flip) in zip(images, parameters, strict=True):
        sides = [int(side) for side in box]
        cut = functional.resized_crop(functional.pad(image, [4]), *sides, size=[32, 32], antialias=True)
        expected.append(mirrored(cut, flip))
    torch.testing.assert_close(resized.apply(images, parameters), torch.stack(expected), rtol=0, atol=1e-5)


def test_a_whole_box_is_the_image_itself() -> None:
    images = photographs(2)
    whole = torch.tensor([[0.0, 0, 32, 32, 0], [0, 0, 32, 32, 1]])
    out = ResizedCrop().apply(images, whole)
    torch.testing.assert_close(out[0], images[0] / 255, rtol=0, atol=1e-6)
    torch.testing.assert_close(out[1], images[1].flip(-1) / 255, rtol=0, atol=1e-6)


def test_parameters_of_zero_give_finite_images() -> None:
    for name in NAMES:
        chosen = augmentation(name)
        assert chosen.apply(photographs(2), torch.zeros(2, chosen.n_parameters)).isfinite().all()


def slow_boxes(n: int, size: tuple[int, int], scale: tuple[float, float]) -> list[list[int]]:
    """torchvision's `RandomResizedCrop.get_params` image by image, on the same draws."""
    draws = generator(9)
    uniform, corner = torch.rand(n, 2, 10, generator=draws).tolist(), torch.rand(n, 2, generator=draws).tolist()
    flips, (height, width) = torch.randint(0, 2, (n,), generator=draws).tolist(), size
    boxes = []
    for (areas, aspects), (down, right), flip in zip(uniform, corner, flips, strict=True):
        for u, v in zip(areas, aspects, strict=True):
            area = height * width * (scale[0] + u * (scale[1] - scale[0]))
            aspect = math.exp(math.log(3 / 4) + v * (math.log(4 / 3) - math.log(3 / 4)))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                top, left = (min(int(d * (s - b + 1)), s - b) for d, s, b in ((down, height, h), (right, width, w)))
                break
        else:
            w = min(width, round(height * 4 / 3)) if width > height * 4 / 3 else width
            h = min(height, round(width / (3 / 4))) if width < height * 3 / 4 else height
            top, left = (height - h) // 2, (width - w) // 2
        boxes.append([top, left, h, w, flip])
    return boxes


@pytest.mark.parametrize("size", [(32, 32), (40, 17), (9, 50), (1, 1), (2, 2), (1, 4), (5, 1)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.2, 1.0), (0.9, 1.0)])
def test_crop_boxes_are_those_of_the_definition_on_the_same_draws(
    scale: tuple[float, float], size: tuple[int, int]
) -> None:
    found = ResizedCrop(scale=scale).draw(300, generator(9), size)
    assert found.tolist() == slow_boxes(300, size, scale)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.2, 1.0)])
def test_crop_boxes_are_distributed_as_torchvisions(scale: tuple[float, float]) -> None:
    n = 4000
    ours = ResizedCrop(padded=True, scale=scale).draw(n, generator(), (32, 32))[:, :4]
    image = torch.zeros(1, 40, 40)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = torch.tensor(
            [transforms.RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(n)]
        )
    for column in range(4):
        levels = torch.arange(41)
        distance = [((side[:, column, None] <= levels).float().mean(0)) for side in (ours, theirs)]
        assert (distance[0] - distance[1]).abs().max() < 1.95 * (2 / n) ** 0.5  # Kolmogorov-Smirnov, one in a thousand
    assert (ours[:, 0] + ours[:, 2]).max() == 40
    assert (ours[:, :2] >= 0).all()


def test_aspect_ratios_are_uniform_in_their_logarithm_and_areas_in_themselves() -> None:
    n = 4000  # small boxes in a large image: none is refused, and rounding is nothing
    boxes = ResizedCrop(scale=(0.1, 0.3)).draw(n, generator(), (2000, 2000))
    heights, widths = boxes[:, 2], boxes[:, 3]
    for values, low, high in (
        ((widths / heights).log(), math.log(3 / 4), math.log(4 / 3)),
        (widths * heights / 2000**2, 0.1, 0.3),
    ):
        level = ((values - low) / (high - low)).sort().values
        assert (
            level - (torch.arange(n) + 0.5) / n
        ).abs().max() < 1.95 / n**0.5  # Kolmogorov-Smirnov, one in a thousand


def test_the_crops_of_each_augmentation_have_its_smallest_area() -> None:
    for name, smallest, side in (("strong", 0.2, 64), ("resized", 0.08, 64), ("padded-resized", 0.08, 64 + 2 * 8)):
        boxes = augmentation(name).draw(4000, generator(), (64, 64))
        areas = boxes[:, 2] * boxes[:, 3] / side**2
        assert smallest - 0.01 < areas.min() < smallest + 0.02 and areas.max() > 0.95


@pytest.mark.parametrize("size", [(10, 100), (100, 10), (21, 20)])
def test_the_fallback_box_is_torchvisions(size: tuple[int, int]) -> None:
    impossible = (2.0, 3.0)  # an area larger than the image: no attempt is valid
    theirs = transforms.RandomResizedCrop.get_params(torch.zeros(1, *size), list(impossible), [3 / 4, 4 / 3])
    ours = ResizedCrop(scale=impossible).draw(5, generator(), size)[:, :4]
    assert torch.equal(ours, torch.tensor(theirs).float().expand(5, 4))


def test_colour_jitter_matches_torchvision_in_every_order() -> None:
    orders = torch.tensor(list(itertools.permutations(range(4))))
    images = photographs(24) / 255
    factors = colour.ColourJitter(probability=1.0).draw(24, generator(), (32, 32))[:, 4:]
    changes = [
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    ]
    expected = []
    for image, order, own in zip(images, orders.tolist(), factors.tolist(), strict=True):
        for change in order:
            image = changes[change](image, own[change])
        expected.append(image)
    out = colour.ColourJitter().apply(images, torch.cat([orders, factors], 1))
    torch.testing.assert_close(out, torch.stack(expected), rtol=0, atol=2e-5)


def test_colour_jitter_draws_orders_and_factors_as_torchvision() -> None:
    parameters = colour.ColourJitter().draw(6000, generator(), (32, 32))
    order, factors = parameters[:, :4], parameters[:, 4:]
    spared = (factors == torch.tensor([1.0, 1, 1, 0])).all(1)
    assert abs(spared.float().mean() - 0.2) < 0.02
    changed = factors[~spared]
    assert changed[:, :3].min() > 0.6
    assert changed[:, :3].max() < 1.4
    assert changed[:, 3].abs().max() < 0.1
    torch.testing.assert_close(changed.mean(0), torch.tensor([1.0, 1, 1, 0]), rtol=0, atol=0.015)
    assert abs(changed[:, 0].std() - 0.8 / 12**0.5) < 0.01
    codes = (order * torch.tensor([64.0, 16, 4, 1])).sum(1).unique(return_counts=True)[1]
    assert codes.shape == (24,)
    assert (codes - 250).abs().max() < 70


def test_a_spared_image_stays_as_it_is() -> None:
    images = photographs(4) / 255
    parameters = colour.ColourJitter(probability=0.0).draw(4, generator(), (32, 32))
    torch.testing.assert_close(colour.ColourJitter().apply(images, parameters), images, rtol=0, atol=1e-6)


def test_strong_is_crop_jitter_and_greyscale_in_turn() -> None:
    images = photographs(16)
    strong = augmentation("strong")
    parameters = strong.draw(16, generator(3), (32, 32))
    assert parameters.shape == (16, strong.n_parameters) == (16, 14)
    expected = []
    for image, row in zip(images / 255, parameters, strict=True):
        (*box, flip), order, factors, grey = row[:5], row[5:9].tolist(), row[9:13].tolist(), row[13]
        sides = [int(side) for side in box]
        image = mirrored(functional.resized_crop(image, *sides, size=[32, 32], antialias=True), flip)
        for change in order:
            adjust = ["brightness", "contrast", "saturation", "hue"][int(change)]
            image = getattr(functional, f"adjust_{adjust}")(image, factors[int(change)])
        expected.append(functional.rgb_to_grayscale(image, 3) if grey else image)
    torch.testing.assert_close(strong.apply(images, parameters), torch.stack(expected), rtol=0, atol=5e-5)


def test_greyscale_takes_a_fifth_of_the_images() -> None:
    assert abs(colour.Greyscale().draw(5000, generator(), (1, 1)).mean() - 0.2) < 0.02


@pytest.mark.parametrize("base", ["shift", "resized"])
def test_brightness_after_a_crop_matches_torchvision(base: str) -> None:
    images = photographs(12)
    chosen = augmentation(f"{base}-brightness")
    parameters = chosen.draw(12, generator(), (32, 32))
    cropped = augmentation(base).apply(images, parameters[:, :-1])
    expected = [functional.adjust_brightness(a, b) for a, b in zip(cropped, parameters[:, -1].tolist(), strict=True)]
    torch.testing.assert_close(chosen.apply(images, parameters), torch.stack(expected), rtol=0, atol=1e-6)
    factors = chosen.draw(4000, generator(), (32, 32))[:, -1]
    assert 1 - 63 / 255 <= factors.min() < 0.77
    assert 1.23 < factors.max() <= 1 + 63 / 255


def test_colour_leaves_the_hue_of_one_channel_alone() -> None:
    images = photographs(6, channels=1)
    strong = augmentation("strong")
    parameters = strong.draw(6, generator(), (32, 32))
    assert strong.apply(images, parameters).shape == (6, 1, 32, 32)
    assert torch.equal(colour.turn_hue(images / 255, torch.full((6,), 0.3)), images / 255)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_draws_repeatably_and_stays_in_range(name: str) -> None:
    chosen: Augment = augmentation(name)
    images = photographs(10)
    before = images.clone()
    first, second = (chosen.draw(10, generator(5), (32, 32)) for _ in range(2))
    assert first.dtype == torch.float32
    assert first.shape == (10, chosen.n_parameters)
    assert torch.equal(first, second)
    out = chosen.apply(images, first)
    assert out.dtype == torch.float32
    assert out.shape == images.shape
    assert out.is_contiguous()
    assert out.min() >= 0
    assert out.max() <= 1 + 1e-6
    torch.testing.assert_close(out, chosen.apply(images / 255, first), rtol=0, atol=2e-6)
    assert torch.equal(images, before)
    if chosen.n_parameters:
        assert not torch.equal(first, chosen.draw(10, generator(6), (32, 32)))


@pytest.mark.parametrize("name", NAMES)
def test_no_name_reads_the_global_generator(name: str) -> None:
    state = torch.get_rng_state()
    augmentation(name).draw(4, generator(), (32, 32))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_the_asked_crop(name: str) -> None:
    chosen = augmentation(name, crop=24)
    images = photographs(3, height=32, width=40)
    assert chosen.apply(images, chosen.draw(3, generator(), (32, 40))).shape == (3, 3, 24, 24)


@pytest.mark.parametrize(("name", "column"), [("flip", 0), ("shift", 2), ("padded-resized", 4), ("resized", 4)])
def test_half_of_the_images_are_flipped(name: str, column: int) -> None:
    flips = augmentation(name).draw(5000, generator(), (32, 32))[:, column]
    assert set(flips.tolist()) == {0.0, 1.0}
    assert abs(flips.mean() - 0.5) < 0.025


def test_flip_mirrors_left_and_right() -> None:
    images = photographs(2)
    out = augmentation("flip").apply(images, torch.tensor([[0.0], [1.0]]))
    assert torch.equal(out, torch.stack([images[0], images[1].flip(-1)]) / 255)


def test_autocast_does_not_touch_the_resize() -> None:
    images = photographs(4)
    resized = augmentation("resized")
    parameters = resized.draw(4, generator(), (32, 32))
    plain = resized.apply(images, parameters)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resized.apply(images, parameters), plain)


@pytest.mark.parametrize(("size", "crop"), [((32, 32), 32), ((33, 40), 24), ((31, 36), 28), ((32, 32), None)])
def test_evaluation_sees_torchvisions_centre_crop(size: tuple[int, int], crop: int | None) -> None:
    images = photographs(3, height=size[0], width=size[1])
    expected = images if crop is None else functional.center_crop(images, [crop])
    assert torch.equal(evaluation_view(images, crop=crop), expected / 255)


def test_normalise_matches_torchvision() -> None:
    images = photographs(3) / 255
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    expected = functional.normalize(images, mean.tolist(), std.tolist())
    torch.testing.assert_close(normalise(images, mean, std), expected)


def test_padding_is_an_eighth_and_at_least_one_pixel() -> None:
    assert [padding((side, side)) for side in (4, 8, 16, 28, 32, 64)] == [1, 1, 2, 3, 4, 8]


def test_every_name_has_a_line() -> None:
    assert list(AUGMENTATIONS) == NAMES
    assert all(entry.description for entry in AUGMENTATIONS.describe().values())


def test_a_window_may_be_as_large_as_the_padded_image() -> None:
    images = photographs(2, height=8, width=8)
    whole = Shift(crop=10, pad=1)
    parameters = whole.draw(2, generator(), (8, 8))
    assert parameters[:, :2].tolist() == [[0, 0], [0, 0]] and parameters.dtype == torch.float32
    parameters[:, 2] = 0
    assert torch.equal(whole.apply(images, parameters)[:, :, 1:9, 1:9], images / 255)
    with pytest.raises(UserError, match="a crop of 11 needs larger images than 8x8"):
        Shift(crop=11, pad=1).draw(2, generator(), (8, 8))


@pytest.mark.parametrize("name", NAMES)
def test_a_crop_of_one_pixel_is_the_smallest(name: str) -> None:
    chosen = augmentation(name, crop=1)
    assert chosen.apply(photographs(2), chosen.draw(2, generator(), (32, 32))).shape == (2, 3, 1, 1)


def test_a_change_of_colour_comes_below_its_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.full(shape, 0.25))
    for probability, changed in ((0.25, False), (0.26, True)):
        assert colour.Greyscale(probability).draw(3, generator(), (1, 1)).bool().all() == changed
        factors = colour.ColourJitter(probability=probability).draw(3, generator(), (1, 1))[0, 4:].tolist()
        assert factors == pytest.approx([0.8, 0.8, 0.8, -0.05] if changed else [1, 1, 1, 0])


def test_factors_are_never_negative() -> None:
    factors = colour.Brightness(strength=3.0).draw(4000, generator(), (1, 1))
    assert 0 <= factors.min() < 0.01 and 3.99 < factors.max() <= 4


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match="unknown augmentation 'shft'"):
        augmentation("shft", crop=0)  # the name comes first
    with pytest.raises(UserError, match=r"unknown augmentation 'shft'.*Did you mean 'shift'\?"):
        augmentation("shft")
    with pytest.raises(UserError, match="crop must be a positive number of pixels, got 0"):
        augmentation("shift", crop=0)
    with pytest.raises(UserError, match="images must be at least 40x40, got 32x32"):
        evaluation_view(photographs(1), crop=40)
    with pytest.raises(UserError, match="a crop of 50 needs larger images than 32x32"):
        augmentation("shift", crop=50).draw(1, generator(), (32, 32))


@pytest.mark.parametrize("size", [(32, 32), (20, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_no_images_give_no_images(name: str, size: tuple[int, int]) -> None:
    chosen = augmentation(name, crop=16)
    images = photographs(2, height=size[0], width=size[1])[:0]
    assert chosen.apply(images, chosen.draw(0, generator(), size)).shape == (0, 3, 16, 16)


@pytest.mark.parametrize("crop", [None, 24])
@pytest.mark.parametrize("name", NAMES)
def test_apply_works_where_the_images_are(name: str, crop: int | None) -> None:
    """Whatever torch's default device is."""
    chosen, images = augmentation(name, crop=crop), photographs(3)
    parameters = chosen.draw(3, generator(), (32, 32))
    wanted = chosen.apply(images, parameters)
    with torch.device("meta"):
        assert torch.equal(chosen.apply(images, parameters), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_apply_never_reads_a_value_back(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    chosen = augmentation(name)
    with FakeTensorMode():  # tensors without values: reading one raises
        out = chosen.apply(torch.empty(8, 3, 32, 32, dtype=torch.uint8), torch.empty(8, chosen.n_parameters))
        assert out.shape == (8, 3, 32, 32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_apply_is_captured_as_a_graph_and_agrees_with_the_cpu(name: str) -> None:
    chosen = augmentation(name)
    images = photographs(8)
    rows = chosen.draw(16, generator(), (32, 32)).view(2, 8, -1)
    on_device, buffer = images.cuda(), rows[0].cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chosen.apply(on_device, buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chosen.apply(on_device, buffer)
    buffer.copy_(rows[1])
    graph.replay()
    torch.testing.assert_close(out.cpu(), chosen.apply(images, rows[1]), rtol=0, atol=1e-4)
