"""Our own results on the real CIFAR-100, as accuracy matrices (``measured.json``, made from ``results/`` by ``make results``)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import nan, sqrt

from tbbn.bench.metrics import average_accuracy, final_accuracy, forgetting, learning_accuracy
from tbbn.bench.report.pairs import difference
from tbbn.bench.report.table import Table
from tbbn.bench.report.tables import percent
from tbbn.paper.published import find_tables

Matrix = list[list[float]]
METRICS: dict[str, Callable[[Matrix], float]] = {
    "A_f": final_accuracy,
    "A_a": average_accuracy,
    "F": forgetting,
    "A_l": learning_accuracy,
}


# Quantiles of Student's t for 95 % and 1 to 9 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Paired:
    """A number of two norms on the same seeds, in percent, and what TBBN gains over batch norm."""

    bn: list[float]
    tbbn: list[float]

    @property
    def gains(self) -> list[float]:
        """For each seed."""
        return [b - a for a, b in zip(self.bn, self.tbbn, strict=True)]

    @property
    def gain(self) -> float:
        return statistics.fmean(self.gains)

    @property
    def error(self) -> float:
        """Standard error of the gain; nan for a single seed."""
        return statistics.stdev(self.gains) / sqrt(len(self.gains)) if len(self.gains) > 1 else nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the gain, by Student's t distribution; for 2 to 10 seeds."""
        reach = _T95[len(self.gains) - 2] * self.error
        return self.gain - reach, self.gain + reach


@dataclass(frozen=True)
class Measured:
    """Runs that differ in method, norm and seed only, and in the epoch that a method keeps."""

    name: str
    protocol: str
    source: str  # where the whole records are
    runs: dict[tuple[str, str, int], Matrix]  # by method, norm and seed
    kept: dict[str, str]  # the epoch that was kept, best or last, by method

    @property
    def methods(self) -> list[str]:
        """Those that have both norms on a seed."""
        return [method for method in dict.fromkeys(method for method, _, _ in self.runs) if self.seeds(method)]

    def title(self, method: str) -> str:
        return f"{self.protocol}, {self.kept[method]} epoch"

    def seeds(self, method: str) -> list[int]:
        """Seeds that both norms have."""
        return sorted(
            seed for m, norm, seed in self.runs if (m, norm) == (method, "tbbn") and (m, "bn", seed) in self.runs
        )

    def after(self, method: str, task: int) -> Paired:
        """Mean accuracy over the tasks seen so far, after this task (from 0)."""
        return self._paired(method, lambda matrix: statistics.fmean(matrix[task]))

    def new_task(self, method: str, task: int) -> Paired:
        """Accuracy on the task just learnt."""
        return self._paired(method, lambda matrix: matrix[task][task])

    def metric(self, method: str, name: str) -> Paired:
        return self._paired(method, METRICS[name])

    def _paired(self, method: str, number: Callable[[Matrix], float]) -> Paired:
        both = [[100 * number(self.runs[method, norm, s]) for s in self.seeds(method)] for norm in ("bn", "tbbn")]
        return Paired(*both)


@cache
def measured() -> dict[str, Measured]:
    """All experiments by name."""
    text = (resources.files(__package__) / "measured.json").read_text()
    return {
        entry["name"]: Measured(
            entry["name"], entry["protocol"], entry["source"],
            {(run["method"], run["norm"], run["seed"]): run["accuracy"] for run in entry["runs"]},
            {run["method"]: run["keep"] for run in entry["runs"]},
        )
        for entry in json.loads(text)
    }  # fmt: skip


def gains_by_task(experiment: Measured, method: str = "ft") -> Table:
    """How much TBBN gains over batch norm after each task, on the same seeds."""
    seeds = experiment.seeds(method)
    tasks = len(next(iter(experiment.runs.values())))
    rows = []
    for task in range(tasks):
        all_seen, new = experiment.after(method, task), experiment.new_task(method, task)
        cells = [f"{task + 1}", _mean(all_seen.bn), _mean(all_seen.tbbn), difference(all_seen.gains)]
        rows.append((*cells, _mean([statistics.fmean(new.bn)]), _mean([statistics.fmean(new.tbbn)])))
    header = ("after task", "bn %", "tbbn %", "gain (standard error)", "new task: bn", "tbbn")
    return Table(
        header, tuple(rows), (f"Mean accuracy over the tasks seen so far, {len(seeds)} seeds, real CIFAR-100.",)
    )


def gains(experiments: dict[str, Measured]) -> Table:
    """TBBN against batch norm on the same seeds, a row for each experiment and method."""
    rows = []
    for experiment in experiments.values():
        for method in experiment.methods:
            pairs = [experiment.metric(method, name) for name in METRICS]
            n = str(len(experiment.seeds(method)))
            cells = [_mean(pairs[0].bn), _mean(pairs[0].tbbn), *(difference(pair.gains) for pair in pairs)]
            rows.append((experiment.title(method), method, n, *cells))
    header = ("protocol", "method", "seeds", "bn A_f", "tbbn A_f", *(f"{name}: tbbn - bn" for name in METRICS))
    note = "tbbn - bn: mean difference on the same seeds, in points (standard error). F is forgetting: less is better."
    return Table(header, tuple(rows), (note,), align="ll" + "r" * (len(header) - 2))


def gain_in_paper(metric: str) -> float:
    """What TBBN gains over batch norm in the paper's Table 1."""
    printed, at = find_tables("table1", "cifar100")[0].rows, list(METRICS).index(metric)
    return printed["ft", "tbbn"][at] - printed["ft", "bn"][at]


def beside_paper(experiment: Measured) -> Table:
    """Fine-tuning beside the paper's Table 1: both norms, and what TBBN gains on the same seeds."""
    printed = find_tables("table1", "cifar100")[0].rows
    pairs = {name: experiment.metric("ft", name) for name in METRICS}
    paper = {norm: dict(zip(METRICS, printed["ft", norm], strict=True)) for norm in ("bn", "tbbn")}
    rows = []
    for label, ours, theirs in (
        ("bn", [_mean(pair.bn) for pair in pairs.values()], list(paper["bn"].values())),
        ("tbbn", [_mean(pair.tbbn) for pair in pairs.values()], list(paper["tbbn"].values())),
        (
            "gain",
            [difference(pair.gains) for pair in pairs.values()],
            [paper["tbbn"][m] - paper["bn"][m] for m in METRICS],
        ),
    ):
        rows.append((label, *(c for own, their in zip(ours, theirs, strict=True) for c in (own, f"{their:.2f}"))))
    header = ("", *(cell for name in METRICS for cell in (f"{name} ours", "paper")))
    return Table(
        header, tuple(rows), (f"{len(experiment.seeds('ft'))} seeds; gain: on the same seeds (standard error).",)
    )


def _mean(percents: list[float]) -> str:
    return percent([value / 100 for value in percents])
