"""A run's whole state in one file: tensors, and a JSON text beside them in the same safetensors file.

Nothing random has to be saved: every draw is a function of the seed and the position. The file is written beside its place,
flushed and renamed; the one before it is kept. A digest over all of it tells a damaged file from a good one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tbbn.errors import UserError
from tbbn.record import write_atomic

SCHEMA = 1
_BYTES = torch.uint8
NEWEST, BEFORE, ARRIVING = (
    "checkpoint.safetensors",
    "checkpoint.previous.safetensors",
    "checkpoint.arriving.safetensors",
)


def save(directory: Path, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint; the one before it stays until the next."""
    from safetensors.torch import save as to_bytes

    directory.mkdir(parents=True, exist_ok=True)
    ready = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps({"schema": SCHEMA, **state})
    content = to_bytes(ready, metadata={"state": text, "sha256": _digest(text, ready)})
    # Whole on the disk before the older ones move: a full disk or a kill leaves at least one that can be read.
    write_atomic(directory / ARRIVING, content)
    if (directory / NEWEST).exists():
        os.replace(directory / NEWEST, directory / BEFORE)
    os.replace(directory / ARRIVING, directory / NEWEST)


def load(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The newest whole checkpoint, or None where there is none; if all that are there are damaged, an error names them."""
    problems = []
    for name in (NEWEST, BEFORE):
        if (directory / name).exists():
            try:
                return _read(directory / name)
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError(" ".join(problems) + " Delete the run's folder to begin again.")
    return None


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        text = metadata["state"]
        if _digest(text, tensors) != metadata["sha256"]:
            raise UserError(f"{file}: damaged: its content does not match its checksum.")
        state = json.loads(text)
        schema = state["schema"]
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: damaged, or not a checkpoint ({type(error).__name__}).") from None
    if schema != SCHEMA:
        raise UserError(f"{file}: has schema {schema}; this version reads {SCHEMA}.")
    return state, tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(dtype=_BYTES).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def split(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under ``prefix.``, without it."""
    start = prefix + "."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def join(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the run's folder; a second process that wants it gets one clear line. The lock dies with its process."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{directory}: another process is working on this run.") from None
        yield
