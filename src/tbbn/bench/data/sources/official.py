"""The published data sets: their files, how they are read, and where they are downloaded from."""

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
from tbbn.bench.data.sources.contents import Contents, Stats, make_source
from tbbn.bench.data.sources.folders import read_folder
from tbbn.bench.data.sources.listing import is_image_folder
from tbbn.bench.data.types import Progress, Source
from tbbn.bench.vision import torchvision
from tbbn.errors import UserError

_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_CIFAR10_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_TIMEOUT = 20  # seconds without a byte before a download is given up


@dataclass(frozen=True)
class Official:
    """A published data set: its files, how they are read and how they are downloaded."""

    description: str
    stats: Stats
    paths: tuple[str, ...]  # under the root, plain or as .gz: the data set is present if all exist
    place: str  # what the user has to place under the root
    read: Callable[[Path], Contents]
    download: Callable[[ModuleType, str], object]  # takes torchvision.datasets and the root
    archive: str = ""  # the published archive of all files, if there is one

    def files_present(self, root: Path) -> bool:
        return all((root / path).exists() or (root / f"{path}.gz").exists() for path in self.paths)

    def archive_present(self, root: Path) -> bool:
        return bool(self.archive) and (root / self.archive).exists()


def present(root: Path) -> dict[str, bool]:
    return {
        name: entry.files_present(root) or entry.archive_present(root) or is_image_folder(root / name)
        for name, entry in OFFICIAL.items()
    }


def read_official(
    name: str, root: Path, size: int | None, download: bool, unreadable: str, on_progress: Progress | None
) -> Source:
    """A published data set from its own files, or from a folder of images of that name; downloaded if neither exists."""
    entry = OFFICIAL[name]
    if not entry.files_present(root) and is_image_folder(root / name):
        contents = read_folder(
            name, root / name, size, channels=len(entry.stats[0]), unreadable=unreadable, on_progress=on_progress
        )
        return make_source(name, contents, entry.stats)
    if not entry.files_present(root):
        fetch(name, root, download=download)
    return make_source(name, entry.read(root), entry.stats, size)


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
    return Contents(formats.read_idx(folder, "train", 10), formats.read_idx(folder, "t10k", 10), _DIGITS)


def _fashion_mnist(root: Path) -> Contents:
    folder = root / "FashionMNIST/raw"
    return Contents(formats.read_idx(folder, "train", 10), formats.read_idx(folder, "t10k", 10), _CLOTHES)


def _svhn(root: Path) -> Contents:
    return Contents(formats.read_svhn(root / "train_32x32.mat"), formats.read_svhn(root / "test_32x32.mat"), _DIGITS)


def _stl10(root: Path) -> Contents:
    folder = root / "stl10_binary"
    return Contents(formats.read_stl10(folder, "train"), formats.read_stl10(folder, "test"), _STL10)


def _download_archive(datasets: ModuleType, kind: str, root: str) -> None:
    """Download the archive of a torchvision data set and check its hash.

    We unpack it ourselves: torchvision's class would also load the pickles inside, whatever they execute.
    """
    published = getattr(datasets, kind)
    datasets.utils.download_url(published.url, root, published.filename, published.tgz_md5)


# Statistics: CIFAR-100's are those of the paper's code, the others the usual published values of the training images.
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
        "10 types of clothing, 60 000 + 10 000 grey images of 28x28",
        ((0.2860,), (0.3530,)),
        tuple(f"FashionMNIST/raw/{file}" for file in _IDX),
        f"FashionMNIST/raw/ ({', '.join(_IDX)}, plain or .gz)",
        _fashion_mnist,
        lambda datasets, root: datasets.FashionMNIST(root, download=True),
    ),
    "svhn": Official(
        "10 digits from house numbers, 73 257 + 26 032 images of 32x32",
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
    """Unpack the archive of a data set if it is under `root`, or else download it there with torchvision, silently.

    If that fails, the error says what to place where.
    """
    entry = OFFICIAL[name]
    reason, root_existed = "downloads are off", root.exists()
    if download and not entry.archive_present(root):
        reason = "the download did not contain it"
        try:
            with _silenced(), _socket_timeout(_TIMEOUT):
                root.mkdir(parents=True, exist_ok=True)
                entry.download(torchvision().datasets, str(root))
        except Exception as error:  # network, hash or disk: the user's remedy is the same
            lines = str(error).strip().splitlines()
            reason = f"the download failed: {lines[0][:160] if lines else type(error).__name__}"
            _clean_up(entry, root, root_existed)
        except BaseException:
            _clean_up(entry, root, root_existed)
            raise
    if entry.archive_present(root):
        archives.unpack(root / entry.archive, root, entry.paths[0].split("/")[0], entry.paths)
    if not entry.files_present(root):
        place = entry.place + (f" or {entry.archive}" if entry.archive else "")
        raise UserError(f"{name}: no data under {root} ({reason}); place {place} there")


def _clean_up(entry: Official, root: Path, root_existed: bool) -> None:
    """Remove the remains of a failed download: a partial archive would look like a whole one next time."""
    if entry.archive:
        (root / entry.archive).unlink(missing_ok=True)
    if not root_existed:
        for path, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(path)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Give sockets opened inside this block a timeout: the downloader sets none and would wait forever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
