"""Records on disk: the files in a run's folder other than checkpoints.

Several files cannot be replaced atomically, so each has its own checksum: a SHA-256 inside the file
(:func:`tbbn.bench.files.seal`), or for ``config.toml`` inside the record. The config is written first, and only the place of the
data in it ever changes; predictions are written before the record that counts them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tbbn.bench.config import to_toml, without_place
from tbbn.bench.engine.record import SCHEMA, Record
from tbbn.bench.files import NO_SEAL, read_limited, seal, seal_problem, write_atomic
from tbbn.bench.runs import checkpoint, schema
from tbbn.errors import UserError

CONFIG, RECORD, PREDICTIONS = "config.toml", "record.json", "predictions.safetensors"
LARGEST = 2**28  # bytes of a record.json, which grows with epochs and classes
DERIVED = ("metrics", "config_sha256", "sha256")  # in record.json, but not fields of a Record


class DamagedRecord(UserError):
    """A ``record.json`` that changed since it was written. The run's checkpoint has a copy."""


def save_record(record: Record, directory: Path) -> None:
    """Write ``config.toml``, the predictions and ``record.json``, each atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    config = to_toml(record.run_config).encode()
    _write_if_changed(directory / CONFIG, config)
    if record.predictions:
        from safetensors.torch import save

        _write_if_changed(directory / PREDICTIONS, seal(save(record.predictions, metadata={"sha256": NO_SEAL})))
    text = record.to_json(config_sha256=hashlib.sha256(config).hexdigest(), sha256=NO_SEAL)
    write_atomic(directory / RECORD, seal(text.encode()))


def update_record(record: Record, directory: Path) -> None:
    """`save_record`, unless the record on disk is of the same run and further along: a resumed run may be behind it."""
    try:
        there = load_record(directory)
    except UserError:  # missing or damaged
        pass
    else:
        if without_place(there.config) == without_place(record.config) and _knows(there) > _knows(record):
            return
    save_record(record, directory)


def _knows(record: Record) -> tuple[int, bool]:
    return len(record.accuracy), record.status == "finished"


def can_be_restored(record: Record, directory: Path) -> bool:
    """Whether the config or the predictions beside a record are damaged or missing, and a checkpoint contains them."""
    try:
        file, wanted = directory / PREDICTIONS, {f"task{t}" for t in range(len(record.accuracy))}
        is_whole = not seal_problem(file.read_bytes()) and wanted <= load_predictions(directory).keys()
        if is_whole and (directory / CONFIG).read_bytes() == to_toml(record.run_config).encode():
            return False
    except (FileNotFoundError, UserError):
        pass
    try:
        found = checkpoint.load(directory)
    except UserError:
        return False
    return found is not None and found[0].get("record", {}).get("weights") == record.weights


def load_predictions(directory: Path) -> dict[str, Tensor]:
    """The predicted class of every test image, by task learnt; empty before the first task is done."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    file = directory / PREDICTIONS
    try:
        return load(read_limited(file, checkpoint.LARGEST)) if file.exists() else {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: damaged ({error}).") from None


def _write_if_changed(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        write_atomic(path, content)


def load_record(path: str | Path) -> Record:
    """The record in the folder of a run, or in a file. The error for a damaged one says how to restore it."""
    path = Path(path)
    file = path / RECORD if path.is_dir() else path
    try:
        return _read_record(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: {_no_record(path)}") from None
    except DamagedRecord as error:
        raise DamagedRecord(f"{error} To restore it from the checkpoint: tbbn resume {file.parent}") from None


def load_or_restore(directory: Path) -> Record:
    """The record of a run, or if it is missing or damaged, the one in the checkpoint. Writes nothing."""
    try:
        return _read_record(directory / RECORD)
    except FileNotFoundError:
        problem = f"{directory}: {_no_record(directory)}"
    except DamagedRecord as error:
        problem = f"{error} No checkpoint can restore it; --overwrite starts the run again."
    found = checkpoint.load(directory)
    if found is None:
        raise UserError(problem)
    record = record_from(found[0].get("record"), str(directory))
    record.status = "interrupted"  # until the run has checked whether anything is left to do
    return record


def _read_record(file: Path) -> Record:
    content = read_limited(file, LARGEST)
    try:
        tree = json.loads(content.decode())
    except (ValueError, RecursionError):
        raise DamagedRecord(f"{file}: not a record: {'cut off, or not JSON' if content else 'empty'}.") from None
    _check_schema(tree, str(file))  # before the checksum, which another version may compute differently
    is_sealed = tree["schema"] > 1 or "sha256" in tree
    if is_sealed and (problem := seal_problem(content)):
        raise DamagedRecord(f"{file}: {problem}")
    return record_from(tree, str(file))


def _no_record(path: Path) -> str:
    inside = sorted(file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/{RECORD}"))
    if not inside and any((path / name).exists() for name in checkpoint.CANDIDATES):
        return f"no record here. To restore it from the checkpoint: tbbn resume {path}"
    if not inside:
        return f"no run here; the folder of a run holds a {RECORD}."
    return f"holds {len(inside)} runs; name one of them, such as {inside[0]}."


def _check_schema(tree: Any, where: str) -> None:
    if not isinstance(tree, dict) or not isinstance(tree.get("schema"), int):
        raise DamagedRecord(f"{where}: not a record: it has no schema number.")
    if tree["schema"] not in (SCHEMA, *schema.MIGRATIONS):
        other = "a newer" if tree["schema"] > SCHEMA else "an older"
        raise UserError(f"{where}: written by {other} version (schema {tree['schema']}; this version reads {SCHEMA}).")


def record_from(tree: Any, where: str) -> Record:
    """The record in a parsed ``record.json``; ``where`` is the file's name for errors."""
    _check_schema(tree, where)
    known = schema.migrate({k: v for k, v in tree.items() if k not in DERIVED})
    if not isinstance(known.get("config"), dict):
        raise DamagedRecord(f"{where}: not a record: it has no config.")
    if wrong := schema.problem(known):
        raise DamagedRecord(f"{where}: not a record: {wrong}")
    try:
        return Record(**known)
    except TypeError as error:
        raise DamagedRecord(f"{where}: not a record: {error}.") from None
