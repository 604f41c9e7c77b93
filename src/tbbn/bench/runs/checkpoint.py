"""A run's whole state in one file: tensors, and a JSON text beside them in the same safetensors file.

Nothing random has to be saved: every draw is a function of the seed and the position. The file is written beside its place,
flushed and renamed; the one before it is kept. A checksum over all of its bytes tells a damaged file from a good one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from tbbn.bench.runs.record import NO_SEAL, seal, seal_problem, sweep_up, write_atomic
from tbbn.errors import UserError

SCHEMA = 2
NEWEST, BEFORE, ARRIVING = (
    "checkpoint.safetensors",
    "checkpoint.previous.safetensors",
    "checkpoint.arriving.safetensors",
)


def task_file(task: int) -> str:
    """The file with the state at a task's start; file names count tasks from 1, as messages do."""
    return f"task-{task + 1}.safetensors"


def save(directory: Path, state: dict[str, Any], tensors: Mapping[str, Tensor], keep: str = "") -> None:
    """Write a checkpoint; the one before it stays until the next. With a name to ``keep`` it stays under that too."""
    from safetensors.torch import save as to_bytes

    directory.mkdir(parents=True, exist_ok=True)
    ready = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps({"schema": SCHEMA, **state})
    # Whole on the disk before the older ones move: a full disk or a kill leaves at least one that can be read.
    write_atomic(directory / ARRIVING, seal(to_bytes(ready, metadata={"state": text, "sha256": NO_SEAL})))
    if keep:
        _keep(directory, keep)
    if (directory / NEWEST).exists():
        os.replace(directory / NEWEST, directory / BEFORE)
    os.replace(directory / ARRIVING, directory / NEWEST)


def _keep(directory: Path, name: str) -> None:
    """A second name for the file that is arriving: no checkpoint is ever written to again, so that one copy will do."""
    beside = directory / f".{name}.{os.getpid()}.00000000"
    beside.unlink(missing_ok=True)
    try:
        os.link(directory / ARRIVING, beside)
    except OSError:  # a file system without links
        write_atomic(directory / name, (directory / ARRIVING).read_bytes())
    else:
        os.replace(beside, directory / name)


def load(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The newest whole checkpoint, or None where there is none; if all that are there are damaged, an error names them."""
    problems = []
    for name in (NEWEST, BEFORE):
        if (directory / name).exists():
            try:
                return read(directory / name)
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError(" ".join(problems) + " Delete the run's folder to begin again.")
    return None


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state and the tensors in a file; one that is damaged is an error that names it."""
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:
        content = file.read_bytes()
        if problem := seal_problem(content):
            raise UserError(f"{file}: {problem}")
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        state = json.loads(header["__metadata__"]["state"])
        schema, tensors = state["schema"], from_bytes(content)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: damaged, or not a checkpoint ({type(error).__name__}).") from None
    if schema != SCHEMA:
        raise UserError(f"{file}: has schema {schema}; this version reads {SCHEMA}.")
    return state, tensors


def split(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under ``prefix.``, without it."""
    start = prefix + "."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def join(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the run's folder; a second process that wants it gets one clear line. The lock dies with its process."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        _remove(made)
        raise
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{directory}: another process is working on this run.") from None
        sweep_up(directory)
        try:
            yield
        finally:
            if made and is_blank(directory):  # nothing came of it
                (directory / ".lock").unlink()
                _remove(made)


def _remove(folders: list[Path]) -> None:
    """Take away folders, innermost first, as far as they are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def is_blank(directory: Path) -> bool:
    """Whether nothing lies there but the lock."""
    return {file.name for file in directory.iterdir()} <= {".lock"}
