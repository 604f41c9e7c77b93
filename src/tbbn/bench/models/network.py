"""The network: a backbone, a growing head, and the tensors a method remembers between tasks, in one state dict."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tbbn.bench.models.base import FEATURES_ONLY, Backbone, Features
from tbbn.bench.models.heads import Head
from tbbn.errors import UserError, unknown_name


@dataclass(frozen=True)
class Output:
    """Everything that a loss or a prediction may use, for a batch of N images.

    `logits` is (N, classes), `features` (N, D), `stages` the backbone's maps before their ReLU; to use them where there are
    none is an error. `similarity` (N, classes) is the score that the head scales into logits, if any; `state` holds the tensors
    that the method remembers.
    """

    logits: Tensor
    features: Tensor
    stages: tuple[Tensor, ...]
    similarity: Tensor | None
    task_sizes: tuple[int, ...]
    state: Mapping[str, Tensor]

    def heads(self) -> tuple[Tensor, ...]:
        """The logits of each task's classes, task 0 first."""
        return self.logits.split(self.task_sizes, dim=1)


_KEPT = "remembered."


def _encode(name: str) -> str:
    """Turn any text into a valid buffer name: without dots, and not an attribute of nn.Module."""
    return "@" + name.replace("%", "%25").replace(".", "%2E")


def _decode(buffer: str) -> str:
    return buffer[1:].replace("%2E", ".").replace("%25", "%")


class Network(nn.Module):
    """Backbone and head. `remember` adds a method's tensors to the state dict, so they are saved with the weights."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        if backbone.n_features != head.n_features:
            raise UserError(
                f"Network: the backbone gives {backbone.n_features} features but the head takes {head.n_features}; "
                "build the head with n_features=backbone.n_features."
            )
        self.backbone = backbone
        self.head = head
        self.remembered = nn.Module()

    @property
    def n_classes(self) -> int:
        return self.head.n_classes

    @property
    def task_sizes(self) -> tuple[int, ...]:
        return tuple(self.head.task_sizes)

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors that the method remembers, by name; not copies."""
        return {_decode(key): tensor for key, tensor in self.remembered._buffers.items() if tensor is not None}

    def forward(self, images: Tensor) -> Output:
        return self.classify(self.backbone(images))

    def classify(self, features: Features) -> Output:
        """The rest of the forward, from the features to the output."""
        logits, similarity = self.head.scores(features.pooled)
        stages = features.stages or FEATURES_ONLY
        return Output(logits, features.pooled, stages, similarity, self.task_sizes, self.state)

    def grow(self, n: int, generator: torch.Generator | None = None) -> None:
        """Add the classes of a new task to the head."""
        self.head.grow(n, generator)

    @torch.no_grad()
    def remember(self, name: str, tensor: Tensor) -> None:
        """Store a copy of a tensor on the network's device.

        A stored tensor of the same shape and dtype is overwritten in place, so that a captured step sees the new values.
        """
        key = _encode(name)
        held = self.remembered._buffers.get(key)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            held.copy_(tensor)
        else:
            device = next(self.parameters()).device
            self.remembered._buffers.pop(key, None)
            self.remembered.register_buffer(key, tensor.detach().to(device, copy=True))

    def recall(self, name: str) -> Tensor:
        """The tensor stored under a name."""
        state = self.state
        if name not in state:
            raise unknown_name("remembered tensor", name, state)
        return state[name]

    def forget(self, name: str) -> None:
        """Drop a stored tensor, if it exists."""
        self.remembered._buffers.pop(_encode(name), None)

    def teacher(self) -> Network:
        """A frozen copy in eval mode, for distillation."""
        return copy.deepcopy(self).eval().requires_grad_(False)

    def restore(self, state_dict: Mapping[str, Tensor], task_sizes: Sequence[int]) -> None:
        """Grow the head to `task_sizes`, register buffers for the remembered tensors, and load the state strictly."""
        have = list(self.task_sizes)
        if have != list(task_sizes[: len(have)]):
            raise UserError(
                f"Network.restore: the head has tasks of {have} classes, the state has {list(task_sizes)}; "
                "restore into a network with a fresh head."
            )
        for n in task_sizes[len(have) :]:
            self.grow(n)
        for name in self.state:
            self.forget(name)
        for key, tensor in state_dict.items():
            if key.startswith(_KEPT):
                self.remember(_decode(key.removeprefix(_KEPT)), tensor)
        self.load_state_dict(state_dict)
