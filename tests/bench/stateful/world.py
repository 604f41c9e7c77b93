"""The folders that the machine's steps work on, and what must be true of them after every step.

Truth is what an undisturbed run of the same config left. Here files are read with as little of tbbn as possible.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked import command

from tbbn.bench.files import locked
from tbbn.bench.runs.overwrite import LIST, settle
from tbbn.bench.runs.verify import verify
from tbbn.errors import UserError

SEEDS = (0, 1)
TRAIN = ("--data", "synthetic:4x4x2x8", "--data.tasks", "2", "--train.epochs", "2", "--memory.budget", "4")
TRAIN += ("--batch.size", "4", "--norm", "tbbn", "--device", "cpu", "--threads", "1", "--out", ".")
SWEEP = "s"
FOLDERS = ("a", *(f"{SWEEP}/ft-tbbn-{seed}" for seed in SEEDS))  # of runs
BY_TASK = ("accuracy", "task_il", "errors", "exemplars", "splits", "weights")
SAME = ("schema", "config", "class_order", "task_sizes", "data", "environment")
CHECKPOINTS = ("checkpoint.safetensors", "checkpoint.arriving.safetensors", "checkpoint.previous.safetensors")
NEEDS_ROOM = ("No space left on device", "File too large")  # what a full disk says
DISK = 8 * 2**20  # bytes, where a file system of its own can be mounted


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Known:
    """What a folder knows of a run: its seed, tasks in the record and in the record or a checkpoint, and whether finished."""

    seed: int
    recorded: int
    tasks: int
    finished: bool


@dataclass
class World:
    """A folder of runs, which is the current folder of this process, and results of undisturbed runs."""

    root: Path
    truth: dict[int, dict[str, Any]] = field(default_factory=dict)  # by seed: record, config, predictions
    lines: dict[str, int] = field(default_factory=dict)  # of tbbn's code that a run passes
    damaged: set[str] = field(default_factory=set)  # checksums of files that a step has damaged
    is_mounted: bool = False
    _checked: dict[str, Any] = field(default_factory=dict)  # folders as they were when last checked

    @staticmethod
    def make() -> World:
        world = World(Path(tempfile.mkdtemp(prefix="tbbn-stateful-")))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(world.root)]
        with suppress(OSError):  # without the right to mount, files of limited size stand for a full disk
            world.is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
        os.chdir(world.root)
        for seed in SEEDS:
            ended = command(["run", *TRAIN, "--seed", str(seed), "--name", "truth", "--quiet"], count=True)
            assert ended.code == 0, ended
            world.lines = ended.lines
            world.truth[seed] = {
                "record": json.loads(Path("truth/record.json").read_bytes()),
                "config": Path("truth/config.toml").read_bytes(),
                "predictions": _tensors(Path("truth/predictions.safetensors")),
            }
            shutil.rmtree("truth")
        return world

    def clear(self) -> None:
        """Start again with an empty folder."""
        for entry in Path().iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.damaged.clear()
        self._checked.clear()

    def remove(self) -> None:
        os.chdir("/")
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.root)], check=True)
        shutil.rmtree(self.root)

    # What is there. --------------------------------------------------------------------------------------------------

    def intact(self, file: Path) -> bool:
        """Whether a file is there and no step has damaged it."""
        return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() not in self.damaged

    def known(self, folder: Path) -> Known | None:
        record = self.record(folder)
        trees = [state["record"] for name in CHECKPOINTS if (state := self.state(folder / name)) is not None]
        if record is None and not trees:
            return None
        first = record if record is not None else trees[0]
        seed = first["config"]["seed"]
        tasks = max(len(tree["accuracy"]) for tree in [first, *trees] if tree["config"]["seed"] == seed)
        is_finished = record is not None and record["status"] == "finished"
        return Known(seed, len(record["accuracy"]) if record else -1, tasks, is_finished)

    def record(self, folder: Path) -> dict[str, Any] | None:
        file = folder / "record.json"
        return json.loads(file.read_bytes()) if self.intact(file) else None

    def state(self, file: Path) -> dict[str, Any] | None:
        """The values in a checkpoint."""
        return json.loads(_header(file)["__metadata__"]["state"]) if self.intact(file) else None

    # What must be true. ----------------------------------------------------------------------------------------------

    def check(self, folder: Path) -> Known | None:
        """Raise `Broken` if a file says what an undisturbed run does not say, or if `verify` is wrong about the folder."""
        if not folder.is_dir():
            return None
        if (folder / LIST).exists():
            return self._check_overwriting(folder)
        stamp = sorted((f.name, f.stat().st_mtime_ns, f.stat().st_ino) for f in folder.iterdir())
        if self._checked.get(str(folder), (None,))[0] != stamp:
            self._check_files(folder)
            self._check_verify(folder)
            self._checked[str(folder)] = stamp, self.known(folder)
        return self._checked[str(folder)][1]  # type: ignore[no-any-return]

    def _check_overwriting(self, folder: Path) -> Known | None:
        """A process died while it replaced a run: look at a copy in which the next command would settle it."""
        copy = folder.with_name(f"{folder.name}.copy")
        shutil.copytree(folder, copy)
        try:
            with locked(copy):
                settle(copy)
            self._check_files(copy)
            return self.known(copy)
        except UserError as error:
            if "damaged" not in str(error) or self.intact(folder / LIST):
                raise Broken(f"{folder}: cannot be settled: {error}") from None
            return None
        finally:
            shutil.rmtree(copy)

    def _check_files(self, folder: Path) -> None:
        record = self.record(folder)
        trees = {"record.json": record} if record is not None else {}
        for file in (*(folder / name for name in CHECKPOINTS), *folder.glob("task-*.safetensors")):
            if (state := self.state(file)) is not None:
                trees[file.name] = state["record"]
        for name, tree in trees.items():
            if problem := self._untrue(tree):
                raise Broken(f"{folder}/{name}: is not true: {problem}")
        if self.intact(file := folder / "predictions.safetensors"):
            found = _tensors(file)
            if not any(found.items() <= truth["predictions"].items() for truth in self.truth.values()):
                raise Broken(f"{file}: is not true")

    def _untrue(self, tree: dict[str, Any]) -> str:
        """What in a record differs from the undisturbed run's."""
        truth = self.truth[tree["config"]["seed"]]["record"]
        n = len(tree["accuracy"])
        has_begun = n or tree["status"] != "failed" or tree["task_sizes"]
        for name in SAME if has_begun else ("schema", "config"):
            if tree[name] != truth[name]:
                return f"{name} is {tree[name]}"
        for name in BY_TASK:
            if tree[name] != truth[name][:n]:
                return f"{name} is {tree[name]}"
        epochs = tree["history"]
        if epochs != truth["history"][: len(epochs)] or len(epochs) < sum(e["task"] < n for e in truth["history"]):
            return f"history is {epochs}"
        if tree["status"] == "finished" and n < len(truth["accuracy"]):
            return f"finished with {n} tasks"
        is_full = any(words in tree["message"] for words in NEEDS_ROOM)
        if tree["status"] == "diverged" or (tree["status"] == "failed" and not is_full):
            return f"status is {tree['status']}: {tree['message']}"
        return ""

    def _check_verify(self, folder: Path) -> None:
        if not (folder / "record.json").exists():
            return  # no run here, says verify
        try:
            wrong = [f"{f.subject}: {f.problem}" for f in verify(folder) if f.problem]
        except UserError as error:
            wrong = [str(error)]
        expected = self._should_fail(folder)
        if bool(wrong) != bool(expected):
            raise Broken(f"{folder}: verify finds {wrong or 'nothing'}, but {expected or 'nothing is wrong'}")

    def _should_fail(self, folder: Path) -> str:
        """Why `verify` must not say OK."""
        for file in folder.iterdir():
            if file.suffix in (".json", ".toml", ".safetensors") and file.name[0] != "." and not self.intact(file):
                return f"{file.name} is damaged"
        record = self.record(folder)
        assert record is not None
        truth = self.truth[record["config"]["seed"]]
        if not (folder / "config.toml").exists() or (folder / "config.toml").read_bytes() != truth["config"]:
            return "config.toml is missing"
        predictions = folder / "predictions.safetensors"
        found = _tensors(predictions) if predictions.exists() else {}
        n = len(record["accuracy"])
        wanted = {name: values for name, values in truth["predictions"].items() if int(name.removeprefix("task")) < n}
        return "" if wanted.items() <= found.items() else f"predictions are {sorted(found)}, the record has {n} tasks"


def _header(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # type: ignore[no-any-return]


def _tensors(file: Path) -> dict[str, Any]:
    """Each tensor's type, shape and bytes."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    entries = {name: entry for name, entry in _header(file).items() if name != "__metadata__"}
    return {
        name: (entry["dtype"], tuple(entry["shape"]), content[slice(*(start + i for i in entry["data_offsets"]))])
        for name, entry in entries.items()
    }
