"""Files that survive a crash: atomic writes, a lock on a folder, checksums."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tbbn.errors import UserError

LOCK = ".lock"
_LEFTOVER = re.compile(r"\..+\.\d+\.[0-9a-f]{8}")
_CHUNK = 1 << 24  # bytes hashed between progress reports
NO_SEAL = "0" * 64  # placeholder that `seal` replaces with the checksum
_SEAL = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Write a temporary file beside `path`, flush it to disk, then rename it to `path`.

    A reader sees the old file or the new one, never a partial one. An exception in the block keeps the old file.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # The error of a failed write or flush names no file, that of a failed open the temporary one.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file's content; see `atomic_writer`."""
    with atomic_writer(path) as file:
        file.write(content)


def read_limited(path: Path, largest: int) -> bytes:
    """Read a regular file of at most `largest` bytes. Other kinds are errors: a device or a pipe may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(
        status.st_mode
    ):  # a folder fails below, with its own message
        raise UserError(f"{path}: not a file")
    if status.st_size > largest:
        raise UserError(f"{path}: has {status.st_size} bytes; the limit for this file is {largest}")
    return path.read_bytes()


def temporary_path(path: Path) -> Path:
    """A new name beside `path` that `remove_leftovers` recognises."""
    # Not with the tempfile module, whose files only their owner may read.
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")


def is_leftover(path: Path) -> bool:
    """Whether a path is named like a temporary file of `atomic_writer`."""
    return _LEFTOVER.fullmatch(path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed processes. Call it with the folder locked, so that nobody else is writing."""
    for path in folder.glob(".*"):
        if is_leftover(path):
            path.unlink()


class FolderInUse(UserError):
    """Another process holds a folder."""


@contextmanager
def folder_writer(place: Path) -> Iterator[Path]:
    """Write into a new folder beside `place`, then replace `place` with it.

    A kill leaves either the old folder or the new one, complete. The next call removes what a killed process left beside it.
    """
    for path in place.parent.glob(f".{place.name}-new-*"):
        if not _is_alive(path.name.rpartition("-")[2]):
            shutil.rmtree(path, ignore_errors=True)
    new = place.with_name(f".{place.name}-new-{os.getpid()}")
    created = [path for path in place.parents if not path.exists()]
    try:
        new.mkdir(parents=True)
        yield new
        for file in new.iterdir():
            with file.open("rb") as content:
                os.fsync(content.fileno())
        if place.exists():
            _exchange(new, place)  # `new` is now the old folder
        else:
            os.rename(new, place)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        _remove_empty(created)


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders, atomically if the system can; otherwise a kill in between may leave nothing at `b`."""
    libc = ctypes.CDLL(None)
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    if hasattr(libc, "renameat2") and libc.renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return
    aside = a.with_name(f"{a.name}-old")
    os.rename(b, aside)
    os.rename(a, b)
    os.rename(aside, a)


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder for this process. If another process holds the lock, raise `FolderInUse` at once, or `wait` for it.

    The lock ends with its process, even if that is killed. The folder is created if needed, and removed again if it
    is still empty at the end.
    """
    from filelock import FileLock, Timeout

    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        _remove_empty(created)
        raise
    lock = FileLock(folder / LOCK, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUse(
            f"{folder}: another process is working on it; wait for it, or choose another folder"
        ) from None
    try:
        remove_leftovers(folder)
        try:
            yield
        finally:
            if created and is_blank(folder):
                (folder / LOCK).unlink()
                _remove_empty(created)
    finally:
        lock.release()


def is_blank(folder: Path, *besides: str) -> bool:
    """Whether a folder contains nothing but its lock and files with these names."""
    return {path.name for path in folder.iterdir()} <= {LOCK, *besides}


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file; `on_bytes` is called with the number of bytes read so far."""
    digest, n_read = hashlib.sha256(), 0
    with path.open("rb") as file:
        while content := file.read(_CHUNK):
            digest.update(content)
            n_read += len(content)
            if on_bytes is not None:
                on_bytes(n_read)
    return digest.hexdigest()


def seal(content: bytes) -> bytes:
    """Put the SHA-256 of the content into its first JSON field ``"sha256"``, which must hold `NO_SEAL`."""
    found = _SEAL.search(content)
    assert found is not None and found[1] == NO_SEAL.encode()
    sealed = bytearray(content)
    sealed[slice(*found.span(1))] = hashlib.sha256(content).hexdigest().encode()
    return bytes(sealed)


def seal_problem(content: bytes) -> str:
    """The problem with sealed content; empty if every byte is as it was written."""
    found = _SEAL.search(content)
    if found is None:
        return "damaged: its checksum is missing."
    unsealed = bytearray(content)
    unsealed[slice(*found.span(1))] = NO_SEAL.encode()
    whole = hashlib.sha256(unsealed).hexdigest().encode() == found[1]
    return "" if whole else "damaged: its content does not match its checksum."


def _remove_empty(folders: list[Path]) -> None:
    """Remove those of the folders that are empty, innermost first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
