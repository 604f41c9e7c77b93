"""The interface of a method: its losses, and what it does before and after a task. The engine owns the training loop.

A method is an immutable dataclass; its fields are its hyper-parameters. It never steps an optimiser, builds a loader or logs:
``loss`` maps a batch and the network's output to named terms, and the engine does the rest. To keep a tensor between tasks, a
method calls ``network.remember``: the tensor is then saved, restored and copied to the teacher with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.data.scenario import Task
from tbbn.bench.data.types import Batch
from tbbn.bench.models import Head, LinearHead, Network, Output

Losses = dict[str, Tensor]


@dataclass(frozen=True)
class Phase:
    """One stage of training within a task. A field that is None takes the run's setting (``train.epochs``, ...).

    ``rows`` says which rows an epoch consists of:

    - "replay": batches [current ; memory] of the task and the memory.
    - "balanced": the same, with as many rows of each new class as the memory has of each old one.
    - "oversampled": the same, with current rows drawn from the task plus two copies of the memory.
    - "exemplars": mixed batches from a memory that already holds exemplars of this task.
    - "holdout": mixed batches of the rows held out by :meth:`Method.holdout`.

    Without memory rows ("exemplars": without a budget) an epoch consists of the task's rows; :meth:`Method.phases` can leave the
    phase out. Mixed batches have no layout: a balanced norm treats them like plain batch norm.
    """

    name: str = "train"
    rows: str = "replay"
    loss: str = "loss"  # name of the method's loss function
    trainable: str = "all"  # see :meth:`Method.parameters`
    epochs: int | None = None
    lr: float | None = None
    lr_factor: float = 1.0  # multiplies the learning rate
    schedule: str | None = None  # "multistep", "cosine" or "constant"
    momentum: float | None = None
    weight_decay: float | None = None
    eval_mode: bool = False  # train with the network in eval mode: norms use their running statistics, unchanged
    keep: str | None = None  # which epoch's weights to keep: "last" or "best"
    uses_previous: bool = True  # False skips the previous network's forward


class TaskContext(Protocol):
    """The task being learnt, as a method sees it. The engine implements it."""

    task: Task
    network: Network
    previous: Network | None  # the network after the previous task, frozen; None in the first task
    memory: ExemplarMemory

    @property
    def number(self) -> int:
        """The task's number, from 0."""
        ...

    @property
    def n_old_classes(self) -> int:
        """The number of classes of the past tasks."""
        ...

    @property
    def n_classes(self) -> int:
        """The number of classes so far, including this task's."""
        ...

    def labels(self, rows: Tensor) -> Tensor:
        """The labels of training rows; classes are numbered in the order in which they arrive."""
        ...

    def outputs(self, rows: Tensor, *, flip: bool = False) -> Output:
        """The network's output on training rows, or on their mirror images, in eval mode without augmentation or gradients.

        It has no stages.
        """
        ...

    def batches(self, purpose: str) -> Iterator[Batch]:
        """One epoch of augmented batches [current ; memory], from a random stream for this purpose only."""
        ...

    def forward(self, network: Network, batch: Batch) -> Output:
        """The output on a batch from ``batches``: one forward with the batch's layout, as in training, with gradients."""
        ...

    def generator(self, *purpose: str | int) -> torch.Generator:
        """A random generator for this task and purpose only."""
        ...


@dataclass(frozen=True)
class Method:
    """The base of every method. Only ``loss`` must be defined."""

    needs_previous: ClassVar[bool] = False  # ``loss`` gets the output of the network after the previous task
    needs_stages: ClassVar[bool] = False  # ``loss`` uses the maps of the backbone's stages
    last_relu: ClassVar[bool] = True  # False removes the ReLU before the pooling, so that features may be negative
    uses_memory: ClassVar[bool] = True
    all_data: ClassVar[bool] = False  # each task trains on all data so far

    def make_head(self, n_features: int) -> Head:
        return LinearHead(n_features)

    def holdout(self) -> float:
        """The fraction of the rows of task and memory that the main phase leaves for a "holdout" phase."""
        return 0.0

    def memory_views(self, past_tasks: int) -> int:
        """The number of augmented views of each memory row in a batch; all but the first are strongly augmented."""
        return 1

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        return (Phase(),)

    def parameters(self, network: Network, trainable: str) -> list[nn.Parameter]:
        """The parameters that a phase trains: "all", "newest" (all but the head's blocks of past tasks) or "head"."""
        if trainable == "head":
            return list(network.head.parameters())
        parameters = list(network.parameters())
        if trainable == "newest":
            old = {id(p) for task in range(len(network.task_sizes) - 1) for p in network.head.block(task)}
            return [p for p in parameters if id(p) not in old]
        assert trainable == "all", trainable
        return parameters

    def before_task(self, context: TaskContext) -> None:
        """Called after the head has grown, before the first phase."""

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        """The loss terms by name; the engine minimises their sum. ``previous`` is the previous network's output, or None."""
        raise NotImplementedError

    def penalty(self, network: Network) -> Losses:
        """Loss terms that depend on the parameters, not on a batch; the engine adds them in every phase."""
        return {}

    def after_training(self, context: TaskContext) -> None:
        """Called after the last phase, before exemplars are chosen."""

    def after_task(self, context: TaskContext) -> None:
        """Called after the exemplars of this task are stored, before evaluation."""

    def predict(self, output: Output) -> Tensor:
        """Scores (N, classes); the largest is the prediction."""
        return output.logits
