"""IL2M (Belouadah & Popescu, 2019): fine-tuning; scores of past classes are rectified by statistics from when they were learnt.

Scores are softmax probabilities. If the best class of an image is new, the score of each past class c, learnt in task k, becomes

    p_c * (mean score of c when learnt / mean score of c now) * (confidence now / confidence after task k).

The mean score of c is over its training images when learnt, over its exemplars now. The confidence of a network is its mean
best score over the images of its newest task.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tbbn.bench.methods.base import TaskContext
from tbbn.bench.methods.ft import FineTune
from tbbn.bench.methods.terms import class_means
from tbbn.bench.models import Output
from tbbn.registry import register_method

LEARNT, CONFIDENCE, FACTORS = "learnt_scores", "confidence", "factors"  # (classes,), (classes,) its task's, (classes,)


def _own_scores(context: TaskContext, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each class, the mean score of its own rows and their number; and the mean best score over all rows."""
    scores, labels = context.outputs(rows).logits.float().softmax(1), context.labels(rows)
    means, counts = class_means(scores.gather(1, labels[:, None]), labels, context.n_classes)
    return means[:, 0], counts, scores.amax(1).mean()


@register_method("il2m", "fine-tuning, past scores rectified by statistics kept from when they were learnt")
@dataclass(frozen=True)
class Il2m(FineTune):
    def after_training(self, context: TaskContext) -> None:
        # Here and not in after_task: the memory has not shrunk yet, and more exemplars give better means.
        network, n_old = context.network, context.n_old_classes
        means, _, best = _own_scores(context, context.task.train)
        learnt, confidence = means[n_old:], best.expand(context.n_classes - n_old)
        if n_old:
            learnt = torch.cat([network.recall(LEARNT), learnt])
            confidence = torch.cat([network.recall(CONFIDENCE), confidence])
        factors = torch.ones_like(learnt)
        if n_old and len(context.memory):
            now, counts, _ = _own_scores(context, context.memory.index)
            rectified = learnt / now.clamp(min=torch.finfo(now.dtype).tiny) * best / confidence
            known = (counts > 0) & (torch.arange(context.n_classes, device=now.device) < n_old)
            factors = torch.where(known, rectified, factors)
        for name, tensor in ((LEARNT, learnt), (CONFIDENCE, confidence), (FACTORS, factors)):
            network.remember(name, tensor)

    def predict(self, output: Output) -> Tensor:
        scores = output.logits.float().softmax(1)
        factors = output.state.get(FACTORS)
        if factors is None or len(factors) != scores.shape[1]:  # in the middle of a task
            return scores
        n_old = sum(output.task_sizes[:-1])
        best_is_new = scores.argmax(1, keepdim=True) >= n_old
        return torch.where(best_is_new, scores * factors, scores)
