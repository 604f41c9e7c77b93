"""The published data sets: which files they consist of, how these are read, and where they come from."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tbbn.bench.data.sources import archives, formats
from tbbn.bench.data.types import Contents
from tbbn.bench.vision import torchvision
from tbbn.errors import UserError

Stats = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel, in [0, 1]

_TEN = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_CIFAR10_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_PATIENCE = 20  # seconds without a byte before a download is given up


@dataclass(frozen=True)
class Official:
    """A published data set: the files it consists of, how they are read and where they come from."""

    line: str
    stats: Stats
    paths: tuple[str, ...]  # all of them, or their .gz, under the root: the data set lies there
    place: str  # what a person puts under the root
    read: Callable[[Path], Contents]
    download: Callable[[ModuleType, str], object]
    archive: str = ""  # the published archive of them all, where there is one

    def lies_packed_under(self, root: Path) -> bool:
        return bool(self.archive) and (root / self.archive).exists()

    def lies_under(self, root: Path) -> bool:
        return all((root / path).exists() or (root / f"{path}.gz").exists() for path in self.paths)


def _cifar10(root: Path) -> Contents:
    folder = root / "cifar-10-batches-py"
    return Contents(
        formats.read_cifar(folder, _CIFAR10_BATCHES, "labels", 10),
        formats.read_cifar(folder, ("test_batch",), "labels", 10),
        formats.read_cifar_names(folder / "batches.meta", "label_names", 10),
    )


def _cifar100(root: Path) -> Contents:
    folder = root / "cifar-100-python"
    return Contents(
        formats.read_cifar(folder, ("train",), "fine_labels", 100),
        formats.read_cifar(folder, ("test",), "fine_labels", 100),
        formats.read_cifar_names(folder / "meta", "fine_label_names", 100),
    )


def _mnist(root: Path) -> Contents:
    folder = root / "MNIST/raw"
    return Contents(formats.read_idx(folder, "train", 10), formats.read_idx(folder, "t10k", 10), _TEN)


def _fashion_mnist(root: Path) -> Contents:
    folder = root / "FashionMNIST/raw"
    return Contents(formats.read_idx(folder, "train", 10), formats.read_idx(folder, "t10k", 10), _CLOTHES)


def _svhn(root: Path) -> Contents:
    return Contents(formats.read_svhn(root / "train_32x32.mat"), formats.read_svhn(root / "test_32x32.mat"), _TEN)


def _stl10(root: Path) -> Contents:
    folder = root / "stl10_binary"
    return Contents(formats.read_stl10(folder, "train"), formats.read_stl10(folder, "test"), _STL10)


def _download_archive(datasets: ModuleType, kind: str, root: str) -> None:
    """Download the archive of one of torchvision's data sets, checked against its hash.

    It is unpacked here: torchvision's own class would also load the pickles inside, with all they may do.
    """
    published = getattr(datasets, kind)
    datasets.utils.download_url(published.url, root, published.filename, published.tgz_md5)


# Mean and standard deviation: CIFAR-100's are those of the paper's code; the others are the usual published values of
# the training images.
OFFICIAL = {
    "cifar10": Official(
        "10 classes, 50 000 + 10 000 images of 32x32",
        ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        tuple(f"cifar-10-batches-py/{batch}" for batch in (*_CIFAR10_BATCHES, "test_batch")),
        "cifar-10-batches-py/ (data_batch_1 to data_batch_5, test_batch, batches.meta)",
        _cifar10,
        lambda datasets, root: _download_archive(datasets, "CIFAR10", root),
        "cifar-10-python.tar.gz",
    ),
    "cifar100": Official(
        "100 classes, 50 000 + 10 000 images of 32x32: the paper's main data set",
        ((0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023)),
        ("cifar-100-python/train", "cifar-100-python/test"),
        "cifar-100-python/ (train, test, meta)",
        _cifar100,
        lambda datasets, root: _download_archive(datasets, "CIFAR100", root),
        "cifar-100-python.tar.gz",
    ),
    "mnist": Official(
        "10 handwritten digits, 60 000 + 10 000 grey images of 28x28",
        ((0.1307,), (0.3081,)),
        tuple(f"MNIST/raw/{file}" for file in _IDX),
        f"MNIST/raw/ ({', '.join(_IDX)}, plain or .gz)",
        _mnist,
        lambda datasets, root: datasets.MNIST(root, download=True),
    ),
    "fashion-mnist": Official(
        "10 kinds of clothes, 60 000 + 10 000 grey images of 28x28",
        ((0.2860,), (0.3530,)),
        tuple(f"FashionMNIST/raw/{file}" for file in _IDX),
        f"FashionMNIST/raw/ ({', '.join(_IDX)}, plain or .gz)",
        _fashion_mnist,
        lambda datasets, root: datasets.FashionMNIST(root, download=True),
    ),
    "svhn": Official(
        "10 digits of house numbers, 73 257 + 26 032 images of 32x32",
        ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        ("train_32x32.mat", "test_32x32.mat"),
        "train_32x32.mat and test_32x32.mat",
        _svhn,
        lambda datasets, root: [datasets.SVHN(root, split=part, download=True) for part in ("train", "test")],
    ),
    "stl10": Official(
        "10 classes, 5 000 + 8 000 labelled images of 96x96",
        ((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
        tuple(f"stl10_binary/{part}_{half}.bin" for part in ("train", "test") for half in "Xy"),
        "stl10_binary/ (train_X.bin, train_y.bin, test_X.bin, test_y.bin)",
        _stl10,
        lambda datasets, root: _download_archive(datasets, "STL10", root),
        "stl10_binary.tar.gz",
    ),
}


def fetch(name: str, root: Path, *, download: bool) -> None:
    """Unpack the data set's archive where that lies under `root`; else download it there with torchvision, silently.

    If that fails, the error says what to place where.
    """
    official = OFFICIAL[name]
    reason, there = "downloads are off", root.exists()
    if download and not official.lies_packed_under(root):
        reason = "the download left none"
        try:
            with _quiet(), _patience(_PATIENCE):
                root.mkdir(parents=True, exist_ok=True)
                official.download(torchvision().datasets, str(root))
        except Exception as error:  # the network, the hash, the disk: for the user it is one thing
            lines = str(error).strip().splitlines()
            reason = f"the download failed: {lines[0][:160] if lines else type(error).__name__}"
            _tidy(official, root, there)
        except BaseException:
            _tidy(official, root, there)
            raise
    if official.lies_packed_under(root):
        archives.unpack(root / official.archive, root, official.paths[0].split("/")[0], official.paths)
    if not official.lies_under(root):
        place = official.place + (f" or {official.archive}" if official.archive else "")
        raise UserError(f"{name}: no data under {root} ({reason}); place {place} there")


def _tidy(official: Official, root: Path, there: bool) -> None:
    """Take away what a download that failed has left: a part of an archive would be taken for the whole next time."""
    if official.archive:
        (root / official.archive).unlink(missing_ok=True)
    if not there:
        _remove_empty(root)


def _remove_empty(folder: Path) -> None:
    """Take away folders that hold nothing: what a download has made before it failed."""
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Sockets opened inside fail after that long without an answer: the downloader itself would wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
