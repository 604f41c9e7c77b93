"""Forward passes: for training, where norms may need the batch's layout, and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from tbbn.bench.data.device import DeviceDataset, to_device
from tbbn.bench.data.types import Batch
from tbbn.bench.models import Network, Output
from tbbn.bench.models.base import joined_stages
from tbbn.nn import balance
from tbbn.nn.sync import Counts

T = TypeVar("T")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


@dataclass(frozen=True, eq=False)
class TrainingForward:
    """The training forward of a batch [current ; memory], inside ``balance`` if the norms take a layout."""

    past_tasks: int
    takes_layout: bool  # whether the network has norms that need the layout
    class_task: Tensor | None = None  # (classes,) the task of each class, if a norm wants task ids
    separate: bool = False  # forward current and memory rows separately, as some released programs do

    def __call__(
        self,
        network: Network,
        batch: Batch,
        call: Callable[[Tensor], Output] | None = None,
        counts: Counts | None = None,
    ) -> Output:
        """Forward a batch. ``call`` may replace ``network(images)`` to run the same modules with different weights.

        With ``counts``, the current and memory rows of every rank, the batch is this rank's part of a larger one.
        """
        call = network if call is None else call
        # All ranks must take the same branch, even if one of them has no memory rows.
        if self.separate and any(memory for _, memory in counts or [(0, batch.n_memory)]):
            return _joined(call(batch.images[batch.current]), call(batch.images[batch.memory]))
        if not self.takes_layout:
            return call(batch.images)
        task_ids = None if self.class_task is None else self.class_task[batch.labels]
        # Without memory rows the layers are batch norm, as in the first task. Saying so, a run without a memory means it.
        means_it = task_ids is None and not any(memory for _, memory in counts or [(0, batch.n_memory)])
        with balance(
            network,
            current=batch.n_current,
            memory=batch.n_memory,
            past_tasks=0 if means_it else self.past_tasks,
            task_ids=task_ids,
            rank_counts=counts,
        ):
            return call(batch.images)

    def mixed(
        self, network: Network, batch: Batch, call: Callable[[Tensor], Output], counts: Counts | None = None
    ) -> Output:
        """Forward a batch whose rows are not marked as current or memory, with plain batch norm."""
        if not self.takes_layout:
            return call(batch.images)
        with balance(network, current=len(batch.images), memory=0, past_tasks=0, rank_counts=counts):
            return call(batch.images)


def _joined(first: Output, second: Output) -> Output:
    """Concatenate the outputs of two parts of a batch."""
    similarity = None
    if first.similarity is not None and second.similarity is not None:
        similarity = torch.cat([first.similarity, second.similarity])
    return Output(
        logits=torch.cat([first.logits, second.logits]),
        features=torch.cat([first.features, second.features]),
        stages=joined_stages(first.stages, second.stages),
        similarity=similarity,
        task_sizes=first.task_sizes,
        state=first.state,
    )


class WorkingCopies:
    """A network that computes with bf16 copies of its convolution weights.

    Autocast needs a launch for each weight copy and each gradient cast: a quarter of all launches of a ResNet-32 step. Here one
    launch makes all copies, and one casts all gradients.
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
        """Update the copies from the weights."""
        if self.weights:
            torch._foreach_copy_(list(self.copies.values()), self.weights)

    @torch.no_grad()
    def copy_gradients_back(self) -> None:
        """Move the gradients of the copies to the weights."""
        targets, sources = [], []
        for weight, copy, gradient in zip(self.weights, self.copies.values(), self.gradients, strict=True):
            if copy.grad is not None and weight.grad is not None:  # from a method's penalty
                weight.grad += copy.grad
                copy.grad = None
            elif copy.grad is not None:
                assert gradient is not None
                targets.append(gradient)
                sources.append(copy.grad)
                weight.grad, copy.grad = gradient, None
        if targets:
            torch._foreach_copy_(targets, sources)


@torch.no_grad()
def evaluation_forward(network: Network, images: Tensor, precision: str) -> Output:
    """A forward in eval mode. The head computes in float32: in bf16 one prediction in a hundred would have tied logits."""
    with autocast(precision, images.device):
        features = network.backbone(images)
    return network.classify(replace(features, pooled=features.pooled.float()))


def evaluation_pass(
    network: Network,
    data: DeviceDataset,
    rows: Tensor,
    batch_size: int,
    precision: str,
    keep: Callable[[Output], T],
    flip: bool = False,
) -> Iterator[T]:
    """Forward ``rows``, or their mirror images, in eval mode, batch by batch; yields ``keep(output)`` for each batch."""
    was_training = network.training
    network.eval()
    try:
        prefetch = data.prefetch(rows.split(batch_size))
        for part, prefetched in zip(to_device(rows, data.images.device).split(batch_size), prefetch, strict=False):
            images = data.evaluation_images(part, prefetched)
            yield keep(evaluation_forward(network, images.flip(3) if flip else images, precision))
    finally:
        network.train(was_training)
