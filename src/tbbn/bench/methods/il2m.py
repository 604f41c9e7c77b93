"""IL2M (Belouadah & Popescu, 2019): fine-tuning; past classes' scores are rectified by statistics from when they were learnt.

A score is a logit, as in the authors' program and in FACIL. If the best class of an image is new, the score of each past class c,
learnt in task k, becomes

    z_c * (mean score of c when learnt / mean score of c now) * (confidence now / confidence after task k).

The mean score of c is taken over its training images when learnt, and over its exemplars now. The confidence of a network is its
mean best score over the images of its newest task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tbbn.bench.methods.base import TaskContext
from tbbn.bench.methods.ft import FineTune
from tbbn.bench.methods.terms import class_means
from tbbn.bench.models import Output
from tbbn.registry import register_method

# Tensors that the network remembers, with one value per class:
LEARNT = "learnt_scores"  # the class's mean score when it was learnt
CONFIDENCE = "confidence"  # the confidence of the network that had just learnt the class
FACTORS = "factors"  # the factor that multiplies the class's score; 1 for new classes


class _Scores(NamedTuple):
    means: Tensor  # (classes,) the mean score of each class over its own rows; 0 if it has none
    best: Tensor  # () the mean best score over all rows


def _own_scores(context: TaskContext, rows: Tensor) -> _Scores:
    scores, labels = context.outputs(rows).logits.float(), context.labels(rows)
    means, _ = class_means(scores.gather(1, labels[:, None]), labels, context.n_classes)
    return _Scores(means[:, 0], scores.amax(1).mean())


@register_method("il2m", "fine-tuning; scores of past classes are rectified by statistics stored when they were learnt")
@dataclass(frozen=True)
class Il2m(FineTune):
    def after_training(self, context: TaskContext) -> None:
        # Not in after_task: here the memory has not shrunk yet, and more exemplars give better means.
        network, n_old = context.network, context.n_old_classes
        new = _own_scores(context, context.task.train)
        learnt, confidence = new.means[n_old:], new.best.expand(context.n_classes - n_old)
        if n_old:
            learnt = torch.cat([network.recall(LEARNT), learnt])
            confidence = torch.cat([network.recall(CONFIDENCE), confidence])
        factors = torch.ones_like(learnt)
        if len(context.memory):
            now = _own_scores(context, context.memory.index)
            rectified = learnt / now.means * new.best / confidence
            is_old = torch.arange(context.n_classes, device=learnt.device) < n_old
            # A mean score of 0, as for a class without exemplars, gives no finite ratio.
            factors = torch.where(is_old & rectified.isfinite(), rectified, factors)
        for name, tensor in ((LEARNT, learnt), (CONFIDENCE, confidence), (FACTORS, factors)):
            network.remember(name, tensor)

    def predict(self, output: Output) -> Tensor:
        scores = output.logits.float()
        factors = output.state.get(FACTORS)
        if factors is None or len(factors) != scores.shape[1]:  # in the middle of a task
            return scores
        n_old = sum(output.task_sizes[:-1])
        best_is_new = scores.argmax(1, keepdim=True) >= n_old
        return torch.where(best_is_new, scores * factors, scores)
