"""Every setting of a run: frozen dataclasses with their defaults."""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass, field, fields
from typing import Any

from tbbn.bench.config.protocols import implied


@dataclass(frozen=True)
class Choice:
    """A norm or a method by name, and its options; which options there are, the norm or the method says."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def dict(self) -> dict[str, Any]:
        return dict(self.options)

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={v}" for k, v in self.options)
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class DataConfig:
    name: str = "digits"  # tbbn list datasets
    root: str = "data"  # where data sets lie, and where downloads go
    download: bool = True  # whether missing data may be downloaded
    unreadable: str = "fail"  # an image file that cannot be read is an error, or left out: "skip"
    size: int = 0  # side of the stored images; 0: as they come
    crop: int = 0  # side of what the network sees; 0: the stored size
    tasks: int = 5  # in how many tasks the classes arrive
    stop_after: int = 0  # learn the first so many tasks only; 0: all
    base_classes: int = 0  # classes of the first task, where it is larger than the others
    class_order: str = "seed"  # "seed", "natural", "icarl", or class numbers with commas
    class_order_seed: int = -1  # -1: the run's seed
    validation: float = 0.0  # share of each class's training images held out
    online: bool = False  # a single pass over each task
    stream: str = "auto"  # read a packed set while training, "yes" or "no"; "auto": where it does not fit in memory
    test: str = "all"  # or "whole-batches": the last short batch of each task's test set is not evaluated


@dataclass(frozen=True)
class MemoryConfig:
    budget: int = 100  # exemplars in all; 0: none
    per_class: bool = False  # whether the budget is a number for each class, not a total
    rounding: str = "floor"  # of budget / classes: "floor" or "ceil"
    selection: str = "herding"  # or "random", "entropy", "distance", "reservoir" (online)
    shrink: str = "truncate"  # old classes keep the first of their order, or "reselect"


@dataclass(frozen=True)
class BatchConfig:
    size: int = 64  # rows of a batch, memory rows among them
    ratio: str = "3:1"  # current rows to memory rows
    length: str = "longer"  # an epoch is as long as the "longer" of the two sets, or "current", or "memory"
    last: str = "short"  # short last batches are used, or "drop"ped
    forward: str = "joint"  # one forward for the whole batch, or "separate" ones for its two parts
    current_from: str = "task"  # current rows are of the new task, or of its "union" with the memory
    memory_from: str = "all"  # online: memory rows are of all stored, the new task's among them, or of "past" tasks
    augment: str = "none"  # tbbn list augmentations
    evaluation: int = 500  # images at once where nothing is trained


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 20  # for each task
    lr: float = 0.1  # of SGD, at each task's start
    momentum: float = 0.9  # of SGD
    nesterov: bool = False  # Nesterov's momentum
    weight_decay: float = 5e-4  # of every parameter
    schedule: str = "multistep"  # of the learning rate; or "cosine", "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)  # of "multistep", as shares of the epochs
    gamma: float = 0.1  # of "multistep": the factor at each milestone
    clip_norm: float = 0.0  # largest norm of the gradient; 0: off
    clip_value: float = 0.0  # largest entry of the gradient; 0: off
    keep: str = "last"  # which epoch's weights stay: "last", or "best" by the validation loss of the current task


@dataclass(frozen=True)
class SaveConfig:
    tasks: str = "small"  # keep the state at each task's start: of "small" networks (up to 8 MiB), or "all", "none"


@dataclass(frozen=True)
class RunConfig:
    protocol: str = "clean"  # or "paper": trained as the authors did
    quirks: tuple[str, ...] = ()  # errors of the released code to reproduce: tbbn list quirks
    seed: int = 0  # of everything random
    device: str = "auto"  # a GPU if there is one; or "cpu", "cuda"
    precision: str = "fp32"  # or "tf32", "bf16": arithmetic of convolutions and products; statistics stay float32
    autotune: bool = False  # a GPU times its algorithms first: faster, but bits may differ from one process to the next
    threads: int = 0  # CPU threads; 0: torch's own choice
    backbone: str = "small"  # tbbn list backbones
    norm: Choice = Choice("bn")
    method: Choice = Choice("ft")
    data: DataConfig = field(default_factory=DataConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    @property
    def label(self) -> str:
        """What tables and curves call it. Options that other settings bring along, as ``data.online`` does, are left out."""
        names = self.norm.name, self.method.name
        brought = implied(self.protocol, self.data.name, *names, self.quirks, self.data.online)

        def said(kind: str, chosen: Choice) -> Choice:
            return Choice(chosen.name, tuple((k, v) for k, v in chosen.options if brought.get(f"{kind}.{k}") != v))

        return f"{said('method', self.method)} + {said('norm', self.norm)}"


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "memory": MemoryConfig,
    "batch": BatchConfig,
    "train": TrainConfig,
    "save": SaveConfig,
}
CHOICES = ("norm", "method")


def names() -> dict[str, Any]:
    """Every setting's dotted name and default, for the command line; norms' and methods' options are not among them."""
    default, found = RunConfig(), {}
    for f in fields(RunConfig):
        value = getattr(default, f.name)
        if f.name in SECTIONS:
            found.update({f"{f.name}.{g.name}": getattr(value, g.name) for g in fields(value)})
        else:
            found[f"{f.name}.name" if f.name in CHOICES else f.name] = value.name if f.name in CHOICES else value
    return found


@functools.cache
def notes() -> dict[str, str]:
    """What the comment beside each setting says, by dotted name, for the command line's help."""
    found = {}
    for prefix, kind in (("", RunConfig), *((f"{name}.", kind) for name, kind in SECTIONS.items())):
        for name, note in re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(kind), re.MULTILINE):
            found[prefix + name] = note
    return found
