"""Every setting of a run: frozen dataclasses whose fields carry their help, choices and limits."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

from tbbn.bench.config.options import default_options
from tbbn.bench.config.protocols import OPTIMIZERS, PROTOCOLS, QUIRKS, Values, implied
from tbbn.options import Option
from tbbn.options import option as setting

# The place of the data, which does not affect results: a run may be resumed, checked and compared with other values.
PLACE = ("data.root", "data.download")
SCHEDULES = ("multistep", "cosine", "constant")
_FLOAT = 3.4e38  # weights are float32
_MANY = 2**20  # a larger number is a typing error that would fill the memory or run forever


@dataclass(frozen=True)
class Setting(Option):
    """One setting, with its dotted name."""

    name: str = ""

    @property
    def line(self) -> str:
        """The help, with the choices if there are any."""
        return f"{self.help} ({', '.join(self.choices)})" if self.choices else self.help


@dataclass(frozen=True)
class Choice:
    """The name and options of a norm or a method. A config made by ``resolve`` has all options, including defaults."""

    kind: ClassVar[str]

    name: str
    options: tuple[tuple[str, Any], ...] = ()  # sorted by name
    # The defaults at the time of the run, from its record. Without them, labels would depend on whether a plugin is installed.
    defaults: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)

    def dict(self) -> dict[str, Any]:
        return dict(self.options)

    def differing(self, **defaults: Any) -> str:
        """The name, with the options that differ from their defaults in brackets; ``defaults`` override the usual ones."""
        defaults = {**(dict(self.defaults) or default_options(self.kind, self.name)), **defaults}
        changed = [(k, v) for k, v in self.options if k not in defaults or defaults[k] != v]
        inside = ", ".join(f"{k}={str(v).removesuffix('.0')}" for k, v in changed)
        return f"{self.name}({inside})" if inside else self.name

    def __str__(self) -> str:
        return self.differing()


class NormChoice(Choice):
    kind = "norm"


class MethodChoice(Choice):
    kind = "method"


@dataclass(frozen=True)
class DataConfig:
    name: str = setting("digits", "data set; tbbn list datasets shows them all")
    root: str = setting("data", "folder of the data sets, and where downloads go")
    download: bool = setting(True, "download missing data")
    unreadable: str = setting(
        "fail", "on an unreadable image file: stop the run, or skip the file", choices=("fail", "skip")
    )
    split: float = setting(
        0.0, "folder without train/ and test/: fraction of each class's images for testing", least=0, below=1
    )
    size: int = setting(0, "side of the stored images in pixels; 0 keeps the original size", least=0, most=4096)
    crop: int = setting(0, "side of the network's input in pixels; 0 uses the stored size", least=0, most=4096)
    tasks: int = setting(5, "number of tasks to split the classes into", least=1, most=_MANY)
    stop_after: int = setting(0, "train only this many tasks; 0 trains all", least=0, most=_MANY)
    base_classes: int = setting(
        0, "number of classes in the first task; 0 splits all classes evenly", least=0, most=_MANY
    )
    class_order: str = setting("seed", "order of the classes: seed, natural, icarl, or class numbers such as 3,1,0,2")
    class_order_seed: int = setting(
        -1, "seed of the class order; -1 uses the seed of the run", least=-1, most=2**32 - 1
    )
    validation: float = setting(
        0.0, "fraction of each class's training images held out for validation", least=0, below=1
    )
    online: bool = setting(False, "online learning: a single pass over each task")
    stream: str = setting(
        "auto",
        "stream a packed data set from disk during training; auto: only if it does not fit in memory",
        choices=("auto", "yes", "no"),
    )
    test: str = setting(
        "all",
        "test images to evaluate; whole-batches drops the last short batch of each task",
        choices=("all", "whole-batches"),
    )
    validate: str = setting(
        "all",
        "validation images to use; whole-batches drops the last short batch of each task, sorted by class",
        choices=("all", "whole-batches"),
    )

    @property
    def learnt_tasks(self) -> int:
        """The number of tasks that a run learns."""
        return min(self.tasks, self.stop_after or self.tasks)

    @property
    def part(self) -> str:
        """The share of tasks that a run learns if it stops early, such as "3 of 10 tasks"; empty for all."""
        return f"{self.learnt_tasks} of {self.tasks} tasks" if self.learnt_tasks < self.tasks else ""


@dataclass(frozen=True)
class MemoryConfig:
    budget: int = setting(100, "total number of exemplars; 0 disables the memory", least=0, most=2**31)
    per_class: bool = setting(False, "budget is per class, not in total")
    rounding: str = setting("floor", "rounding of budget / classes", choices=("floor", "ceil"))
    selection: str = setting(
        "herding",
        "how exemplars are selected; reservoir is for online learning",
        choices=("herding", "random", "entropy", "distance", "reservoir"),
    )
    shrink: str = setting(
        "truncate",
        "how an old class gives up exemplars: keep its first ones, or select again",
        choices=("truncate", "reselect"),
    )


@dataclass(frozen=True)
class BatchConfig:
    size: int = setting(64, "batch size, including memory rows", least=2, most=_MANY)
    ratio: str = setting("3:1", "ratio of current rows to memory rows in a batch")
    length: str = setting(
        "longer",
        "an epoch is one pass over the current task, the memory, or the longer of the two",
        choices=("longer", "current", "memory"),
    )
    last: str = setting("short", "use a short last batch, or drop it", choices=("short", "drop"))
    forward: str = setting(
        "joint",
        "one forward pass for the whole batch, or separate ones for current and memory rows",
        choices=("joint", "separate"),
    )
    current_from: str = setting(
        "task",
        "draw current rows from the new task, or from its union with the memory",
        choices=("task", "union"),
    )
    memory_from: str = setting(
        "all",
        "online only: draw memory rows from all stored rows, or from past tasks",
        choices=("all", "past"),
    )
    augment: str = setting("none", "data augmentation; tbbn list augmentations shows them all")
    evaluation: int = setting(500, "batch size for evaluation", least=1, most=_MANY)


@dataclass(frozen=True)
class FirstTaskConfig:
    """Settings of the first task, where they differ from those of later tasks."""

    epochs: int = setting(0, "epochs of the first task; 0: as in later tasks", least=0, most=_MANY)
    lr: float = setting(0.0, "learning rate of the first task; 0: as in later tasks", least=0, most=_FLOAT)
    weight_decay: float = setting(
        -1.0, "weight decay of the first task; negative: as in later tasks", least=-1, most=_FLOAT
    )
    schedule: str = setting("same", "learning-rate schedule of the first task", choices=("same", *SCHEDULES))
    milestones: tuple[float, ...] = setting(
        (), "milestones of the first task; empty: as in later tasks", least=0, most=1
    )
    gamma: float = setting(0.0, "decay factor of the first task; 0: as in later tasks", least=0, most=_FLOAT)

    def chosen(self) -> dict[str, Any]:
        """The settings that differ from those of later tasks."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: value for name, value in own.items() if not (isinstance(value, float) and value < 0)}


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = setting(20, "epochs per task", least=1, most=_MANY)
    optimizer: str = setting("sgd", "optimiser; also sets the defaults of lr and weight_decay", choices=OPTIMIZERS)
    lr: float = setting(0.1, "learning rate at the start of each task", above=0, most=_FLOAT)
    momentum: float = setting(0.9, "momentum of SGD", least=0, most=_FLOAT)
    nesterov: bool = setting(False, "Nesterov momentum of SGD")
    betas: tuple[float, ...] = setting((0.9, 0.999), "decay rates of Adam's two moments", least=0, below=1)
    weight_decay: float = setting(5e-4, "weight decay, on every parameter", least=0, most=_FLOAT)
    schedule: str = setting("multistep", "learning-rate schedule", choices=SCHEDULES)
    warmup: int = setting(0, "number of warm-up epochs, with a linearly rising learning rate", least=0, most=_MANY)
    milestones: tuple[float, ...] = setting(
        (0.5, 0.75), "multistep: decay after these fractions of the epochs", least=0, most=1
    )
    gamma: float = setting(0.1, "multistep: decay factor at each milestone", above=0, most=_FLOAT)
    clip_norm: float = setting(0.0, "clip the gradient to this norm; 0 is off", least=0, most=_FLOAT)
    clip_value: float = setting(0.0, "clip each gradient entry to this value; 0 is off", least=0, most=_FLOAT)
    keep: str = setting(
        "last",
        "epoch whose weights to keep; best: lowest validation loss on the current task (joint: on all tasks so far)",
        choices=("last", "best"),
    )
    scale: float = setting(1.0, "fraction of the epochs to train, in every phase of a method", above=0, most=1)
    first: FirstTaskConfig = field(default_factory=FirstTaskConfig)

    def scaled(self, epochs: int) -> int:
        """The number of epochs to train in a phase of ``epochs`` epochs."""
        return max(1, round(self.scale * epochs))

    def of_task(self, number: int) -> "TrainConfig":
        """The settings of a task (0-based). In the first task, settings in ``first`` replace the others if set."""
        return self if number else replace(self, **self.first.chosen())


@dataclass(frozen=True)
class SaveConfig:
    tasks: str = setting(
        "small",
        "save the state at the start of each task; small: only if the network is at most 8 MiB",
        choices=("small", "all", "none"),
    )


@dataclass(frozen=True)
class RunConfig:
    protocol: str = setting("clean", "training protocol; paper trains as the authors did", choices=PROTOCOLS)
    quirks: tuple[str, ...] = setting((), "errors of the released code to reproduce", choices=tuple(QUIRKS))
    plugins: tuple[str, ...] = setting((), "plugins to load: module names or Python files")
    seed: int = setting(0, "seed of all random numbers", least=0)
    device: str = setting("auto", "cpu, cuda, cuda:N, mps or xpu; auto: cuda if available, else cpu")
    precision: str = setting(
        "fp32",
        "precision of convolutions and matrix products; statistics stay float32",
        choices=("fp32", "tf32", "bf16"),
    )
    autotune: bool = setting(False, "cuDNN autotuning on GPUs; faster, but not bit-reproducible")
    threads: int = setting(0, "number of CPU threads; 0 uses torch's default", least=0, most=1024)
    backbone: str = setting("small", "network; tbbn list backbones shows them all")
    norm: NormChoice = setting(NormChoice("bn"), "normalisation layer; tbbn list norms shows them all")  # noqa: RUF009
    method: MethodChoice = setting(MethodChoice("ft"), "method; tbbn list methods shows them all")  # noqa: RUF009
    data: DataConfig = field(default_factory=DataConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    def at(self, root: str | None) -> "RunConfig":
        """The config with its data in another folder; None keeps the folder."""
        return self if root is None else replace(self, data=replace(self.data, root=root))

    @property
    def label(self) -> str:
        """The run's name in tables and plots."""
        return " + ".join(self.names)

    @property
    def names(self) -> tuple[str, str]:
        """Method and norm with their options, except options that other settings such as ``data.online`` imply."""
        names = self.norm.name, self.method.name
        values = implied(self.protocol, self.data.name, *names, self.quirks, self.data.online, self.train.optimizer)
        return self.method.differing(**inside(values, "method")), self.norm.differing(**inside(values, "norm"))


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "memory": MemoryConfig,
    "batch": BatchConfig,
    "train": TrainConfig,
    "train.first": FirstTaskConfig,
    "save": SaveConfig,
}
CHOICES: dict[str, type[Choice]] = {"norm": NormChoice, "method": MethodChoice}


def inside(values: Values, section: str) -> dict[str, Any]:
    """The values of one section, by their names in it.

    >>> inside({"seed": 1, "train.lr": 0.1}, "train")
    {'lr': 0.1}
    """
    return {key.removeprefix(f"{section}."): value for key, value in values.items() if key.startswith(f"{section}.")}


def _settings() -> Mapping[str, Setting]:
    found = {}
    for prefix, owner in (("", RunConfig), *((f"{name}.", owner) for name, owner in SECTIONS.items())):
        for f in fields(owner):
            if f.default is MISSING:  # a section or a subsection
                continue
            if f.name in CHOICES and not prefix:
                found[f"{f.name}.name"] = Setting(f.default.name, **f.metadata, kind=str, name=f"{f.name}.name")
            else:
                found[prefix + f.name] = Setting(f.default, **f.metadata, kind=f.type, name=prefix + f.name)
    return MappingProxyType(found)


SETTINGS = _settings()  # by dotted name, without the options of norms and methods
