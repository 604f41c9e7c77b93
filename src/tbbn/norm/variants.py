"""The other normalisation layers of the comparison, each with batch norm's constructor so that any model can take it.

All accept (N, C, *) input. Where the code released with the paper departs from a layer's own publication, the publication is
the default and the departure an option (docs/norms.md lists them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tbbn.errors import UserError
from tbbn.norm.functional import statistics_dtype
from tbbn.norm.layers import BalancedNorm
from tbbn.norm.plan import Layout


class AnyDims:
    """Accepts what ``nn.BatchNorm1d/2d/3d`` accept together; mixed in before a batch norm class."""

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"{type(self).__name__}: expected input of shape (N, C, ...), got {tuple(x.shape)}.")


def check_groups(owner: str, groups: int, channels: int) -> None:
    if groups < 1 or channels % groups:
        fitting = [d for d in range(1, channels + 1) if channels % d == 0]
        raise UserError(f"{owner}: groups={groups} does not divide {channels} channels; choose one of {fitting}.")


class InstanceNorm(nn.GroupNorm):
    """Each channel of each sample by its own mean and variance (Ulyanov et al., 2016), with a learnable affine map."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(num_features, num_features, eps, affine, device, dtype)


class GroupNorm(nn.GroupNorm):
    """Groups of channels of each sample by their own mean and variance (Wu and He, 2018).

    ``channels_per_group`` takes precedence over ``groups`` where given: the released code read its number that way.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        groups: int = 16,
        channels_per_group: int | None = None,
    ) -> None:
        if channels_per_group is not None:
            groups = max(1, num_features // channels_per_group)
        check_groups("gn", groups, num_features)
        super().__init__(groups, num_features, eps, affine, device, dtype)


class ContinualNorm(AnyDims, _BatchNorm):
    """Group norm without an affine map, then batch norm (Pham et al., ICLR 2022); the state is the batch norm's."""

    def __init__(self, num_features: int, *args: Any, groups: int = 16, **kwargs: Any) -> None:
        check_groups("cn", groups, num_features)
        super().__init__(num_features, *args, **kwargs)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.group_norm(x, self.groups, eps=self.eps))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}"


class SwitchableNorm(AnyDims, _BatchNorm):
    """A learnt mixture of instance, layer and batch statistics (Luo et al., ICLR 2019).

    Means and variances have three softmax weights each. Running statistics are the batch part's.
    """

    def __init__(self, num_features: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_features, *args, **kwargs)
        factory = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.mean_weight = nn.Parameter(torch.ones(3, **factory))
        self.var_weight = nn.Parameter(torch.ones(3, **factory))

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        rows = x.to(statistics_dtype(x)).flatten(2) if x.dim() > 2 else x.to(statistics_dtype(x)).unsqueeze(2)
        var_in, mean_in = torch.var_mean(rows, 2, unbiased=False)  # (N, C)
        square = var_in + mean_in.square()
        mean_ln = mean_in.mean(1, keepdim=True)
        var_ln = square.mean(1, keepdim=True) - mean_ln.square()
        if self.training or self.running_mean is None or self.running_var is None:
            mean_bn = mean_in.mean(0)
            var_bn = square.mean(0) - mean_bn.square()
            self._run(mean_bn, var_bn, rows.shape[0] * rows.shape[2])
        else:
            mean_bn, var_bn = self.running_mean.to(rows.dtype), self.running_var.to(rows.dtype)
        wm, wv = self.mean_weight.softmax(0), self.var_weight.softmax(0)
        mean = wm[0] * mean_in + wm[1] * mean_ln + wm[2] * mean_bn
        inv = (wv[0] * var_in + wv[1] * var_ln + wv[2] * var_bn + self.eps).rsqrt()
        y = (rows - mean.unsqueeze(2)) * inv.unsqueeze(2)
        if self.weight is not None:
            y = y * self.weight.view(-1, 1) + self.bias.view(-1, 1)
        return y.view(x.shape).to(x.dtype)

    @torch.no_grad()
    def _run(self, mean: Tensor, var: Tensor, n: int) -> None:
        if self.running_mean is None or self.running_var is None or not self.training:
            return
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)  # type: ignore[arg-type]
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((var * n / max(n - 1, 1)).to(self.running_var.dtype), momentum)


class BatchRenorm(AnyDims, _BatchNorm):
    """Batch norm corrected towards its running statistics (Ioffe, 2017).

    ``y = (x - mu_B) / sigma_B * r + d`` with ``r = clip(sigma_B / sigma, 1/r_max, r_max)`` and
    ``d = clip((mu_B - mu) / sigma, -d_max, d_max)``, both constants to the gradient. Following the publication the limits open
    from (1, 0) at step 5 000 to r_max at 40 000 and d_max at 25 000, and the moving average is one of sigma, with rate 0.01.
    The buffers are batch norm's (``sigma = sqrt(running_var + eps)``), so in eval mode the layer is batch norm.

    ``eps_on_std`` adds ``eps`` to the standard deviation instead of the variance, as the released code did (with 1e-3).
    """

    own_momentum = True  # converted layers take 0.01, not the replaced layer's rate

    @property
    def is_batch_norm_in_eval(self) -> bool:
        return not self.eps_on_std

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.01,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        r_max: float = 3.0,
        d_max: float = 5.0,
        eps_on_std: bool = False,
    ) -> None:
        if momentum is None or not track_running_stats:
            raise UserError("brn: batch renormalisation needs running statistics and a momentum, such as 0.01.")
        super().__init__(num_features, eps, momentum, affine, True, device, dtype)
        self.r_max, self.d_max, self.eps_on_std = r_max, d_max, eps_on_std

    def _limits(self) -> tuple[Tensor, Tensor]:
        step = self.num_batches_tracked.float()  # type: ignore[union-attr]
        r_max = (1 + (self.r_max - 1) * (step - 5_000) / 35_000).clamp(1.0, self.r_max)
        d_max = (self.d_max * (step - 5_000) / 20_000).clamp(0.0, self.d_max)
        return r_max, d_max

    def _sigma(self, var: Tensor) -> Tensor:
        return var.sqrt() + self.eps if self.eps_on_std else (var + self.eps).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        shape = (1, -1) + (1,) * (x.dim() - 2)
        rows = x.to(statistics_dtype(x))
        if self.training:
            dims = [d for d in range(x.dim()) if d != 1]
            if x.numel() == x.shape[1]:
                raise ValueError(
                    f"BatchRenorm: expected more than 1 value per channel in training, got {tuple(x.shape)}."
                )
            var, mean = torch.var_mean(rows, dims, unbiased=False)
            sigma = self._sigma(var)
            with torch.no_grad():
                old_sigma, old_mean = self._sigma(self.running_var), self.running_mean
                r_max, d_max = self._limits()
                r = (sigma / old_sigma).clamp(1 / r_max, r_max)
                d = torch.maximum(torch.minimum((mean - old_mean) / old_sigma, d_max), -d_max)
                new_sigma = old_sigma.lerp(sigma.to(old_sigma.dtype), self.momentum)
                self.running_mean.lerp_(mean.to(old_mean.dtype), self.momentum)
                self.running_var.copy_(
                    (new_sigma - self.eps).square() if self.eps_on_std else new_sigma.square() - self.eps
                )
                self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            y = (rows - mean.view(shape)) * (r / sigma).view(shape) + d.view(shape)
        else:
            y = (rows - self.running_mean.view(shape)) / self._sigma(self.running_var).view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)


class AdaptiveBalancedNorm(AnyDims, BalancedNorm):
    """AdaB2N (Lyu et al., NeurIPS 2023): task weights that adapt, and a running average that does.

    With ``c_k`` rows of task ``k`` in the batch, task ``k`` weighs ``(exp(w_k) + c_k) / sum`` with learnable ``w``; a row
    weighs its task's weight over ``c_k``. The rate of the running statistics falls from ``m^kappa`` towards
    ``1 - (1 - m)^kappa``. ``penalty`` holds ``strength`` times the squared distance between the batch's and the running
    statistics; :func:`tbbn.penalty` collects it from a model for the loss.

    Rows' tasks come from ``balance(..., task_ids=...)``; without it memory rows count as spread evenly over past tasks.
    """

    def __init__(
        self,
        num_features: int,
        *args: Any,
        max_tasks: int = 100,
        kappa: float = 1.0,
        strength: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_features, *args, **kwargs)
        if self.momentum is None or not self.track_running_stats:
            raise UserError("adab2n: needs running statistics and a momentum, such as 0.1.")
        factory = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.task_logits = nn.Parameter(torch.zeros(max_tasks, **factory))
        self.register_buffer("rate", torch.zeros((), device=kwargs.get("device")))
        self.max_tasks, self.kappa, self.strength = max_tasks, kappa, strength
        self.penalty: Tensor | None = None
        self._member: Tensor | None = None

    def set_layout(self, layout: Layout | None) -> None:
        super().set_layout(layout)
        self.penalty = None
        if layout is None:
            self._member = None
            return
        if layout.past_tasks + 1 > self.max_tasks:
            raise UserError(
                f"adab2n: max_tasks is {self.max_tasks} but this is task {layout.past_tasks + 1}; raise it."
            )
        self._member = membership(layout).to(self.task_logits.device, statistics_dtype(self.task_logits))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "penalty": None, "_member": None}

    def _next_rate(self) -> Tensor:
        assert self.momentum is not None and isinstance(self.rate, Tensor)
        m = self.momentum
        first = torch.full_like(self.rate, m**self.kappa)
        self.rate.copy_(torch.where(self.rate == 0, first, self.rate / (self.rate + (1 - m) ** self.kappa)))
        return self.rate

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        layout = self.layout_of(x)
        if layout is None or not layout.past_tasks or self._member is None:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None
        member = self._member  # (B, tasks)
        counts = member.sum(0)
        concentration = self.task_logits[: member.shape[1]].exp() + counts
        share = concentration / concentration.sum() / counts.clamp_min(torch.finfo(counts.dtype).tiny)
        weights = member @ torch.where(counts > 0, share, 0)  # (B,); an absent task keeps its share, as published
        rows = x.to(statistics_dtype(x)).flatten(2) if x.dim() > 2 else x.to(statistics_dtype(x)).unsqueeze(2)
        mean = weights @ rows.mean(2)  # (C,)
        centred = rows - mean.view(1, -1, 1)
        var = weights @ centred.square().mean(2)
        with torch.no_grad():
            rate = self._next_rate()
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            self.running_var.lerp_(var.to(self.running_var.dtype), rate)
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        if self.strength:
            self.penalty = self.strength * (
                F.mse_loss(mean, self.running_mean.clone()) + F.mse_loss(var, self.running_var.clone())
            )
        y = centred * (var + self.eps).rsqrt().view(1, -1, 1)
        if self.weight is not None:
            y = y * self.weight.view(1, -1, 1) + self.bias.view(1, -1, 1)
        return y.view(x.shape).to(x.dtype)


def membership(layout: Layout) -> Tensor:
    """(B, tasks): which task each row belongs to; a memory row of unknown task to every past one in equal parts."""
    n_tasks = layout.past_tasks + 1
    if layout.task_ids is not None:
        ids = layout.task_ids.long()
        if int(ids.max()) >= n_tasks or int(ids.min()) < 0:
            raise UserError(
                f"balance: task_ids must lie in 0..{n_tasks - 1} for past_tasks={n_tasks - 1}, got {int(ids.max())}."
            )
        return F.one_hot(ids, n_tasks).double()
    is_memory = layout.memory_mask()
    current = F.one_hot(torch.full_like(is_memory, n_tasks - 1, dtype=torch.int64), n_tasks).double()
    spread = (1 - current) / max(layout.past_tasks, 1)
    return torch.where(is_memory.unsqueeze(1), spread, current)


def penalty(module: nn.Module) -> Tensor | None:
    """The sum of what norms of ``module`` ask to be added to the loss after a training forward; None if none does."""
    found = [m.penalty for m in module.modules() if isinstance(m, AdaptiveBalancedNorm) and m.penalty is not None]
    return torch.stack(found).sum() if found else None
