"""Pair two norms on the same seeds: the gain of one over the other, and its confidence interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tbbn.bench.engine.record import Record
from tbbn.bench.metrics import Matrix
from tbbn.bench.report.columns import SHORT
from tbbn.bench.report.groups import Group, Seed, blocks
from tbbn.bench.report.interval import difference
from tbbn.bench.report.table import Table


@dataclass(frozen=True)
class Pair:
    """Two groups that differ only in their norm, and the seeds that both have finished."""

    base: Group
    other: Group
    seeds: tuple[Seed, ...]

    @property
    def runs(self) -> list[tuple[Record, Record]]:
        return [(self.base.runs[seed], self.other.runs[seed]) for seed in self.seeds]

    def differences(self, numbers: Callable[[Matrix], Sequence[float]]) -> list[list[float]]:
        """For each number of a run, the differences for all seeds; only for numbers that all runs have."""
        rows = [
            [b - a for a, b in zip(numbers(base.accuracy), numbers(other.accuracy), strict=False)]
            for base, other in self.runs
        ]
        return [list(column) for column in zip(*rows, strict=False)]


def pairs(groups: Sequence[Group]) -> list[Pair]:
    """Every norm against batch norm or, if that is missing, against the first norm of its block."""
    found = []
    for block in blocks(groups):
        finished = [group for group in block if group.finished]
        base = next((group for group in finished if group.norm == "bn"), finished[0] if finished else None)
        if base is None:
            continue
        for other in finished:
            both = [seed for seed in base.runs if seed in other.runs] if other is not base else []
            seeds = tuple(s for s in both if base.runs[s].status == other.runs[s].status == "finished")
            if seeds:
                found.append(Pair(base, other, seeds))
    return found


def pairs_table(found: Sequence[Pair], metrics: Sequence[str]) -> Table:
    """One row per pair: the mean difference of each metric and its 95 % interval."""
    rows = []
    for pair in found:
        cells = []
        for metric in metrics:
            gains = [100 * (other.metrics[metric] - base.metrics[metric]) for base, other in pair.runs]
            cells.append(difference(gains))
        rows.append((pair.other.label, pair.base.norm, str(len(pair.seeds)), *cells))
    header = ("method + norm", "over", "seeds", *(SHORT[m] for m in metrics))
    caption = "Mean difference on the same seeds, in points, and its 95 % interval."
    return Table(header, tuple(rows), align="ll" + "r" * (len(header) - 2), caption=caption)
