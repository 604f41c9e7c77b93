"""The norms that task-balanced batch norm is compared with: IN, GN, SN, BRN, CN. AdaB2N has its own file.

Each has batch norm's constructor, so that ``tbbn.convert`` can put it into any model, and accepts (N, C, ...) input. The default
is the norm as published; where the code released with the paper differs, an option selects it (docs/norms.md lists them).

All of them map channel c of sample n by ``(x - center) * scale + shift``, with center, scale and shift computed from the mean and
variance of each channel of each sample. ``normaliser`` is that computation, for kernels that only do the passes over ``x``
(``tbbn.accelerators.fused``). ``form`` holds its parameters, for kernels that also do the computation; it is None where they
cannot (a cumulative average reads its counter). ``compiles_normaliser`` says whether ``torch.compile`` can compile it. A norm
that reads statistics and changes them has a ``snapshot`` of them: compiled code may read its inputs again in the backward.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tbbn.errors import UserError
from tbbn.nn.functional import statistics_dtype, update_average
from tbbn.nn.private import AnyBatchNorm
from tbbn.options import Option


class AnyDims:
    """Mixin that accepts the inputs of ``nn.BatchNorm1d``, ``2d`` and ``3d``; place it before a batch norm class."""

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"{type(self).__name__}: expected input of shape (N, C, ...), got {tuple(x.shape)}.")


def check_groups(owner: str, groups: int, channels: int, name: str = "groups") -> None:
    if groups < 1 or channels % groups:
        fitting = [d for d in range(1, channels + 1) if channels % d == 0]
        raise UserError(f"{owner}: {name}={groups} does not divide {channels} channels; choose one of {fitting}.")


def pixels_last(x: Tensor) -> Tensor:
    """``x`` (N, C, ...) as (N, C, pixels), in the precision of the statistics."""
    x = x.to(statistics_dtype(x))
    return x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)


def apply_affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply by each channel's weight and add its bias, where given."""
    shape = (1, -1) + (1,) * (y.dim() - 2)
    if weight is not None:
        y = y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


class Normaliser(NamedTuple):
    """``(x - center) * scale + shift``, each for every sample and channel: tensors that broadcast to (N, C)."""

    center: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, center: Tensor, inverse: Tensor, layer: Any, shift: Tensor | None = None) -> Normaliser:
        """``(x - center) * inverse + shift``, then the affine map of ``layer``."""
        if layer.weight is not None:
            inverse, shift = inverse * layer.weight, None if shift is None else shift * layer.weight
        if layer.bias is not None:
            shift = layer.bias if shift is None else shift + layer.bias
        return cls(center, inverse, center.new_zeros(1) if shift is None else shift)


class Groups(NamedTuple):
    """Parameters of a norm over groups of channels of each sample, optionally followed by batch norm before the affine map."""

    groups: int
    then_batch: bool


class Mixture(NamedTuple):
    """Parameters of switchable norm."""

    unbiased: bool


class Renorm(NamedTuple):
    """Parameters of batch renormalisation."""

    r_max: float
    d_max: float
    eps_on_std: bool


def batch_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) over the batch from those of each sample: the law of total variance."""
    between, batch_mean = torch.var_mean(mean, 0, unbiased=False)
    return batch_mean, between + var.mean(0)


def group_moments(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the group of each channel, (N, C), from those of the channels."""
    parts = mean.unflatten(1, (groups, -1))
    between, group_mean = torch.var_mean(parts, 2, unbiased=False, keepdim=True)
    group_var = between + var.unflatten(1, (groups, -1)).mean(2, keepdim=True)
    return group_mean.expand_as(parts).flatten(1), group_var.expand_as(parts).flatten(1)


@torch.no_grad()
def track(layer: Any, mean: Tensor, var: Tensor, n: int) -> None:
    """Move a batch norm's running statistics, if any, towards the mean and biased variance of ``n`` values per channel."""
    if layer.running_mean is None or not layer.track_running_stats:
        return
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum if layer.momentum is not None else 1 / float(layer.num_batches_tracked)
    update_average(layer.running_mean, mean, momentum)
    update_average(layer.running_var, var * n / max(n - 1, 1), momentum)


class InstanceNorm(nn.GroupNorm):
    """Instance norm: normalises each channel of each sample (Ulyanov et al., 2016), with an affine map."""

    per_sample = True  # no statistics over rows, so nothing to synchronise over ranks
    compiles_normaliser = True

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(num_features, num_features, eps, affine, device, dtype)

    def form(self, x: Tensor) -> Groups:
        return Groups(self.num_groups, False)

    def normaliser(self, x: Tensor, mean: Tensor, var: Tensor) -> Normaliser:
        return Normaliser.of(mean, (var + self.eps).rsqrt(), self)


class GroupNorm(nn.GroupNorm):
    """Group norm: normalises each group of channels of each sample (Wu and He, 2018).

    ``channels_per_group`` overrides ``groups`` unless it is 0; the released code interprets its number this way.
    """

    per_sample = True
    compiles_normaliser = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        groups: Annotated[int, Option(help="number of channel groups", least=1)] = 16,
        channels_per_group: Annotated[int, Option(help="channels per group, instead of groups; 0 is off", least=0)] = 0,
    ) -> None:
        if channels_per_group:
            check_groups("gn", channels_per_group, num_features, "channels_per_group")
            groups = num_features // channels_per_group
        check_groups("gn", groups, num_features)
        super().__init__(groups, num_features, eps, affine, device, dtype)

    def form(self, x: Tensor) -> Groups:
        return Groups(self.num_groups, False)

    def normaliser(self, x: Tensor, mean: Tensor, var: Tensor) -> Normaliser:
        mean, var = group_moments(mean, var, self.num_groups)
        return Normaliser.of(mean, (var + self.eps).rsqrt(), self)


class ContinualNorm(AnyDims, AnyBatchNorm):
    """Continual norm: group norm without an affine map, then batch norm (Pham et al., ICLR 2022). Its state is batch norm's."""

    @property
    def compiles_normaliser(self) -> bool:
        return self.momentum is not None  # a cumulative average reads its counter

    def form(self, x: Tensor) -> Groups | None:
        return None if self.momentum is None else Groups(self.groups, True)

    def __init__(
        self,
        num_features: int,
        *args: Any,
        groups: Annotated[int, Option(help="number of channel groups", least=1)] = 16,
        **kwargs: Any,
    ) -> None:
        check_groups("cn", groups, num_features)
        super().__init__(num_features, *args, **kwargs)
        self.groups = groups

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.group_norm(input, self.groups, eps=self.eps))

    def normaliser(self, x: Tensor, mean: Tensor, var: Tensor) -> Normaliser:
        group_mean, group_var = group_moments(mean, var, self.groups)
        inverse = (group_var + self.eps).rsqrt()
        # Batch norm's input: the channels after group norm.
        seen_mean, seen_var = batch_moments((mean - group_mean) * inverse, var * inverse.square())
        if self.training:
            track(self, seen_mean, seen_var, x.numel() // x.shape[1])
        elif self.running_mean is not None:
            seen_mean, seen_var = self.running_mean, cast(Tensor, self.running_var)
        return Normaliser.of(group_mean + seen_mean / inverse, inverse * (seen_var + self.eps).rsqrt(), self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}"


class SwitchableNorm(AnyDims, AnyBatchNorm):
    """Switchable norm: a learnt mixture of instance, layer and batch statistics (Luo et al., ICLR 2019).

    Means and variances have three softmax weights each. The running statistics belong to the batch part. ``unbiased`` divides the
    instance variance by ``H W - 1``, as the released code of both papers does; the publication divides by ``H W``.
    ``zero_variance`` starts the running variance at 0, as the released code of the TBBN paper does; batch norm's starts at 1.
    """

    @property
    def compiles_normaliser(self) -> bool:
        return self.momentum is not None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        unbiased: Annotated[bool, Option(help="unbiased instance variance, as in the released code")] = False,
        zero_variance: Annotated[
            bool, Option(help="the running variance starts at 0 instead of 1, as in the released code")
        ] = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.mean_weight = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
        self.var_weight = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
        self.unbiased = unbiased
        self.zero_variance = zero_variance
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        if (
            getattr(self, "zero_variance", False) and self.running_var is not None
        ):  # batch norm's constructor also calls this
            self.running_var.zero_()

    def form(self, x: Tensor) -> Mixture | None:
        return None if self.momentum is None else Mixture(self.unbiased)

    def forward(self, input: Tensor) -> Tensor:
        x = input
        self._check_input_dim(x)
        rows = pixels_last(x)
        var_in, mean_in = torch.var_mean(rows, 2, unbiased=self.unbiased)  # (N, C)
        mean, inverse = self._mixture(mean_in, var_in, rows.shape[2])
        y = (rows - mean.unsqueeze(2)) * inverse.unsqueeze(2)
        return apply_affine(y, self.weight, self.bias).view(x.shape).to(x.dtype)

    def normaliser(self, x: Tensor, mean: Tensor, var: Tensor) -> Normaliser:
        pixels = x.shape[2:].numel()
        return Normaliser.of(*self._mixture(mean, var * pixels / (pixels - 1) if self.unbiased else var, pixels), self)

    def _mixture(self, mean_in: Tensor, var_in: Tensor, pixels: int) -> tuple[Tensor, Tensor]:
        """The mean and the inverse standard deviation of each channel of each sample (N, C)."""
        # Law of total variance: the mean of the parts' variances plus the variance of their means.
        var_ln, mean_ln = torch.var_mean(mean_in, 1, unbiased=False, keepdim=True)
        var_ln = var_ln + var_in.mean(1, keepdim=True)
        if self.training or self.running_mean is None:
            var_bn, mean_bn = torch.var_mean(mean_in, 0, unbiased=False)
            var_bn = var_bn + var_in.mean(0)
            track(self, mean_bn, var_bn, mean_in.shape[0] * pixels)  # in eval mode there is nothing to move
        else:
            mean_bn, var_bn = (t.to(mean_in.dtype) for t in (self.running_mean, cast(Tensor, self.running_var)))
        wm, wv = self.mean_weight.softmax(0), self.var_weight.softmax(0)
        mean = wm[0] * mean_in + wm[1] * mean_ln + wm[2] * mean_bn
        return mean, (wv[0] * var_in + wv[1] * var_ln + wv[2] * var_bn + self.eps).rsqrt()


class BatchRenorm(AnyDims, AnyBatchNorm):
    """Batch renormalisation: batch norm corrected towards its running statistics (Ioffe, 2017).

    ``y = (x - mu_B) / sigma_B * r + d`` with ``r = clip(sigma_B / sigma, 1/r_max, r_max)`` and
    ``d = clip((mu_B - mu) / sigma, -d_max, d_max)``; no gradient flows through r and d. As published, the limits open from
    (1, 0) at step 5 000 to r_max at 40 000 and d_max at 25 000, and the moving average is of sigma, with momentum 0.01. The
    buffers are batch norm's (``sigma = sqrt(running_var + eps)``), so in eval mode the layer is batch norm.

    ``eps_on_std`` adds ``eps`` to the standard deviation instead of the variance, as the released code did (with 1e-3).
    """

    own_momentum = True  # convert keeps 0.01 instead of the replaced layer's momentum
    compiles_normaliser = True

    @property
    def is_batch_norm_in_eval(self) -> bool:
        return not self.eps_on_std

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: Annotated[float | None, Option(help="momentum of the running statistics", least=0, most=1)] = 0.01,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        r_max: Annotated[float, Option(help="limit of the scale r", least=1)] = 3.0,
        d_max: Annotated[float, Option(help="limit of the shift d", least=0)] = 5.0,
        eps_on_std: Annotated[bool, Option(help="add eps to the standard deviation, as the released code did")] = False,
    ) -> None:
        if momentum is None or not track_running_stats:
            raise UserError("brn: batch renormalisation needs running statistics and a momentum, such as 0.01.")
        super().__init__(num_features, eps, momentum, affine, True, device, dtype)
        self.r_max, self.d_max, self.eps_on_std = r_max, d_max, eps_on_std

    def form(self, x: Tensor) -> Renorm:
        return Renorm(self.r_max, self.d_max, self.eps_on_std)

    def _limits(self, step: Tensor) -> tuple[Tensor, Tensor]:
        step = step.float()
        r_max = (1 + (self.r_max - 1) * (step - 5_000) / 35_000).clamp(1.0, self.r_max)
        d_max = (self.d_max * (step - 5_000) / 20_000).clamp(0.0, self.d_max)
        return r_max, d_max

    def _sigma(self, var: Tensor) -> Tensor:
        return var.sqrt() + self.eps if self.eps_on_std else (var + self.eps).sqrt()

    def forward(self, input: Tensor) -> Tensor:
        x = input
        self._check_input_dim(x)
        assert self.running_mean is not None and self.running_var is not None
        if not self.training and not self.eps_on_std:
            return super().forward(x)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        rows = x.to(statistics_dtype(x))
        if self.training:
            if rows.numel() == rows.shape[1]:
                raise ValueError(
                    f"BatchRenorm: expected more than 1 value per channel in training, got {tuple(rows.shape)}."
                )
            var, mean = torch.var_mean(rows, [d for d in range(rows.dim()) if d != 1], unbiased=False)
            factor, d = self._correction(mean, var, *self._state())
            y = (rows - mean.view(shape)) * factor.view(shape) + d.view(shape)
        else:
            sigma = self._sigma(self.running_var.to(rows.dtype))
            y = (rows - self.running_mean.view(shape)) / sigma.view(shape)
        return apply_affine(y, self.weight, self.bias).to(x.dtype)

    def _state(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        return self.running_mean, self.running_var, self.num_batches_tracked

    def snapshot(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in self._state())

    def normaliser(self, x: Tensor, mean: Tensor, var: Tensor, *state: Tensor) -> Normaliser:
        running_mean, running_var, step = state or self._state()
        if not self.training:
            return Normaliser.of(running_mean, 1 / self._sigma(running_var), self)
        mean, var = batch_moments(mean, var)
        factor, d = self._correction(mean, var, running_mean, running_var, step)
        return Normaliser.of(mean, factor, self, d)

    def _correction(
        self, mean: Tensor, var: Tensor, old_mean: Tensor, old_var: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``r / sigma_B`` and ``d`` for the moments (C,) of a batch. Updates the running statistics."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        sigma = self._sigma(var)
        with torch.no_grad():
            old_mean, old_sigma = old_mean.to(mean.dtype), self._sigma(old_var.to(mean.dtype))
            r_max, d_max = self._limits(step)
            r = torch.clamp(sigma / old_sigma, 1 / r_max, r_max)
            d = torch.clamp((mean - old_mean) / old_sigma, -d_max, d_max)
            new_sigma = old_sigma.lerp(sigma, self.momentum)
            self.running_mean.copy_(old_mean.lerp(mean, self.momentum))
            self.running_var.copy_(
                (new_sigma - self.eps).square() if self.eps_on_std else new_sigma.square() - self.eps
            )
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        return r / sigma, d
