"""Task-balanced batch norm word for word: real copies of the memory rows in every split, nothing clever.

Written from the paper's text and pseudo-code alone; nothing here knows of plans or moments. ``reshape_repeat`` is the pseudo-code
(splits as extra channels of ``F.batch_norm``), ``split_by_split`` a loop that also takes splits of unequal size, a mask, and the
first preprint's treatment of memory rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def reshape_repeat(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    n_current: int,
    r: int,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """The paper's pseudo-code: rows [0, n_current) are current; ``r`` divides their number."""
    c, rest = x.shape[1], x.shape[2:]
    current = x[:n_current].reshape(n_current // r, r * c, *rest)  # sample n becomes row n // r of split n mod r
    memory = x[n_current:].repeat(1, r, *[1] * len(rest))
    # Statistics of r * C channels: the old running ones are the same for every split, so their average moves as it should.
    mean = None if running_mean is None else running_mean.repeat(r)
    var = None if running_var is None else running_var.repeat(r)
    y = F.batch_norm(
        torch.cat([current, memory]),
        mean,
        var,
        None if weight is None else weight.repeat(r),
        None if bias is None else bias.repeat(r),
        training=True,
        momentum=momentum,
        eps=eps,
    )
    if running_mean is not None and running_var is not None and mean is not None and var is not None:
        running_mean.copy_(mean.view(r, c).mean(0))
        running_var.copy_(var.view(r, c).mean(0))
    rows = n_current // r
    y_memory = y[rows:].reshape(-1, r, c, *rest).mean(1)
    return torch.cat([y[:rows].reshape(n_current, c, *rest), y_memory])


def split_by_split(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    is_memory: Tensor,
    r: int,
    momentum: float = 0.1,
    eps: float = 1e-5,
    memory: str = "averaged",
) -> Tensor:
    """One split after the other; the i-th current row goes to split i mod r, every memory row to all of them."""
    shape = (1, -1) + (1,) * (x.dim() - 2)
    dims = [0, *range(2, x.dim())]
    current_rows, memory_rows = torch.where(~is_memory)[0].tolist(), torch.where(is_memory)[0].tolist()
    seen: dict[int, list[Tensor]] = {row: [] for row in range(len(x))}
    means, variances = [], []
    for j in range(r):
        rows = current_rows[j::r] + memory_rows
        split = torch.stack([x[row] for row in rows])
        n = split.numel() // split.shape[1]
        mean = split.sum(dims) / n
        var = (split - mean.view(shape)).square().sum(dims) / n
        normalised = (split - mean.view(shape)) / (var.view(shape) + eps).sqrt()
        for place, row in enumerate(rows):
            own = memory == "averaged" or row not in memory_rows or memory_rows.index(row) % r == j
            if own:
                seen[row].append(normalised[place])
        means.append(mean.detach())
        variances.append(var.detach() * n / (n - 1))
    y = torch.stack([torch.stack(seen[row]).mean(0) for row in range(len(x))])
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(momentum * torch.stack(means).mean(0))
        running_var.mul_(1 - momentum).add_(momentum * torch.stack(variances).mean(0))
    return y


def splits_by_trial(n_current: int, n_memory: int, past_tasks: int, rule: str) -> int:
    """The rule's text, number by number, with fractions."""
    from fractions import Fraction

    if min(n_current, n_memory, past_tasks) == 0:
        return 1
    wanted = Fraction(n_current, n_memory) * past_tasks
    nearest = min(range(1, n_current + 1), key=lambda r: (abs(r - wanted), -r))
    if rule == "uneven":
        return nearest
    allowed = [
        r
        for r in range(1, n_current + 1)
        if n_current % r == 0 and (rule == "current" or n_memory % r == 0) and r <= wanted
    ]
    best = max(allowed, default=1)
    return nearest if best == 1 and wanted >= 2 else best
