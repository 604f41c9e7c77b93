"""Bias correction (Wu et al., 2019): the logits of each task's head get a scale and an offset, fitted on held-out rows.

First phase: L = (1 - l) CE + l * KD, l = C_old / C_all, KD the cross-entropy of all old logits with the teacher's at
temperature T. Second phase, from the second task on: with the network frozen and in eval mode, alpha and beta of the
newest head, o -> alpha o + beta, are fitted on new and stored rows held out of the first, L = CE + 0.05 beta^2. They
are part of the head, so a teacher's logits are corrected ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, Phase, TaskContext
from tbbn.bench.methods.terms import cross_entropy, shared_distillation
from tbbn.bench.models import Head, LinearHead, Network, Output
from tbbn.registry import register_method


class BiasCorrectedHead(LinearHead):
    """A linear head with logits alpha_t o + beta_t for the classes of task t; ``similarity`` is what beta is added to."""

    def __init__(self, n_features: int) -> None:
        super().__init__(n_features)
        self.alphas = nn.ParameterList()
        self.betas = nn.ParameterList()

    def _grow(self, n: int) -> None:
        super()._grow(n)
        self.alphas.append(self._place(torch.ones(())))
        self.betas.append(self._place(torch.zeros(())))

    def block(self, task: int) -> list[nn.Parameter]:
        return [*super().block(task), self.alphas[task], self.betas[task]]

    def correction(self, task: int) -> list[nn.Parameter]:
        return [self.alphas[task], self.betas[task]]

    def scores(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        scaled = super().scores(features)[0] * self._spread(self.alphas)
        return scaled + self._spread(self.betas), scaled

    def _spread(self, parameters: nn.ParameterList) -> Tensor:
        """One value a task to one a class."""
        return torch.cat([p.expand(n) for p, n in zip(parameters, self.task_sizes, strict=True)])


@register_method("bic", "distillation, then a scale and an offset of the new logits fitted on held-out rows")
@dataclass(frozen=True)
class BiasCorrection(Method):
    needs_previous = True
    limits: ClassVar = {"temperature": (0, math.inf), "held_out": (0, 1)}

    temperature: float = 2.0
    held_out: float = 0.1
    correction_epochs: int = 200
    offset_penalty: float = 0.05

    def make_head(self, n_features: int) -> Head:
        return BiasCorrectedHead(n_features)

    def holdout(self) -> float:
        return self.held_out

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        if not context.number or not len(context.memory) or not self.correction_epochs:
            return (Phase(),)
        correction = Phase(
            "correction",
            rows="holdout",
            loss="correction_loss",
            trainable="correction",
            epochs=self.correction_epochs,
            schedule="constant",
            momentum=0.9,
            weight_decay=0.0,
            network_mode="eval",
            keep="last",  # the current task's validation rows alone would choose the least corrected epoch
            uses_previous=False,
        )
        return Phase(), correction

    def parameters(self, network: Network, trainable: str) -> list[nn.Parameter]:
        head = network.head
        assert isinstance(head, BiasCorrectedHead)
        if trainable == "correction":
            return head.correction(-1)
        corrections = {id(p) for p in (*head.alphas, *head.betas)}
        return [p for p in super().parameters(network, trainable) if id(p) not in corrections]

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        if previous is None:
            return {"ce": cross_entropy(output.logits, batch.labels)}
        return shared_distillation(output.logits, batch.labels, previous.logits, self.temperature)

    def correction_loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        assert output.similarity is not None
        beta = (output.logits[:, -1] - output.similarity[:, -1]).float()  # the same in every row
        return {
            "ce": cross_entropy(output.logits, batch.labels),
            "offset": self.offset_penalty * beta.square().mean(),
        }
