"""A task being learnt: what the engine hands to a method, and the passes over data in which nothing is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench import seeds
from tbbn.bench.data.augment import Augment
from tbbn.bench.data.batches import Block, balanced_rows, epoch_blocks, stream_blocks
from tbbn.bench.data.device import DeviceDataset
from tbbn.bench.data.memory import ExemplarMemory, Reservoir, select
from tbbn.bench.data.scenario import Scenario, Task
from tbbn.bench.data.types import Batch
from tbbn.bench.engine.step import Shape, autocast
from tbbn.bench.methods import Method
from tbbn.bench.models import Network, Output


@dataclass(frozen=True, eq=False)
class Drawn:
    """Steps of one layout with all that is random about them: rows (steps, B), parameters (steps, n, k) each."""

    shape: Shape
    index: Tensor
    parameters: list[Tensor]

    @property
    def steps(self) -> int:
        return len(self.index)


@dataclass(frozen=True, eq=False)
class Rows:
    """What a phase's epochs are drawn from: rows of the data, how batches are made of them, and whether these have a layout."""

    kind: str
    current: Tensor
    memory: Tensor
    ratio: tuple[int, int]
    layout: bool


@dataclass(eq=False)
class LearningStage:
    """The engine's :class:`tbbn.bench.methods.Stage`."""

    number: int
    task: Task
    network: Network
    previous: Network | None
    memory: ExemplarMemory
    scenario: Scenario
    method: Method
    data: DeviceDataset
    augment: Augment
    strong: Augment
    seed: int
    batch_size: int
    ratio: tuple[int, int]
    length: str
    last: str
    from_union: bool
    online: bool
    past_only: bool
    evaluation_size: int
    precision: str
    passed: Reservoir | None = field(default=None)  # the memory after an online pass

    @property
    def n_old_classes(self) -> int:
        return self.task.classes.start

    @property
    def n_classes(self) -> int:
        return self.task.classes.stop

    def generator(self, *purpose: str | int) -> torch.Generator:
        return seeds.generator(self.seed, *purpose, self.number)

    def labels(self, rows: Tensor) -> Tensor:
        return self.data.labels[sent(rows, self.data.labels.device)]

    # What a phase trains on. -----------------------------------------------------------------------------------------

    def train_rows(self) -> Tensor:
        """The task's training rows; all rows so far for the upper bound."""
        if self.method.all_data:
            return torch.cat([task.train for task in self.scenario.tasks[: self.number + 1]])
        return self.task.train

    def held_out(self) -> Tensor:
        """A class-balanced share of new and stored rows, left out of the main phase for a later one; none at first."""
        share = self.method.holdout()
        if not share or not len(self.memory) or not self.number:
            return torch.zeros(0, dtype=torch.int64)
        each = max(1, round(share * len(self.memory) / self.n_old_classes))
        rows = torch.cat([self.memory.index, self.task.train])
        return rows[select("random", None, self.labels(rows).cpu(), each, self.generator("holdout"))]

    def phase_rows(self, rows: str) -> Rows:
        """What a phase's epochs are drawn from; chosen once, when the phase begins."""
        task, memory = self.train_rows(), self.memory.index.cpu() if self.method.uses_memory else self.task.train[:0]
        if rows == "balanced" and self.passed is not None:
            # Online the task has gone by: what is left of it is what was stored.
            stored = self.passed.index.cpu()
            new = self.labels(stored).cpu() >= self.n_old_classes
            task, memory = (stored[new], stored[~new]) if new.any() else (stored, memory[:0])
        if rows == "replay":
            out = self.held_out()
            task, memory = task[~torch.isin(task, out)], memory[~torch.isin(memory, out)]
            return Rows(rows, torch.cat([task, memory]) if self.from_union else task, memory, self.ratio, True)
        if rows == "balanced" and len(memory):
            each = max(1, len(memory) // self.n_old_classes)
            task = balanced_rows(task, self.labels(task).cpu(), each, self.generator("balanced"))
            # In proportion, but with a row of the task in every batch: after many tasks its share may be less than one.
            least = -(-len(memory) // (self.batch_size - 1))
            return Rows(rows, task, memory, (max(len(task), least), len(memory)), True)
        if rows == "holdout" and len(self.held_out()):
            return Rows(rows, self.held_out(), memory[:0], self.ratio, False)
        if rows == "exemplars" and self.memory.budget:
            kept = self.updated_memory("provisional exemplars") if self.passed is None else self.passed
            return Rows(rows, kept.index.cpu(), memory[:0], self.ratio, False)
        return Rows(rows, task, memory[:0], self.ratio, False)

    def draw(self, rows: Rows, *purpose: str | int) -> list[Drawn]:
        """An epoch: every index and every augmentation parameter, drawn on the CPU and sent to the device in one go."""
        generator = self.generator("batches", *purpose)
        blocks: list[Block]
        if self.online and rows.kind == "replay" and not self.method.all_data:
            blocks, passed = stream_blocks(
                rows.current,
                self.memory.reservoir(),
                batch_size=self.batch_size,
                ratio=rows.ratio,
                last=self.last,
                past_only=self.past_only,
                without=self.held_out(),
                generator=generator,
            )
            # The first pass counts; a method that asks for the task's batches again stores nothing more of them.
            self.passed = passed if self.passed is None else self.passed
        else:
            blocks = epoch_blocks(
                rows.current,
                rows.memory,
                batch_size=self.batch_size,
                ratio=rows.ratio,
                length=self.length,
                last=self.last if rows.kind == "replay" else "short",
                generator=generator,
            )
        return [
            self._drawn(block, rows.layout, self.generator("augmentation", *purpose, i))
            for i, block in enumerate(blocks)
        ]

    def _drawn(self, block: Block, layout: bool, generator: torch.Generator) -> Drawn:
        views = self.method.memory_views(self.number) if layout and block.n_memory else 1
        shape = Shape(block.n_current, block.n_memory, views, self.number, self.n_old_classes, self.n_classes, layout)
        index = block.index
        if shape.extra_rows:
            index = torch.cat([index, index[:, block.n_current :].repeat(1, views - 1)], dim=1)
        size = (self.data.images.shape[2], self.data.images.shape[3])
        drawn = [self.augment.draw(block.steps * shape.base_rows, generator, size).unflatten(0, (block.steps, -1))]
        if shape.extra_rows:
            extra = self.strong.draw(block.steps * shape.extra_rows, generator, size)
            drawn.append(extra.unflatten(0, (block.steps, -1)))
        device = self.data.images.device
        return Drawn(shape, sent(index, device), [sent(d, device) for d in drawn])

    # Passes in which nothing is trained. -----------------------------------------------------------------------------

    def batches(self, purpose: str) -> Iterator[Batch]:
        passed = self.passed
        blocks = self.draw(self.phase_rows("replay"), purpose)
        self.passed = passed  # an extra look at a stream does not count as its pass
        for drawn in blocks:
            parts = drawn.index[:, : drawn.shape.base_rows]
            for rows, parameters, prefetched in zip(
                parts, drawn.parameters[0], self.data.prefetch(parts), strict=False
            ):
                images = self.data.normalised(self.augment.apply(self.data.gather(rows, prefetched), parameters))
                shape = drawn.shape
                yield Batch(
                    images,
                    self.data.labels[rows],
                    rows,
                    shape.n_current,
                    shape.n_memory,
                    shape.n_old_classes,
                    shape.n_classes,
                )

    def outputs(self, rows: Tensor) -> Output:
        parts = list(evaluated(self.network, self.data, rows, self.evaluation_size, self.precision, _without_stages))
        similar = [p.similarity for p in parts if p.similarity is not None]
        return Output(
            logits=torch.cat([p.logits for p in parts]),
            features=torch.cat([p.features for p in parts]),
            stages=(),
            similarity=torch.cat(similar) if similar else None,
            task_sizes=parts[0].task_sizes,
            state=parts[0].state,
        )

    def validation_loss(self) -> Tensor:
        """Cross-entropy over all classes seen, on the current task's validation rows: what the paper's code selects by."""
        rows = self.task.validation
        logits = torch.cat(
            list(evaluated(self.network, self.data, rows, self.evaluation_size, self.precision, lambda out: out.logits))
        )
        return F.cross_entropy(logits.float(), self.labels(rows))

    def updated_memory(self, purpose: str = "exemplars") -> ExemplarMemory:
        """The memory after this task; the stage's own is left as it is."""
        memory = copy.copy(self.memory)
        if self.passed is not None and purpose == "exemplars":
            memory.adopt(self.passed, self.data.labels.cpu())
            return memory
        rows = memory.candidates(self.task.train)
        scores = None
        if memory.scores is not None:
            scores = getattr(self.outputs(rows), memory.scores).cpu()
        memory.update(
            rows, self.labels(rows).cpu(), n_seen=self.n_classes, scores=scores, generator=self.generator(purpose)
        )
        return memory


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device. The host does not wait for the copy, as it would for one from memory that is not pinned.

    A wait in one lane is a wait in all: whoever is to enqueue their work stands still.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _without_stages(output: Output) -> Output:
    return Output(output.logits, output.features, (), output.similarity, output.task_sizes, output.state)


@torch.no_grad()
def _forward(network: Network, images: Tensor, precision: str) -> Output:
    """A forward of evaluation. The head works in float32: in bf16 one prediction in a hundred is an exact tie of two logits."""
    with autocast(precision, images.device):
        features = network.backbone(images)
    return network.classify(replace(features, pooled=features.pooled.float()))


T = TypeVar("T")


def evaluated(
    network: Network, data: DeviceDataset, rows: Tensor, size: int, precision: str, keep: Callable[[Output], T]
) -> Iterator[T]:
    """What ``keep`` makes of the network's output in eval mode, batch by batch over ``rows``."""
    was_training = network.training
    network.eval()
    try:
        prefetched = data.prefetch(rows.split(size))
        for part, read in zip(sent(rows, data.images.device).split(size), prefetched, strict=False):
            yield keep(_forward(network, data.evaluation_images(part, read), precision))
    finally:
        network.train(was_training)
