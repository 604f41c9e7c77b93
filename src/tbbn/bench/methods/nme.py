"""Classification by the nearest mean of exemplars: an image gets the class whose exemplars have the nearest mean feature.

Features and means have length 1. The means are remembered with the network's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.methods.base import TaskContext
from tbbn.bench.methods.terms import class_means
from tbbn.bench.models import Output

MEANS = "exemplar_means"  # (classes, D), zero for a class without exemplars


def remember_means(context: TaskContext, *, flipped: bool = False) -> None:
    """Store the mean feature of each class's exemplars; ``flipped`` averages over their mirror images too."""
    rows = context.memory.index
    if not len(rows):
        return
    features = F.normalize(context.outputs(rows).features.float())
    if flipped:
        features = features + F.normalize(context.outputs(rows, flip=True).features.float())
    means, _ = class_means(features, context.labels(rows), context.n_classes)
    context.network.remember(MEANS, F.normalize(means))


def nearest_mean_scores(output: Output) -> Tensor:
    """-|f - m_c|^2 for features f and means m_c of length 1; a class without exemplars is never chosen.

    Without means of every class (no memory, or before a task has ended) these are the logits.
    """
    means = output.state.get(MEANS)
    if means is None or len(means) != output.logits.shape[1]:
        return output.logits
    scores = 2 * F.normalize(output.features.float()) @ means.T - 2
    return scores.masked_fill(~means.any(1), -torch.inf)
