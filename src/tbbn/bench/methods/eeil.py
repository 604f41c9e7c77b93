"""End-to-end incremental learning (Castro et al., 2018): distillation head by head, then a balanced phase.

L = CE over all classes + kd * sum_k BCE(softmax(o_k / T), softmax(o_k^old / T)), k over the heads of the past tasks, o_k the
logits of head k, each BCE a mean over rows and classes. From the second task on, a second phase trains everything at a tenth
of the learning rate (the TBBN paper: a hundredth), on as many rows of each new class as the memory has of each old one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, Phase, TaskContext
from tbbn.bench.methods.terms import cross_entropy, over_heads, soft_binary_cross_entropy
from tbbn.bench.models import Output
from tbbn.options import option
from tbbn.registry import register_method


@register_method("eeil", "distillation per head, then a class-balanced phase")
@dataclass(frozen=True)
class EndToEnd(Method):
    """``skip_newest_head`` leaves the first phase of the second task without distillation: there is only one past head."""

    needs_previous = True

    kd: float = option(1.0, "weight of the distillation", least=0)
    temperature: float = option(2.0, "temperature of the distillation", above=0)
    balanced_epochs: int = option(40, "epochs of the balanced phase; 0 skips it", least=0)
    balanced_lr_factor: float = option(0.1, "learning rate of the balanced phase, relative to the main phase", least=0)
    skip_newest_head: bool = option(
        False, "bug of released code: do not distil the newest past head in the first phase"
    )
    unbalanced_phase: bool = option(False, "bug of released code: draw the second phase from task + twice memory")

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        if not context.number or not len(context.memory) or not self.balanced_epochs:
            return (Phase(),)
        balanced = Phase(
            "balanced",
            rows="oversampled" if self.unbalanced_phase else "balanced",
            loss="balanced_loss",
            epochs=self.balanced_epochs,
            lr_factor=self.balanced_lr_factor,
            schedule="constant",
        )
        return Phase(), balanced

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        return self._losses(batch, output, previous, skip=1 if self.skip_newest_head else 0)

    def balanced_loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        return self._losses(batch, output, previous, skip=0)

    def _losses(self, batch: Batch, output: Output, previous: Output | None, skip: int) -> Losses:
        losses = {"ce": cross_entropy(output.logits, batch.labels)}
        if previous is None or len(previous.task_sizes) == skip:
            return losses
        heads = previous.task_sizes[: len(previous.task_sizes) - skip]
        kd = over_heads(soft_binary_cross_entropy, output.logits, previous.logits, heads, self.temperature)
        return losses | {"kd": self.kd * kd}
