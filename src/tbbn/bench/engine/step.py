"""A training step as a function of device tensors: rows of the data set and augmentation parameters in, loss terms out.

Everything random was drawn before the epoch, everything it needs lies on the device, and nothing in it waits for the device:
so a step can run eagerly, or be captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from tbbn.bench.data import crop
from tbbn.bench.data.augment import Augment
from tbbn.bench.data.device import DeviceDataset
from tbbn.bench.data.types import Batch
from tbbn.bench.methods import Losses
from tbbn.bench.models import Network, Output
from tbbn.nn import balance, is_balanced, penalty


@dataclass(frozen=True)
class Shape:
    """What is the same for all steps of a block: the batch's layout and the place in the sequence of tasks."""

    n_current: int
    n_memory: int
    views: int  # of each memory row; those after the first are strongly augmented
    past_tasks: int
    n_old_classes: int
    n_classes: int
    layout: bool  # whether rows are [current ; memory]; mixed batches have none

    @property
    def base_rows(self) -> int:
        return self.n_current + self.n_memory

    @property
    def extra_rows(self) -> int:
        return self.n_memory * (self.views - 1)


LossFunction = Callable[[Batch, Output, Output | None], Losses]


@dataclass(eq=False)
class Step:
    """The eager step. ``totals`` adds up the loss terms, in the order of ``names``, until they are read."""

    data: DeviceDataset
    augment: Augment
    strong: Augment
    network: Network
    previous: Network | None
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    shape: Shape
    clip_norm: float = 0.0
    clip_value: float = 0.0
    separate: bool = False
    precision: str = "fp32"
    class_task: Tensor | None = None  # (classes,) the task of each class, where the norm asks for it
    told: bool = True  # whether the norms learn what a batch is made of; without it they are batch norm

    def __post_init__(self) -> None:
        self.names: list[str] = []
        self.count = 0  # steps since the totals were read
        self.totals = torch.zeros(0, device=self.data.images.device)
        # Of these, how many came before a loss that was not finite.
        self.sound = torch.zeros((), dtype=torch.int64, device=self.totals.device)
        self.balanced = self.told and self.shape.layout and not self.separate and is_balanced(self.network)
        half = self.precision == "bf16" and self.totals.is_cuda
        self.working = WorkingCopies(self.network) if half else None
        # Made once for this kind of batch: nobody trains the previous network.
        self.teacher = WorkingCopies(self.previous) if half and self.previous is not None else self.previous

    def __call__(self, index: Tensor, drawn: list[Tensor]) -> None:
        """Train on one batch: ``index`` (rows,), for each augmentation its parameters (rows, k), and the images if streamed."""
        self.count += 1
        self.train(index, drawn)

    def train(self, index: Tensor, drawn: list[Tensor]) -> None:
        terms = self.losses(self.batch(index, drawn))
        names = [*terms, "total"]
        if names != self.names:
            self.names, self.totals = names, torch.zeros(len(names), device=self.totals.device)
        total = reduce(torch.add, terms.values())
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        if self.working is not None:
            self.working.hand_back()
        if self.clip_value:
            nn.utils.clip_grad_value_(self.parameters, self.clip_value)
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        self.totals += torch.stack([*terms.values(), total]).detach().float()
        so_far = self.totals[-1]
        self.sound += so_far - so_far == 0  # once not finite, a sum stays so; isfinite would be four launches

    def batch(self, index: Tensor, drawn: list[Tensor]) -> Batch:
        shape = self.shape
        n_memory = shape.n_memory * shape.views if shape.layout else 0
        n_current = shape.n_current if shape.layout else shape.base_rows
        labels = self.data.labels[index]
        images = self.images(index, drawn)
        return Batch(images, labels, index, n_current, n_memory, shape.n_old_classes, shape.n_classes)

    def images(self, index: Tensor, drawn: list[Tensor]) -> Tensor:
        """The rows' images, augmented and normalised."""
        n, more, data = self.shape.base_rows, self.shape.extra_rows, self.data
        stored, rows = data.locate(index, drawn)
        if not more and crop.suits(self.augment, stored):
            return crop.cropped(self.augment, stored, rows, drawn[0], data.mean, data.std, data.memory_format)
        raw = data.gather(index, drawn)
        images = self.augment.apply(raw[:n] if more else raw, drawn[0])
        if more:
            images = torch.cat([images, self.strong.apply(raw[n:], drawn[1])])
        return data.normalised(images)

    def losses(self, batch: Batch) -> Losses:
        with autocast(self.precision, batch.images.device):
            previous = None
            if self.teacher is not None:
                with torch.no_grad():
                    previous = self.teacher(batch.images)
            output = self.forward(batch)
            terms = self.loss(batch, output, previous)
            extra = penalty(self.network) if self.balanced else None
        return terms if extra is None else {**terms, "norm": extra}

    def forward(self, batch: Batch) -> Output:
        network: Callable[[Tensor], Output] = self.network
        if self.working is not None:
            self.working.refresh()
            network = self.working
        if self.separate and batch.n_memory:
            parts = [network(batch.images[rows]) for rows in (batch.current, batch.memory)]
            return joined(*parts)
        if not self.balanced:
            return network(batch.images)
        ids = None if self.class_task is None else self.class_task[batch.labels]
        with balance(
            self.network,
            current=batch.n_current,
            memory=batch.n_memory,
            past_tasks=self.shape.past_tasks,
            task_ids=ids,
        ):
            return network(batch.images)


class WorkingCopies:
    """The network with bf16 copies in the place of its convolutions' weights.

    Autocast makes the same copies, each in a launch of its own, and turns each gradient back in another: a quarter of all the
    launches of a ResNet-32 step. Here all are made together.
    """

    def __init__(self, network: Network) -> None:
        named = {f"{name}.weight": m.weight for name, m in network.named_modules() if isinstance(m, nn.Conv2d)}
        self.network, self.weights = network, list(named.values())
        self.copies = {
            name: weight.detach().bfloat16().requires_grad_(weight.requires_grad) for name, weight in named.items()
        }
        self.gradients = [torch.empty_like(weight) if weight.requires_grad else None for weight in self.weights]

    def __call__(self, images: Tensor) -> Output:
        return torch.func.functional_call(self.network, self.copies, (images,))

    @torch.no_grad()
    def refresh(self) -> None:
        if self.weights:
            torch._foreach_copy_(list(self.copies.values()), self.weights)

    @torch.no_grad()
    def hand_back(self) -> None:
        """Give the weights the gradients of their copies."""
        made, found = [], []
        for weight, copy, gradient in zip(self.weights, self.copies.values(), self.gradients, strict=True):
            if copy.grad is not None:
                assert weight.grad is None and gradient is not None
                made.append(gradient)
                found.append(copy.grad)
                weight.grad, copy.grad = gradient, None
        if made:
            torch._foreach_copy_(made, found)


def joined(first: Output, second: Output) -> Output:
    """The outputs of two parts of a batch as those of the whole."""
    similarity = None
    if first.similarity is not None and second.similarity is not None:
        similarity = torch.cat([first.similarity, second.similarity])
    return Output(
        logits=torch.cat([first.logits, second.logits]),
        features=torch.cat([first.features, second.features]),
        stages=tuple(torch.cat(pair) for pair in zip(first.stages, second.stages, strict=True)),
        similarity=similarity,
        task_sizes=first.task_sizes,
        state=first.state,
    )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


class Captured:
    """A step captured as a CUDA graph after a few eager ones, which are training steps like any other."""

    EAGER_STEPS = 3

    def __init__(self, step: Step) -> None:
        self.step, self.done = step, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, index: Tensor, drawn: list[Tensor]) -> None:
        self.done += 1
        if self.done == 1:
            self.index, self.drawn = index.clone(), [d.clone() for d in drawn]
        # Eager steps read them too: kernels are compiled for the alignment of what they are given, and never while capturing.
        self.index.copy_(index)
        for mine, given in zip(self.drawn, drawn, strict=True):
            mine.copy_(given)
        if self.done <= self.EAGER_STEPS:
            self.step(self.index, self.drawn)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # Captured on the run's own stream: libraries keep a workspace for each stream, and graphs captured on a common
            # one would share it when they are replayed side by side.
            stream = torch.cuda.current_stream()
            own = None if stream == torch.cuda.default_stream() else stream
            with torch.cuda.graph(self.graph, stream=own):
                self.step.train(self.index, self.drawn)
        self.step.count += 1
        self.graph.replay()


def eager(step: Step | Captured) -> Step:
    """The step itself, captured or not."""
    return step.step if isinstance(step, Captured) else step


def read_totals(steps: Iterable[Step | Captured]) -> dict[str, float]:
    """The mean of each loss term over the steps since the last reading; the totals begin again, if they are finite."""
    sums: dict[str, float] = {}
    count = 0
    for step in map(eager, steps):
        values = step.totals.tolist()
        for name, value in zip(step.names, values, strict=True):
            sums[name] = sums.get(name, 0.0) + value
        count += step.count
        if all(map(math.isfinite, values)):
            step.totals.zero_()
            step.sound.zero_()
            step.count = 0
    return {name: value / max(count, 1) for name, value in sums.items()}
