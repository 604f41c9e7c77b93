"""Fine-tuning with replay: cross-entropy over all classes seen, on the mixed batch."""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method
from tbbn.bench.methods.terms import cross_entropy
from tbbn.bench.models import Output


@dataclass(frozen=True)
class FineTune(Method):
    name = "ft"
    description = "fine-tuning with replay: cross-entropy over all classes"

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        return {"ce": cross_entropy(output.logits, batch.labels)}
