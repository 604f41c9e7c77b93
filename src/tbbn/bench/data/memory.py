"""The exemplar memory: which training rows of past tasks are kept for replay, and how they are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tbbn.errors import UserError, unknown_name

# What each strategy looks at; None: neither features nor logits have to be computed.
SELECTIONS: dict[str, str | None] = {
    "herding": "features",
    "random": None,
    "entropy": "logits",
    "distance": "logits",
    "reservoir": None,
}
ROUNDINGS = ("floor", "ceil")
SHRINKS = ("truncate", "reselect")

_GRAM_SIDE = 2048  # above this many images a class, inner products are computed pick by pick
_GRAM_ELEMENTS = 2**24  # float64 inner products held at once: 128 MiB


def rank_in_class(keys: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Positions grouped by label and ascending in `keys` inside a label, and the rank each has in its label's group."""
    order = keys.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]
    grouped = labels[order]
    return order, torch.arange(len(order), device=order.device) - torch.searchsorted(grouped, grouped)


def herding(features: Tensor, n: int) -> Tensor:
    """Indices of the `n` rows whose running mean follows the class mean best, in the order they are picked.

    Features (N, D) are L2-normalised, mu is the mean of the normalised rows, and with sum s of the k rows picked so far
    the next one is argmin_x || mu - (x + s) / (k + 1) || among the rest (iCaRL, algorithm 4). All rows when N <= n.
    """
    labels = torch.zeros(len(features), dtype=torch.int64, device=features.device)
    return select("herding", features, labels, n)


def select(
    strategy: str, scores: Tensor | None, labels: Tensor, n_per_class: int, generator: torch.Generator | None = None
) -> Tensor:
    """Positions of at most `n_per_class` rows of each class, grouped by ascending label, best first inside a class.

    "herding" reads features (N, D), see `herding`; "entropy" takes the highest predictive entropy of logits
    (N, n_seen) first; "distance" takes the smallest logit of the row's own class first, the closeness to the decision
    boundary of RWalk; "random" takes rows by `generator`. A class with fewer rows gives all of them.
    """
    if strategy not in SELECTIONS or strategy == "reservoir":
        raise unknown_name("selection", strategy, SELECTIONS.keys() - {"reservoir"})
    if strategy == "random":
        assert generator is not None, "random selection needs a generator"
        keys = torch.rand(len(labels), generator=generator, dtype=torch.float64).to(labels.device)
    else:
        assert scores is not None, f"{strategy} selection needs {SELECTIONS[strategy]}"
        assert len(scores) == len(labels), "one row of scores for each label"
        scores = scores.detach().to(labels.device)
        if strategy == "herding":
            return _herd(scores, labels, n_per_class)
        if strategy == "entropy":
            keys = -torch.special.entr(scores.double().softmax(1)).sum(1)
        else:
            keys = scores.gather(1, labels[:, None])[:, 0]
    order, rank = rank_in_class(keys, labels)
    return order[rank < n_per_class]


def _herd(features: Tensor, labels: Tensor, n: int) -> Tensor:
    """Herding of all classes side by side: classes are padded to the largest one and masked."""
    if not len(labels) or n < 1:
        return torch.empty(0, dtype=torch.int64, device=labels.device)
    order, rank = rank_in_class(torch.arange(len(labels), device=labels.device), labels)
    _, member, counts = torch.unique_consecutive(labels[order], return_inverse=True, return_counts=True)
    side = int(counts.max())
    padded = features.new_zeros(len(counts), side, features.shape[1])
    padded[member, rank] = features[order]
    position = torch.zeros(len(counts), side, dtype=torch.int64, device=labels.device)
    position[member, rank] = order
    chunk = max(1, _GRAM_ELEMENTS // side**2)
    picks = [_herd_padded(x, c, min(n, side)) for x, c in zip(padded.split(chunk), counts.split(chunk), strict=True)]
    chosen = position.gather(1, torch.cat(picks))
    return chosen[torch.arange(chosen.shape[1], device=chosen.device) < counts[:, None]]


def _herd_padded(x: Tensor, counts: Tensor, n: int) -> Tensor:
    """The first `n` picks of each class, (K, n); features x are (K, M, D), zero beyond a class's count.

    || (k + 1) mu - s - x ||^2 is a constant plus |x|^2 - 2 (k + 1) x.mu + 2 x.s, so that inner products suffice, and
    the score to be maximised changes by 2 x.mu - 2 x.picked from one pick to the next.
    """
    # Rows that are not finite (a diverged network) count as zero: the memory must stay sound whatever comes.
    x = F.normalize(x.double(), dim=2).nan_to_num(0.0, 0.0, 0.0)
    gram = x @ x.mT if x.shape[1] <= _GRAM_SIDE else None  # (K, M, M)
    classes = torch.arange(len(x), device=x.device)
    pull = 2 * (x @ (x.sum(1) / counts[:, None])[:, :, None])[:, :, 0]  # 2 x.mu
    beyond = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
    score = (pull - x.square().sum(2)).masked_fill_(beyond, -torch.inf)
    picks = torch.empty(len(x), n, dtype=torch.int64, device=x.device)
    for k in range(n):
        pick = score.argmax(1)
        picks[:, k] = pick
        push = gram[classes, pick] if gram is not None else (x @ x[classes, pick][:, :, None])[:, :, 0]
        score.add_(pull).sub_(push, alpha=2)
        score[classes, pick] = -torch.inf
    return picks


def reservoir_update(index: Tensor, rows: Tensor, seen: int, budget: int, generator: torch.Generator) -> Tensor:
    """The reservoir `index` after the stream rows number seen, seen + 1, ... have passed by.

    Row number i (from 0) fills slot i while there is room; later it replaces slot j, uniform in 0..i, when j < budget.
    Every row of the stream is then kept with probability budget / (rows seen). Slots of the other rows do not move.
    """
    assert len(index) == min(seen, budget), "a reservoir is full or holds all it has seen"
    number = seen + torch.arange(len(rows))
    slot = (torch.rand(len(rows), generator=generator, dtype=torch.float64) * (number + 1)).long()
    slot = torch.where(number < budget, number, slot)
    hit = slot < budget
    # Of several rows for one slot the last wins; an indexed assignment would leave that open.
    winner = torch.full((min(seen + len(rows), budget),), -1)
    winner.scatter_reduce_(0, slot[hit], torch.arange(len(rows))[hit], "amax")
    winner = winner.to(rows.device)
    grown = torch.cat([index.to(rows.device), rows.new_zeros(len(winner) - len(index))])
    return torch.where(winner >= 0, rows[winner.clamp(min=0)], grown) if len(rows) else index


@dataclass(frozen=True, eq=False)
class Reservoir:
    """A uniform sample of at most `budget` rows of a stream of which `seen` rows have passed."""

    budget: int
    index: Tensor  # (min(seen, budget),) int64 rows of source.train, by slot
    seen: int

    def update(self, rows: Tensor, generator: torch.Generator) -> Reservoir:
        index = reservoir_update(self.index, rows, self.seen, self.budget, generator)
        return Reservoir(self.budget, index, self.seen + len(rows))


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class ExemplarMemory:
    """The rows kept of past tasks, within a budget shared over the classes seen or given to each class.

    After a task the engine asks for `candidates`, computes what `scores` names for exactly those rows in one pass, and
    calls `update`. `shrink="truncate"`: old classes keep the first rows of their order; "reselect": every class is
    chosen again from its stored and new rows (the paper's code).
    """

    budget: int
    per_class: bool = False  # the budget is a number for each class, not a total
    rounding: str = "floor"
    selection: str = "herding"
    shrink: str = "truncate"
    index: Tensor = field(default_factory=_no_rows)  # int64 rows of source.train; by class, then in selection order
    labels: Tensor = field(default_factory=_no_rows)  # int64 arrival-order classes of `index`
    seen: int = 0  # rows of the stream so far; used by the reservoir alone

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
        """What `update` needs of each candidate: "features", "logits" or None."""
        return SELECTIONS[self.selection] if self.budget else None

    def quota(self, n_seen: int) -> int:
        """Exemplars of each class when `n_seen` classes have been learnt.

        >>> [ExemplarMemory(2000, rounding="ceil").quota(n) for n in (10, 30, 60)]
        [200, 67, 34]
        """
        if self.per_class or not self.budget:
            return self.budget
        quota = -(-self.budget // n_seen) if self.rounding == "ceil" else self.budget // n_seen
        if quota == 0:
            raise UserError(
                f"memory: a budget of {self.budget} gives none of {n_seen} classes an exemplar; "
                f"use at least {n_seen}, or rounding = 'ceil'"
            )
        return quota

    def candidates(self, new_rows: Tensor) -> Tensor:
        """The rows among which the next `update` chooses: those of the new task, after all stored ones to reselect."""
        if self.shrink == "reselect" and self.selection != "reservoir":
            return torch.cat([self.index.to(new_rows.device), new_rows])
        return new_rows

    def update(
        self, rows: Tensor, labels: Tensor, *, n_seen: int, scores: Tensor | None = None, generator: torch.Generator
    ) -> None:
        """Take in a task: `rows` are the `candidates`, `labels` and `scores` belong to them row by row.

        Classes among `labels` are chosen anew, the others keep the first `quota` of their order. A reservoir takes
        the rows as a stream in random order.
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
        """The memory as the reservoir of a stream, for `tbbn.bench.data.batches.stream_blocks`."""
        return Reservoir(self.budget, self.index, self.seen)

    def adopt(self, reservoir: Reservoir, train_labels: Tensor) -> None:
        """Take over a reservoir after a stream; `train_labels` are the arrival-order labels of all training rows."""
        self.index, self.seen = reservoir.index, reservoir.seen
        self.labels = train_labels[reservoir.index.to(train_labels.device)]

    def state_dict(self) -> dict[str, Tensor]:
        return {"index": self.index, "labels": self.labels, "seen": torch.tensor(self.seen)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.index, self.labels, self.seen = state["index"], state["labels"], int(state["seen"])
