"""Select exemplars: which rows of a class are kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tbbn.errors import unknown_name

# The input of each strategy: "features", "logits", or None if the network need not run.
SELECTIONS: dict[str, str | None] = {
    "herding": "features",
    "random": None,
    "entropy": "logits",
    "distance": "logits",
    "reservoir": None,
}

_GRAM_SIDE = 2048  # with more images per class, inner products are computed pick by pick
_GRAM_ELEMENTS = 2**24  # float64 inner products held at once: 128 MiB


def rank_in_class(keys: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Positions grouped by label and sorted by `keys` within a label, and the rank of each within its label."""
    order = keys.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]
    grouped = labels[order]
    return order, torch.arange(len(order), device=order.device) - torch.searchsorted(grouped, grouped)


def select(
    strategy: str, scores: Tensor | None, labels: Tensor, n_per_class: int, generator: torch.Generator | None = None
) -> Tensor:
    """Positions of at most `n_per_class` rows of each class, grouped by ascending label, best first within a class.

    - "herding" (iCaRL, algorithm 4) reads features (N, D). It follows the class mean with the mean of the rows picked:
      on L2-normalised features with mean mu, the next of k + 1 rows is argmin_x || mu - (x + s) / (k + 1) ||, where s
      is the sum of the k rows picked so far.
    - "entropy" takes the highest predictive entropy of the logits (N, n_seen) first.
    - "distance" takes the smallest logit of the row's own class first: RWalk's distance to the decision boundary.
    - "random" draws from `generator`.

    A class with fewer rows gives all of them.
    """
    if strategy not in SELECTIONS or strategy == "reservoir":
        raise unknown_name("selection", strategy, SELECTIONS.keys() - {"reservoir"})
    if strategy == "random":
        assert generator is not None, "random selection needs a generator"
        keys = torch.rand(len(labels), generator=generator, dtype=torch.float64).to(labels.device)
    else:
        assert scores is not None, f"{strategy} selection needs {SELECTIONS[strategy]}"
        assert len(scores) == len(labels), "one row of scores per label"
        scores = scores.detach().to(labels.device)
        if strategy == "herding":
            return _herd(scores, labels, n_per_class)
        if strategy == "entropy":
            keys = -torch.special.entr(scores.double().softmax(1)).sum(1)
        else:
            keys = scores.gather(1, labels[:, None])[:, 0]
    order, rank = rank_in_class(keys, labels)
    return order[rank < n_per_class]


def _herd(features: Tensor, labels: Tensor, n: int) -> Tensor:
    """Herding of all classes at once: they are padded to the largest and masked."""
    if not len(labels) or n < 1:
        return torch.empty(0, dtype=torch.int64, device=labels.device)
    order, rank = rank_in_class(torch.arange(len(labels), device=labels.device), labels)
    _, member, counts = torch.unique_consecutive(labels[order], return_inverse=True, return_counts=True)
    side = int(counts.max())
    padded = features.new_zeros(len(counts), side, features.shape[1])
    padded[member, rank] = features[order]
    position = torch.zeros(len(counts), side, dtype=torch.int64, device=labels.device)
    position[member, rank] = order
    chunk = max(1, _GRAM_ELEMENTS // side**2)
    picks = [_herd_padded(x, c, min(n, side)) for x, c in zip(padded.split(chunk), counts.split(chunk), strict=True)]
    chosen = position.gather(1, torch.cat(picks))
    return chosen[torch.arange(chosen.shape[1], device=chosen.device) < counts[:, None]]


def _herd_padded(x: Tensor, counts: Tensor, n: int) -> Tensor:
    """The first `n` picks of each class, (K, n), from features x (K, M, D) that are zero beyond a class's count.

    || (k + 1) mu - s - x ||^2 is a constant plus |x|^2 - 2 (k + 1) x.mu + 2 x.s. So inner products suffice, and the
    score to maximise changes by 2 x.mu - 2 x.picked from one pick to the next.
    """
    # Features that are not finite (a diverged network) count as zero, so that the memory stays valid.
    x = F.normalize(x.double(), dim=2).nan_to_num()
    gram = x @ x.mT if x.shape[1] <= _GRAM_SIDE else None  # (K, M, M)
    classes = torch.arange(len(x), device=x.device)
    pull = 2 * (x @ (x.sum(1) / counts[:, None])[:, :, None])[:, :, 0]  # 2 x.mu
    beyond = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
    score = (pull - x.square().sum(2)).masked_fill_(beyond, -torch.inf)
    picks = torch.empty(len(x), n, dtype=torch.int64, device=x.device)
    for k in range(n):
        pick = score.argmax(1)
        picks[:, k] = pick
        push = gram[classes, pick] if gram is not None else (x @ x[classes, pick][:, :, None])[:, :, 0]
        score.add_(pull).sub_(push, alpha=2)
        score[classes, pick] = -torch.inf
    return picks
