"""Loss terms: plain functions of tensors, each with its formula.

Softmax, logarithms and distances are computed in float32 whatever the network's precision. A training step has no
data-dependent shapes and no host syncs, so that it can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """mean_n -log softmax(logits_n)[label_n], over n >= 1 rows."""
    return F.cross_entropy(logits.float(), labels)


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """mean_n -sum_c p_nc log q_nc with p, q = softmax(teacher / T), softmax(student / T)."""
    return F.cross_entropy(student.float() / temperature, (teacher.float() / temperature).softmax(1))


def shared_distillation(logits: Tensor, labels: Tensor, old: Tensor, temperature: float) -> dict[str, Tensor]:
    """(1 - l) CE + l KD, l = C_old / C_all. KD is the soft cross-entropy of the old classes' logits with the teacher's."""
    share = old.shape[1] / logits.shape[1]
    kd = soft_cross_entropy(logits[:, : old.shape[1]], old, temperature)
    return {"ce": (1 - share) * cross_entropy(logits, labels), "kd": share * kd}


def soft_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 mean_n KL(p_n || q_n) with p, q = softmax(teacher / T), softmax(student / T)."""
    log_q = (student.float() / temperature).log_softmax(1)
    log_p = (teacher.float() / temperature).log_softmax(1)
    return temperature**2 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def soft_binary_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """mean_nc -[p log q + (1 - p) log(1 - q)] with p, q = softmax(teacher / T), softmax(student / T)."""
    log_q = (student.float() / temperature).log_softmax(1)
    p = (teacher.float() / temperature).softmax(1)
    # The clamp keeps value and gradient finite where q is 1, as in a head with one class.
    log_not_q = torch.log(-torch.expm1(log_q.clamp(max=-1e-7)))
    return -(p * log_q + (1 - p) * log_not_q).mean()


def over_heads(
    term: Callable[[Tensor, Tensor, float], Tensor],
    student: Tensor,
    teacher: Tensor,
    sizes: Sequence[int],
    temperature: float,
) -> Tensor:
    """sum_k term(student_k, teacher_k, T) for a term that is a mean over rows; head k has the next ``sizes[k]`` columns.

    Heads of equal size are stacked as rows of one call: called per head, a term of 20 launches takes 200 with ten heads.
    """
    classes = sum(sizes)
    student, teacher = student[:, :classes], teacher[:, :classes]
    if len(set(sizes)) == 1:
        return len(sizes) * term(student.reshape(-1, sizes[0]), teacher.reshape(-1, sizes[0]), temperature)
    pairs = zip(student.split(tuple(sizes), 1), teacher.split(tuple(sizes), 1), strict=True)
    return torch.stack([term(new, old, temperature) for new, old in pairs]).sum()


def cosine_distance(x: Tensor, y: Tensor) -> Tensor:
    """mean_n 1 - cos(x_n, y_n)."""
    return (1 - F.cosine_similarity(x.float(), y.float())).mean()


def is_class(labels: Tensor, n_classes: int) -> Tensor:
    """Boolean (N, classes): whether the column is the row's label."""
    return labels[:, None] == torch.arange(n_classes, device=labels.device)


def pod_spatial(stages: Sequence[Tensor], old_stages: Sequence[Tensor]) -> Tensor:
    """Pooled outputs distillation of maps (N, C, H, W): the mean over stages and rows of |p(x) / |p(x)| - p(y) / |p(y)||.

    p(x) holds the sums of x^2 over the width and over the height, side by side: (N, C (H + W)).
    """
    distances = [
        torch.linalg.vector_norm(_pooled(x) - _pooled(y), dim=1).mean() for x, y in zip(stages, old_stages, strict=True)
    ]
    return torch.stack(distances).mean()


def _pooled(maps: Tensor) -> Tensor:
    energy = maps.float().square()
    return F.normalize(torch.cat([energy.sum(3).flatten(1), energy.sum(2).flatten(1)], dim=1))


def channel_distance(stages: Sequence[Tensor], old_stages: Sequence[Tensor], importance: Sequence[Tensor]) -> Tensor:
    """Mean over stages, rows and channels c of I_c |u(x)_c - u(y)_c|, with I (C,) the importance of a stage's channels.

    u(x)_c is channel c of x^2, flattened over the pixels and scaled to length 1.
    """
    distances = []
    for x, y, weight in zip(stages, old_stages, importance, strict=True):
        u, v = (F.normalize(maps.float().square().flatten(2), dim=2) for maps in (x, y))
        distances.append((weight * torch.linalg.vector_norm(u - v, dim=2)).mean())
    return torch.stack(distances).mean()


def nca(logits: Tensor, labels: Tensor) -> Tensor:
    """mean_n log(1 + sum_{c != y} exp s_c) - s_y with s = z - max_c z_c: 1 replaces exp s_y, the term of the label's class.

    This is the form of the authors' code. The papers add a margin to the label's class only; then a negative scale eta would
    lower the loss, and training does reach negative values.
    """
    shifted = logits.float() - logits.float().amax(1, keepdim=True)
    own = is_class(labels, logits.shape[1])
    return (shifted.masked_fill(own, 0.0).logsumexp(1) - shifted.gather(1, labels[:, None])[:, 0]).mean()


def class_means(values: Tensor, labels: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """The mean (n_classes, D) of the rows of `values` (N, D) for each label, zero for a class without rows; and the counts."""
    if not _has_float64(values.device):
        means, counts = class_means(values.cpu(), labels.cpu(), n_classes)
        return means.to(values.device), counts.float().to(values.device)
    # A matrix product in float64: scatter-add is not deterministic on a GPU.
    member = is_class(labels, n_classes).double()
    counts = member.sum(0)
    means = member.T @ values.double() / counts.clamp(min=1)[:, None]
    return means.to(values.dtype), counts


def _has_float64(device: torch.device) -> bool:
    """Whether a device is known to support float64: Apple's GPUs do not, and not all of Intel's do."""
    return device.type in ("cpu", "cuda")


def norm_ratio(old: Tensor, new: Tensor) -> Tensor:
    """The mean length of the rows of `old`, divided by that of `new`."""
    return old.norm(dim=1).mean() / new.norm(dim=1).mean()


@torch.no_grad()
def k_means(points: Tensor, n_centres: int, generator: torch.Generator, n_iterations: int = 50) -> Tensor:
    """Centres (n_centres, D) of points (N, D): k-means++ seeds, then Lloyd's iterations.

    A centre without points does not move; with fewer distinct points than centres, some coincide.
    """
    if not _has_float64(points.device):
        return k_means(points.cpu(), n_centres, generator, n_iterations).to(points.device)
    centres = _spread(points, torch.rand(n_centres, generator=generator, dtype=torch.float64))
    for _ in range(n_iterations):
        means, counts = class_means(points, _distances(points, centres).argmin(1), n_centres)
        centres = torch.where(counts[:, None] > 0, means, centres)
    return centres


def _spread(points: Tensor, draws: Tensor) -> Tensor:
    """k-means++ seeds: each point is drawn with probability proportional to its squared distance from the seeds so far."""
    draws = draws.to(points.device)
    last = len(points) - 1
    weight = points.new_ones(len(points), dtype=torch.float64)
    chosen = []
    for draw in draws:
        reach = weight.cumsum(0)
        chosen.append(points[torch.searchsorted(reach, draw * reach[-1], right=True).clamp(max=last)])
        nearest = _distances(points, chosen[-1][None])[:, 0].square().double()
        weight = nearest if len(chosen) == 1 else weight.minimum(nearest)
    return torch.stack(chosen)


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
