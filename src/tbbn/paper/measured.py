"""Our own results on real CIFAR-100 as accuracy matrices (``measured.json``, made from ``results/`` by ``make results``)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TypeVar

from tbbn.bench.config import resolve
from tbbn.bench.metrics import average_accuracy, final_accuracy, forgetting, learning_accuracy
from tbbn.bench.report.interval import difference, half_width, signed
from tbbn.bench.report.table import Table
from tbbn.bench.report.tables import percent
from tbbn.paper.published import find_tables

Matrix = list[list[float]]
Key = tuple[str, str, int]  # method, norm and seed
T = TypeVar("T")
METRICS: dict[str, Callable[[Matrix], float]] = {
    "A_f": final_accuracy,
    "A_a": average_accuracy,
    "F": forgetting,
    "A_l": learning_accuracy,
}
TASK_KNOWN = "A_f, task known"  # task-IL: the task of each test image is given

DIFFERENCE = "tbbn - bn: mean difference on the same seeds, in points, and its 95 % interval."


@dataclass(frozen=True)
class Paired:
    """One number for batch norm and TBBN on the same seeds, in percent, and TBBN's gain.

    >>> print(Paired([50.0, 50.0], [60.0, 70.0]), Paired([50.0], [60.0]))
    +15.0 [-48.5, 78.5] +10.0
    """

    bn: list[float]
    tbbn: list[float]

    @property
    def gains(self) -> list[float]:
        """The gain for each seed."""
        return [b - a for a, b in zip(self.bn, self.tbbn, strict=True)]

    @property
    def gain(self) -> float:
        return statistics.fmean(self.gains)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the gain."""
        half = half_width(self.gains)
        return self.gain - half, self.gain + half

    def __str__(self) -> str:
        return difference(self.gains)


@dataclass(frozen=True)
class Measured:
    """Runs that differ only in method, norm and seed, and in which epoch a method keeps."""

    name: str
    protocol: str
    source: str  # the place of the complete records
    runs: dict[Key, Matrix]
    task_known: dict[Key, float]  # final accuracy if the task is known
    kept: dict[str, str]  # the epoch that was kept, "best" or "last", by method

    @property
    def methods(self) -> list[str]:
        """The methods that ran with both norms on at least one seed."""
        return [method for method in dict.fromkeys(method for method, _, _ in self.runs) if self.seeds(method)]

    def title(self, method: str) -> str:
        """The protocol, and which epoch was kept if that is not the protocol's choice."""
        layer = {"protocol": self.protocol, "data": "cifar100", "method": method}
        kept = self.kept[method]
        return self.protocol if kept == resolve(layer).train.keep else f"{self.protocol}, {kept} epoch"

    def seeds(self, method: str) -> list[int]:
        """The seeds that both norms ran with."""
        return sorted(
            seed for m, norm, seed in self.runs if (m, norm) == (method, "tbbn") and (m, "bn", seed) in self.runs
        )

    def after(self, method: str, task: int) -> Paired:
        """Mean accuracy over the tasks seen so far, after this task (from 0)."""
        return self._paired(method, self.runs, lambda matrix: statistics.fmean(matrix[task]))

    def new_task(self, method: str, task: int) -> Paired:
        """Accuracy on the task just learnt."""
        return self._paired(method, self.runs, lambda matrix: matrix[task][task])

    def metric(self, method: str, name: str) -> Paired:
        """One of ``METRICS``, or ``TASK_KNOWN``."""
        if name == TASK_KNOWN:
            return self._paired(method, self.task_known, float)
        return self._paired(method, self.runs, METRICS[name])

    def _paired(self, method: str, runs: Mapping[Key, T], number: Callable[[T], float]) -> Paired:
        both = [[100 * number(runs[method, norm, s]) for s in self.seeds(method)] for norm in ("bn", "tbbn")]
        return Paired(*both)


@cache
def measured() -> dict[str, Measured]:
    """All experiments by name."""
    text = (resources.files(__package__) / "measured.json").read_text()
    return {
        entry["name"]: Measured(
            entry["name"], entry["protocol"], entry["source"],
            {(run["method"], run["norm"], run["seed"]): run["accuracy"] for run in entry["runs"]},
            {(run["method"], run["norm"], run["seed"]): run["task_known"] for run in entry["runs"]},
            {run["method"]: run["keep"] for run in entry["runs"]},
        )
        for entry in json.loads(text)
    }  # fmt: skip


def gains_by_task(experiment: Measured, method: str = "ft") -> Table:
    """TBBN's gain over batch norm after each task, on the same seeds."""
    seeds = experiment.seeds(method)
    tasks = len(next(iter(experiment.runs.values())))
    rows = []
    for task in range(tasks):
        all_seen, new = experiment.after(method, task), experiment.new_task(method, task)
        rows.append((f"{task + 1}", _mean(all_seen.bn), _mean(all_seen.tbbn), str(all_seen), str(new)))
    header = ("after task", "bn %", "tbbn %", "tbbn - bn", "on the new task: tbbn - bn")
    note = f"Mean accuracy over the tasks seen so far, {len(seeds)} seeds, real CIFAR-100."
    return Table(header, tuple(rows), (note, DIFFERENCE))


def gains(experiments: Mapping[str, Measured], metrics: Sequence[str]) -> Table:
    """TBBN against batch norm on the same seeds, one row per experiment and method."""
    rows = []
    for experiment in experiments.values():
        for method in experiment.methods:
            pairs = [experiment.metric(method, name) for name in metrics]
            n = str(len(experiment.seeds(method)))
            cells = [_mean(pairs[0].bn), _mean(pairs[0].tbbn), *map(str, pairs)]
            rows.append((experiment.title(method), method, n, *cells))
    columns = (f"bn {metrics[0]}", f"tbbn {metrics[0]}", *(f"{name}: tbbn - bn" for name in metrics))
    notes = (DIFFERENCE, *(["F is forgetting: lower is better."] if "F" in metrics else []))
    return Table(
        ("protocol", "method", "seeds", *columns), tuple(rows), tuple(notes), align="ll" + "r" * (1 + len(columns))
    )


def printed_gain(method: str, metric: str) -> float:
    """TBBN's gain over batch norm in the paper's Table 2."""
    printed, at = find_tables("table2", "cifar100")[0].rows, list(METRICS).index(metric)
    return printed[method, "tbbn"][at] - printed[method, "bn"][at]


def gains_beside_paper(experiments: Sequence[Measured]) -> Table:
    """TBBN's gain with each method, here and in the paper's Table 2."""
    rows = []
    for experiment in experiments:
        for method in experiment.methods:
            cells = []
            for name in METRICS:
                pair, theirs = experiment.metric(method, name), printed_gain(method, name)
                low, high = pair.interval
                cells += [str(pair), signed(theirs) + ("" if low <= theirs <= high else " *")]
            rows.append((method, *cells))
    header = ("method", *(cell for name in METRICS for cell in (f"{name} ours", "paper")))
    return Table(header, tuple(rows), (DIFFERENCE, "*: the paper's difference is outside that interval."))


def _mean(percents: list[float]) -> str:
    return percent([value / 100 for value in percents])
