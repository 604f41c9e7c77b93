"""The record of a run, in memory; :mod:`tbbn.bench.runs.record` reads and writes its file."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tbbn
from tbbn.bench import metrics
from tbbn.bench.config import RunConfig, flatten, resolve, to_dict, with_defaults
from tbbn.bench.engine.plugins import used_plugins

SCHEMA = 4  # of the record's fields


@dataclass
class Record:
    """The result of a run. Accuracies are fractions; row ``t`` of a matrix holds tasks 0 to ``t`` after learning task ``t``."""

    config: dict[str, Any]
    schema: int = SCHEMA
    status: str = "running"  # then "finished", "interrupted", "diverged" or "failed"
    message: str = ""  # why the run diverged or failed
    environment: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # class names, shape of the input, channel mean and std
    class_order: list[int] = field(default_factory=list)
    task_sizes: list[int] = field(default_factory=list)
    accuracy: list[list[float]] = field(default_factory=list)  # class-IL: the task of a test image is unknown
    task_il: list[list[float]] = field(default_factory=list)  # task-IL: the task of a test image is given
    # Class-IL with the newest task's scores shifted so that as many images are called new as are; an empty row is unknown.
    calibrated: list[list[float]] = field(default_factory=list)
    errors: list[dict[str, int]] = field(default_factory=list)  # after each task: C->C, C->P, P->C, P->P
    exemplars: list[int] = field(default_factory=list)  # memory rows after each task
    splits: list[int] = field(default_factory=list)  # r* of a full batch in each task
    history: list[dict[str, Any]] = field(default_factory=list)  # one entry per epoch
    skipped: list[str] = field(default_factory=list)  # image files left out because they cannot be read
    weights: list[str] = field(default_factory=list)  # SHA-256 of the network's state after each task
    plugins: list[dict[str, Any]] = field(default_factory=list)  # each with version or file hash, and the names used
    resumed: list[dict[str, Any]] = field(default_factory=list)  # environments of later sessions, where they differ
    seconds: float = 0.0  # of training and evaluation, over all sessions
    predictions: dict[str, Tensor] = field(default_factory=dict)  # predicted class of every test image, by task learnt

    @property
    def run_config(self) -> RunConfig:
        config = resolve(("record", flatten(self.config)))
        for plugin in self.plugins:
            for kind, defaults in plugin.get("defaults", {}).items():
                config = with_defaults(config, kind, defaults)
        return config

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics over the tasks learnt so far; empty before the first task is done."""
        if not self.accuracy:
            return {}
        sizes = self.task_sizes[: len(self.accuracy)]
        return metrics.summary(self.accuracy, weights=sizes, task_il=self.task_il)

    def kept_epochs(self) -> dict[tuple[int, str], int]:
        """The 0-based epoch whose weights were kept, for each phase of each task learnt.

        If the best epoch is kept, entries have a validation loss, and the first epoch with the lowest one counts. Otherwise the
        last epoch counts.
        """
        kept: dict[tuple[int, str], dict[str, Any]] = {}
        for entry in (entry for entry in self.history if entry["task"] < len(self.accuracy)):
            key = entry["task"], entry["phase"]
            if key not in kept or "validation" not in entry or entry["validation"] < kept[key]["validation"]:
                kept[key] = entry
        return {key: entry["epoch"] for key, entry in kept.items()}

    def with_task(self, task: int, entries: Mapping[str, Any], predictions: Tensor, seconds: float) -> Record:
        """The record with one more task; ``entries`` has its entry for each of the lists with one entry per task."""
        longer: dict[str, Any] = {name: [*getattr(self, name), entry] for name, entry in entries.items()}
        longer["predictions"] = {**self.predictions, f"task{task}": predictions}
        return replace(self, **longer, seconds=self.seconds + seconds)

    def tree(self) -> dict[str, Any]:
        """The record as in its JSON file: everything but the tensors."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "predictions"}

    def to_json(self, **more: str) -> str:
        return json.dumps({**self.tree(), "metrics": self.metrics, **more}, indent=1) + "\n"


def new_record(config: RunConfig) -> Record:
    found = environment()
    found |= {"threads": config.threads} if config.threads else {}
    return Record(to_dict(config), environment=found, plugins=used_plugins(config))


def environment() -> dict[str, Any]:
    """Everything besides the config that may change a result."""
    found = {
        "tbbn": tbbn.__version__,
        "source": source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


@cache
def processor() -> str:
    """The model and the vector instructions of the CPU: libraries choose their kernels, and the order of sums, by both."""
    model = platform.processor()
    with suppress(OSError):  # there only on Linux, whose platform.processor() may be empty
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return ", ".join(filter(None, (model, torch.backends.cpu.get_cpu_capability())))


@cache
def source_digest() -> str:
    """A short digest of the package's code. Between two releases, the version does not say which code trained a run."""
    folder = Path(tbbn.__file__).parent
    found = hashlib.sha256()
    files = sorted(file for file in folder.rglob("*.*") if file.suffix in (".py", ".c", ".h"))
    for file in files:
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue  # not code: an editor's lock of an open file, a link to nothing, has that file's ending
        found.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of named tensors: names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        # A tensor with one value counts as contiguous whatever its stride, but view(dtype) needs stride 1.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        found.update(flat.view(dtype=torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()
