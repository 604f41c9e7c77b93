"""LUCIR (Hou et al., 2019): cosine classifier, feature distillation ("less forget") and margin ranking.

L = CE(eta cos) + less_forget * sqrt(C_old / C_new) * mean_n (1 - cos(f_n, f_n^old)) + ranking * R
R = mean max(0, margin - cos_y + cos_k), over the rows of past classes and the ``top_k`` new classes k nearest to each row.

f are features before the last ReLU, "old" is the network after the task before, y is the label. The head's weights of past
classes are frozen.
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
from tbbn.registry import option, register_method


@register_method("lucir", "cosine classifier, feature distillation and margin ranking")
@dataclass(frozen=True)
class Lucir(Method):
    needs_previous = True  # ``loss`` gets the previous network's output
    last_relu = False
    limits: ClassVar = {"top_k": (0, math.inf)}

    less_forget: float = option(5.0, "weight of the feature distillation")
    ranking: float = option(1.0, "weight of the margin ranking")
    margin: float = option(0.5, "margin between the cosine of the label and those of new classes")
    top_k: int = option(2, "new classes that each row of a past class is compared with")

    def make_head(self, n_features: int) -> Head:
        return CosineHead(n_features)

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        return (Phase(trainable="newest"),)  # all but the head's weights of past classes

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        losses = {"ce": cross_entropy(output.logits, batch.labels)}
        if previous is not None:  # from the second task on
            weight = self.less_forget * math.sqrt(batch.n_old_classes / (batch.n_classes - batch.n_old_classes))
            losses["less_forget"] = weight * cosine_distance(output.features, previous.features)
            losses["ranking"] = self.ranking * self._ranking(batch, output)
        return losses

    def _ranking(self, batch: Batch, output: Output) -> Tensor:
        assert output.similarity is not None  # the cosines, (rows, classes)
        cosine = output.similarity.float()
        own = cosine.gather(1, batch.labels[:, None])
        new = cosine[:, batch.n_old_classes :]
        nearest = new.topk(min(self.top_k, new.shape[1]), dim=1).values
        is_old = (batch.labels < batch.n_old_classes)[:, None]
        # Masked, not selected: a captured step needs shapes that do not depend on values.
        hinge = F.relu(self.margin - own + nearest) * is_old
        return hinge.sum() / (is_old.sum() * nearest.shape[1]).clamp(min=1)
