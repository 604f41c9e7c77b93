"""Separated softmax for incremental learning (Ahn et al., 2021).

L = mean_n CE_n + kd * sum_k T^2 KL(softmax(o_k^old / T) || softmax(o_k / T)). The softmax of CE_n runs over the new classes for
a row of a new class, and over the old classes for a row of an old class. k runs over the heads of the past tasks; KL is a mean
over all rows. The first task uses plain cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method
from tbbn.bench.methods.terms import cross_entropy, over_heads, soft_kl
from tbbn.bench.models import Output
from tbbn.options import option
from tbbn.registry import register_method


@register_method("ssil", "separated softmax and task-wise distillation")
@dataclass(frozen=True)
class SeparatedSoftmax(Method):
    needs_previous = True

    kd: float = option(1.0, "weight of the distillation", least=0)
    temperature: float = option(2.0, "temperature of the distillation", above=0)
    kd_last_task_only: bool = option(False, "bug of the paper's code: distil the newest past task only")

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        is_new = torch.arange(batch.n_classes, device=batch.labels.device) >= batch.n_old_classes
        other = (batch.labels >= batch.n_old_classes)[:, None] != is_new
        losses = {"ce": cross_entropy(output.logits.masked_fill(other, -torch.inf), batch.labels)}
        if previous is not None:
            student, teacher, heads = output.logits, previous.logits, previous.task_sizes
            if self.kd_last_task_only:
                *before, last = heads
                student, teacher, heads = student[:, sum(before) :], teacher[:, sum(before) :], (last,)
            losses["kd"] = self.kd * over_heads(soft_kl, student, teacher, heads, self.temperature)
        return losses
