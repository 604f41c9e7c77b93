"""LUCIR (Hou et al., 2019): cosine classifier, feature distillation ("less forget") and margin ranking.

L = CE(eta cos) + less_forget * sqrt(C_old / C_new) * mean_n (1 - cos(f_n, f_n^old)) + ranking * R
R = mean max(0, margin - cos_y + cos_k), over the rows of past classes and the ``top_k`` new classes k nearest to each row.

f_n are the features of row n, f_n^old those from the network after the previous task. cos_c is the cosine of f and the head's
weight of class c, y is the label. The logits are eta cos, with one learnable scale eta for all classes. C_old and C_new are the
numbers of classes of the past tasks and of this one.

With ``imprint``, as in the authors' program, the weight of a new class starts as the mean of its normalised features, scaled to
the mean length of the old weights; otherwise it starts at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, Phase, TaskContext
from tbbn.bench.methods.terms import class_means, cosine_distance, cross_entropy
from tbbn.bench.models import CosineHead, Head, Output
from tbbn.options import option
from tbbn.registry import register_method


@register_method("lucir", "cosine classifier, feature distillation and margin ranking")
@dataclass(frozen=True)
class Lucir(Method):
    needs_previous = True  # ``loss`` gets the previous network's output
    last_relu = False  # no ReLU before the pooling: features may be negative, so that cosines span [-1, 1]

    less_forget: float = option(5.0, "weight of the feature distillation", least=0)
    ranking: float = option(1.0, "weight of the margin ranking", least=0)
    margin: float = option(0.5, "margin between the cosine of the label and those of new classes", least=0)
    top_k: int = option(2, "new classes that each row of a past class is compared with", least=1)
    imprint: bool = option(False, "initialise the weight of a new class with the mean feature of its images")

    def make_head(self, n_features: int) -> Head:
        return CosineHead(n_features)  # holds the weights and eta

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        # One phase. "newest" trains the backbone, eta and the weights of the new classes; those of past classes are frozen.
        return (Phase(trainable="newest"),)

    @torch.no_grad()
    def before_task(self, context: TaskContext) -> None:
        if not self.imprint or not context.number:
            return
        rows, (*old, new) = context.task.train, context.network.head.weights
        features = F.normalize(context.outputs(rows).features.float())
        means, _ = class_means(features, context.labels(rows), context.n_classes)
        new.copy_(F.normalize(means[context.n_old_classes :]) * torch.cat(old).norm(dim=1).mean())

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        losses = {"ce": cross_entropy(output.logits, batch.labels)}
        if previous is not None:  # from the second task on
            weight = self.less_forget * math.sqrt(batch.n_old_classes / (batch.n_classes - batch.n_old_classes))
            losses["less_forget"] = weight * cosine_distance(output.features, previous.features)
            losses["ranking"] = self.ranking * self._ranking(batch, output)
        return losses

    def _ranking(self, batch: Batch, output: Output) -> Tensor:
        assert output.similarity is not None  # the cosine head's cosines, (rows, classes)
        cosine = output.similarity.float()
        own = cosine.gather(1, batch.labels[:, None])
        new = cosine[:, batch.n_old_classes :]
        nearest = new.topk(min(self.top_k, new.shape[1])).values
        is_old = (batch.labels < batch.n_old_classes)[:, None]
        # Rows of new classes are masked, not removed: a step captured as a CUDA graph needs fixed shapes.
        hinge = F.relu(self.margin - own + nearest) * is_old
        return hinge.sum() / (is_old.sum() * nearest.shape[1]).clamp(min=1)
