"""Fine-tuning with replay: cross-entropy over all classes so far, on batches [current ; memory].

The simplest method; read it first. In every training step the engine calls ``loss`` with the batch, the network's output on it,
and the previous network's output (None unless the method sets ``needs_previous``). It sums the returned terms, runs the backward
and steps the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method
from tbbn.bench.methods.terms import cross_entropy
from tbbn.bench.models import Output
from tbbn.registry import register_method


@register_method("ft", "fine-tuning with replay: cross-entropy over all classes")
@dataclass(frozen=True)
class FineTune(Method):
    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        return {"ce": cross_entropy(output.logits, batch.labels)}
