"""iCaRL (Rebuffi et al., 2017): sigmoid distillation, and classification by the nearest mean of exemplars.

L = CE over all classes + kd * sum_c mean_n BCE(sigmoid z_nc, sigmoid z_nc^old), c over the old classes. An image gets the class
whose exemplars have the nearest mean feature; features and means have length 1. Without exemplars of every class (no memory, or
before a task has ended) the logits decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, TaskContext
from tbbn.bench.methods.terms import class_means, cross_entropy
from tbbn.bench.models import Output
from tbbn.options import option
from tbbn.registry import register_method

MEANS = "exemplar_means"  # (classes, D), zero for a class without exemplars


@register_method("icarl", "sigmoid distillation and nearest-mean-of-exemplars classification")
@dataclass(frozen=True)
class Icarl(Method):
    needs_previous = True

    kd: float = option(1.0, "weight of the distillation", least=0)

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        losses = {"ce": cross_entropy(output.logits, batch.labels)}
        if previous is not None:
            old = output.logits[:, : batch.n_old_classes].float()
            wanted = previous.logits.float().sigmoid()
            losses["kd"] = self.kd * F.binary_cross_entropy_with_logits(old, wanted, reduction="sum") / len(old)
        return losses

    def after_task(self, context: TaskContext) -> None:
        rows = context.memory.index
        if len(rows):
            features = F.normalize(context.outputs(rows).features.float(), dim=1)
            means, _ = class_means(features, context.labels(rows), context.n_classes)
            context.network.remember(MEANS, F.normalize(means, dim=1))

    def predict(self, output: Output) -> Tensor:
        """-|f - m_c|^2 for features f and means m_c of length 1; a class without exemplars is never chosen."""
        means = output.state.get(MEANS)
        if means is None or len(means) != output.logits.shape[1]:
            return output.logits
        scores = 2 * F.normalize(output.features.float(), dim=1) @ means.T - 2
        return scores.masked_fill(~means.any(1), -torch.inf)
