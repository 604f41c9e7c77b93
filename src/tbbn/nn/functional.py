"""Task-balanced batch norm as a function of tensors: row moments, the plan, one affine pass.

A plan has two small constant matrices. ``gather`` (r, B) averages the B rows of a batch into the statistics of r groups;
``scatter`` (B, r) says with which groups each row is normalised. For each channel:

    m[b], q[b]        mean and mean square of row b over its pixels
    mean[j], var[j]   gather @ m,  gather @ q - mean^2
    y[b]              x[b] * A[b] + S[b]  with  A = scatter @ (weight / std),  S = bias - scatter @ (weight * mean / std)

Memory rows are in all groups, yet no tensor of size (r, B, C, H, W) exists. :func:`reference` is this in tensor operations that
autograd and ``torch.compile`` understand. Faster forms of the same function are in ``tbbn.accelerators``, which is optional.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.errors import UserError
from tbbn.nn.plan import Plan

if TYPE_CHECKING:
    from tbbn.accelerators.backend import Backend


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, group means (r, C) relative to a centre, biased group variances (r, C), and the centre (C,).

    ``plan.blend``, where given, averages group statistics before they are used.
    """
    dims, shape = tuple(range(2, x.dim())), (*x.shape[:2], *[1] * (x.dim() - 2))
    rows = x.to(plan.gather.dtype)
    # Subtract the mean of the rows that all groups share: mean squares lose digits where a mean is large against its spread.
    shared = plan.gather.amin(0, keepdim=True)
    centre = _product(shared / shared.sum(), _pixel_mean(rows.detach(), dims))[0]  # (C,)
    rows = rows - centre.view(1, *shape[1:])
    mean = _product(plan.gather, _pixel_mean(rows, dims))  # (r, C)
    var = (_product(plan.gather, _pixel_mean(rows.square(), dims)) - mean.square()).clamp_min(0)
    used_mean, used_var = (mean, var) if plan.blend is None else (_product(plan.blend, mean), _product(plan.blend, var))
    scale = (used_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    shift = -used_mean * scale
    if bias is not None:
        shift = shift + bias.to(scale.dtype)
    y = rows * _product(plan.scatter, scale).view(shape) + _product(plan.scatter, shift).view(shape)
    return y.to(x.dtype), mean.detach(), var.detach(), centre


def task_balanced_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    plan: Plan | None,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """Normalise ``x`` (N, C, ...) by a plan. Update the running statistics and count the batch in place, if given.

    ``plan=None`` means that there is nothing to balance: batch norm in training mode. Statistics are computed in float32, or in
    float64 for float64 input.
    """
    if plan is not None and x.shape[0] != plan.rows:
        raise UserError(f"task_balanced_batch_norm: the plan covers {plan.rows} rows but the input has {x.shape[0]}.")
    if not torch.compiler.is_compiling():  # a compiler fuses the reference with its neighbours
        backend = _find_backend()(x, running_mean, running_var, weight, bias, plan)
        if backend is not None:
            return backend.norm(
                x, running_mean, running_var, weight, bias, plan, momentum, eps, num_batches_tracked
            )  # fmt: skip
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    if plan is None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, True, float(momentum), eps)
    plan = plan.to(x.device, statistics_dtype(x))
    y, mean, var, centre = reference(x, weight, bias, plan, eps)
    if running_mean is not None and running_var is not None:
        counts = plan.sizes * x[0, 0].numel()
        unbiased = plan.running * counts / (counts - 1)  # the unbiased variance is tracked, as in batch norm
        batch_mean, batch_var = _product(plan.running[None], mean)[0], _product(unbiased[None], var)[0]
        if plan.total_variance:
            batch_var = batch_var + _product(plan.running[None], (mean - batch_mean).square())[0]
        update_average(running_mean, batch_mean + centre, momentum)
        update_average(running_var, batch_var, momentum)
    return y


@cache
def _find_backend() -> Callable[..., Backend | None]:
    """``tbbn.accelerators.backend.find``: the only import of that folder from here. Without the folder nothing is found."""
    try:
        from tbbn.accelerators.backend import find
    except ModuleNotFoundError as error:
        if error.name != "tbbn.accelerators":
            raise
        return lambda *inputs: None
    return find


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.no_grad()
def update_average(running: Tensor, value: Tensor, momentum: float | Tensor) -> None:
    """Exponential moving average in place, computed in the type of ``value``."""
    if isinstance(momentum, Tensor):
        momentum = momentum.to(value.dtype)
    if running.dtype == value.dtype:
        running.lerp_(value, momentum)
    else:
        running.copy_(running.to(value.dtype).lerp_(value, momentum))


def _product(matrix: Tensor, values: Tensor) -> Tensor:
    """``matrix @ values`` as sums: autocast would round a matrix product, also in backward."""
    return (matrix.unsqueeze(2) * values).sum(1)


def _pixel_mean(t: Tensor, dims: tuple[int, ...]) -> Tensor:
    return t.mean(dims) if dims else t
