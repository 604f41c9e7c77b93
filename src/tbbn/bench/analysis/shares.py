"""Each task's share in the statistics of a norm, computed from the batch and the split rule without any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor

from tbbn.bench.config import RunConfig
from tbbn.bench.engine.setup import full_batch, method_of
from tbbn.bench.report.tables import Table
from tbbn.errors import UserError
from tbbn.nn.plan import Layout, PlanOptions, one_group, splits

NORMS: dict[str, dict[str, Any]] = {"bn": {}, "tbbn": {}, "weighted": {"kind": "weighted"}}  # each norm's fixed options


@dataclass(frozen=True)
class Share:
    """The newest task's share in the running statistics of a batch, and the numbers of splits behind it."""

    exact: float  # the r that would balance the batch
    splits: int | None  # r*, the number of splits that the rule allows; None for a norm without splits
    current: float  # share of the newest task; the past tasks share the rest equally


def share(current: int, memory: int, past_tasks: int, options: PlanOptions | None) -> Share:
    """The share for a batch with these numbers of rows. ``options=None`` is batch norm, where all rows have equal weight."""
    layout = Layout(current, memory, past_tasks)
    plan = layout.plan(options) if options is not None else None
    weights = row_weights(one_group(layout.rows) if plan is None else plan)
    exact = current * past_tasks / memory if memory else 1.0
    # Not the plan's number of groups: an ablation has the whole batch as an additional group.
    r = splits(current, memory, past_tasks, options.rule) if has_splits(options) else None
    return Share(max(1.0, exact), r, float(weights[:current].sum()))


def has_splits(options: PlanOptions | None) -> TypeGuard[PlanOptions]:
    return options is not None and options.kind == "tbbn"


def row_weights(plan: Any) -> Tensor:
    """The weight of each row of a batch in the running mean: its weight in each group, mixed over groups as in the plan."""
    weights: Tensor = plan.running @ plan.gather
    return weights


def norm_options(norm: str, options: dict[str, Any]) -> PlanOptions | None:
    """The plan options of a norm that differs from batch norm only in its statistics; None for batch norm itself."""
    if norm not in NORMS:
        raise UserError(f"shares: {norm!r} has no fixed share of a task; choose from {', '.join(NORMS)}.")
    known = PlanOptions.__dataclass_fields__
    return None if norm == "bn" else PlanOptions(**NORMS[norm], **{k: v for k, v in options.items() if k in known})


def shares_table(configs: Sequence[RunConfig]) -> Table:
    """One row per task: r, and each norm's r* and share of the newest task. The configs may differ only in their norm."""
    first, method = configs[0], method_of(configs[0])
    if method.all_data:
        raise UserError(
            f"shares: {first.method} trains on all tasks at once; its batches have no current and memory rows."
        )
    options = {str(config.norm): norm_options(config.norm.name, config.norm.dict()) for config in configs}
    header = ["task", "batch", "r"]
    for name, chosen in options.items():
        header += [f"{name} r*", f"{name} %"] if has_splits(chosen) else [f"{name} %"]
    rows = []
    for task in range(first.data.tasks):
        batch = full_batch(first, method, task)
        found = [share(batch.current, batch.memory, task, chosen) for chosen in options.values()]
        row = [f"{task + 1}", f"{batch.current}+{batch.memory}", f"{found[0].exact:.3g}"]
        for entry in found:
            row += [] if entry.splits is None else [f"{entry.splits}"]
            row.append(f"{100 * entry.current:.1f}")
        rows.append((*row, f"{100 / (task + 1):.1f}"))
    notes = [
        "Share of the newest task in the running statistics, in percent; the past tasks share the rest.",
        "balanced: every task has the same. r = current / memory * past tasks would balance the batch.",
    ]
    if any(map(has_splits, options.values())):
        notes.append("r* is the number of splits that a norm's rule allows; norms without it have no splits.")
    if first.batch.current_from == "union":
        notes.append(
            "batch.current_from = union: some current rows are of past tasks, so the newest has less than this."
        )
    if first.data.online and first.batch.memory_from == "all":
        notes.append("batch.memory_from = all: some memory rows are of the newest task, so it has more than this.")
    return Table((*header, "balanced %"), tuple(rows), tuple(notes))
