"""Experience replay with two means, as in the program of the online survey (Mai et al., 2022).

L = mean_current CE + mean_memory CE: all memory rows together weigh as much as all current rows together. The experience
replay of Chaudhry et al. (2019) takes one mean over both; that is ``ft`` here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method
from tbbn.bench.methods.terms import cross_entropy
from tbbn.bench.models import Output
from tbbn.registry import register_method


@register_method("er", "experience replay: mean cross-entropy of the current rows plus that of the memory rows")
@dataclass(frozen=True)
class ExperienceReplay(Method):
    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        losses = {"ce": cross_entropy(output.logits[batch.current], batch.labels[batch.current])}
        if batch.n_memory:
            losses["replay"] = cross_entropy(output.logits[batch.memory], batch.labels[batch.memory])
        return losses
