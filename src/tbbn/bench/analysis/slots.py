"""Test whether a network tells new images from past ones by the statistics that normalise them.

A batch is [current ; memory]. TBBN normalises a current row by its own split and a memory row by the average over the splits,
so the output depends on a row's place in the batch, its slot. In training, new images are always in current slots and past ones
in memory slots. Here some of them are exchanged. If the prediction follows the slot and not the image, the network has learnt
the slot, which a test image does not have.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from tbbn.bench.data.types import Batch
from tbbn.bench.engine.forward import autocast, evaluation_forward
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.task import EngineTaskContext
from tbbn.bench.engine.torch_settings import torch_settings
from tbbn.bench.report.tables import Table
from tbbn.errors import UserError


@dataclass
class Seen:
    """How many images of a kind were classified correctly, and how many as one of the past classes."""

    images: int = 0
    right: int = 0
    past: int = 0

    def add(self, logits: Tensor, labels: Tensor, n_old_classes: int) -> None:
        predicted = logits.argmax(1)
        self.images += len(labels)
        self.right += int((predicted == labels).sum())
        self.past += int((predicted < n_old_classes).sum())


@dataclass
class Slots:
    """Predictions for training images by slot; ``*_eval`` with running statistics instead of the batch's."""

    new_in_current: Seen = field(default_factory=Seen)  # as in training
    new_in_memory: Seen = field(default_factory=Seen)
    new_eval: Seen = field(default_factory=Seen)
    past_in_memory: Seen = field(default_factory=Seen)  # as in training
    past_in_current: Seen = field(default_factory=Seen)
    past_eval: Seen = field(default_factory=Seen)


NAMES = {
    "new_in_current": "new, in current slots (as trained)",
    "new_in_memory": "new, in memory slots",
    "new_eval": "new, eval mode",
    "past_in_memory": "past, in memory slots (as trained)",
    "past_in_current": "past, in current slots",
    "past_eval": "past, eval mode",
}


def slots(run: Run, batches: int = 20) -> Slots:
    """Test the network of a run on training batches of its last task, as drawn and with rows exchanged."""
    context = last_task(run)
    found, old = Slots(), context.n_old_classes
    with torch.no_grad(), torch_settings(run.config, run.device):
        for batch in islice(context.batches("slots"), batches):
            new, past = batch.current, batch.memory
            logits = _training_logits(context, batch)
            found.new_in_current.add(logits[new], batch.labels[new], old)
            found.past_in_memory.add(logits[past], batch.labels[past], old)
            n = min(batch.n_current, batch.n_memory)
            swapped = exchange(batch, n)
            logits, labels, first = _training_logits(context, swapped), swapped.labels, past.start
            found.new_in_memory.add(logits[first : first + n], labels[first : first + n], old)
            found.past_in_current.add(logits[:n], labels[:n], old)
            logits = evaluation_forward(run.network.eval(), batch.images, run.config.precision).logits
            found.new_eval.add(logits[new], batch.labels[new], old)
            found.past_eval.add(logits[past], batch.labels[past], old)
    return found


def exchange(batch: Batch, n: int) -> Batch:
    """The batch with its first ``n`` current rows and its first ``n`` memory rows exchanged."""
    order = torch.arange(len(batch.labels), device=batch.labels.device)
    first = batch.memory.start
    order[:n], order[first : first + n] = torch.arange(first, first + n), torch.arange(n)
    return replace(batch, images=batch.images[order], labels=batch.labels[order])


def last_task(run: Run) -> EngineTaskContext:
    """The last task learnt, with the exemplars of the previous tasks.

    For an online task these are the past rows left in the reservoir, and batches are drawn as for an offline task: drawing them
    as a stream would store new rows among the past ones.
    """
    number = len(run.network.task_sizes) - 1
    context = run.context(run.scenario.tasks[number])
    memory = copy.copy(run.memory)
    memory.index = memory.index[context.labels(memory.index).to(memory.index.device) < context.n_old_classes]
    if not len(memory.index):
        raise UserError("slots: there are no exemplars of past tasks; look at a later task of a method with a memory.")
    return replace(context, memory=memory, config=replace(run.config, data=replace(run.config.data, online=False)))


def _training_logits(context: EngineTaskContext, batch: Batch) -> Tensor:
    """The logits in train mode. Restores the running statistics, and leaves the network in eval mode."""
    network = context.network
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.train()
    with autocast(context.config.precision, batch.images.device):
        logits = context.forward(network, batch).logits
    network.eval()
    for name, buffer in network.named_buffers():
        buffer.copy_(before[name])
    return logits


def slots_table(labels: Sequence[str], found: Sequence[Slots]) -> Table:
    """One row per kind of image and slot: for each run the percentages classified correctly and as past classes."""
    rows = []
    for key, name in NAMES.items():
        seen: list[Seen] = [getattr(entry, key) for entry in found]
        cells = (f"{100 * count / max(s.images, 1):.1f}" for s in seen for count in (s.right, s.past))
        rows.append((name, *cells))
    header = ("images", *(cell for label in labels for cell in (f"{label}: right %", "said past %")))
    notes = (
        "Training images of the last task (new) and exemplars (past), augmented, in batches [current ; memory].",
        "If 'said past' follows the slot, the network tells new from past by batch statistics, which are absent at test time.",
    )
    return Table(header, tuple(rows), notes)
