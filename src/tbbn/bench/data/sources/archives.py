"""Archives as they are published, unpacked beside themselves.

No member of an archive can write anywhere but under the folder it is unpacked into: names that lead elsewhere, links and
devices refuse the whole archive before a byte is written. The content arrives in a folder of its own and is renamed into its
place when all of it is there, so that an archive that breaks off leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from tbbn.errors import UserError


@dataclass(frozen=True)
class Member:
    """A file in an archive: where it wants to lie, its length, and its content."""

    path: PurePosixPath
    size: int
    open: Callable[[], IO[bytes]]


def unpack(archive: Path, root: Path, folder: str, wanted: Sequence[str] = ()) -> None:
    """Unpack `folder/` of an archive (.tar, .tar.gz, .zip ...) into `root`; what else it holds is left out.

    The paths `wanted` must be among what it holds.
    """
    arriving = root / f".{folder}.{os.getpid()}"
    try:
        with _members(archive) as found:
            members = [member for member in found if member.path.parts[0] == folder]
            held = {str(member.path) for member in members}
            missing = [path for path in wanted if path not in held] if held else [f"{folder}/"]
            if missing:
                raise UserError(
                    f"{archive}: does not hold {missing[0]}; replace it by the published file, or delete it"
                )
            needed = sum(member.size for member in members)
            if needed > shutil.disk_usage(root).free:
                raise UserError(f"{archive}: unpacks to {needed} bytes, more than are free under {root}")
            for member in members:
                target = arriving / member.path
                target.parent.mkdir(parents=True, exist_ok=True)
                with member.open() as source, target.open("xb") as file:
                    shutil.copyfileobj(source, file)
        _settle(arriving / folder, root / folder)
    except UserError:
        raise
    except Exception as error:  # zlib, tarfile and zipfile each raise what they stumble over
        if isinstance(error, OSError) and error.filename is not None and Path(error.filename) != archive:
            raise  # the disk's fault, not the archive's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{archive}: cannot be unpacked ({reason}); delete it and try again") from error
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _settle(arrived: Path, place: Path) -> None:
    """Move the whole folder; into one that is already there, file by file, over older ones."""
    if not place.exists():
        arrived.replace(place)
        return
    for file in sorted(arrived.rglob("*")):
        if file.is_file():
            target = place / file.relative_to(arrived)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)


@contextmanager
def _members(archive: Path) -> Iterator[list[Member]]:
    """The plain files of an archive; raises for the first member that is neither file nor folder, or leads elsewhere."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield list(_zip_members(archive, opened))
        return
    with tarfile.open(archive) as tar:
        yield list(_tar_members(archive, tar))
        assert tar.fileobj is not None
        while tar.fileobj.read(1 << 20):  # to the end, where the checksum of a compressed file stands
            pass


def _zip_members(archive: Path, opened: zipfile.ZipFile) -> Iterator[Member]:
    for info in opened.infolist():
        path = _inside(archive, info.orig_filename)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _refused(archive, info.filename, "is a link or a device")
        if not info.is_dir() and path.parts:
            yield Member(path, info.file_size, lambda info=info: opened.open(info))  # type: ignore[misc]


def _tar_members(archive: Path, tar: tarfile.TarFile) -> Iterator[Member]:
    for info in tar.getmembers():
        path = _inside(archive, info.name)
        if not (info.isreg() or info.isdir()):
            raise _refused(archive, info.name, "is a link or a device")
        if info.isreg() and path.parts:
            yield Member(path, info.size, lambda info=info: _content(tar, info))  # type: ignore[misc]


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(info)
    assert content is not None, "a regular file has content"
    return content


def _inside(archive: Path, name: str) -> PurePosixPath:
    """The member's path, if it leads to a place inside the folder it is unpacked into, on any system."""
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
