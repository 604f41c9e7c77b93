"""A task being learnt: the rows of its phases, the batches of its epochs, and the passes that a method may request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.accelerators.graphs import CapturedFunction
from tbbn.bench import seeds
from tbbn.bench.config import RunConfig
from tbbn.bench.data.batches import BatchMaker, BatchSpec, EpochBlock
from tbbn.bench.data.device import to_device
from tbbn.bench.data.memory import ExemplarMemory, Reservoir
from tbbn.bench.data.sampling import IndexBlock, balanced_rows, epoch_blocks, online_blocks
from tbbn.bench.data.scenario import Scenario, Task
from tbbn.bench.data.selection import select
from tbbn.bench.data.types import Batch
from tbbn.bench.engine.forward import TrainingForward, evaluation_pass
from tbbn.bench.engine.ranks import Ranks
from tbbn.bench.engine.setup import ratio_of
from tbbn.bench.methods import Method, TaskContext
from tbbn.bench.models import Network, Output
from tbbn.bench.models.base import no_stages

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PhaseRows:
    """The rows that the epochs of a phase are drawn from."""

    kind: str  # :attr:`tbbn.bench.methods.Phase.rows`
    current: Tensor
    memory: Tensor
    ratio: tuple[int, int]  # of current to memory rows in a batch
    has_layout: bool  # batches are [current ; memory]; if False they are mixed, and ``current`` holds all rows


@dataclass(frozen=True, eq=False)
class Validation:
    """The pass over the validation rows of a task."""

    rows: Tensor
    loss: Tensor  # the pass writes its result here
    run: Callable[[Tensor], None]


@dataclass(eq=False)
class EngineTaskContext(TaskContext):
    """The engine's implementation of :class:`tbbn.bench.methods.TaskContext`."""

    task: Task
    network: Network
    previous: Network | None
    memory: ExemplarMemory
    config: RunConfig
    scenario: Scenario
    method: Method
    maker: BatchMaker
    training_forward: TrainingForward
    ranks: Ranks
    reservoir: Reservoir | None = None  # online: the memory after the pass over the task
    validation: Validation | None = None  # made on first use

    @property
    def number(self) -> int:
        return self.task.number

    @property
    def n_old_classes(self) -> int:
        return self.task.classes.start

    @property
    def n_classes(self) -> int:
        return self.task.classes.stop

    def generator(self, *purpose: str | int) -> torch.Generator:
        return seeds.generator(self.config.seed, *purpose, self.number)

    def labels(self, rows: Tensor) -> Tensor:
        labels = self.maker.data.labels
        return labels[to_device(rows, labels.device)]

    def hook(self, name: str) -> Any:
        """Call one of the method's functions that take the context. What it draws from a global generator is seeded."""
        device = self.maker.data.labels.device
        with seeds.seeded_globals(device, self.config.seed, "global", name, self.number):
            return getattr(self.method, name)(self)

    # Training rows. --------------------------------------------------------------------------------------------------

    def phase_rows(self, kind: str) -> PhaseRows:
        """The rows of a phase; chosen once, when the phase begins."""
        ratio = ratio_of(self.config)
        if kind == "replay":
            return self._replay_rows(ratio)
        if kind in ("balanced", "oversampled"):
            current, memory = self._seen_rows()
            if len(memory) and kind == "balanced":
                return self._balanced_rows(current, memory)
            if len(memory):
                return PhaseRows(kind, torch.cat([memory, current, memory]), memory, ratio, has_layout=True)
        elif kind == "holdout" and len(self.held_out()):
            current = self.held_out()
        elif kind == "exemplars" and self.memory.budget:
            kept = self.updated_memory("provisional exemplars") if self.reservoir is None else self.reservoir
            current = kept.index.cpu()
        else:
            current = self._train_rows()
        return PhaseRows(kind, current, current[:0], ratio, has_layout=False)

    def _replay_rows(self, ratio: tuple[int, int]) -> PhaseRows:
        current, memory, out = self._train_rows(), self._memory_rows(), self.held_out()
        current, memory = current[~torch.isin(current, out)], memory[~torch.isin(memory, out)]
        if self.config.batch.current_from == "union":
            current = torch.cat([current, memory])
        return PhaseRows("replay", current, memory, ratio, has_layout=True)

    def _balanced_rows(self, current: Tensor, memory: Tensor) -> PhaseRows:
        n_per_class = max(1, len(memory) // self.n_old_classes)
        current = balanced_rows(current, self.labels(current).cpu(), n_per_class, self.generator("balanced"))
        # A batch has current and memory rows in proportion to both sets, but at least one current row: after many tasks the
        # proportion alone would give less than one.
        least = -(-len(memory) // (self.config.batch.size - 1))
        return PhaseRows("balanced", current, memory, (max(len(current), least), len(memory)), has_layout=True)

    def _train_rows(self) -> Tensor:
        """The task's training rows; for joint training all rows so far."""
        if self.method.all_data:
            return torch.cat([task.train for task in self.scenario.tasks[: self.number + 1]])
        return self.task.train

    def _memory_rows(self) -> Tensor:
        return self.memory.index.cpu() if self.method.uses_memory else self.task.train[:0]

    def _seen_rows(self) -> tuple[Tensor, Tensor]:
        """Rows of the task and of the memory. After an online pass, only the rows in the reservoir are left."""
        if self.reservoir is None:
            return self._train_rows(), self._memory_rows()
        stored = self.reservoir.index.cpu()
        is_new = self.labels(stored).cpu() >= self.n_old_classes
        return (stored[is_new], stored[~is_new]) if is_new.any() else (stored, stored[:0])

    def held_out(self) -> Tensor:
        """Class-balanced rows of the task and the memory, reserved for a "holdout" phase; none in the first task."""
        share = self.method.holdout()
        if not share or not len(self.memory) or not self.number:
            return self.task.train[:0]
        n_per_class = max(1, round(share * len(self.memory) / self.n_old_classes))
        rows = torch.cat([self.memory.index, self.task.train])
        return rows[select("random", None, self.labels(rows).cpu(), n_per_class, self.generator("holdout"))]

    def draw(self, rows: PhaseRows, *purpose: str | int) -> list[EpochBlock]:
        """Draw the rows and augmentation parameters of an epoch on the CPU, and copy them to the device."""
        generator, batch = self.generator("batches", *purpose), self.config.batch
        blocks: list[IndexBlock]
        if self.config.data.online and rows.kind == "replay" and not self.method.all_data:
            blocks, reservoir = online_blocks(
                rows.current,
                self.memory.reservoir(),
                batch_size=batch.size,
                ratio=rows.ratio,
                last=batch.last,
                past_only=batch.memory_from == "past",
                without=self.held_out(),
                generator=generator,
            )
            # Only the first pass over an online task fills the memory; later passes, which a method requests, store nothing.
            self.reservoir = reservoir if self.reservoir is None else self.reservoir
        else:
            blocks = epoch_blocks(
                rows.current,
                rows.memory,
                batch_size=batch.size,
                ratio=rows.ratio,
                length=batch.length,
                last=batch.last if rows.kind in ("replay", "oversampled") else "short",
                generator=generator,
            )
        return [
            self.maker.draw(block, self._spec(block, rows.has_layout), self.generator("augmentation", *purpose, i))
            for i, block in enumerate(blocks)
        ]

    def _spec(self, block: IndexBlock, has_layout: bool) -> BatchSpec:
        return BatchSpec(
            n_current=block.n_current,
            n_memory=block.n_memory,
            views=self.method.memory_views(self.number) if has_layout and block.n_memory else 1,
            past_tasks=self.number,
            n_old_classes=self.n_old_classes,
            n_classes=self.n_classes,
            has_layout=has_layout,
        )

    # Passes without training. ----------------------------------------------------------------------------------------

    def batches(self, purpose: str) -> Iterator[Batch]:
        reservoir = self.reservoir
        blocks = self.draw(self.phase_rows("replay"), purpose)
        self.reservoir = reservoir  # drawing these batches must not store rows
        for block in blocks:
            for i, prefetched in zip(range(block.steps), self.maker.data.prefetch(block.index), strict=False):
                inputs = [*(values[i] for values in block.parameters), *prefetched]
                yield self.maker.make_batch(block.spec, block.index[i], inputs)

    def forward(self, network: Network, batch: Batch) -> Output:
        with self.ranks.alone(network):
            return replace(self.training_forward, separate=False)(network, batch)

    def outputs(self, rows: Tensor, *, flip: bool = False) -> Output:
        parts = self._evaluate(rows, _without_stages, flip)
        similarities = [part.similarity for part in parts if part.similarity is not None]
        return Output(
            logits=self._joined([part.logits for part in parts], rows),
            features=self._joined([part.features for part in parts], rows),
            stages=_FORWARD_ONLY,
            similarity=self._joined(similarities, rows) if similarities else None,
            task_sizes=parts[0].task_sizes,
            state=parts[0].state,
        )

    def validation_loss(self) -> Tensor:
        """Cross-entropy over all classes so far on the validation rows; the paper's code selects epochs by it.

        On a GPU the pass is captured, like steps: while the host launches kernels one by one, no other lane can advance.
        """
        if self.validation is None:
            rows, data = self.validation_rows(), self.maker.data
            capture = data.labels.is_cuda and not data.is_streamed and self.ranks.size == 1
            rows = to_device(rows, data.labels.device) if capture else rows
            run = CapturedFunction(self._validate) if capture else self._validate
            self.validation = Validation(rows, torch.zeros((), device=data.labels.device), run)
        self.validation.run(self.validation.rows)
        return self.validation.loss

    def _validate(self, rows: Tensor) -> None:
        assert self.validation is not None
        logits = self._joined(self._evaluate(rows, lambda output: output.logits), rows)
        self.validation.loss.copy_(F.cross_entropy(logits.float(), self.labels(rows)))

    def validation_rows(self) -> Tensor:
        """The task's validation rows; for joint training, those of all tasks so far.

        With ``data.validate = "whole-batches"`` the task's rows are sorted by class, and a short last batch is left out.
        """
        if self.method.all_data:
            return torch.cat([task.validation for task in self.scenario.tasks[: self.number + 1]])
        rows, size = self.task.validation, self.config.batch.size
        if self.config.data.validate == "all":
            return rows
        return rows[self.labels(rows).cpu().argsort(stable=True)][: len(rows) // size * size]

    def _evaluate(self, rows: Tensor, keep: Callable[[Output], T], flip: bool = False) -> list[T]:
        """``keep(output)`` for each batch of this rank's part of the rows."""
        size, precision, rows = self.config.batch.evaluation, self.config.precision, self.ranks.part(rows)
        return list(evaluation_pass(self.network, self.maker.data, rows, size, precision, keep, flip))

    def _joined(self, parts: list[Tensor], rows: Tensor) -> Tensor:
        """The values of all rows, gathered from the batches of all ranks."""
        return self.ranks.gather(torch.cat(parts), len(rows))

    def updated_memory(self, purpose: str = "exemplars") -> ExemplarMemory:
        """The memory after this task; ``self.memory`` does not change."""
        memory = copy.copy(self.memory)
        if self.reservoir is not None and purpose == "exemplars":
            memory.adopt(self.reservoir, self.maker.data.labels.cpu())
            return memory
        rows = memory.candidates(self.task.train)
        scores = None if memory.scores is None else getattr(self.outputs(rows), memory.scores).cpu()
        labels = self.labels(rows).cpu()
        memory.update(rows, labels, n_seen=self.n_classes, scores=scores, generator=self.generator(purpose))
        return memory


_FORWARD_ONLY = no_stages(
    "the output of context.outputs has no stages; context.forward on a batch of context.batches has."
)


def _without_stages(output: Output) -> Output:
    return Output(output.logits, output.features, (), output.similarity, output.task_sizes, output.state)
