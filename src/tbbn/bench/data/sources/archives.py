"""Unpack published archives safely.

Nothing is written outside the target folder: an archive with a link, a device or a name that leads elsewhere is refused
before anything is written. Files are unpacked into a temporary folder, which is renamed at the end, so a truncated archive
leaves nothing behind.
"""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, TypeVar, cast

from tbbn.errors import UserError

# Of an archive. The largest published one holds 130 000 images in 3 GB.
_MAX_MEMBERS = 2**20
_MAX_BYTES = 2**35
_MAX_READ = 2**24  # bytes read at once
T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A file in an archive: its path, its size and how to open it."""

    path: PurePosixPath
    size: int
    open: Callable[[], IO[bytes]]


def unpack(archive: Path, root: Path, folder: str, wanted: Sequence[str] = ()) -> None:
    """Unpack `folder/` of an archive (.tar, .tar.gz or .zip) into `root`, and nothing else of it.

    The archive must contain the paths `wanted`.
    """
    temporary = root / f".{folder}.{os.getpid()}"
    try:
        with _members(archive) as found:
            members = [member for member in found if member.path.parts[0] == folder]
            held = {str(member.path) for member in members}
            missing = [path for path in wanted if path not in held] if held else [f"{folder}/"]
            if missing:
                raise UserError(
                    f"{archive}: does not contain {missing[0]}; replace it with the published file, or delete it"
                )
            needed = sum(member.size for member in members)
            if needed > shutil.disk_usage(root).free:
                raise UserError(f"{archive}: needs {needed} bytes unpacked, more than are free under {root}")
            for member in members:
                target = temporary / member.path
                target.parent.mkdir(parents=True, exist_ok=True)
                with member.open() as source, target.open("xb") as file:
                    shutil.copyfileobj(source, file)
        _move(temporary / folder, root / folder)
    except UserError:
        raise
    except Exception as error:  # zlib, tarfile and zipfile raise all kinds of exceptions
        if isinstance(error, OSError) and error.filename is not None and Path(error.filename) != archive:
            raise  # about another file: not the archive's fault
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{archive}: cannot be unpacked ({reason}); delete it and try again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(source: Path, dest: Path) -> None:
    """Rename the folder; if `dest` exists, move file by file and replace existing files."""
    if not dest.exists():
        source.replace(dest)
        return
    for file in sorted(source.rglob("*")):
        if file.is_file():
            target = dest / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)


@contextmanager
def _members(archive: Path) -> Iterator[list[Member]]:
    """The regular files of an archive; raises if any member is not a file or folder, or leads elsewhere."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield list(_zip_members(archive, opened))
        return
    with archive.open("rb") as file:
        is_zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        content = _Limited(gzip.GzipFile(fileobj=file) if is_zipped else file)
        with tarfile.TarFile(fileobj=cast(IO[bytes], content)) as tar:
            yield list(_tar_members(archive, tar))
        while content.read(1 << 20):  # to the end, so that the checksum of a compressed file is verified
            pass


class _Limited:
    """A stream that limits the size of a read: tarfile reads a member's header of any size into memory."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile) -> None:
        self.stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def read(self, n: int = -1) -> bytes:
        if not 0 <= n <= _MAX_READ:
            raise ValueError(f"a header of {n} bytes")
        return self.stream.read(n)


def _zip_members(archive: Path, opened: zipfile.ZipFile) -> Iterator[Member]:
    for info in _within_limits(archive, opened.infolist(), lambda info: info.file_size):
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # other methods have no memory limit
            raise _refused(archive, info.filename, "is not compressed by deflate")
        path = _inside(archive, info.orig_filename)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _refused(archive, info.filename, "is a link or a device")
        if not info.is_dir() and path.parts:
            yield Member(path, info.file_size, lambda info=info: opened.open(info))  # type: ignore[misc]


def _tar_members(archive: Path, tar: tarfile.TarFile) -> Iterator[Member]:
    for info in _within_limits(archive, tar, lambda info: info.size):
        path = _inside(archive, info.name)
        if not (info.isreg() or info.isdir()):
            raise _refused(archive, info.name, "is a link or a device")
        if info.isreg() and path.parts:
            yield Member(path, info.size, lambda info=info: _content(tar, info))  # type: ignore[misc]


def _within_limits(archive: Path, infos: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
    """The members one by one; raises as soon as they are too many or their total size is too large."""
    n_bytes = 0
    for number, info in enumerate(infos, 1):
        n_bytes += size(info)
        if number > _MAX_MEMBERS or n_bytes > _MAX_BYTES:
            raise UserError(
                f"{archive}: refused: more than {_MAX_MEMBERS} members or {_MAX_BYTES} bytes unpacked; replace it with the "
                "published file"
            )
        yield info


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(info)
    assert content is not None, "a regular file can be opened"
    return content


def _inside(archive: Path, name: str) -> PurePosixPath:
    """The path of a member; raises if it leads out of the target folder on any operating system."""
    path = PurePosixPath(name)
    windows = PureWindowsPath(name)
    if (
        path.is_absolute()
        or windows.drive
        or windows.root
        or ".." in path.parts
        or ".." in windows.parts
        or "\0" in name
    ):
        raise _refused(archive, name, "leads out of its folder")
    return path


def _refused(archive: Path, name: str, why: str) -> UserError:
    return UserError(f"{archive}: refused: its member {name[:120]!r} {why}")
