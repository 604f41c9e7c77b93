"""Who is normalised with whom: the split rule, the layout of a batch, and the plan made from it.

A batch is ``[current ; memory]``: rows of the task being learnt, and rows replayed from the tasks before it. Task-balanced
batch norm divides the current rows into ``r`` splits, gives every split all memory rows, normalises each split by its own
statistics and averages what a memory row received (Cha et al., CVPR 2023, section 4.2). All of that is one 0/1 matrix
``member (r, B)``: divided by its row sums it gathers statistics, divided by its column sums it hands them back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tbbn.errors import UserError, choose

RULES = ("paper", "current", "uneven")


def splits(current: int, memory: int, past_tasks: int, rule: str = "paper") -> int:
    """The number of splits ``r*`` for a batch of ``current`` new rows and ``memory`` rows of ``past_tasks`` earlier tasks.

    Balance asks for ``r = current / memory * past_tasks``. A rule says which whole numbers may stand for it:

    - ``"paper"``: the largest common divisor of both counts that is at most ``r``;
    - ``"current"``: the largest divisor of ``current`` that is at most ``r`` (memory rows are copied, never divided, so
      their number need not be divisible);
    - ``"uneven"``: ``r`` rounded, with splits whose sizes differ by at most one row.

    Where a rule finds nothing above 1 although ``r >= 2`` (a short last batch, say), uneven splits are used.

    >>> [splits(48, 16, past) for past in range(10)]
    [1, 2, 4, 8, 8, 8, 16, 16, 16, 16]
    >>> [splits(48, 16, past, rule="current") for past in range(10)]
    [1, 3, 6, 8, 12, 12, 16, 16, 24, 24]
    >>> splits(47, 16, 3)
    9
    """
    for name, value in (("current", current), ("memory", memory), ("past_tasks", past_tasks)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"splits: {name} must be a whole number, got {value!r}.")
        if value < 0:
            raise UserError(f"splits: {name} must not be negative, got {value}.")
    if rule not in RULES:
        raise choose("split rule", str(rule), RULES)
    if not (current and memory and past_tasks):
        return 1
    wanted = current * past_tasks  # r as the fraction wanted / memory
    uneven = max(1, min((2 * wanted + memory) // (2 * memory), current))
    if rule == "uneven":
        return uneven
    whole = math.gcd(current, memory) if rule == "paper" else current
    best = max((d for d in range(1, whole + 1) if whole % d == 0 and d * memory <= wanted), default=1)
    return uneven if best == 1 and wanted >= 2 * memory else best


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rows of a batch are memory, and how many tasks they come from. Made by :func:`tbbn.balance`."""

    current: int
    memory: int
    past_tasks: int
    is_memory: Tensor | None = None  # (B,) bool; None: rows [0, current) are current
    task_ids: Tensor | None = None  # (B,) int64, 0-based; only AdaB2N asks for it

    @property
    def rows(self) -> int:
        return self.current + self.memory

    def memory_mask(self) -> Tensor:  # (B,) bool
        if self.is_memory is not None:
            return self.is_memory
        return torch.arange(self.rows) >= self.current


def make_layout(
    current: int | None, memory: int | None, is_memory: Tensor | None, past_tasks: int, task_ids: Tensor | None
) -> Layout:
    """Check what the user said about a batch; every mistake is one line."""
    if is_memory is not None:
        if current is not None or memory is not None:
            raise UserError("balance: give either current and memory, or is_memory, not both.")
        if not isinstance(is_memory, Tensor) or is_memory.dtype != torch.bool or is_memory.dim() != 1:
            what = f"{is_memory.dtype} {tuple(is_memory.shape)}" if isinstance(is_memory, Tensor) else repr(is_memory)
            raise TypeError(f"balance: is_memory must be a 1-d bool tensor with one entry per row, got {what}.")
        memory = int(is_memory.sum())
        current = is_memory.numel() - memory
    elif current is None or memory is None:
        raise UserError("balance: give both current and memory (row counts), or is_memory (a bool per row).")
    for name, value in (("current", current), ("memory", memory), ("past_tasks", past_tasks)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"balance: {name} must be a whole number, got {value!r}.")
        if value < 0:
            raise UserError(f"balance: {name} must not be negative, got {value}.")
    if task_ids is not None:
        if not isinstance(task_ids, Tensor) or task_ids.dtype not in (torch.int64, torch.int32) or task_ids.dim() != 1:
            raise TypeError("balance: task_ids must be a 1-d integer tensor with one 0-based task number per row.")
        if task_ids.numel() != current + memory:
            raise UserError(
                f"balance: task_ids has {task_ids.numel()} entries but the layout covers {current + memory} rows."
            )
    return Layout(current, memory, past_tasks, is_memory, task_ids)


@dataclass(frozen=True, eq=False)
class Plan:
    """Two small constant matrices that say everything the layer must know about a batch.

    ``gather`` and ``scatter`` are the W and V of the documentation: row ``b`` of a batch of ``rows`` rows contributes
    ``gather[j, b]`` to the statistics of group ``j``, and is normalised with ``scatter[b, j]`` of them. ``blend``, where
    given, averages group statistics before they are used: ``scatter`` then speaks of blended groups. ``running[j]`` is the
    share of group ``j`` in the running statistics, ``sizes[j]`` the rows counted for its unbiased variance.
    """

    rows: int
    gather: Tensor  # (r, B), rows sum to 1
    scatter: Tensor  # (B, r) or (B, blended), rows sum to 1
    running: Tensor  # (r,), sums to 1
    sizes: Tensor  # (r,)
    blend: Tensor | None = None  # (blended, r)
    total_variance: bool = False  # running variance includes the variance between groups

    _per_pixels: dict[int, PerPixel] = field(default_factory=dict, repr=False)

    @property
    def splits(self) -> int:
        return self.gather.shape[0]

    def per_pixel(self, pixels: int) -> PerPixel:
        """The matrices with the division by the number of pixels in them, made once for each image size."""
        found = self._per_pixels.get(pixels)
        if found is None:
            counts = self.sizes * pixels
            found = PerPixel(
                gather=self.gather / pixels,
                gather_back=self.gather.T / -pixels,
                scatter_back=self.scatter.T.contiguous(),
                running_var=self.running * counts / (counts - 1),
            )
            self._per_pixels[pixels] = found
        return found

    def to(self, device: torch.device, dtype: torch.dtype) -> Plan:
        def move(t: Tensor) -> Tensor:
            return t.to(device=device, dtype=dtype)

        return replace(
            self,
            gather=move(self.gather),
            scatter=move(self.scatter),
            running=move(self.running),
            sizes=move(self.sizes),
            blend=None if self.blend is None else move(self.blend),
            _per_pixels={},
        )


class PerPixel(NamedTuple):
    gather: Tensor  # (r, B), makes group means of row sums
    gather_back: Tensor  # (B, r), minus its transpose
    scatter_back: Tensor  # (r, B)
    running_var: Tensor  # (r,), with the factor n / (n - 1) of the unbiased variance


@dataclass(frozen=True)
class PlanOptions:
    """Which plan a layer wants; the default is the paper's layer.

    ``case`` selects an ablation of the paper (Table 6): 1 balances the running statistics alone, 2 the normalisation alone,
    3 normalises every row with the average of the split statistics, 4 is batch norm but for the count in the unbiased
    variance. ``memory="own"`` normalises memory row ``m`` with split ``m mod r`` only, as the first preprint did.
    """

    kind: str = "tbbn"  # or "weighted": one group, every task with equal weight
    rule: str = "paper"
    case: int = 0
    memory: str = "averaged"
    total_variance: bool = False

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise choose("split rule", str(self.rule), RULES)
        if self.case not in (0, 1, 2, 3, 4):
            raise UserError(f"tbbn: case must be 0 (the layer itself) or an ablation 1 to 4, got {self.case!r}.")
        if self.memory not in ("averaged", "own"):
            raise choose("treatment of memory rows", str(self.memory), ("averaged", "own"))


def make_plan(layout: Layout, options: PlanOptions, device: torch.device, dtype: torch.dtype) -> Plan | None:
    """The plan of a batch, or None where it is plain batch norm. Layouts given by counts are planned once."""
    if layout.is_memory is not None:
        plan = _build(layout, options)
        return None if plan is None else plan.to(device, dtype)
    return _planned(layout.current, layout.memory, layout.past_tasks, options, device, dtype)


@lru_cache(maxsize=256)
def _planned(
    current: int, memory: int, past_tasks: int, options: PlanOptions, device: torch.device, dtype: torch.dtype
) -> Plan | None:
    plan = _build(Layout(current, memory, past_tasks), options)
    return None if plan is None else plan.to(device, dtype)


def _build(layout: Layout, options: PlanOptions) -> Plan | None:
    if not (layout.current and layout.memory and layout.past_tasks):
        return None
    if options.kind == "weighted":
        return _weighted(layout)
    r = splits(layout.current, layout.memory, layout.past_tasks, options.rule)
    if r == 1:
        return None
    is_memory = layout.memory_mask()
    # The i-th current row belongs to split i mod r; a memory row to all of them.
    turn = torch.where(is_memory, (is_memory.cumsum(0) - 1) % r, ((~is_memory).cumsum(0) - 1) % r)
    own = (turn == torch.arange(r, device=turn.device).unsqueeze(1)).double()  # (r, B)
    member = torch.where(is_memory, torch.ones_like(own), own)
    sizes = member.sum(1)
    gather = member / sizes.unsqueeze(1)
    scatter = (own if options.memory == "own" else member / member.sum(0)).T
    running = torch.full((r,), 1 / r, dtype=torch.double)
    plan = Plan(layout.rows, gather, scatter, running, sizes, total_variance=options.total_variance)
    return _ablated(plan, options.case) if options.case else plan


def _weighted(layout: Layout) -> Plan:
    """One group in which each of the ``past_tasks + 1`` tasks weighs the same."""
    share = 1 / (layout.past_tasks + 1)
    weights = torch.tensor([share / layout.current, (1 - share) / layout.memory], dtype=torch.double)
    gather = weights.to(layout.memory_mask().device)[layout.memory_mask().long()].unsqueeze(0)
    one = torch.ones(1, dtype=torch.double)
    return Plan(layout.rows, gather, torch.ones(layout.rows, 1), one, one * layout.rows)


def _ablated(plan: Plan, case: int) -> Plan:
    """The paper's ablations are the same groups, or plain batch norm's one group, used for one purpose and not for another."""
    b, r = plan.rows, plan.splits
    whole = torch.full((1, b), 1 / b, dtype=torch.double, device=plan.gather.device)
    everyone = torch.ones(b, 1, dtype=torch.double, device=plan.gather.device)
    if case == 3:  # all rows share the averaged statistics
        return replace(plan, scatter=everyone, blend=torch.full((1, r), 1 / r, dtype=torch.double), _per_pixels={})
    if case == 4:  # batch statistics, repeated over the splits: batch norm but for the counted rows
        return replace(
            plan, gather=whole, scatter=everyone, running=torch.ones(1), sizes=plan.sizes[:1], _per_pixels={}
        )
    gather = torch.cat([plan.gather, whole])
    no_split, no_whole = torch.zeros(b, r, dtype=torch.double), torch.zeros(b, 1, dtype=torch.double)
    sizes = torch.cat([plan.sizes, torch.tensor([float(b)])])
    if case == 1:  # normalise with the whole batch, run with the splits
        scatter = torch.cat([no_split.to(everyone), everyone], 1)
        running = torch.cat([plan.running, torch.zeros(1)])
    else:  # case 2: normalise with the splits, run with the whole batch
        scatter = torch.cat([plan.scatter, no_whole.to(everyone)], 1)
        running = torch.cat([torch.zeros_like(plan.running), torch.ones(1)])
    return replace(plan, gather=gather, scatter=scatter, running=running, sizes=sizes, _per_pixels={})
