"""LUCIR, a unified classifier by rebalancing (Hou et al., 2019): cosine scores, less forgetting, margin ranking.

L = CE(eta cos) + less_forget sqrt(C_old / C_new) mean_n (1 - cos(f_n, f_n^old)) + ranking * mean max(0, margin - cos_y
+ cos_k), the last mean over the rows of past classes and the ``top_k`` new classes k nearest to each. Weights of past
classes are frozen, features are taken without the last ReLU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, Phase, TaskContext
from tbbn.bench.methods.terms import cosine_distance, cross_entropy
from tbbn.bench.models import CosineHead, Head, Output
from tbbn.registry import register_method


@register_method("lucir", "cosine classifier, feature distillation and margin ranking")
@dataclass(frozen=True)
class Lucir(Method):
    needs_previous = True
    last_relu = False
    limits: ClassVar = {"top_k": (0, math.inf)}

    less_forget: float = 5.0
    ranking: float = 1.0
    margin: float = 0.5
    top_k: int = 2

    def make_head(self, n_features: int) -> Head:
        return CosineHead(n_features)

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        return (Phase(trainable="newest"),)

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        losses = {"ce": cross_entropy(output.logits, batch.labels)}
        if previous is not None:
            weight = self.less_forget * math.sqrt(batch.n_old_classes / (batch.n_classes - batch.n_old_classes))
            losses["less_forget"] = weight * cosine_distance(output.features, previous.features)
            losses["ranking"] = self.ranking * self._ranking(batch, output)
        return losses

    def _ranking(self, batch: Batch, output: Output) -> Tensor:
        assert output.similarity is not None
        cosine = output.similarity.float()
        own = cosine.gather(1, batch.labels[:, None])
        new = cosine[:, batch.n_old_classes :]
        nearest = new.topk(min(self.top_k, new.shape[1]), dim=1).values
        is_old = (batch.labels < batch.n_old_classes)[:, None]
        # Masked rather than picked out: how many rows are old must not shape a tensor.
        hinge = F.relu(self.margin - own + nearest) * is_old
        return hinge.sum() / (is_old.sum() * nearest.shape[1]).clamp(min=1)
