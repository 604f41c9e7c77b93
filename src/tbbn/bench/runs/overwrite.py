"""Replace a run with a new one in the same folder, so that a kill or a full disk never loses both.

The old run stays untouched until the new one writes its first files. Then all old files are set aside except ``record.json``,
which the new record replaces atomically: the record on disk tells which of the two runs the folder holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tbbn.bench.files import file_sha256, write_atomic
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import CONFIG, PREDICTIONS, RECORD
from tbbn.errors import UserError

# Everything that a run writes into its folder besides its record.
RUN_FILES = (CONFIG, PREDICTIONS, checkpoint.NEWEST, checkpoint.PREVIOUS, checkpoint.ARRIVING, checkpoint.TASKS)
LIST = ".overwritten.json"  # the names of the files set aside, and the checksum of the old record
ASIDE = ".overwritten."  # prefix of files set aside, so that no reader takes them for a run's files


@contextmanager
def replacing(directory: Path) -> Iterator[None]:
    """Set the old run aside while the block writes a new one. If the block leaves no new record, restore the old run."""
    write_atomic(directory / LIST, json.dumps({"files": _files(directory), "record": _record(directory)}).encode())
    try:
        for name in _files(directory):
            os.replace(directory / name, directory / f"{ASIDE}{name}")
        yield
    finally:
        settle(directory)


def settle(directory: Path) -> None:
    """Finish an overwrite, even one of a killed process: if the new run has its record, delete the old run, else restore it.

    Call it with the folder locked.
    """
    if not (directory / LIST).exists():
        return
    old = _read_list(directory / LIST)
    has_new_record = _record(directory) != old["record"]
    if not has_new_record:
        for name in set(_files(directory)) - set(old["files"]):
            (directory / name).unlink()
    for name in old["files"]:
        aside = directory / f"{ASIDE}{name}"
        if has_new_record:
            aside.unlink(missing_ok=True)
        elif aside.exists():
            os.replace(aside, directory / name)
    (directory / LIST).unlink()


def _read_list(file: Path) -> dict[str, Any]:
    try:
        old = json.loads(file.read_bytes())
        if isinstance(old["record"], str) and all(Path(name).name == name for name in old["files"]):
            return {"record": old["record"], "files": old["files"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(
        f"{file}: damaged; delete it, and rename the files {ASIDE}* beside it to get an overwritten run back."
    )


def _files(directory: Path) -> list[str]:
    return sorted(file.name for pattern in RUN_FILES for file in directory.glob(pattern))


def _record(directory: Path) -> str:
    return file_sha256(directory / RECORD) if (directory / RECORD).exists() else ""
