"""Classifiers that grow by one block of parameters per task."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tbbn.bench.models.base import seeded_init
from tbbn.errors import UserError


def _joined(blocks: Iterable[Tensor]) -> Tensor:
    parts = list(blocks)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Head(nn.Module):
    """Maps features (N, D) to logits (N, `n_classes`), the classes of task 0 first.

    `weights[t]` belongs to task t. Growing adds a block; the earlier blocks stay the same Parameter objects, so that optimisers
    and frozen blocks stay valid.
    """

    _anchor: Tensor

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.n_features = n_features
        self.task_sizes: list[int] = []
        self.weights = nn.ParameterList()
        # Follows .to(...), so that a head without classes knows the device and dtype for its first block.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    @property
    def n_classes(self) -> int:
        return sum(self.task_sizes)

    def grow(self, n: int, generator: torch.Generator | None = None) -> None:
        """Add a task of n classes. Its parameters are drawn on the CPU and moved to the head's device."""
        if n < 1:
            raise UserError(f"{type(self).__name__}.grow: a task needs at least 1 class, got {n}.")
        with seeded_init(generator):
            self._grow(n)
        self.task_sizes.append(n)

    def _grow(self, n: int) -> None:
        raise NotImplementedError

    def _place(self, parameter: Tensor) -> nn.Parameter:
        return nn.Parameter(parameter.detach().to(self._anchor))

    def scores(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits, and the similarities that they are scaled from, or None; both (N, `n_classes`)."""
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        return self.scores(features)[0]

    def block(self, task: int) -> list[nn.Parameter]:
        """The parameters of one task's classes."""
        return [self.weights[task]]

    def joined_weights(self) -> Tensor:
        """The weights of all classes, task 0 first: (`n_classes`, ...)."""
        if not self.task_sizes:
            raise UserError(f"{type(self).__name__}: the head has no classes yet; call grow(n) first.")
        return _joined(self.weights)

    def extra_repr(self) -> str:
        return f"n_features={self.n_features}, task_sizes={self.task_sizes}"


class LinearHead(Head):
    """One linear layer per task with torch's default initialisation; their logits are concatenated."""

    def __init__(self, n_features: int) -> None:
        super().__init__(n_features)
        self.biases = nn.ParameterList()

    def _grow(self, n: int) -> None:
        linear = nn.Linear(self.n_features, n)
        self.weights.append(self._place(linear.weight))
        self.biases.append(self._place(linear.bias))

    def block(self, task: int) -> list[nn.Parameter]:
        return [self.weights[task], self.biases[task]]

    def scores(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        # One product with the concatenated weights: a product per task would cost a launch each, forward and backward.
        return F.linear(features, self.joined_weights(), _joined(self.biases)), None


class BiasCorrectedHead(LinearHead):
    """BiC's classifier: a linear head whose logits for task t are alpha_t o + beta_t; ``similarity`` is alpha_t o."""

    def __init__(self, n_features: int) -> None:
        super().__init__(n_features)
        self.alphas = nn.ParameterList()
        self.betas = nn.ParameterList()

    def _grow(self, n: int) -> None:
        super()._grow(n)
        self.alphas.append(self._place(torch.ones(())))
        self.betas.append(self._place(torch.zeros(())))

    def block(self, task: int) -> list[nn.Parameter]:
        return [*super().block(task), self.alphas[task], self.betas[task]]

    def correction(self, task: int) -> list[nn.Parameter]:
        return [self.alphas[task], self.betas[task]]

    def scores(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        scaled = super().scores(features)[0] * self._spread(self.alphas)
        return scaled + self._spread(self.betas), scaled

    def _spread(self, parameters: nn.ParameterList) -> Tensor:
        """Expand one value per task to one per class."""
        return torch.cat([p.expand(n) for p, n in zip(parameters, self.task_sizes, strict=True)])


class CosineHead(Head):
    """LUCIR's classifier: logit = eta * cos(f, w), with one learnable scale eta for all classes, initially 1."""

    def __init__(self, n_features: int) -> None:
        super().__init__(n_features)
        self.eta = nn.Parameter(torch.ones(()))

    def _grow(self, n: int) -> None:
        bound = 1 / math.sqrt(self.n_features)
        self.weights.append(self._place(torch.empty(n, self.n_features).uniform_(-bound, bound)))

    def scores(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        cosine = F.linear(F.normalize(features, dim=1), F.normalize(self.joined_weights(), dim=1))
        return self.eta * cosine, cosine


class ProxyHead(Head):
    """PODNet's local similarity classifier (Douillard et al., 2020): `n_proxies` weight vectors per class.

    With s_k = -|f/|f| - w_k/|w_k||^2 = 2 cos(f, w_k) - 2, the similarity of a class is sum_k softmax(s)_k s_k;
    logit = eta * similarity, eta learnable, initially 1. `weights[t]` is (classes, `n_proxies`, D). A non-zero `scale` is the
    length of features and proxies instead of 1: s_k is `scale`^2 times as large, and eta is not meant to be trained.
    """

    def __init__(self, n_features: int, n_proxies: int = 10, scale: float = 0.0) -> None:
        super().__init__(n_features)
        self.n_proxies = n_proxies
        self.scale = scale
        self.eta = nn.Parameter(torch.ones(()))

    def _grow(self, n: int) -> None:
        weights = torch.randn(n, self.n_proxies, self.n_features) / math.sqrt(self.n_features)
        self.weights.append(self._place(weights))

    @torch.no_grad()
    def set_proxies(self, task: int, centres: Tensor) -> None:
        """Overwrite the proxies of a task with `centres` (classes, `n_proxies`, D), in place."""
        weights = self.weights[task]
        if centres.shape != weights.shape:
            wanted, got = tuple(weights.shape), tuple(centres.shape)
            raise UserError(f"ProxyHead.set_proxies: task {task} takes centres of shape {wanted}, got {got}.")
        weights.copy_(centres)

    def scores(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        proxies = F.normalize(self.joined_weights(), dim=2).flatten(0, 1)
        near = 2 * F.linear(F.normalize(features, dim=1), proxies) - 2  # (N, classes * proxies)
        near = near.unflatten(1, (-1, self.n_proxies))
        if self.scale:
            near = self.scale**2 * near
        similarity = (near * near.softmax(2)).sum(2)
        return self.eta * similarity, similarity
