"""The numbers and tables of ``docs/results.md``, from the records in ``results/``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from tbbn.bench.config import resolve
from tbbn.bench.engine.record import new_record
from tbbn.bench.metrics import ERROR_TYPES
from tbbn.bench.report.groups import groups, stamp
from tbbn.bench.report.interval import half_width
from tbbn.bench.report.tables import Table
from tbbn.bench.runs.record import load_record
from tbbn.paper import measured
from tbbn.paper.published import compare, find_tables

ROOT = Path(__file__).parents[1]
EXPERIMENTS = {  # by name: protocol, where the records are
    "best": ("paper", "results/cifar100-ft.json"),
    "table2": ("paper", "results/cifar100-table2"),
    "last": ("paper", "results/cifar100-ft-last"),
    "clean": ("clean", "results/cifar100-ft-clean"),
}
TABLE1 = "results/cifar100-table1"  # every norm; of batch norm and TBBN the seeds that were repeated
H200 = "results/h200.json"  # tbbn speed --json and more
NEAREST_MEAN = "results/cifar100-podnet-nme/podnet-bn-0"  # as PODNet's authors configure the other classifier
LAST_TASK_DISTILLED = "results/cifar100-ssil-quirk/ssil-bn-0"  # SS-IL with the quirk kd-last-task-only


@cache
def records_in(source: str) -> list[Any]:
    """The records in a folder. All numbers are means over its runs by method and norm, so nothing else may differ in them."""
    records = [load_record(file.parent) for file in sorted((ROOT / source).glob("*/record.json"))]
    found = groups(records)
    for group in found:
        same = next(other for other in found if other.method == group.method)
        assert group.apart_from_norm == same.apart_from_norm, f"{source}: {group.label} and {same.label} are mixed"
    assert not stamp(group.config for group in found), f"{source}: {stamp(group.config for group in found)}"
    return records


def metrics(record: Any) -> dict[str, float]:
    """The four metrics of the paper, in percent."""
    return {name: 100 * metric(record.accuracy) for name, metric in measured.METRICS.items()}


def calibrated(record: Any) -> float:
    """The final accuracy with the newest task's scores shifted so that it gets its share of the test images."""
    return fmean(record.calibrated[-1])


def all_calibrated(records: Sequence[Any]) -> bool:
    """Whether all of these runs have the calibrated accuracy; older ones do not."""
    return all(record.calibrated and record.calibrated[-1] for record in records)


def last_kept(record: Any) -> int:
    """The epoch, from 1, that was kept in the first phase of the last task."""
    return first_kept(record)[len(record.accuracy) - 1]


@cache
def first_drop() -> int:
    """The epoch after which the learning rate of these runs first drops."""
    runs: dict[tuple[int, tuple[float, ...]], list[Any]] = {}
    for record in best_kept():
        train = record.run_config.train
        runs.setdefault((train.epochs, train.milestones), []).append(record)
    named = [
        f"{epochs} epochs with milestones {list(milestones)} ({len(records)}, such as {_run(records[0])})"
        for (epochs, milestones), records in runs.items()
    ]
    assert len(runs) == 1, (
        f"runs that kept the best epoch differ in its schedule: {'; '.join(named) or 'there are none'}"
    )
    ((epochs, milestones),) = runs
    return round(milestones[0] * epochs)


def _run(record: Any) -> str:
    return f"{record.run_config.label}, seed {record.run_config.seed}"


# Table 1.


@cache
def of_norm(norm: str) -> dict[int, Any]:
    """The records of a norm of Table 1, by seed."""
    return {r.run_config.seed: r for r in records_in(TABLE1) if r.run_config.names[1] == norm}


def first_runs() -> list[dict[str, Any]]:
    """The runs of "best" as they were first made."""
    runs: list[dict[str, Any]] = json.loads((ROOT / EXPERIMENTS["best"][1]).read_text())["runs"]
    return runs


def sessions() -> dict[str, measured.Paired]:
    """A_f of "best" as it was first made, by the seeds that were made together; "all" of them last."""
    finals = {(run["norm"], run["seed"]): 100 * measured.METRICS["A_f"](run["accuracy"]) for run in first_runs()}
    made = [session["seeds"] for session in json.loads((ROOT / EXPERIMENTS["best"][1]).read_text())["sessions"]]
    together = {listed(seeds): seeds for seeds in made} | {"all": [seed for seeds in made for seed in seeds]}
    return {
        name: measured.Paired(*([finals[norm, seed] for seed in seeds] for norm in ("bn", "tbbn")))
        for name, seeds in together.items()
    }


def sessions_table() -> Table:
    rows = [
        (name, f"{min(pair.bn):.1f} to {max(pair.bn):.1f}", f"{min(pair.tbbn):.1f} to {max(pair.tbbn):.1f}", str(pair))
        for name, pair in sessions().items()
    ]
    return Table(("seeds", "bn A_f", "tbbn A_f", "tbbn - bn"), tuple(rows), (measured.DIFFERENCE,))


@cache
def repeated() -> dict[tuple[str, int], Any]:
    """The records of runs of "best" that were repeated, by norm and seed."""
    records = {(r.run_config.names[1], r.run_config.seed): r for r in records_in(TABLE1)}
    return {key: records[key] for run in first_runs() if (key := (run["norm"], run["seed"])) in records}


def repetition() -> Table:
    """Final and average accuracy of the repeated runs, then and now."""
    rows = []
    for run in (run for run in first_runs() if (run["norm"], run["seed"]) in repeated()):
        record = repeated()[run["norm"], run["seed"]]
        then = [f"{100 * measured.METRICS[name](run['accuracy']):.1f}" for name in ("A_f", "A_a")]
        now = [f"{metrics(record)[name]:.1f}" for name in ("A_f", "A_a")]
        rows.append((run["norm"], str(run["seed"]), *then, *now, str(last_kept(record))))
    header = ("norm", "seed", "A_f then", "A_a then", "A_f now", "A_a now", "epoch kept in the last task, now")
    return Table(header, tuple(rows))


def table1() -> Table:
    return compare(find_tables("table1", "cifar100")[0], records_in(TABLE1) + without_record())


def _table1_runs(pair: measured.Measured) -> dict[str, dict[int, measured.Matrix]]:
    """The accuracies of every norm of Table 1, by seed."""
    runs: dict[str, dict[int, measured.Matrix]] = {}
    for (_, norm, seed), accuracy in pair.runs.items():
        runs.setdefault(norm, {})[seed] = accuracy
    for record in records_in(TABLE1):
        runs.setdefault(record.run_config.names[1], {})[record.run_config.seed] = record.accuracy
    return runs


def shared_seeds(pair: measured.Measured) -> list[int]:
    """Seeds that every norm of Table 1 has."""
    return sorted(set.intersection(*(set(seeds) for seeds in _table1_runs(pair).values())))


def _over_shared_seeds(pair: measured.Measured) -> dict[str, dict[str, list[float]]]:
    """The metrics of every norm of Table 1 on the seeds that all have, in percent."""
    seeds = shared_seeds(pair)
    return {
        norm: {name: [100 * metric(runs[seed]) for seed in seeds] for name, metric in measured.METRICS.items()}
        for norm, runs in _table1_runs(pair).items()
    }


def shared_table(pair: measured.Measured) -> Table:
    """The means of every norm over the seeds that all have, best average accuracy first, and A_f beside batch norm's."""
    found = _over_shared_seeds(pair)
    rows = []
    for norm, values in sorted(found.items(), key=lambda item: -fmean(item[1]["A_a"])):
        gains = [a - b for a, b in zip(values["A_f"], found["bn"]["A_f"], strict=True)]
        each = ", ".join(f"{gain + 0.0:+.1f}" for gain in gains) if norm != "bn" else ""
        rows.append((norm, *(f"{fmean(v):.1f}" for v in values.values()), each))
    return Table(("norm", *measured.METRICS, "A_f - bn's"), tuple(rows), (f"Seeds {listed(shared_seeds(pair))}.",))


def place(pair: measured.Measured, norm: str, metric: str) -> str:
    """The place of a norm in Table 1, by its mean over the seeds that all have."""
    found = _over_shared_seeds(pair)
    better = sum(fmean(values[metric]) > fmean(found[norm][metric]) for values in found.values())
    return f"{better + 1} of {len(found)}"


def places_by_seed(pair: measured.Measured, norm: str, metric: str) -> str:
    """The place of a norm in Table 1 on each seed that all have."""
    values = {name: metrics[metric] for name, metrics in _over_shared_seeds(pair).items()}
    places = [1 + sum(v[at] > own for v in values.values()) for at, own in enumerate(values[norm])]
    return _and([str(place) for place in places])


# Table 2.


@cache
def of_method(method: str, norm: str) -> dict[int, Any]:
    """The finished runs of a row of Table 2, by seed."""
    found = (r for r in records_in(EXPERIMENTS["table2"][1]) if r.status == "finished")
    return {r.run_config.seed: r for r in found if r.run_config.names == (method, norm)}


def mean_row(method: str, norm: str) -> dict[str, float]:
    """The mean metrics of a row of Table 2 over its seeds."""
    rows = [metrics(record) for record in of_method(method, norm).values()]
    return {name: fmean(row[name] for row in rows) for name in measured.METRICS}


def paper_row(method: str, norm: str) -> dict[str, float]:
    return dict(zip(measured.METRICS, find_tables("table2", "cifar100")[0].rows[method, norm], strict=True))


def each_seed(records: dict[int, Any], metric: str) -> str:
    return ", ".join(f"{metrics(record)[metric]:.1f}" for record in records.values())


def each_kept(records: dict[int, Any]) -> str:
    return ", ".join(str(last_kept(record)) for record in records.values())


def beside(method: str, one: str, other: str, metric: str | Callable[[Any], float]) -> measured.Paired:
    """A metric of two norms with a method of Table 2, on the seeds that both have."""
    value = metric if callable(metric) else lambda record: metrics(record)[metric]
    runs = of_method(method, one), of_method(method, other)
    seeds = sorted(set(runs[0]) & set(runs[1]))
    return measured.Paired(*([value(norm[seed]) for seed in seeds] for norm in runs))


def clear_of_0(pairs: dict[str, measured.Paired]) -> str:
    """The methods whose gain has an interval above 0."""
    return _and([method for method, pair in pairs.items() if pair.interval[0] > 0]) or "none"


def mean_of_methods(experiment: measured.Measured, metric: str) -> measured.Paired:
    """The mean over all methods, on each seed."""
    return mean_of([experiment.metric(method, metric) for method in experiment.methods])


def mean_of(pairs: Sequence[measured.Paired]) -> measured.Paired:
    """The mean over pairs of the same seeds, on each seed."""
    norms = [pair.bn for pair in pairs], [pair.tbbn for pair in pairs]
    return measured.Paired(*([fmean(values) for values in zip(*norm, strict=True)] for norm in norms))


def won(experiment: measured.Measured, metric: str) -> str:
    """In how many pairs of runs TBBN is above batch norm."""
    gains = [gain for method in experiment.methods for gain in experiment.metric(method, metric).gains]
    return f"{sum(gain > 0 for gain in gains)} of {len(gains)}"


def higher_with_tbbn(found: dict[str, measured.Measured], metric: str) -> str:
    """In how many methods under the paper's protocol the mean is higher with TBBN, and where its interval excludes 0."""
    pairs = {m: e.metric(m, metric) for e in (found["best"], found["table2"]) for m in e.methods}
    higher = sum(pair.gain > 0 for pair in pairs.values())
    return f"{higher} of {len(pairs)} methods (the interval excludes 0 for {clear_of_0(pairs)})"


def beyond_chance(experiments: list[measured.Measured]) -> str:
    """How many gains of the paper are outside our intervals, and which also are if its three runs spread as ours."""
    outside, still = 0, []
    for method, name, pair in (
        (m, n, e.metric(m, n)) for e in experiments for m in e.methods for n in measured.METRICS
    ):
        apart, half, seeds = (
            abs(measured.printed_gain(method, name) - pair.gain),
            half_width(pair.gains),
            len(pair.gains),
        )
        outside += apart > half
        if apart > half * (1 + seeds / 3) ** 0.5:  # the standard error of a difference of two means
            still.append(f"{name} of {method}")
    return (
        f"{len(still)} of the {outside} differences marked `*` remain outside the wider interval ({', '.join(still)})"
    )


def missing() -> str:
    """The runs of Table 2, seeds 0 to 2, that are not there."""
    gaps: dict[str, list[str]] = {}
    for method in ("eeil", "lucir", "ssil", "podnet", "afc"):
        for norm in ("bn", "cn", "tbbn"):
            without = [str(seed) for seed in range(3) if seed not in of_method(method, norm)]
            if without:
                gaps.setdefault(f"{norm}, {'seed' if len(without) == 1 else 'seeds'} {_and(without)}", []).append(
                    method
                )
    return "; ".join(f"{what} ({', '.join(methods)})" for what, methods in gaps.items())


# The epoch that is kept.


@cache
def best_kept() -> list[Any]:
    """The records of runs that kept the best epoch."""
    folders = (TABLE1, EXPERIMENTS["table2"][1])
    return [r for folder in folders for r in records_in(folder) if r.run_config.train.keep == "best"]


def kept() -> Table:
    """Of every row with histories: how often it kept an epoch from before the first drop, and what of the last task."""
    rows = []
    runs: dict[tuple[str, str], dict[int, Any]] = {}
    for record in best_kept():
        runs.setdefault(record.run_config.names, {})[record.run_config.seed] = record
    for (method, norm), seeds in runs.items():
        early = f"{100 * early_share(list(seeds.values())):.0f}"
        rows.append((f"{method} + {norm}", listed(list(seeds)), early, each_kept(seeds), each_seed(seeds, "A_f")))
    header = ("method + norm", "seeds", "early, % of tasks 2 to 10", "epoch kept in task 10", "A_f %")
    notes = (
        f"early: an epoch from before the learning rate first drops, after epoch {first_drop()}. The last columns: each seed.",
        "tbbn epochs FOLDER prints the epoch of every task.",
    )
    return Table(header, tuple(rows), notes, align="llrll")


def early_share(records: list[Any]) -> float:
    """In how many of the tasks after the first these runs kept an epoch from before the first drop of the learning rate."""
    return fmean(epoch <= first_drop() for record in records for task, epoch in first_kept(record).items() if task)


def first_kept(record: Any) -> dict[int, int]:
    """The epoch, from 1, that was kept in the first phase of each task."""
    first: dict[int, int] = {}
    for (task, _), epoch in record.kept_epochs().items():
        first.setdefault(task, epoch + 1)
    return first


def errors_table(runs: list[Any]) -> Table:
    """Error types after the last task, and accuracy with the task known, batch norm and TBBN."""
    rows = []
    for norm in ("bn", "tbbn"):
        records = [record for record in runs if record.run_config.norm.name == norm]
        errors = [f"{fmean(record.errors[-1][kind] for record in records):.0f}" for kind in ERROR_TYPES]
        known = fmean(100 * record.metrics["task_il_final_accuracy"] for record in records)
        rows.append((norm, *errors, f"{known:.1f}"))
    note = "C: a class of the newest task, P: of a past one; P->C is a past class taken for a new one."
    return Table(("norm", *ERROR_TYPES, "accuracy with the task known, %"), tuple(rows), (note,))


def biased() -> measured.Paired:
    """The past images that fine-tuning takes for new ones after the last task."""
    runs = {(r.run_config.norm.name, r.run_config.seed): float(r.errors[-1]["P->C"]) for r in fine_tuned()}
    seeds = sorted(seed for norm, seed in runs if norm == "bn")
    return measured.Paired(*([runs[norm, seed] for seed in seeds] for norm in ("bn", "tbbn")))


# All of them.


def all_records() -> list[Any]:
    folders = [*(source for _, source in EXPERIMENTS.values() if (ROOT / source).is_dir()), TABLE1]
    return [record for source in folders for record in records_in(source)] + without_record()


def fine_tuned() -> list[Any]:
    """The runs of "best" as records."""
    return [*without_record(), *repeated().values()]


def without_record() -> list[Any]:
    """The runs of "best" of which only accuracies were kept, as records."""
    layers, _ = find_tables("table1", "cifar100")[0].layers()
    records = []
    for run in (run for run in first_runs() if (run["norm"], run["seed"]) not in repeated()):
        own = {"precision": "bf16", "method.name": run["method"], "norm.name": run["norm"], "seed": run["seed"]}
        record = new_record(resolve(*layers, ("run", own)))
        record.status, record.accuracy, record.task_il = "finished", run["accuracy"], run["task_il"]
        record.errors = run["errors"]
        record.task_sizes = 10 * [10]
        records.append(record)
    return records


def listed(seeds: list[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 2 else " and ".join(map(str, seeds))


def _and(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
