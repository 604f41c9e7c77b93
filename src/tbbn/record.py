"""What a run leaves behind: its config, its environment, every accuracy, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import tbbn
from tbbn import metrics
from tbbn.config import RunConfig, flatten, resolve, to_dict, to_toml
from tbbn.errors import UserError

SCHEMA = 1
# Everything a run writes into its folder, and an overwriting one deletes first.
FILES = (
    "config.toml",
    "record.json",
    "predictions.safetensors",
    "checkpoint.safetensors",
    "checkpoint.previous.safetensors",
)
STATUSES = ("running", "finished", "interrupted", "diverged", "failed")


@dataclass
class Record:
    """The result of a run. Accuracies are shares of 1; row ``t`` of a matrix holds tasks 0 to ``t`` after learning task ``t``."""

    config: dict[str, Any]
    schema: int = SCHEMA
    status: str = "running"
    message: str = ""  # why it ended, where not by finishing
    environment: dict[str, Any] = field(default_factory=dict)
    class_order: list[int] = field(default_factory=list)
    task_sizes: list[int] = field(default_factory=list)
    accuracy: list[list[float]] = field(default_factory=list)  # class-IL: the task of an image is not known
    task_il: list[list[float]] = field(default_factory=list)  # task-IL: it is known
    errors: list[dict[str, int]] = field(default_factory=list)  # after each task: C->C, C->P, P->C, P->P
    exemplars: list[int] = field(default_factory=list)  # rows in memory after each task
    splits: list[int] = field(default_factory=list)  # r* of a whole batch in each task
    history: list[dict[str, Any]] = field(default_factory=list)  # one entry an epoch
    seconds: float = 0.0  # of training and evaluation, over all sessions
    predictions: dict[str, torch.Tensor] = field(default_factory=dict)  # class of every test image, by task learnt

    @property
    def run_config(self) -> RunConfig:
        return resolve(("record", flatten(self.config)))

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric of what has been learnt so far; empty before the first task is done."""
        if not self.accuracy:
            return {}
        sizes = self.task_sizes[: len(self.accuracy)]
        return metrics.summary(self.accuracy, weights=sizes, task_il=self.task_il)

    def to_json(self) -> str:
        tree = {k: v for k, v in asdict(self).items() if k != "predictions"}
        return json.dumps({**tree, "metrics": self.metrics}, indent=1) + "\n"

    def save(self, directory: Path) -> None:
        """Write ``config.toml``, ``record.json`` and the predictions; each file is whole or absent, whenever the power goes."""
        directory.mkdir(parents=True, exist_ok=True)
        config = to_toml(self.run_config)
        if not (directory / "config.toml").exists() or (directory / "config.toml").read_text() != config:
            write_atomic(directory / "config.toml", config.encode())
        if self.predictions:
            from safetensors.torch import save

            write_atomic(directory / "predictions.safetensors", save(self.predictions))
        write_atomic(directory / "record.json", self.to_json().encode())


def load_record(path: str | Path) -> Record:
    """The record in a run directory, or in a file."""
    path = Path(path)
    file = path / "record.json" if path.is_dir() else path
    try:
        tree = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: {_instead(path)}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not a record: {error}.") from None
    return record_from(tree, str(file))


def _instead(path: Path) -> str:
    """What to say about a path without a record: whether it is a folder of runs."""
    inside = sorted(file.parent for file in path.glob("*/record.json"))
    if not inside:
        return "no run here; a run's folder holds a record.json."
    return f"holds {len(inside)} runs, not one; give one of them, such as {inside[0]}."


def record_from(tree: Any, where: str) -> Record:
    """The record of a parsed ``record.json``; ``where`` names it in errors."""
    if not isinstance(tree, dict) or not isinstance(tree.get("schema"), int):
        raise UserError(f"{where}: not a record: it has no schema number.")
    if tree["schema"] > SCHEMA:
        raise UserError(
            f"{where}: written by a newer version (schema {tree['schema']}, this one reads up to {SCHEMA})."
        )
    known = {k: v for k, v in tree.items() if k != "metrics"}
    if not isinstance(known.get("config"), dict):
        raise UserError(f"{where}: not a record: it has no config.")
    try:
        return Record(**known)
    except TypeError as error:
        raise UserError(f"{where}: not a record: {error}.") from None


def new_record(config: RunConfig) -> Record:
    return Record(to_dict(config), environment=environment())


def environment() -> dict[str, Any]:
    """What a number may depend on besides the config."""
    found = {
        "tbbn": tbbn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


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
    except BaseException:
        name.unlink(missing_ok=True)
        raise
