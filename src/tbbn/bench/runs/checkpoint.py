"""The state of a run in one safetensors file: its tensors, and the rest as JSON in the file's metadata.

No random state is saved, because every draw is a function of the seed and the position. The previous checkpoint is kept in case
the newest is damaged, which a checksum over all bytes detects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tbbn.bench.engine.events import Position
from tbbn.bench.files import NO_SEAL, read_limited, seal, seal_problem, temporary_path, write_atomic
from tbbn.errors import UserError

SCHEMA = 2
LARGEST = 2**36  # bytes; reading takes as much memory as the file is large
NEWEST, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
ARRIVING = "checkpoint.arriving.safetensors"  # complete, but not yet NEWEST
CANDIDATES = (NEWEST, ARRIVING, PREVIOUS)  # a process killed between two renames leaves only the last two
TASKS = "task-*.safetensors"  # see task_file


def task_file(task: int) -> str:
    """The file with the state at the start of a task. File names count tasks from 1, like messages."""
    return f"task-{task + 1}.safetensors"


def save(directory: Path, state: dict[str, Any], tensors: Mapping[str, Tensor], keep_as: str = "") -> None:
    """Write a checkpoint, and keep the previous one. With ``keep_as``, also keep this one under that name."""
    directory.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it meanwhile
    # On disk before the older ones are renamed: a full disk or a kill leaves at least one readable checkpoint.
    write_atomic(directory / ARRIVING, encode(state, tensors))
    if keep_as:
        _link(directory / ARRIVING, directory / keep_as)
    if (directory / NEWEST).exists():
        os.replace(directory / NEWEST, directory / PREVIOUS)
    os.replace(directory / ARRIVING, directory / NEWEST)


def encode(state: dict[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a checkpoint file."""
    from safetensors.torch import save as to_bytes

    ready = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps({"schema": SCHEMA, **state})
    return seal(to_bytes(ready, metadata={"state": text, "sha256": NO_SEAL}))


def _link(file: Path, name: Path) -> None:
    """Hard-link a file: checkpoints are never modified, so a copy would waste disk space."""
    temporary = temporary_path(name)
    try:
        os.link(file, temporary)
    except OSError:  # a file system without links
        write_atomic(name, file.read_bytes())
    else:
        os.replace(temporary, name)


def load(directory: Path, *, repair: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The newest readable checkpoint, or None if there is none. If all are damaged, the error names them.

    ``repair``, for a locked folder, renames it to the newest, so that the next `save` keeps it and not a damaged one.
    """
    problems = []
    for name in CANDIDATES:
        if (directory / name).exists():
            try:
                found = read(directory / name)
            except OtherSchema:  # not damaged: another version can read this
                raise
            except UserError as error:
                problems.append(str(error))
            else:
                if repair:
                    os.replace(directory / name, directory / NEWEST)  # the newest itself stays as it is
                return found
    if problems:
        raise UserError(" ".join(problems) + " Delete the folder of the run to start again.")
    return None


def after_task(directory: Path, n_tasks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The saved state of a run that had learnt this many tasks and not begun the next."""
    problem = ""
    for name in (task_file(n_tasks), *CANDIDATES):
        if not (directory / name).exists():
            continue
        try:
            state, tensors = read(directory / name)
        except UserError as error:
            problem = problem or str(error)
            continue
        if Position(**state["position"]) == Position(n_tasks):
            return state, tensors
    raise UserError(
        problem
        or f"{directory}: the network after task {n_tasks} is not saved; --save.tasks all keeps it for every task."
    )


class OtherSchema(UserError):
    """A checkpoint of another version."""


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state and the tensors in a file. The error for a damaged file names it."""
    try:
        content = read_limited(file, LARGEST)
    except OSError as error:
        raise _damaged(str(file), error) from None
    return decode(content, str(file))


def _damaged(file: str, error: Exception) -> UserError:
    return UserError(f"{file}: damaged, or not a checkpoint ({type(error).__name__}).")


def decode(content: bytes, file: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state and the tensors in the content of a checkpoint file; ``file`` is its name for errors."""
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:
        if problem := seal_problem(content):
            raise UserError(f"{file}: {problem}")
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        state = json.loads(header["__metadata__"]["state"])
        schema, tensors = state["schema"], from_bytes(content)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged(file, error) from None
    if schema != SCHEMA:
        raise OtherSchema(f"{file}: has schema {schema}; this version reads {SCHEMA}.")
    return state, tensors


def section(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix.``, by their names without it."""
    start = prefix + "."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def join(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with ``prefix.`` before their names."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
