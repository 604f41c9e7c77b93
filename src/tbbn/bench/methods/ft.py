"""Fine-tuning with replay: cross-entropy over all classes seen, on the mixed batch."""

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
