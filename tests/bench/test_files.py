"""Files that survive a crash: what is left after a failure or a kill, and who gets a locked folder."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest

from tbbn.bench import files
from tbbn.bench.files import (
    NO_SEAL,
    atomic_writer,
    file_sha256,
    folder_writer,
    is_blank,
    locked,
    read_limited,
    remove_leftovers,
    seal,
    seal_problem,
    write_atomic,
)
from tbbn.errors import UserError


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"old")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and names(tmp_path) == {"a"}


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_is_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    write_atomic(tmp_path / "a", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'"):
        write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old" and names(tmp_path) == {"a"}


def test_an_exception_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"old")

    def interrupted() -> None:
        with atomic_writer(tmp_path / "a") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(FileNotFoundError, match="other"), atomic_writer(tmp_path / "a"):
        (tmp_path / "other").read_bytes()  # another file's error keeps its name
    assert (tmp_path / "a").read_bytes() == b"old" and names(tmp_path) == {"a"}


def test_a_missing_folder_is_named_by_the_file_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        write_atomic(tmp_path / "no" / "a", b"")
    assert error.value.filename == str(tmp_path / "no" / "a")


def test_everybody_may_read_who_may_by_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "a", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


HOLDING = """
import sys, time
from pathlib import Path
from tbbn.bench.files import atomic_writer, locked
with locked(Path(sys.argv[1])), atomic_writer(Path(sys.argv[1]) / "a") as file:
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_refuses_at_once_and_dies_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDING, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(UserError, match=r"run: another process is working on it; wait for it"), locked(folder):
                raise AssertionError("entered")
            leftovers = names(folder) - {".lock"}
            assert len(leftovers) == 1  # the refused process has not touched the other's file
        finally:
            holder.kill()
    assert names(folder) == {".lock", *leftovers}
    with locked(folder):
        assert is_blank(folder)  # the killed process's file is gone


def test_a_folder_is_held_within_one_process_too(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="another process is working on it"), locked(tmp_path):
        raise AssertionError("entered")
    with locked(tmp_path):
        pass


def test_a_folder_is_asked_for_once_or_until_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks: list[filelock.BaseFileLock] = []
    real = filelock.FileLock

    def watched(file: Path, timeout: float) -> filelock.BaseFileLock:
        locks.append(real(file, timeout))
        return locks[-1]

    monkeypatch.setattr(filelock, "FileLock", watched)
    for wait in (False, True):
        with locked(tmp_path, wait=wait):
            assert locks[-1].is_locked
        assert not locks[-1].is_locked, "it does not wait for the garbage collector"
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    assert [lock.timeout for lock in locks] == [0, -1, 0], "in seconds; below 0 without end"
    assert not locks[-1].is_locked


def test_folders_made_on_the_way_are_removed_where_the_last_one_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, **_: object) -> None:
        os.makedirs(self.parent)
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"), locked(tmp_path / "a" / "b"):
        raise AssertionError("entered")
    assert not names(tmp_path)


def test_only_temporary_files_are_swept_up(tmp_path: Path) -> None:
    kept = {".lock", "a.123.0a1b2c3d", ".a.123", ".a.b.0a1b2c3d", ".hidden"}
    left = {files.temporary_path(tmp_path / name).name for name in ("a", "b.json")}
    for name in kept | left:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == kept


def test_a_folder_nothing_was_put_into_is_removed_again(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b"):
        pass
    assert not names(tmp_path)
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert names(tmp_path / "mine") == {".lock"}, "a folder that was there before stays as it is"
    with locked(tmp_path / "c"):
        write_atomic(tmp_path / "c" / "file", b"")
    assert names(tmp_path / "c") == {".lock", "file"}


def test_a_file_in_the_way_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), locked(tmp_path / "file" / "run"):
        raise AssertionError("entered")
    assert names(tmp_path) == {"file"}


def test_the_checksum_of_a_file_is_that_of_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 1000)
    content = os.urandom(2500)
    (tmp_path / "a").write_bytes(content)
    heard: list[int] = []
    assert file_sha256(tmp_path / "a", heard.append) == hashlib.sha256(content).hexdigest()
    assert heard == [1000, 2000, 2500]
    (tmp_path / "a").write_bytes(b"")
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"").hexdigest()


def test_the_content_is_on_disk_before_the_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for call in ("fsync", "replace"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *a, call=call, real=real: (order.append(call), real(*a))[1])
    write_atomic(tmp_path / "a", b"content")
    assert order == ["fsync", "replace"]


def test_a_seal_is_the_checksum_of_the_content_with_zeros_in_its_place() -> None:
    content = f'{{"a": 1, "sha256": "{NO_SEAL}"}}'.encode()
    sealed = seal(content)
    assert sealed == content.replace(NO_SEAL.encode(), hashlib.sha256(content).hexdigest().encode())
    assert seal_problem(sealed) == ""


def test_every_changed_byte_of_sealed_content_is_noticed() -> None:
    sealed = seal(f'{{"a": 1, "sha256": "{NO_SEAL}", "b": [2, 3]}}'.encode())
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        assert seal_problem(bytes(changed)).startswith("damaged: ")
    assert seal_problem(b"{}") == "damaged: its checksum is missing."


def test_all_bytes_have_left_the_buffer_when_a_file_is_forced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[int] = []
    monkeypatch.setattr(files.os, "fsync", lambda number: forced.append(os.fstat(number).st_size))
    write_atomic(tmp_path / "small", b"12345")
    assert forced == [5]


def test_a_file_is_read_up_to_a_limit_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_limited(file, 5) == b"12345"
    with pytest.raises(UserError, match=r"a: has 5 bytes; the limit for this file is 4"):
        read_limited(file, 4)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match=rf"{name}: not a file$"):
            read_limited(tmp_path / name, 5)
    with pytest.raises(IsADirectoryError):
        read_limited(tmp_path, 10**6)
    with pytest.raises(FileNotFoundError):
        read_limited(tmp_path / "none", 5)


def test_whoever_waits_for_a_folder_gets_it_when_it_is_free(tmp_path: Path) -> None:
    order: list[str] = []
    holds, asked = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(tmp_path):
            holds.set()
            asked.wait(10)
            order.append("first")

    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait(10)
    threading.Timer(0.1, asked.set).start()
    with locked(tmp_path, wait=True):
        order.append("second")
    holder.join()
    assert order == ["first", "second"]


def test_a_folder_is_blank_with_its_lock_and_the_files_named(tmp_path: Path) -> None:
    assert is_blank(tmp_path)
    for name in (".lock", "log"):
        (tmp_path / name).touch()
    assert is_blank(tmp_path, "log") and is_blank(tmp_path, "other", "log")
    assert not is_blank(tmp_path) and not is_blank(tmp_path, "other")


@pytest.mark.parametrize("system", ["exchanges", "refuses", "cannot"])
def test_a_folder_is_put_in_the_place_of_the_old_one(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refused(*arguments: object) -> int:
        asked.append(arguments)
        return -1

    if system != "exchanges":
        libc = SimpleNamespace(renameat2=refused) if system == "refuses" else SimpleNamespace()
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: libc)
    place = tmp_path / "a" / "place"
    for content in ("one", "two", "three"):
        with folder_writer(place) as folder:
            assert folder.parent == place.parent and folder != place
            (folder / content).write_text(content)
        assert names(place) == {content} and names(place.parent) == {"place"}
    assert len(asked) == (2 if system == "refuses" else 0)
    if asked:
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        new = os.fsencode(place.with_name(f".place-new-{os.getpid()}"))
        assert asked[0] == (here, new, here, os.fsencode(place), exchange)


def test_the_files_of_a_folder_are_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = os.rename
    monkeypatch.setattr(os, "fsync", lambda number: order.append(Path(f"/proc/self/fd/{number}").readlink().name))
    monkeypatch.setattr(os, "rename", lambda *paths: (order.append("rename"), real(*paths))[1])
    with folder_writer(tmp_path / "place") as folder:
        for name in "ab":
            (folder / name).touch()
    assert sorted(order[:2]) == ["a", "b"] and order[2:] == ["rename"]


def test_only_what_dead_processes_left_beside_a_folder_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    alive, dead = f".place-new-{os.getppid()}", {f".place-new-{ended.pid}", ".place-new-x", ".place-new-" + "9" * 30}
    others = {".other-new-x", "place-new-x", ".place-new-file"}  # the last one is no folder
    (tmp_path / ".place-new-file").touch()
    for name in {alive, *dead, *others} - {".place-new-file"}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with folder_writer(tmp_path / "place"):
        assert names(tmp_path) == {alive, *others, f".place-new-{os.getpid()}"}
    assert names(tmp_path) == {alive, *others, "place"}
    with pytest.raises(KeyError), folder_writer(tmp_path / "b" / "c" / "place"):
        raise KeyError
    assert not (tmp_path / "b").exists(), "folders made on the way are removed after a failure"


def test_a_process_of_another_user_is_alive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(process: int, number: int) -> None:
        assert number == 0
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    (tmp_path / ".place-new-12").mkdir()
    with folder_writer(tmp_path / "place"):
        pass
    assert names(tmp_path) == {".place-new-12", "place"}
