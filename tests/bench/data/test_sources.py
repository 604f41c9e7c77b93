"""Data sets by name: the bundled ones, sequences, resizing, what is found, and what is said when nothing is."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import PIL.Image
import pytest
import torch

from tbbn.bench.data.loading import found, load
from tbbn.bench.data.sources import bundled, contents, official
from tbbn.errors import UserError
from tbbn.registry import DATASETS


def write_images(root: Path, classes: tuple[str, ...] = ("a", "b"), side: int = 8) -> None:
    for seed, path in enumerate(f"{part}/{name}/0.png" for part in ("train", "test") for name in classes):
        (root / path).parent.mkdir(parents=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3)).astype(np.uint8)
        PIL.Image.fromarray(pixels).save(root / path)


def test_every_fifth_image_of_each_digit_is_for_test() -> None:
    from sklearn.datasets import load_digits

    source = load("digits")
    bunch = load_digits()
    seen, train, test = [0] * 10, [], []
    for image, label in zip(bunch.images, bunch.target, strict=True):
        seen[label] += 1
        (test if seen[label] % 5 == 0 else train).append((image, int(label)))
    assert source.train.labels.tolist() == [label for _, label in train]
    assert source.test.labels.tolist() == [label for _, label in test]
    expected = np.stack([image for image, _ in test]) * 255 / 16
    assert source.test.images.shape == (len(test), 1, 8, 8)
    assert np.abs(source.test.images[:, 0].numpy() - expected).max() <= 0.5
    assert source.classes == tuple("0123456789")
    pixels = source.train.images / 255
    assert abs(pixels.mean() - source.mean[0]) < 1e-3
    assert abs(pixels.std() - source.std[0]) < 1e-3


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"digits: scikit-learn is required.*pip install scikit-learn"):
        load("digits")


def test_synthetic_images_are_the_same_each_time_and_of_the_asked_kind() -> None:
    source = load("synthetic")
    assert source.train.images.shape == (800, 3, 16, 16)
    assert source.test.images.shape == (200, 3, 16, 16)
    assert source.train.labels.bincount().tolist() == [40] * 20
    assert torch.equal(source.test.images, load("synthetic").test.images)
    pixels = source.train.images / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(source.mean), rtol=0, atol=0.01)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(source.std), rtol=0, atol=0.01)
    small = load("synthetic:10x20x5x8")
    assert small.train.images.shape == (200, 3, 8, 8)
    assert small.test.labels.bincount().tolist() == [5] * 10
    assert len(small.classes) == 10
    assert load("synthetic:01x1x1x04").train.images.shape == (1, 3, 4, 4)


def slow_synthetic(n_classes: int, n_each: tuple[int, int], side: int) -> list[np.ndarray]:
    """Its description, pixel by pixel, with the same draws."""
    draws = torch.Generator().manual_seed(2023)

    def smooth(n: int) -> np.ndarray:
        small = torch.randn(n, 3, 4, 4, generator=draws).double().numpy()
        large = np.zeros((n, 3, side, side))
        # Pixel i of the large image lies at (i + 1/2) * 4 / side - 1/2 between those of the small one.
        places = np.clip((np.arange(side) + 0.5) * 4 / side - 0.5, 0, None)
        for i, y in enumerate(places):
            for j, x in enumerate(places):
                for k, wy in ((int(y), 1 - y % 1), (min(int(y) + 1, 3), y % 1)):
                    for m, wx in ((int(x), 1 - x % 1), (min(int(x) + 1, 3), x % 1)):
                        large[:, :, i, j] += wy * wx * small[:, :, k, m]
        return large

    patterns, reach, parts = smooth(n_classes), max(1, side // 8), []
    for n in n_each:
        moves = torch.randint(-reach, reach + 1, (n_classes * n, 2, 1), generator=draws).tolist()
        own = smooth(n_classes * n)
        noise = torch.randn(n_classes * n, 3, side, side, generator=draws).double().numpy()
        images = np.empty(own.shape)
        for row, ((down,), (right,)) in enumerate(moves):
            moved = np.roll(patterns[row // n], (-down, -right), (1, 2))
            images[row] = 0.5 + 0.12 * moved + 0.12 * own[row] + 0.1 * noise[row]
        parts.append(255 * images.clip(0, 1))
    return parts


@pytest.mark.parametrize("side", [5, 17])
def test_synthetic_images_are_moved_patterns_with_a_pattern_of_their_own_and_noise(side: int) -> None:
    source = load(f"synthetic:3x4x2x{side}")
    for part, wanted in zip((source.train, source.test), slow_synthetic(3, (4, 2), side), strict=True):
        assert np.abs(part.images.double().numpy() - wanted).max() <= 0.5 + 1e-3
    assert source.test.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_synthetic_classes_can_be_learnt_but_not_by_looking_at_one_image() -> None:
    source = load("synthetic")
    train, test = (part.images.float().flatten(1) for part in (source.train, source.test))
    means = torch.stack([train[source.train.labels == label].mean(0) for label in range(20)])
    by_mean = (torch.cdist(test, means).argmin(1) == source.test.labels).float().mean()
    by_one = (torch.cdist(test, train[::40]).argmin(1) == source.test.labels).float().mean()
    assert 0.7 < by_mean < 0.99
    assert by_one < 0.6


@pytest.mark.parametrize(
    "spec",
    [
        *("", "10x20x5", "10x20x5x8x2", "10x20x5x8 ", "10X20X5X8", "tenx20x5x8", "\u0661x20x5x8", "-1x20x5x8"),
        *("0x20x5x8", "10x0x5x8", "10x20x0x8", "10x20x5x0", "10x20x5x3", "1234567890x1x1x4"),
    ],
)
def test_a_wrong_synthetic_spec_is_one_line(spec: str) -> None:
    with pytest.raises(UserError, match=r"needs CLASSESxTRAINxTESTxSIZE .* such as synthetic:10x20x5x8, got"):
        load(f"synthetic:{spec}")


def test_a_sequence_counts_classes_on_and_numbers_its_data_sets(tmp_path: Path) -> None:
    write_images(tmp_path / "x", side=40)
    source = load(f"digits+synthetic:3x2x1x16+folder:{tmp_path}/x")
    digits = load("digits")
    assert source.groups == (0,) * 10 + (1,) * 3 + (2,) * 2
    assert source.classes[9:11] == ("digits/9", "synthetic:3x2x1x16/0")
    assert source.train.images.shape[1:] == source.test.images.shape[1:] == (3, 32, 32)
    assert source.train.labels[:1442].tolist() == digits.train.labels.tolist()
    assert source.train.labels[1442:].tolist() == [10, 10, 11, 11, 12, 12, 13, 14]
    assert source.test.labels[355:].tolist() == [10, 11, 12, 13, 14]
    assert torch.equal(source.train.images[:1442, 0], source.train.images[:1442, 2])
    assert (source.mean, source.std) == ((0.5,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(("name", "size"), [("digits", 32), ("synthetic", 12), ("synthetic", 7)])
def test_size_resizes_as_pil_does(name: str, size: int) -> None:
    before, after = load(name).test.images[:20], load(name, size=size).test.images[:20]
    for image, resized in zip(before, after, strict=True):
        pixels = np.ascontiguousarray(image.permute(1, 2, 0).squeeze(2).numpy())
        expected = np.asarray(PIL.Image.fromarray(pixels).resize((size, size), PIL.Image.Resampling.BILINEAR))
        got = resized.permute(1, 2, 0).squeeze(2).numpy()
        assert np.abs(got.astype(int) - expected).max() <= 1


def test_a_folder_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    write_images(tmp_path / "a+b")
    assert load(f"folder:{tmp_path}/a+b").classes == ("a", "b")
    write_images(tmp_path / "x", side=32)
    assert load(f"folder:{tmp_path}/x+synthetic:2x1x1x4").groups == (0, 0, 1, 1)


def test_an_archive_that_is_there_is_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-100-python.tar.gz").touch()
    unpacked: list[tuple[object, ...]] = []
    monkeypatch.setattr(official.archives, "unpack", lambda *given: unpacked.append(given))
    monkeypatch.setattr(official, "torchvision", lambda: pytest.fail("downloaded"))
    with pytest.raises(UserError, match=r"cifar100: no data under .* \(downloads are off\)"):
        load("cifar100", tmp_path)
    paths = ("cifar-100-python/train", "cifar-100-python/test")
    assert unpacked == [(tmp_path / "cifar-100-python.tar.gz", tmp_path, "cifar-100-python", paths)]


def test_found_looks_for_paths(tmp_path: Path) -> None:
    there = found(tmp_path / "nowhere")
    assert {name for name, is_there in there.items() if is_there} == {"digits", "synthetic"}
    assert {*there} == {*DATASETS} - {"folder", "packed", "arrays"}
    for path in official.OFFICIAL["cifar10"].paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    for path in official.OFFICIAL["mnist"].paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{path}.gz").touch()
    write_images(tmp_path / "svhn")
    write_images(tmp_path / "tiny-imagenet")
    now = {name for name, is_there in found(tmp_path).items() if is_there}
    assert now == {"digits", "synthetic", "cifar10", "mnist", "svhn", "tiny-imagenet"}
    write_images(tmp_path / "fashion-mnist")
    write_images(tmp_path / "stl10")
    write_images(tmp_path / "imagenet100")
    assert found(tmp_path)["dissimilar"]
    assert found(tmp_path)["imagenet100"]


def test_the_dissimilar_sequence_is_the_papers_five_data_sets(tmp_path: Path) -> None:
    five = ("mnist", "fashion-mnist", "svhn", "cifar10", "stl10")
    for name in five:
        write_images(tmp_path / name)
    source = load("dissimilar", tmp_path, download=False)
    assert source.name == "dissimilar"
    assert source.groups == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    assert source.classes == tuple(f"{name}/{label}" for name in five for label in "ab")
    assert load("digits+dissimilar", tmp_path, download=False).groups[-1] == 5


def test_the_name_of_the_sequence_reads_by_itself_what_load_reads(tmp_path: Path) -> None:
    for name in ("mnist", "fashion-mnist", "svhn", "cifar10", "stl10"):
        write_images(tmp_path / name)
    heard: list[tuple[int, int]] = []
    given = {"root": tmp_path, "download": False, "unreadable": "fail", "on_progress": lambda *n: heard.append(n)}
    for size in (None, 4):
        made = DATASETS.make("dissimilar", name="dissimilar", size=size, **given)
        wanted = load("dissimilar", tmp_path, download=False, size=size)
        assert made.name == wanted.name and made.classes == wanted.classes
        assert torch.equal(made.train.images, wanted.train.images) and made.test.images.shape[2] == (size or 32)
    assert heard[-1] == (4, 4)


@pytest.mark.parametrize("name", official.OFFICIAL)
def test_without_data_and_download_the_error_says_what_to_place(tmp_path: Path, name: str) -> None:
    first = official.OFFICIAL[name].paths[0].split("/")[0]
    with pytest.raises(UserError, match=rf"{name}: no data under \S+ \(downloads are off\); place {first}.* there"):
        load(name, tmp_path, download=False)


def test_a_failed_download_is_one_silent_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patience = []

    class CIFAR100:
        url, filename, tgz_md5 = "https://nowhere", "cifar-100-python.tar.gz", ""

    class Offline(ModuleType):
        @staticmethod
        def download_url(url: str, root: str, filename: str, md5: str) -> None:
            (Path(root) / filename).write_bytes(b"the beginning")
            patience.append(socket.getdefaulttimeout())
            print("Downloading", file=sys.stderr)  # noqa: T201
            print("0%")  # noqa: T201
            raise OSError("<urlopen error no route to host>\nand more")

    datasets = ModuleType("datasets")
    datasets.CIFAR100, datasets.utils = CIFAR100, Offline("utils")  # type: ignore[attr-defined]
    vision = ModuleType("torchvision")
    vision.datasets = datasets  # type: ignore[attr-defined]
    monkeypatch.setattr(official, "torchvision", lambda: vision)
    with pytest.raises(UserError) as caught:
        load("cifar100", tmp_path / "new")
    assert str(caught.value) == (
        f"cifar100: no data under {tmp_path}/new (the download failed: <urlopen error no route to host>); "
        "place cifar-100-python/ (train, test, meta) or cifar-100-python.tar.gz there"
    )
    assert not (tmp_path / "new").exists()
    assert capsys.readouterr() == ("", "")
    assert patience == [20]
    assert socket.getdefaulttimeout() is None


def test_a_download_is_read_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(datasets: ModuleType, root: str) -> None:
        import pickle

        (Path(root) / "cifar-100-python").mkdir()
        for part in ("train", "test"):
            content = {"data": np.zeros((1, 3072), np.uint8), "fine_labels": [42]}
            (Path(root) / "cifar-100-python" / part).write_bytes(pickle.dumps(content))

    entry = official.OFFICIAL["cifar100"]
    changed = official.Official(entry.description, entry.stats, entry.paths, entry.place, entry.read, download)
    monkeypatch.setitem(official.OFFICIAL, "cifar100", changed)
    assert load("cifar100", tmp_path).train.labels.tolist() == [42]


@pytest.mark.parametrize("name", official.OFFICIAL)
def test_the_downloader_is_called_as_torchvision_defines_it(tmp_path: Path, name: str) -> None:
    import inspect

    from tbbn.bench.vision import torchvision

    real = torchvision().datasets
    calls = []

    class Utils:
        @staticmethod
        def download_url(*arguments: object) -> None:
            bound = inspect.signature(real.utils.download_url).bind(*arguments).arguments
            assert bound["filename"] == official.OFFICIAL[name].archive and bound["md5"]
            calls.append({"download": True, **bound})

    class Recorder:
        utils = Utils

        def __getattr__(self, kind: str):
            if official.OFFICIAL[name].archive:
                return getattr(real, kind)

            def call(*arguments: object, **options: object) -> None:
                calls.append(inspect.signature(getattr(real, kind)).bind(*arguments, **options).arguments)

            return call

    official.OFFICIAL[name].download(Recorder(), str(tmp_path))  # type: ignore[arg-type]
    assert calls
    assert all(call["download"] is True and call["root"] == str(tmp_path) for call in calls)


def test_a_download_without_torchvision_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> ModuleType:
        raise UserError("torchvision is required here but not installed; pip install torchvision")

    monkeypatch.setattr(official, "torchvision", missing)
    with pytest.raises(UserError, match=r"mnist: no data .*pip install torchvision\); place MNIST/raw/"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("name", ["tiny-imagenet", "imagenet100"])
def test_folders_that_cannot_be_downloaded_say_what_to_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"{name}: no data under \S+; place {name}.* there"):
        load(name, tmp_path)


def test_wrong_names_and_sizes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown dataset 'cifar_100'.*Did you mean 'cifar100'\?"):
        load("cifar_100", tmp_path)
    with pytest.raises(UserError, match="unknown dataset 'nothing'"):
        load("digits+nothing", tmp_path)
    with pytest.raises(UserError, match="digits: size must be a positive number of pixels, got 0"):
        load("digits", size=0)
    for name, root in (("folder:a\0b", "data"), ("digits", "a\0")):
        with pytest.raises(UserError, match="a path cannot contain NUL"):
            load(name, root)
    assert bundled.digits().train.images.shape[1] == 1


# Mean and standard deviation of the channels, as published.
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "stl10": ((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
}


def test_the_statistics_of_data_sets_are_the_published_ones() -> None:
    assert {name: entry.stats for name, entry in official.OFFICIAL.items()} == STATISTICS
    assert contents.IMAGENET_STATS == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    made = load("synthetic:2x2x2x4", "data")
    assert (made.mean, made.std) == ((0.5, 0.5, 0.5), (0.16, 0.16, 0.16))


def test_official_data_sets_read_their_own_files_and_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[object, ...]] = []

    def watch(name: str) -> None:
        monkeypatch.setattr(official.formats, name, lambda place, *more: read.append((place.as_posix(), *more)))

    for name in ("read_cifar", "read_cifar_names", "read_idx", "read_svhn", "read_stl10"):
        watch(name)
    for entry in official.OFFICIAL.values():
        entry.read(Path("root"))
    assert read == [
        ("root/cifar-10-batches-py", tuple(f"data_batch_{i}" for i in (1, 2, 3, 4, 5)), "labels", 10),
        ("root/cifar-10-batches-py", ("test_batch",), "labels", 10),
        ("root/cifar-10-batches-py/batches.meta", "label_names", 10),
        ("root/cifar-100-python", ("train",), "fine_labels", 100),
        ("root/cifar-100-python", ("test",), "fine_labels", 100),
        ("root/cifar-100-python/meta", "fine_label_names", 100),
        ("root/MNIST/raw", "train", 10),
        ("root/MNIST/raw", "t10k", 10),
        ("root/FashionMNIST/raw", "train", 10),
        ("root/FashionMNIST/raw", "t10k", 10),
        ("root/train_32x32.mat",),
        ("root/test_32x32.mat",),
        ("root/stl10_binary", "train"),
        ("root/stl10_binary", "test"),
    ]
