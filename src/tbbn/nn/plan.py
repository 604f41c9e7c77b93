"""Who is normalised with whom: the number of splits, the layout of a batch, and the plan made from it.

A batch is ``[current ; memory]``: rows of the task being learnt, then rows replayed from earlier tasks. Task-balanced batch
norm divides the current rows into ``r`` splits and adds all memory rows to every split. It normalises each split by its own
statistics; a memory row gets the average over the splits (Cha et al., CVPR 2023, section 4.2). One 0/1 matrix
``member (r, B)`` describes all of this. Divided by its row sums it averages rows into split statistics (``Plan.gather``).
Divided by its column sums it distributes split statistics to rows (``Plan.scatter``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from tbbn.errors import UserError, unknown_name
from tbbn.nn.private import dispatch_modes, functorch_active

_MISSING = object()
RULES = ("paper", "current", "uneven")
_MOST = 2**31  # rows of a batch, or tasks: no device holds more, and searching divisors takes time


def splits(current: int, memory: int, past_tasks: int, rule: str = "paper") -> int:
    """The number of splits ``r*`` for a batch of ``current`` new rows and ``memory`` rows of ``past_tasks`` earlier tasks.

    Exact balance needs ``r = current / memory * past_tasks``. A rule rounds it to a whole number:

    - ``"paper"``: the largest common divisor of both counts that is at most ``r``;
    - ``"current"``: the largest divisor of ``current`` that is at most ``r`` (memory rows are shared by all splits, so their
      number need not be divisible);
    - ``"uneven"``: ``r`` rounded to the nearest; split sizes differ by at most one row. For counts that vary from batch to batch,
      because their common divisors would jump.

    If a rule gives 1 although ``r >= 2`` (a short last batch, for example), uneven splits are used.

    >>> [splits(48, 16, past) for past in range(10)]
    [1, 2, 4, 8, 8, 8, 16, 16, 16, 16]
    >>> [splits(48, 16, past, rule="current") for past in range(10)]
    [1, 3, 6, 8, 12, 12, 16, 16, 24, 24]
    >>> splits(47, 16, 3)
    9
    """
    current, memory, past_tasks = _counts("splits", current, memory, past_tasks)
    if rule not in RULES:
        raise unknown_name("split rule", str(rule), RULES)
    if not memory:
        return 1
    wanted = current * past_tasks  # r as the fraction wanted / memory
    uneven = max(1, min((2 * wanted + memory) // (2 * memory), current))
    if rule == "uneven":
        return uneven
    whole = math.gcd(current, memory) if rule == "paper" else current
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    best = max([1] + [d for pair in small for d in (pair, whole // pair) if d * memory <= wanted])
    return uneven if best == 1 and wanted >= 2 * memory else best


def _counts(owner: str, current: Any, memory: Any, past_tasks: Any) -> tuple[int, int, int]:
    """The three numbers as ``int``; they may be numpy scalars or tensors."""
    named = (("current", current), ("memory", memory), ("past_tasks", past_tasks))
    return cast(tuple[int, int, int], tuple(whole_number(f"{owner}: {name}", value) for name, value in named))


def whole_number(what: str, value: Any) -> int:
    if type(value) is not int:
        given = value
        try:
            if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):  # numpy's, too
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{what} must be a whole number, got {given!r}.") from None
    if value < 0:
        raise UserError(f"{what} must not be negative, got {value}.")
    if value >= _MOST:
        raise UserError(f"{what} must be below {_MOST}, got {value}.")
    return value


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rows of a batch are memory, and how many past tasks they come from. Made by :func:`tbbn.balance`."""

    current: int
    memory: int
    past_tasks: int
    is_memory: Tensor | None = None  # (B,) bool on the CPU; None: rows [0, current) are current
    task_ids: Tensor | None = None  # (B,) integers on any device, 0-based; for layers with ``wants_task_ids``
    rule: str | None = None  # the split rule; None: the layer's own

    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # plans, shared by all layers

    @property
    def rows(self) -> int:
        return self.current + self.memory

    def key(self) -> tuple[Any, ...]:
        """A key that is equal for layouts of the same rows."""
        mask = None if self.is_memory is None else tuple(self.is_memory.tolist())
        known = type(self) is Layout and self.task_ids is None  # otherwise a layout equals only itself
        return self.current, self.memory, self.past_tasks, self.rule, mask, None if known else id(self)

    def memory_mask(self) -> Tensor:  # (B,) bool
        if self.is_memory is not None:
            return self.is_memory
        return torch.arange(self.rows, device="cpu") >= self.current

    def plan(
        self,
        options: PlanOptions | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Plan | None:
        """The plan of this batch; None if there is nothing to balance (plain batch norm)."""
        options, device = options or PlanOptions(), device or torch.device("cpu")
        return self._cached((options, device, dtype), lambda: _build(self, options, device, dtype))

    def membership(self, device: torch.device, dtype: torch.dtype) -> Tensor:  # (B, tasks)
        """The task of each row, one-hot. Without ``task_ids`` a memory row belongs to all past tasks in equal parts.

        It is computed on the device of ``task_ids`` without a host sync, so that a captured CUDA graph can contain it.
        """
        return self._cached((device, dtype), lambda: _membership(self).to(dtype).to(device))

    def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if torch.compiler.is_compiling() or dispatch_modes():  # tracing, or fake tensors
            return make()
        found = self._cache.get(key, _MISSING)
        if found is _MISSING:
            with torch.inference_mode(False):  # a forward with gradients may use it later
                found = make()
            if not functorch_active():  # torch.func's tensors are valid only within their transform
                self._cache[key] = found
        return found


def make_layout(
    current: Any, memory: Any, is_memory: Any, past_tasks: Any, task_ids: Tensor | None, rule: str | None = None
) -> Layout:
    """Check the arguments of :func:`tbbn.balance` and make a layout from them."""
    if is_memory is not None:
        if current is not None or memory is not None:
            raise UserError("balance: give either current and memory, or is_memory, not both.")
        # Plans are built on the CPU. A copy: a loader may fill the same mask again.
        is_memory = row_values("is_memory", is_memory, "bool").cpu().clone()
        memory = int(is_memory.sum())
        current = is_memory.numel() - memory
    elif current is None or memory is None:
        raise UserError(
            "balance: give both current and memory (row counts); or else is_memory (a bool per row), labels and "
            "current_classes, or task_ids and current_task."
        )
    current, memory, past_tasks = _counts("balance", current, memory, past_tasks)
    if task_ids is not None and task_ids.numel() != current + memory:
        raise UserError(
            f"balance: task_ids has {task_ids.numel()} entries but the layout covers {current + memory} rows."
        )
    if rule is not None and rule not in RULES:
        raise unknown_name("split rule", str(rule), RULES)
    if is_memory is None and task_ids is None and not torch.compiler.is_compiling():
        return _counted(current, memory, past_tasks, rule)
    return Layout(current, memory, past_tasks, is_memory, task_ids, rule)


def row_values(name: str, value: Any, kind: str) -> Tensor:
    """One value per row as a 1-d tensor: of ``kind`` "bool" or "integer". Takes tensors, arrays and lists."""
    try:
        if hasattr(value, "astype"):  # numpy: torch accepts neither negative strides nor a foreign byte order
            value = value.astype(value.dtype.newbyteorder("="))
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        raise TypeError(f"balance: {name} must be 1-d with one {kind} per row, got {value!r}.") from None
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.dim() != 1 or not (tensor.dtype == torch.bool if kind == "bool" else is_whole):
        got = f"{tensor.dtype} {tuple(tensor.shape)}"
        # A DataLoader's default collate makes int64 of Python's 0 and 1.
        remedy = (
            "; if these are 0 and 1 for each row: .bool()" if kind == "bool" and tensor.dim() == 1 and is_whole else ""
        )
        raise TypeError(f"balance: {name} must be 1-d with one {kind} per row, got {got}{remedy}.")
    return tensor


@cache
def _counted(current: int, memory: int, past_tasks: int, rule: str | None) -> Layout:
    """The layout, and with it the plan, of all batches with these counts. Never freed: a CUDA graph may still read it."""
    return Layout(current, memory, past_tasks, rule=rule)


@dataclass(frozen=True, eq=False)
class Plan:
    """Two small constant matrices that say which rows share statistics.

    ``gather[j, b]`` is the weight of row ``b`` in the statistics of group ``j`` (W in the documentation). ``scatter[b, j]`` is
    the weight of group ``j`` in the normalisation of row ``b`` (V). If ``blend`` is given, it averages group statistics before
    they are used, and ``scatter`` refers to the blended groups. ``running[j]`` is the share of group ``j`` in the running
    statistics; ``sizes[j]`` is the number of rows that its unbiased variance counts. ``anchor`` is a row that is in all groups.
    """

    rows: int
    gather: Tensor  # (r, B), rows sum to 1
    scatter: Tensor  # (B, r) or (B, blended), rows sum to 1
    running: Tensor  # (r,), sums to 1
    sizes: Tensor  # (r,)
    anchor: Tensor  # (1,), int64
    blend: Tensor | None = None  # (blended, r)
    total_variance: bool = False  # whether the running variance includes the variance between groups

    def __post_init__(self) -> None:
        # Not a field: torch.compile rebuilds the plan from its fields and would pass it to the constructor.
        object.__setattr__(self, "_moved", {})  # copies by device and type

    def to(self, device: torch.device, dtype: torch.dtype) -> Plan:
        """The plan on another device or in another precision; each copy is made once."""
        if self.gather.device == device and self.gather.dtype == dtype:
            return self
        moved: dict[Any, Plan] = self._moved  # type: ignore[attr-defined]
        found = moved.get((device, dtype))
        if found is None:
            # First the dtype, then the device: some devices have no float64.
            tensors: dict[str, Any] = {
                name: (value.to(dtype) if value.is_floating_point() else value).to(device)
                for name in self.__dataclass_fields__
                if isinstance(value := getattr(self, name), Tensor)
            }
            found = replace(self, **tensors)
            if not (torch.compiler.is_compiling() or dispatch_modes() or functorch_active()):
                moved[device, dtype] = found
        return found


@dataclass(frozen=True)
class PlanOptions:
    """Variants of the plan; the default is the paper's layer.

    ``case`` selects an ablation of the paper (Table 5): 1 balances only the running statistics, 2 only the normalisation,
    3 normalises every row with the average of the split statistics, 4 is batch norm except for the count in the unbiased
    variance. ``memory="own"`` normalises memory row ``m`` with split ``m mod r`` only, as the first preprint did.
    """

    kind: str = "tbbn"  # "weighted": one group in which every task has the same weight; "plain": batch norm
    rule: str = "paper"
    case: int = 0
    memory: str = "averaged"
    total_variance: bool = False

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise unknown_name("split rule", str(self.rule), RULES)
        if self.case not in (0, 1, 2, 3, 4):
            raise UserError(f"tbbn: case must be 0 (the layer itself) or an ablation 1 to 4, got {self.case!r}.")
        if self.memory not in ("averaged", "own"):
            raise unknown_name("treatment of memory rows", str(self.memory), ("averaged", "own"))
        if self.kind != "tbbn" and replace(self, kind="tbbn") != PlanOptions():
            raise UserError(f"{self.kind}: it has no splits, so rule, case, memory and total_variance do not apply.")

    def rule_for(self, layout: Layout) -> str:
        """The rule given to ``balance``, or the layer's. With a mask counts vary, and "paper", for fixed counts, is "uneven"."""
        if layout.rule is not None:
            return layout.rule
        return "uneven" if self.rule == "paper" and layout.is_memory is not None else self.rule


def _build(layout: Layout, options: PlanOptions, device: torch.device, dtype: torch.dtype) -> Plan | None:
    """The plan of ``layout``, built on the CPU in double precision and then moved: it is small, and its rounding would show."""
    if options.kind == "plain" or not (layout.current and layout.memory and layout.past_tasks):
        return None
    if options.kind == "weighted":
        return _weighted(layout).to(device, dtype)
    r = splits(layout.current, layout.memory, layout.past_tasks, options.rule_for(layout))
    if r == 1:
        return None
    plan = _split(layout, r, options)
    return (_ablated(plan, options.case) if options.case else plan).to(device, dtype)


def _split(layout: Layout, r: int, options: PlanOptions) -> Plan:
    is_memory = layout.memory_mask()
    # The i-th current row belongs to split i mod r, a memory row to all splits.
    split = torch.where(is_memory, (is_memory.cumsum(0) - 1) % r, ((~is_memory).cumsum(0) - 1) % r)
    own = (split == torch.arange(r, device="cpu").unsqueeze(1)).double()  # (r, B)
    member = torch.where(is_memory, torch.ones_like(own), own)
    sizes = member.sum(1)
    gather = member / sizes.unsqueeze(1)
    scatter = (own if options.memory == "own" else member / member.sum(0)).t().contiguous()
    return Plan(
        layout.rows,
        gather,
        scatter,
        _filled(1 / r, r),
        sizes,
        _anchor(is_memory),
        total_variance=options.total_variance,
    )


def _weighted(layout: Layout) -> Plan:
    """One group in which each of the ``past_tasks + 1`` tasks has the same weight."""
    b, share = layout.rows, 1 / (layout.past_tasks + 1)
    is_memory = layout.memory_mask()
    weights = torch.where(is_memory, _filled((1 - share) / layout.memory, b), _filled(share / layout.current, b))
    return Plan(b, weights.unsqueeze(0), _filled(1, b, 1), _filled(1, 1), _filled(b, 1), _anchor(is_memory))


def _ablated(plan: Plan, case: int) -> Plan:
    """The plan of an ablation: most use the splits for one purpose and plain batch norm's single group for the other."""
    r, b = plan.gather.shape
    everyone, whole = _filled(1, b, 1), _filled(1 / b, 1, b)
    if case == 3:  # all rows share the averaged statistics
        return replace(plan, scatter=everyone, blend=_filled(1 / r, 1, r))
    if case == 4:  # batch statistics, repeated over the splits: batch norm except for the counted rows
        return replace(plan, gather=whole, scatter=everyone, running=_filled(1, 1), sizes=plan.sizes[:1])
    gather, sizes = torch.cat([plan.gather, whole]), torch.cat([plan.sizes, _filled(b, 1)])
    if case == 1:  # normalise with the whole batch, track the splits
        scatter, running = torch.cat([_filled(0, b, r), everyone], 1), torch.cat([plan.running, _filled(0, 1)])
    else:  # case 2: normalise with the splits, track the whole batch
        scatter, running = torch.cat([plan.scatter, _filled(0, b, 1)], 1), torch.cat([_filled(0, r), _filled(1, 1)])
    return replace(plan, gather=gather, scatter=scatter, running=running, sizes=sizes)


def _membership(layout: Layout) -> Tensor:
    if layout.task_ids is not None:
        tasks = torch.arange(layout.past_tasks + 1, device=layout.task_ids.device)
        return layout.task_ids.unsqueeze(1) == tasks
    tasks = torch.arange(layout.past_tasks + 1, device="cpu")
    current = (tasks == layout.past_tasks).double()
    past = (1 - current) / max(layout.past_tasks, 1)
    return torch.where(layout.memory_mask().unsqueeze(1), past, current)


def _anchor(is_memory: Tensor) -> Tensor:
    return is_memory.to(torch.uint8).argmax(keepdim=True)  # the first memory row


def one_group(rows: int) -> Plan:
    """Batch norm as a plan: all rows share one mean and variance."""
    first = torch.zeros(1, dtype=torch.int64, device="cpu")
    return Plan(rows, _filled(1 / max(1, rows), 1, rows), _filled(1, rows, 1), _filled(1, 1), _filled(rows, 1), first)


def product(matrix: Tensor, values: Tensor) -> Tensor:
    """``matrix @ values`` as sums, because autocast would round a matrix product, also in backward."""
    return (matrix.unsqueeze(2) * values).sum(1)


def _filled(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.double, device="cpu")
