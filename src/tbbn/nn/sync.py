"""The layer on several ranks: statistics over the rows of all processes, equal to one process with the whole batch.

The whole batch is the current rows of rank 0, 1, ..., then the memory rows of rank 0, 1, ... Its plan decides the splits. A rank
needs the plan's columns for its own rows and, to merge the moments of all ranks, the weight of every rank in every group:

    forward     each rank computes the mean and variance of its part of each group; one collective gathers them for merging
    backward    one collective sums the gradients of the groups' means and variances over the ranks

Weight and bias get the gradients of this rank's rows only, as in ``nn.SyncBatchNorm``: DDP and FSDP average them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from tbbn.errors import UserError
from tbbn.nn.plan import Layout, Plan, PlanOptions, one_group, product

Counts = Sequence[tuple[int, int]]  # current and memory rows of rank 0, 1, ...


def ranks_in(group: Any) -> int:
    """The number of ranks in a process group (None: the default group); 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return max(1, dist.get_world_size(group))


@dataclass(frozen=True, eq=False)
class RankLayout(Layout):
    """The layout of this rank's rows, with the counts of all ranks of each process group."""

    counts: Mapping[Any, Counts] = field(default_factory=dict)

    def rank_plan(self, group: Any, options: PlanOptions, device: torch.device, dtype: torch.dtype) -> RankPlan:
        key = (group, options, device, dtype)
        return self._cached(key, lambda: _build(self, group, options).to(device, dtype))


def share_counts(layout: Layout, groups: Mapping[Any, torch.device], given: Counts | None = None) -> Layout:
    """``layout`` with the counts of all ranks: ``given``, or gathered. ``groups`` maps each process group to its device."""
    groups = {group: device for group, device in groups.items() if ranks_in(group) > 1}
    if not groups:
        return layout
    counts = {
        group: _gather_counts(layout, group, device) if given is None else _checked(layout, group, given)
        for group, device in groups.items()
    }
    if (
        layout.is_memory is None
        and layout.task_ids is None
        and layout.rule is None
        and not torch.compiler.is_compiling()
    ):
        return _counted(layout.current, layout.memory, layout.past_tasks, tuple(counts.items()))
    return RankLayout(**{f.name: getattr(layout, f.name) for f in fields(layout) if f.init}, counts=counts)


@lru_cache(maxsize=64)  # batches with the same counts share a layout, and therefore its plan
def _counted(current: int, memory: int, past_tasks: int, counts: tuple[tuple[Any, Counts], ...]) -> RankLayout:
    return RankLayout(current, memory, past_tasks, counts=dict(counts))


def _gather_counts(layout: Layout, group: Any, device: torch.device) -> Counts:
    if "cpu" in dist.get_backend_config(group):  # NCCL alone needs GPU tensors, and reading them back is a host sync
        device = torch.device("cpu")
    mine = torch.tensor([layout.current, layout.memory, layout.past_tasks], device=device)
    rows = _all_gather(mine, ranks_in(group), group).tolist()
    if any(past != layout.past_tasks for _, _, past in rows):
        raise UserError(f"balance: past_tasks must be the same on all ranks, got {[past for _, _, past in rows]}.")
    return tuple((current, memory) for current, memory, _ in rows)


def _checked(layout: Layout, group: Any, given: Counts) -> Counts:
    counts = tuple((int(current), int(memory)) for current, memory in given)
    ranks, rank = ranks_in(group), dist.get_rank(group)
    if len(counts) != ranks:
        raise UserError(f"balance: rank_counts has {len(counts)} entries but the process group has {ranks} ranks.")
    if counts[rank] != (layout.current, layout.memory):
        raise UserError(
            f"balance: rank_counts says {counts[rank]} for rank {rank}, whose batch has {(layout.current, layout.memory)} "
            "current and memory rows."
        )
    return counts


@dataclass(frozen=True, eq=False)
class RankPlan(Plan):
    """The part of the whole batch's plan that one rank needs.

    ``gather`` (r, rows) and ``scatter`` (rows, r) are for this rank's rows; ``running`` and ``sizes`` are those of the whole
    batch. ``shares[k, j]`` is the weight of rank ``k`` in group ``j``. It is None in a training forward outside ``balance``,
    where the counts of other ranks are unknown: there is one group, ``gather`` is 1, and ranks send counts with their moments.
    """

    shares: Tensor | None = None  # (ranks, r), columns sum to 1
    ranks: int = 1
    group: Any = None


def unbalanced_plan(rows: int, group: Any, device: torch.device, dtype: torch.dtype) -> RankPlan:
    """The plan of batch norm over all ranks when only this rank's number of rows is known."""
    plan = one_group(rows)
    plan = _rank_plan(plan, gather=plan.scatter.t(), ranks=ranks_in(group), group=group)
    return cast(RankPlan, plan.to(device, dtype))


def _build(layout: RankLayout, group: Any, options: PlanOptions) -> RankPlan:
    """This rank's part of the whole batch's plan, on the CPU in double precision."""
    rank, counts = dist.get_rank(group), layout.counts[group]
    current, memory = (sum(rows) for rows in zip(*counts, strict=True))
    whole = Layout(current, memory, layout.past_tasks, rule=options.rule_for(layout))
    plan = whole.plan(options) or one_group(current + memory)
    # Where the current and the memory rows of each rank begin in the whole batch.
    starts = [(sum(c for c, _ in counts[:k]), current + sum(m for _, m in counts[:k])) for k in range(len(counts))]
    shares = [
        plan.gather[:, i : i + c].sum(1) + plan.gather[:, j : j + m].sum(1)
        for (i, j), (c, m) in zip(starts, counts, strict=True)
    ]
    is_memory = layout.memory_mask()
    mine = torch.where(
        is_memory, starts[rank][1] + is_memory.cumsum(0) - 1, starts[rank][0] + (~is_memory).cumsum(0) - 1
    )
    return _rank_plan(
        plan,
        rows=layout.rows,
        gather=plan.gather[:, mine],
        scatter=plan.scatter[mine],
        shares=torch.stack(shares),
        ranks=len(counts),
        group=group,
    )


def _rank_plan(plan: Plan, **changes: Any) -> RankPlan:
    return RankPlan(**{f.name: getattr(plan, f.name) for f in fields(plan) if f.init} | changes)


def synchronised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: RankPlan, eps: float
) -> tuple[Tensor, Tensor, Tensor, RankPlan]:
    """Output, means (r, C) and biased variances (r, C) of the whole batch's groups, and the plan with its counts filled in."""
    if x.dim() == 2:
        y, mean, var, plan = synchronised(x.unsqueeze(2), weight, bias, plan, eps)
        return y.squeeze(2), mean, var, plan
    with torch.no_grad():
        mean, var, plan = _moments(x, plan)
    # Pass the plan's tensors: for the plan itself torch 2.9 would compile once for every value of its numbers, such as ``rows``.
    parts = (plan.gather, plan.scatter, plan.running, plan.blend)
    return _Normalise.apply(x, weight, bias, mean, var, *parts, plan.group, eps), mean, var, plan


def _moments(x: Tensor, plan: RankPlan) -> tuple[Tensor, Tensor, RankPlan]:
    rows, dims, shape = x.to(plan.gather.dtype), *_geometry(x)
    row_mean = rows.mean(dims)  # (B, C)
    row_var = (rows - row_mean.view(shape)).square().mean(dims)
    # Mean squares lose digits if the mean is large relative to the spread: first subtract the mean of this rank's rows.
    centre = row_mean.sum(0) / max(1, x.shape[0])
    row_mean = row_mean - centre
    weight = plan.gather.sum(1, keepdim=True)  # (r, 1)
    inside = plan.gather / torch.where(weight > 0, weight, 1)  # a rank may have no row in a group
    mean = product(inside, row_mean)  # (r, C)
    var = (product(inside, row_var + row_mean.square()) - mean.square()).clamp_min(0)
    message = [mean + centre, var] if plan.shares is not None else [mean + centre, var, weight.expand_as(mean)]
    means, variances, *counts = _all_gather(torch.stack(message), plan.ranks, plan.group).unbind(1)  # (ranks, r, C)
    if plan.shares is None:
        total = counts[0][:, :, 0].sum(0)  # (r,)
        plan = replace(plan, gather=plan.gather / total, shares=counts[0][:, :, 0] / total, sizes=total)
    shares = cast(Tensor, plan.shares).unsqueeze(2)
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean).square())).sum(0)
    return mean, var, plan


def _geometry(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of the pixels, and the shape (B, C, 1, ...) of a value per row and channel."""
    return tuple(range(2, x.dim())), (*x.shape[:2], *[1] * (x.dim() - 2))


def _all_gather(message: Tensor, ranks: int, group: Any) -> Tensor:  # (ranks, ...)
    parts = [torch.empty_like(message) for _ in range(ranks)]
    dist.all_gather(parts, message, group=group)
    return torch.stack(parts)


class _Normalise(torch.autograd.Function):
    """``x`` normalised by the groups' statistics. Its backward includes the other ranks' rows, which autograd does not see."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        gather: Tensor,
        scatter: Tensor,
        running: Tensor,
        blend: Tensor | None,
        group: Any,
        eps: float,
    ) -> Tensor:
        _, shape = _geometry(x)
        centre = product(running[None], mean)[0]  # as in the reference, for the digits
        mean = mean - centre
        used_mean, used_var = (mean, var) if blend is None else (product(blend, mean), product(blend, var))
        inv = (used_var + eps).rsqrt()
        scale = inv if weight is None else inv * weight.to(inv.dtype)
        factor, offset = product(scatter, scale), -product(scatter, used_mean * scale)  # (B, C)
        if bias is not None:
            offset = offset + bias.to(inv.dtype)
        y = (x.to(inv.dtype) - centre.view(1, *shape[1:])) * factor.view(shape) + offset.view(shape)
        ctx.save_for_backward(x, weight, bias, mean, used_mean, inv, scale, centre, gather, scatter, blend)
        ctx.group = group
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, group_mean, mean, inv, scale, centre, gather, scatter, blend = ctx.saved_tensors
        dims, shape = _geometry(x)
        rows, g = x.to(inv.dtype) - centre.view(1, *shape[1:]), grad.to(inv.dtype)
        sum_g = product(scatter.t(), g.sum(dims))  # (r, C)
        spread = (product(scatter.t(), (g * rows).sum(dims)) - mean * sum_g) * inv  # sums of g * normalised x
        grad_weight = spread.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_g.sum(0).to(bias.dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, *[None] * 8
        sums = torch.stack([sum_g, spread])
        dist.all_reduce(sums, group=ctx.group)
        level, slope = sums[0] * scale, sums[1] * inv * scale  # minus the gradients of mean and, doubled, of variance
        if blend is not None:
            level, slope = product(blend.t(), level), product(blend.t(), slope)
        level = level - slope * group_mean
        back = gather.t() / x.shape[2:].numel()
        level, slope, factor = product(back, level), product(back, slope), product(scatter, scale)  # (B, C)
        dx = g * factor.view(shape) - rows * slope.view(shape) - level.view(shape)
        return dx.to(x.dtype), grad_weight, grad_bias, *[None] * 8
