"""What a run leaves behind: its config, its environment, every accuracy, and how it ended.

Each file answers for itself, since several cannot be replaced at one instant: a SHA-256 over all of its bytes stands in it
(:func:`seal`), but for the config's, which stands in the record. The config is written before the first record and does not
change; predictions are written before the record that counts them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from torch import Tensor

from tbbn.bench.config import to_toml
from tbbn.bench.engine.record import SCHEMA, Record
from tbbn.bench.runs import schema
from tbbn.errors import UserError

CONFIG, RECORD, PREDICTIONS = "config.toml", "record.json", "predictions.safetensors"
# Everything a run writes into its folder, and an overwriting one deletes first.
FILES = (
    CONFIG,
    RECORD,
    PREDICTIONS,
    "checkpoint.safetensors",
    "checkpoint.previous.safetensors",
    "checkpoint.arriving.safetensors",
    "task-*.safetensors",
)
DERIVED = ("metrics", "config_sha256", "sha256")  # in the file, but not of the record
NO_SEAL = "0" * 64  # where a seal will stand


def save_record(record: Record, directory: Path) -> None:
    """Write ``config.toml``, ``record.json`` and the predictions; each file is whole or absent, whenever the power goes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = to_toml(record.run_config).encode()
    _write_new(directory / CONFIG, config)
    if record.predictions:
        from safetensors.torch import save

        _write_new(directory / PREDICTIONS, seal(save(record.predictions, metadata={"sha256": NO_SEAL})))
    text = record.to_json(config_sha256=hashlib.sha256(config).hexdigest(), sha256=NO_SEAL)
    write_atomic(directory / RECORD, seal(text.encode()))


def load_predictions(directory: Path) -> dict[str, Tensor]:
    """The predicted class of every test image, by task learnt; empty before the first task is done."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = directory / PREDICTIONS
    try:
        return load_file(file) if file.exists() else {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: damaged ({error}).") from None


def _write_new(path: Path, content: bytes) -> None:
    """Write what is not there yet."""
    if not path.exists() or path.read_bytes() != content:
        write_atomic(path, content)


_SEAL = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')


def seal(content: bytes) -> bytes:
    """The content with its SHA-256, taken with zeros in its place, in the first ``"sha256"`` of its JSON."""
    found = _SEAL.search(content)
    assert found is not None and found[1] == NO_SEAL.encode()
    sealed = bytearray(content)
    sealed[slice(*found.span(1))] = hashlib.sha256(content).hexdigest().encode()
    return bytes(sealed)


def seal_problem(content: bytes) -> str:
    """What is wrong with a file that was sealed; nothing, if every byte is as it was written."""
    found = _SEAL.search(content)
    if found is None:
        return "damaged: its checksum is not there."
    blank = bytearray(content)
    blank[slice(*found.span(1))] = NO_SEAL.encode()
    sealed = hashlib.sha256(blank).hexdigest().encode() == found[1]
    return "" if sealed else "damaged: its content does not match its checksum."


def load_record(path: str | Path) -> Record:
    """The record in a run directory, or in a file; one that is not as it was written is an error."""
    path = Path(path)
    file = path / RECORD if path.is_dir() else path
    try:
        content = file.read_bytes()
        tree = json.loads(content.decode())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: {_instead(path)}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a record: {error}.") from None
    # Of what a newer version wrote it is said first that it is newer.
    ours = isinstance(tree, dict) and "sha256" in tree and tree.get("schema") in range(1, SCHEMA + 1)
    if ours and (problem := seal_problem(content)):
        raise UserError(f"{file}: {problem} Delete it and start its run again: the checkpoint holds the record too.")
    return record_from(tree, str(file))


def _instead(path: Path) -> str:
    """What to say about a path without a record: whether it is a folder of runs."""
    inside = sorted(file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/{RECORD}"))
    if not inside:
        return "no run here; the folder of a run holds a record.json."
    return f"holds {len(inside)} runs; name one of them, such as {inside[0]}."


def record_from(tree: Any, where: str) -> Record:
    """The record of a parsed ``record.json``; ``where`` names it in errors."""
    if not isinstance(tree, dict) or not isinstance(tree.get("schema"), int):
        raise UserError(f"{where}: not a record: it has no schema number.")
    if tree["schema"] > SCHEMA:
        raise UserError(
            f"{where}: written by a newer version (schema {tree['schema']}, this one reads up to {SCHEMA})."
        )
    known = {k: v for k, v in tree.items() if k not in DERIVED}
    if not isinstance(known.get("config"), dict):
        raise UserError(f"{where}: not a record: it has no config.")
    if wrong := schema.problem(known):
        raise UserError(f"{where}: not a record: {wrong}")
    try:
        return Record(**known)
    except TypeError as error:
        raise UserError(f"{where}: not a record: {error}.") from None


def write_atomic(path: Path, content: bytes) -> None:
    """Write beside the target, flush to the disk, rename over it: a reader sees the old file or the new one."""
    # Not by tempfile: its files are for their owner alone, and a record is for whoever may read the folder.
    name = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(name, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        name.unlink(missing_ok=True)
        if isinstance(error, OSError):  # which of a write or a flush does not say what could not be written
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def sweep_up(directory: Path) -> None:
    """Delete what a process that was killed in :func:`write_atomic` left there."""
    for file in directory.glob(".*"):
        if re.fullmatch(r"\..+\.\d+\.[0-9a-f]{8}", file.name):
            file.unlink(missing_ok=True)
