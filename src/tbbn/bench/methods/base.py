"""What a class-incremental method is: its losses, and what it does around a task. The loop is the engine's.

A method is an immutable dataclass whose fields are its hyper-parameters. It never steps an optimiser, builds a loader or logs:
``loss`` maps a batch and the network's output on it to named terms, and the engine does the rest. What a method has to keep
between tasks it gives to ``network.remember``, so that it is saved, copied to the teacher and restored with the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.data.scenario import Task
from tbbn.bench.data.types import Batch
from tbbn.bench.models import Head, LinearHead, Network, Output
from tbbn.errors import UserError, unknown_name

Losses = dict[str, Tensor]


@dataclass(frozen=True)
class Phase:
    """One stretch of training inside a task. A field left at None is the run's own setting.

    ``rows`` says what an epoch is made of: "replay", [task ; memory] batches; "balanced", the same with the task cut to the
    memory's size per class; "exemplars", mixed batches of a memory that already holds the new task's exemplars; "holdout",
    mixed batches of the rows held out by :meth:`Method.holdout`. Only "replay" and "balanced" batches have a layout.
    ``trainable`` goes to :meth:`Method.parameters`, ``loss`` names the method's function to minimise.
    """

    name: str = "train"
    rows: str = "replay"
    loss: str = "loss"
    trainable: str = "all"
    epochs: int | None = None
    lr: float | None = None
    lr_factor: float = 1.0
    schedule: str | None = None  # "multistep", "cosine" or "constant"
    momentum: float | None = None
    weight_decay: float | None = None
    network_mode: str = "train"  # "eval": norms use, and keep, their running statistics
    keep: str | None = None  # which epoch's weights stay: "last" or "best"
    uses_previous: bool = True  # False spares the previous network's forward where the loss does not look at it


class TaskContext(Protocol):
    """A task being learnt, as a method sees it. The engine implements it."""

    task: Task
    network: Network
    previous: Network | None  # the network after the task before, frozen; None in the first task
    memory: ExemplarMemory

    @property
    def number(self) -> int:
        """The task's number, from 0."""
        ...

    @property
    def n_old_classes(self) -> int:
        """Classes of the tasks before."""
        ...

    @property
    def n_classes(self) -> int:
        """Classes up to and with this task's."""
        ...

    def outputs(self, rows: Tensor) -> Output:
        """The network's output in eval mode on training rows without augmentation, batch by batch, without gradient;
        ``stages`` is empty."""
        ...

    def labels(self, rows: Tensor) -> Tensor:
        """The labels of training rows, in arrival order of the classes."""
        ...

    def batches(self, purpose: str) -> Iterator[Batch]:
        """One epoch of augmented [task ; memory] batches, drawn for this purpose alone; nothing is trained."""
        ...

    def forward(self, network: Network, batch: Batch) -> Output:
        """The output for such a batch as in training: with the batch's layout, in the network's own mode, with gradients."""
        ...

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Randomness for this task and purpose alone."""
        ...


@dataclass(frozen=True)
class Method:
    """The base of every method; as it stands, it has no loss."""

    needs_previous: ClassVar[bool] = False  # whether ``loss`` wants the previous network's output
    needs_stages: ClassVar[bool] = False  # whether ``loss`` looks at the backbone's stages
    last_relu: ClassVar[bool] = True  # whether features are taken after the backbone's last ReLU
    uses_memory: ClassVar[bool] = True
    all_data: ClassVar[bool] = False  # whether each task's training set is all data so far (the upper bound)
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}  # open intervals; other numbers must be at least 0

    def make_head(self, n_features: int) -> Head:
        return LinearHead(n_features)

    def holdout(self) -> float:
        """The fraction of the rows (new and stored) that the main phase leaves to a "holdout" phase."""
        return 0.0

    def memory_views(self, past_tasks: int) -> int:
        """How many augmented views of each memory row a batch holds; views after the first are strongly augmented."""
        return 1

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        return (Phase(),)

    def parameters(self, network: Network, trainable: str) -> list[nn.Parameter]:
        """The parameters a phase trains: "all", "newest" (no head block of an earlier task) or "head"."""
        if trainable == "head":
            return list(network.head.parameters())
        parameters = list(network.parameters())
        if trainable == "newest":
            old = {id(p) for task in range(len(network.task_sizes) - 1) for p in network.head.block(task)}
            return [p for p in parameters if id(p) not in old]
        assert trainable == "all", trainable
        return parameters

    def before_task(self, context: TaskContext) -> None:
        """Called when the head has grown, before the first phase."""

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        """The terms to minimise, by name; their sum is differentiated. ``previous`` has no gradient."""
        raise NotImplementedError

    def after_training(self, context: TaskContext) -> None:
        """Called after the last phase, before exemplars are chosen."""

    def after_task(self, context: TaskContext) -> None:
        """Called when the memory holds this task's exemplars, before the evaluation."""

    def predict(self, output: Output) -> Tensor:
        """Scores (N, classes) whose largest entry is the prediction."""
        return output.logits


def make_method(method: str, kind: type[Method], options: Mapping[str, Any]) -> Method:
    """A method with these hyper-parameters; an unknown option or a wrong value is an error that names the method."""
    known = {f.name: f for f in fields(kind)}
    checked = {}
    for name, value in options.items():
        if name not in known:
            if not known:
                raise UserError(f"[method] {method!r} takes no options, got {name!r}.")
            raise unknown_name(f"option of method {method!r}:", name, known)
        default = known[name].default
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not type(default):
            raise UserError(
                f"[method] {method}.{name} must be of type {type(default).__name__} (default {default!r}), got {value!r}."
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_range(method, kind, name, value)
        checked[name] = value
    return kind(**checked)


def _check_range(method: str, kind: type[Method], name: str, value: float) -> None:
    if name in kind.limits:
        low, high = kind.limits[name]
        if not low < value < high:
            allowed = f"above {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise UserError(f"[method] {method}.{name} must be {allowed}, got {value!r}.")
    elif not 0 <= value < math.inf:
        raise UserError(f"[method] {method}.{name} must be at least 0 and finite, got {value!r}.")
