"""The exemplar memory: which training rows of past tasks are kept for replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tbbn.bench.data.selection import SELECTIONS, rank_in_class, select
from tbbn.errors import UserError, unknown_name

ROUNDINGS = ("floor", "ceil")
SHRINKS = ("truncate", "reselect")


@dataclass(frozen=True, eq=False)
class Reservoir:
    """Reservoir sampling: a uniform sample of at most `budget` of the `seen` rows of a stream so far."""

    budget: int
    index: Tensor  # (min(seen, budget),) int64 rows of source.train, by slot
    seen: int

    def __post_init__(self) -> None:
        assert len(self.index) == min(self.seen, self.budget), "a reservoir is full or holds all it has seen"

    def update(self, rows: Tensor, generator: torch.Generator) -> Reservoir:
        """The reservoir after the next `rows` of the stream.

        Row number i of the stream (from 0) fills slot i while there is room. Later it replaces slot j, uniform in 0..i,
        if j < budget. So every row is kept with probability budget / (rows seen). The other rows keep their slots.
        """
        if not len(rows):
            return self
        number = self.seen + torch.arange(len(rows))
        slot = (torch.rand(len(rows), generator=generator, dtype=torch.float64) * (number + 1)).long()
        slot = torch.where(number < self.budget, number, slot)
        hit = slot < self.budget
        # If several rows hit one slot, the last wins; an indexed assignment does not guarantee that.
        winner = torch.full((min(self.seen + len(rows), self.budget),), -1)
        winner.scatter_reduce_(0, slot[hit], torch.arange(len(rows))[hit], "amax")
        winner = winner.to(rows.device)
        grown = torch.cat([self.index.to(rows.device), rows.new_zeros(len(winner) - len(self.index))])
        index = torch.where(winner >= 0, rows[winner.clamp(min=0)], grown)
        return Reservoir(self.budget, index, self.seen + len(rows))


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class ExemplarMemory:
    """The rows kept from past tasks, within a budget that is a total or a number per class.

    After a task the engine asks for `candidates`, computes the quantity named by `scores` for those rows in one pass, and
    calls `update`. When the quota shrinks, old classes keep their first rows (`shrink="truncate"`), or every class is
    selected again from its stored and new rows ("reselect", as in the paper's code).
    """

    budget: int
    per_class: bool = False  # the budget is a number per class, not a total
    rounding: str = "floor"
    selection: str = "herding"
    shrink: str = "truncate"
    index: Tensor = field(default_factory=_no_rows)  # int64 rows of source.train; by class, then in selection order
    labels: Tensor = field(default_factory=_no_rows)  # int64 arrival-order classes of `index`
    seen: int = 0  # rows of the stream so far; only a reservoir counts them

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise UserError(f"memory: budget must not be negative, got {self.budget}; 0 keeps no exemplars")
        for kind, name, known in (
            ("rounding", self.rounding, ROUNDINGS),
            ("selection", self.selection, tuple(SELECTIONS)),
            ("shrink", self.shrink, SHRINKS),
        ):
            if name not in known:
                raise unknown_name(kind, name, known)
        if self.selection == "reservoir" and self.per_class:
            raise UserError("memory: a reservoir has a total budget, not one per class; set per_class = false")

    def __len__(self) -> int:
        return len(self.index)

    @property
    def scores(self) -> str | None:
        """The quantity that `update` needs for each candidate: "features", "logits" or None."""
        return SELECTIONS[self.selection] if self.budget else None

    def quota(self, n_seen: int) -> int:
        """Exemplars per class after `n_seen` classes.

        >>> [ExemplarMemory(2000, rounding="ceil").quota(n) for n in (10, 30, 60)]
        [200, 67, 34]
        """
        if self.per_class or not self.budget:
            return self.budget
        quota = -(-self.budget // n_seen) if self.rounding == "ceil" else self.budget // n_seen
        if quota == 0:
            raise UserError(
                f"memory: a budget of {self.budget} gives none of the {n_seen} classes an exemplar; "
                f"use at least {n_seen}, or rounding = 'ceil'"
            )
        return quota

    def candidates(self, new_rows: Tensor) -> Tensor:
        """The rows from which `update` selects: those of the new task; with "reselect" preceded by all stored ones."""
        if self.shrink == "reselect" and self.selection != "reservoir":
            return torch.cat([self.index.to(new_rows.device), new_rows])
        return new_rows

    def update(
        self, rows: Tensor, labels: Tensor, *, n_seen: int, scores: Tensor | None = None, generator: torch.Generator
    ) -> None:
        """Add a task: `rows` are the `candidates`, with their `labels` and `scores`.

        Classes among `labels` are selected anew, the others keep their first `quota` rows. A reservoir takes the rows as
        a stream in random order.
        """
        if not self.budget or not len(rows):
            return
        index, old = self.index.to(rows.device), self.labels.to(rows.device)
        if self.selection == "reservoir":
            order = torch.randperm(len(rows), generator=generator).to(rows.device)
            passed = self.reservoir().update(rows[order], generator)
            label_of = torch.zeros(int(torch.cat([index, rows]).max()) + 1, dtype=torch.int64, device=rows.device)
            label_of[index], label_of[rows] = old, labels
            self.adopt(passed, label_of)
            return
        quota = self.quota(n_seen)
        chosen = select(self.selection, scores, labels, quota, generator)
        order, rank = rank_in_class(torch.arange(len(old), device=old.device), old)
        kept = order[(rank < quota) & ~torch.isin(old[order], labels)]
        index, old = torch.cat([index[kept], rows[chosen]]), torch.cat([old[kept], labels[chosen]])
        by_class = old.argsort(stable=True)
        self.index, self.labels = index[by_class], old[by_class]

    def reservoir(self) -> Reservoir:
        """The memory as a reservoir, for `tbbn.bench.data.sampling.online_blocks`."""
        return Reservoir(self.budget, self.index, self.seen)

    def adopt(self, reservoir: Reservoir, train_labels: Tensor) -> None:
        """Take over a reservoir after an online pass; `train_labels` are the arrival-order labels of all training rows."""
        self.index, self.seen = reservoir.index, reservoir.seen
        self.labels = train_labels[reservoir.index.to(train_labels.device)]

    def state_dict(self) -> dict[str, Tensor]:
        return {"index": self.index, "labels": self.labels, "seen": torch.tensor(self.seen)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.index, self.labels, self.seen = state["index"], state["labels"], int(state["seen"])
