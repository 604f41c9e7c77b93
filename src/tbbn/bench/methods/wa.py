"""Weight aligning (Zhao et al., 2020): after training, rescale the weights of the new classes to the length of the old ones.

L = (1 - l) CE + l * KD, l = C_old / C_all. KD is the cross-entropy of all old logits with the teacher's, at temperature T.
Then w_new <- w_new * mean |w_old| / mean |w_new|; biases do not change.

The rule was published for new weights that are longer than old ones, as they are after long training on few exemplars. After
short training they are shorter. Then the rule lengthens them, and past classes are predicted as new ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, TaskContext
from tbbn.bench.methods.terms import cross_entropy, norm_ratio, shared_distillation
from tbbn.bench.models import Output
from tbbn.options import option
from tbbn.registry import register_method


@register_method("wa", "distillation, then the new classes' weights are rescaled to the norm of the old ones")
@dataclass(frozen=True)
class WeightAligning(Method):
    needs_previous = True

    temperature: float = option(2.0, "temperature of the distillation", above=0)

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        if previous is None:
            return {"ce": cross_entropy(output.logits, batch.labels)}
        return shared_distillation(output.logits, batch.labels, previous.logits, self.temperature)

    @torch.no_grad()
    def after_training(self, context: TaskContext) -> None:
        if context.number:
            *old, new = context.network.head.weights
            new.mul_(norm_ratio(torch.cat(old), new))
