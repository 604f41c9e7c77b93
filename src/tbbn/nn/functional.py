"""Task-balanced batch norm as a function of tensors: row moments, the plan, one affine pass.

A batch has B rows. A *plan* says which rows share statistics, in r groups, by two small constant matrices:

    gather (r, B)     the weight of each row in the mean and variance of each group; its rows sum to 1
    scatter (B, r)    the weight of each group in the normalisation of each row; its rows sum to 1

With them, for each channel:

    m[b], v[b]        mean and biased variance of row b over its pixels
    mean[j], var[j]   gather @ m,  sum over b of gather[j, b] * (v[b] + (m[b] - mean[j])^2)
    y[b]              x[b] * A[b] + S[b]  with  A = scatter @ (weight / std),  S = bias - scatter @ (weight * mean / std)

In the code ``product(a, b)`` is ``a @ b``. Memory rows are in all groups, yet no tensor of size (r, B, C, H, W) exists.
:func:`reference` computes this in tensor operations that autograd and ``torch.compile`` understand. Faster implementations are
in ``tbbn.accelerators``, which is optional.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.errors import UserError
from tbbn.nn.plan import Plan, product
from tbbn.nn.private import functorch_active
from tbbn.nn.sync import RankPlan, synchronised

if TYPE_CHECKING:
    from tbbn.accelerators.backend import Backend


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, group means (r, C) and biased group variances (r, C)."""
    rows = x.to(plan.gather.dtype)
    rows = rows if x.dim() > 2 else rows.unsqueeze(2)
    pixels = tuple(range(2, rows.dim()))
    shape = (*x.shape[:2], *[1 for _ in pixels])
    # Squares lose digits if the mean is large relative to the spread, so subtract each row's first pixel. Unlike the mean, this
    # needs no pass over x: a compiler computes both moments in one. It is a constant to autograd, since it cancels in the result.
    first = rows.detach()  # (B, C), once the pixels are selected
    for _ in pixels:
        first = first[..., 0]
    rows = rows - first.view(shape)
    row_mean = rows.mean(pixels)  # (B, C)
    row_var = rows.square().mean(pixels) - row_mean.square()
    # For the same reason group means are relative to the mean of row ``plan.anchor``, which is in all groups.
    origin = (first + row_mean.detach()).index_select(0, plan.anchor)  # (1, C)
    first = first - origin
    row_mean = row_mean + first
    mean = product(plan.gather, row_mean)  # (r, C)
    var = (product(plan.gather, row_var + row_mean.square()) - mean.square()).clamp_min(0)
    # ``plan.blend``, if given, averages the statistics of the groups before they are used: one of the paper's ablations.
    used_mean, used_var = (mean, var) if plan.blend is None else (product(plan.blend, mean), product(plan.blend, var))
    scale = (used_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    factor = product(plan.scatter, scale)  # (B, C)
    offset = first * factor - product(plan.scatter, used_mean * scale)
    if bias is not None:
        offset = offset + bias.to(scale.dtype)
    y = rows * factor.view(shape) + offset.view(shape)
    return y.view(x.shape).to(x.dtype), mean.detach() + origin, var.detach()


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
    if eps <= 0:
        raise ValueError(f"task_balanced_batch_norm: eps must be positive, got {eps}.")
    if plan is not None and x.shape[0] != plan.scatter.shape[0]:
        raise UserError(
            f"task_balanced_batch_norm: the plan covers {plan.scatter.shape[0]} rows but the input has {x.shape[0]}."
        )
    compiling = torch.compiler.is_compiling()  # on a CPU, torch.compile compiles the reference
    if x.is_cuda or not compiling:
        find = _import_backends()[1] if compiling else _backends()[0]
        backend = find(x, running_mean, running_var, weight, bias, plan)
        if backend is not None:
            return backend.norm(
                x, running_mean, running_var, weight, bias, plan, momentum, eps, num_batches_tracked
            )  # fmt: skip
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    if plan is None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, True, float(momentum), eps)
    if torch.jit.is_tracing():
        raise UserError("torch.jit.trace would keep the layout of one batch; trace the model in eval mode.")
    plan = plan.to(x.device, statistics_dtype(x))
    if isinstance(plan, RankPlan):  # the groups have rows on other ranks too
        y, mean, var, plan = synchronised(x, weight, bias, plan, eps)
    else:
        y, mean, var = reference(x, weight, bias, plan, eps)
    update_running(running_mean, running_var, mean, var, plan, x.shape[2:].numel(), momentum)
    return y


def _import_backends() -> tuple[Callable[..., Backend | None], Callable[..., Backend | None]]:
    """The functions that find a backend for eager and for compiled code. The only import of ``tbbn.accelerators``."""
    try:
        from tbbn.accelerators.backend import find, find_for_compiler
    except ModuleNotFoundError as error:
        if error.name != "tbbn.accelerators":
            raise
        return _find_nothing, _find_nothing
    return find, find_for_compiler


def _find_nothing(*inputs: Any) -> None:
    return None


_backends = cache(_import_backends)  # eager code only: torch.compile warns of caches


def statistics_dtype(x: Tensor) -> torch.dtype:
    if not x.is_floating_point():
        raise TypeError(f"batch norm needs floating-point input, got {x.dtype}.")
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def update_running(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, plan: Plan, pixels: int,
    momentum: float | Tensor,
) -> None:  # fmt: skip
    """Move the running statistics, if there are any, towards the average of the groups' ``mean`` and ``var`` (r, C)."""
    if running_mean is None or running_var is None:
        return
    # ``running`` (r,) is the share of each group; ``sizes`` (r,) is the number of rows that its unbiased variance counts.
    counts = plan.sizes * pixels
    unbiased = plan.running * counts / (counts - 1)
    batch_mean, batch_var = product(plan.running[None], mean)[0], product(unbiased[None], var)[0]
    if plan.total_variance:  # an option: the running variance includes the variance between groups
        batch_var = batch_var + product(plan.running[None], (mean - batch_mean).square())[0]
    update_average(running_mean, batch_mean, momentum)
    update_average(running_var, batch_var, momentum)


@torch.no_grad()
def update_average(running: Tensor, value: Tensor, momentum: float | Tensor) -> None:
    """Exponential moving average in place, computed in the type of ``value``."""
    if running.dtype == value.dtype and not functorch_active():
        running.lerp_(value, momentum.to(value.dtype) if isinstance(momentum, Tensor) else momentum)
    else:
        running.copy_(averaged(running, value, momentum))


def averaged(running: Tensor, value: Tensor, momentum: float | Tensor) -> Tensor:
    """The result of :func:`update_average`, in the type of ``value``, without changing ``running``."""
    running = running.to(value.dtype)
    if isinstance(momentum, Tensor):
        momentum = momentum.to(value.dtype)
    if functorch_active():  # torch.func.vmap has no rule for lerp
        return running + (value - running) * momentum
    return running.lerp(value, momentum)
