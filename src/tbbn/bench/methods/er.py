"""Experience replay (Chaudhry et al., 2019): the mean loss of the current rows plus the mean loss of the memory rows.

L = mean_current CE + mean_memory CE. Fine-tuning takes one mean over all rows, so a memory row weighs as much as a current
one. Here all memory rows together weigh as much as all current rows together.
"""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method
from tbbn.bench.methods.terms import cross_entropy
from tbbn.bench.models import Output
from tbbn.registry import register_method


@register_method("er", "experience replay: cross-entropy of the current and of the memory rows, each a mean of its own")
@dataclass(frozen=True)
class ExperienceReplay(Method):
    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        losses = {"ce": cross_entropy(output.logits[batch.current], batch.labels[batch.current])}
        if batch.n_memory:
            losses["replay"] = cross_entropy(output.logits[batch.memory], batch.labels[batch.memory])
        return losses
