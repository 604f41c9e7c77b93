"""Bias correction (Wu et al., 2019): a scale and an offset for the logits of each task, fitted on held-out rows.

First phase: L = (1 - l) CE + l * KD, l = C_old / C_all. KD is the cross-entropy of all old logits with the teacher's, at
temperature T. Second phase, from the second task on: the network is frozen and in eval mode; alpha and beta of the newest
head, o -> alpha o + beta, are fitted on rows held out of the first phase, L = CE + 0.05 beta^2. Both are part of the head, so
the teacher's logits are corrected too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, Phase, TaskContext
from tbbn.bench.methods.terms import cross_entropy, shared_distillation
from tbbn.bench.models import BiasCorrectedHead, Head, Network, Output
from tbbn.options import option
from tbbn.registry import register_method


@register_method("bic", "distillation, then a scale and an offset for the new logits, fitted on held-out rows")
@dataclass(frozen=True)
class BiasCorrection(Method):
    needs_previous = True

    temperature: float = option(2.0, "temperature of the distillation", above=0)
    held_out: float = option(0.1, "fraction of the rows held out for the second phase", above=0, below=1)
    correction_epochs: int = option(200, "epochs of the second phase; 0 skips it", least=0)
    offset_penalty: float = option(0.05, "weight of beta^2 in the second phase", least=0)

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
            eval_mode=True,
            keep="last",  # validation rows belong to the current task only and would select the least corrected epoch
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
