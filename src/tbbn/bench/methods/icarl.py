"""iCaRL (Rebuffi et al., 2017): sigmoid distillation, and classification by the nearest mean of exemplars.

L = CE over all classes + kd * sum_c mean_n BCE(sigmoid z_nc, sigmoid z_nc^old), c over the old classes. An image gets the class
whose exemplars have the nearest mean feature (:mod:`tbbn.bench.methods.nme`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, TaskContext
from tbbn.bench.methods.nme import nearest_mean_scores, remember_means
from tbbn.bench.methods.terms import cross_entropy
from tbbn.bench.models import Output
from tbbn.options import option
from tbbn.registry import register_method


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
        remember_means(context)

    def predict(self, output: Output) -> Tensor:
        return nearest_mean_scores(output)
