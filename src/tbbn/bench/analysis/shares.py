"""Each task's share in the statistics of a norm: what the split rule makes of the batch, without any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tbbn.bench.config import RunConfig
from tbbn.bench.engine.setup import full_batch, method_of
from tbbn.bench.report.tables import Table
from tbbn.errors import UserError
from tbbn.nn.plan import Layout, PlanOptions, one_group

NORMS: dict[str, dict[str, Any]] = {"bn": {}, "tbbn": {}, "weighted": {"kind": "weighted"}}  # fixed options of each


@dataclass(frozen=True)
class Share:
    """The shares in the running statistics after a batch of one task, and the numbers of splits behind them."""

    exact: float  # r that would balance the batch
    splits: int  # r*, what the rule makes of it
    current: float  # share of the newest task
    past: float  # share of each past task


def share(current: int, memory: int, past_tasks: int, options: PlanOptions | None) -> Share:
    """The shares for a batch of these rows. ``options=None`` is batch norm, where every row counts the same."""
    layout = Layout(current, memory, past_tasks)
    plan = layout.plan(options) if options is not None else None
    weights = row_weights(one_group(layout.rows) if plan is None else plan)
    newest = float(weights[:current].sum())
    exact = current * past_tasks / memory if memory else 1.0
    past = (1 - newest) / past_tasks if past_tasks else 0.0
    return Share(max(1.0, exact), 1 if plan is None else plan.gather.shape[0], newest, past)


def row_weights(plan: Any) -> Tensor:
    """How much each row of a batch counts in the running mean: the mean over the groups, as the plan mixes them."""
    weights: Tensor = plan.running @ plan.gather
    return weights


def norm_options(norm: str, options: dict[str, Any]) -> PlanOptions | None:
    """The plan of a norm that is batch norm but for its statistics; None for batch norm itself."""
    if norm not in NORMS:
        raise UserError(f"shares: {norm!r} has no fixed share of a task; choose from {', '.join(NORMS)}.")
    known = PlanOptions.__dataclass_fields__
    return None if norm == "bn" else PlanOptions(**NORMS[norm], **{k: v for k, v in options.items() if k in known})


def shares_table(configs: Sequence[RunConfig]) -> Table:
    """A row for each task: r, r*, and the share of the newest task with each norm. The configs differ in their norm."""
    first = configs[0]
    names = [str(config.norm) for config in configs]
    options = [norm_options(config.norm.name, config.norm.dict()) for config in configs]
    rows = []
    for task in range(first.data.tasks):
        batch = full_batch(first, method_of(first), task)
        found = [share(batch.current, batch.memory, task, chosen) for chosen in options]
        splits = max(entry.splits for entry in found)
        cells = [f"{100 * entry.current:.1f}" for entry in found]
        rows.append((f"{task + 1}", f"{batch.current}+{batch.memory}", f"{found[0].exact:.3g}", f"{splits}", *cells))
        rows[-1] += (f"{100 / (task + 1):.1f}",)
    notes = (
        "Share of the newest task in the running statistics, in percent; balanced: every task has the same.",
        "r = current / memory * past tasks would balance the batch; r* is the number of splits that the rule allows.",
    )
    return Table(("task", "batch", "r", "r*", *(f"{name} %" for name in names), "balanced %"), tuple(rows), notes)
