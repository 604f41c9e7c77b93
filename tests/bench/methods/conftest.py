"""A small world for methods: outputs made of random numbers, and a task context without an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.data.scenario import Task
from tbbn.bench.data.types import Batch
from tbbn.bench.methods import Method
from tbbn.bench.models import Network, Output, backbone


def seed(value: int) -> torch.Generator:
    return torch.Generator().manual_seed(value)


@dataclass
class FakeContext:
    """Rows of one tensor of images; what a method asks for is computed on the spot."""

    number: int
    task: Task
    network: Network
    previous: Network | None
    memory: ExemplarMemory
    images: Tensor
    all_labels: Tensor
    quirks: frozenset[str] = frozenset()
    asked: list[str] = field(default_factory=list)

    @property
    def n_old_classes(self) -> int:
        return self.task.classes.start

    @property
    def n_classes(self) -> int:
        return self.task.classes.stop

    @torch.no_grad()
    def outputs(self, rows: Tensor, *, flip: bool = False) -> Output:
        was = self.network.training
        images = self.images[rows]
        out = self.network.eval()(images.flip(3) if flip else images)
        self.network.train(was)
        return Output(out.logits, out.features, (), out.similarity, out.task_sizes, out.state)

    def labels(self, rows: Tensor) -> Tensor:
        return self.all_labels[rows]

    def batches(self, purpose: str) -> Iterator[Batch]:
        self.asked.append(purpose)
        for part in self.task.train.split(8):
            yield self.batch(torch.cat([part, self.memory.index[:3]]), n_memory=len(self.memory.index[:3]))

    def batch(self, rows: Tensor, n_memory: int) -> Batch:
        old, new = self.n_old_classes, self.n_classes
        return Batch(self.images[rows], self.all_labels[rows], rows, len(rows) - n_memory, n_memory, old, new)

    def forward(self, network: Network, batch: Batch) -> Output:
        return network(batch.images)

    def generator(self, purpose: str) -> torch.Generator:
        self.asked.append(purpose)
        return seed(1000 + self.number)


class World:
    """Tasks of 2, 3 and 2 classes, 12 images of 8x8 pixels a class."""

    sizes = (2, 3, 2)

    def __init__(self) -> None:
        n = sum(self.sizes)
        self.labels = torch.arange(n).repeat_interleave(12)
        pattern = torch.randn(n, 1, 8, 8, generator=seed(1))
        self.images = pattern[self.labels] + 0.5 * torch.randn(len(self.labels), 1, 8, 8, generator=seed(2))

    def context(self, method: Method, number: int = 0, budget: int = 12) -> FakeContext:
        """The context of a task, the tasks before it gone through without training."""
        net = Network(
            backbone("small", in_channels=1, last_relu=method.last_relu, generator=seed(3)), method.make_head(64)
        )
        previous, memory, first = None, ExemplarMemory(budget, selection="random"), 0
        for i, size in enumerate(self.sizes[: number + 1]):
            classes = range(first, first + size)
            first += size
            rows = torch.isin(self.labels, torch.tensor(classes)).nonzero()[:, 0]
            task = Task(i, classes, rows, rows[:0], rows[:0])
            net.grow(size, seed(10 + i))
            context = FakeContext(i, task, net, previous, memory, self.images, self.labels)
            if i < number:
                self.finish(method, context)
                self.unsettle(net, i)
                previous, memory = net.teacher(), context.memory
        return context

    def finish(self, method: Method, context: FakeContext) -> None:
        """What the engine does around the training of a task, without the training."""
        method.before_task(context)
        method.after_training(context)
        memory, rows = copy.copy(context.memory), context.task.train
        memory.update(rows, self.labels[rows], n_seen=context.n_classes, generator=seed(20 + context.number))
        context.memory = memory
        method.after_task(context)

    def unsettle(self, net: Network, value: int) -> None:
        """Moves weights and running statistics a little, as training would."""
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=seed(30 + value))
            net.train()(self.images)
            net.eval()

    def batch(self, labels: list[int], n_memory: int = 0, n_old: int = 5, n: int = 7) -> Batch:
        index = torch.arange(100, 100 + len(labels))
        return Batch(
            torch.zeros(len(labels), 1, 2, 2), torch.tensor(labels), index, len(labels) - n_memory, n_memory, n_old, n
        )

    def output(
        self, rows: int, sizes: tuple[int, ...] = (2, 3, 2), value: int = 0, eta: float = 1.7, cosine: bool = False
    ) -> Output:
        """Numbers of the right shapes; similarities lie in [-4, 0], or in [-1, 1] for ``cosine``."""
        g = seed(50 + value)
        draw = torch.rand(rows, sum(sizes), generator=g)
        similarity = 2 * draw - 1 if cosine else -4 * draw
        features = torch.randn(rows, 6, generator=g)
        stages = tuple(torch.randn(rows, c, h, w, generator=g) for c, h, w in ((3, 4, 5), (4, 2, 2)))
        return Output(eta * similarity, features, stages, similarity, sizes, {})


@pytest.fixture(scope="module")
def world() -> World:
    return World()
