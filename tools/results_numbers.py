"""The numbers and tables of ``docs/results.md``, from the records in ``results/``."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tbbn.bench.analysis.epochs import kept_table
from tbbn.bench.analysis.slots import Slots, slots_table
from tbbn.bench.config import resolve
from tbbn.bench.engine.record import new_record
from tbbn.bench.metrics import ERROR_TYPES
from tbbn.bench.report.pairs import difference
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
DRIFT = "results/cifar100-ft-last-drift.json"  # tbbn drift --images 200 --json of the same networks, by --view
SLOTS = "results/cifar100-ft-last-slots.json"  # tbbn slots --json of the networks of "last", which are not kept here
NEAREST_MEAN = "results/cifar100-podnet-nme/podnet-bn-0"  # as PODNet's authors configure the other classifier
LAST_TASK_DISTILLED = "results/cifar100-ssil-quirk/ssil-bn-0"  # SS-IL with the quirk kd-last-task-only


@cache
def records_in(source: str) -> list[Any]:
    return [load_record(file.parent) for file in sorted((ROOT / source).glob("*/record.json"))]


def metrics(record: Any) -> dict[str, float]:
    """The four metrics of the paper, in percent."""
    return {name: 100 * metric(record.accuracy) for name, metric in measured.METRICS.items()}


def last_kept(record: Any) -> int:
    """The epoch, from 1, that was kept in the first phase of the last task."""
    epochs = [epoch for (task, _), epoch in record.kept_epochs().items() if task == len(record.accuracy) - 1]
    return int(epochs[0]) + 1


@cache
def first_drop() -> int:
    """The epoch after which the learning rate of these runs first drops."""
    ((epochs, milestones),) = {(r.run_config.train.epochs, r.run_config.train.milestones) for r in best_kept()}
    return round(milestones[0] * epochs)


# Table 1.


@cache
def of_norm(norm: str) -> dict[int, Any]:
    """The records of a norm of Table 1, by seed."""
    return {r.run_config.seed: r for r in records_in(TABLE1) if r.run_config.names[1] == norm}


def first_runs() -> list[dict[str, Any]]:
    """The runs of "best" as they were first made."""
    runs: list[dict[str, Any]] = json.loads((ROOT / EXPERIMENTS["best"][1]).read_text())["runs"]
    return runs


def sessions() -> tuple[list[int], list[int]]:
    """The seeds of "best" that were made before and in the last session."""
    *first, last = (session["seeds"] for session in json.loads((ROOT / EXPERIMENTS["best"][1]).read_text())["sessions"])
    return [seed for seeds in first for seed in seeds], last


def first_made(seeds: list[int]) -> measured.Paired:
    """A_f of these seeds of "best" as they were first made."""
    finals = {(run["norm"], run["seed"]): 100 * measured.METRICS["A_f"](run["accuracy"]) for run in first_runs()}
    return measured.Paired(*([finals[norm, seed] for seed in seeds] for norm in ("bn", "tbbn")))


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


def norms_beside_paper() -> Table:
    """Table 1 without the two norms that have a table of their own."""
    table = compare(find_tables("table1", "cifar100")[0], records_in(TABLE1))
    return replace(table, rows=tuple(row for row in table.rows if row[0] not in ("ft + bn", "ft + tbbn")))


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


def ranking(pair: measured.Measured) -> str:
    """Every norm of Table 1 with its mean A_f over the seeds that all have, best first."""
    found = sorted(_over_shared_seeds(pair).items(), key=lambda item: -fmean(item[1]["A_f"]))
    return ", ".join(f"{norm} {fmean(values['A_f']):.1f}" for norm, values in found)


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


def lost_with_cn(method: str) -> list[float]:
    """Points of A_f that a method loses with continual norm instead of batch norm, on each seed that both have."""
    bn, cn = of_method(method, "bn"), of_method(method, "cn")
    return [metrics(bn[seed])["A_f"] - metrics(cn[seed])["A_f"] for seed in bn if seed in cn]


def gains_by_method(experiment: measured.Measured, metric: str) -> str:
    """What TBBN gains with each method, and its standard error."""
    return ", ".join(f"{m} {difference(experiment.metric(m, metric).gains)}" for m in experiment.methods)


def won(experiment: measured.Measured, metric: str) -> str:
    """In how many pairs of runs TBBN is above batch norm."""
    gains = [gain for method in experiment.methods for gain in experiment.metric(method, metric).gains]
    return f"{sum(gain > 0 for gain in gains)} of {len(gains)}"


def standing_out(found: dict[str, measured.Measured]) -> str:
    """Methods whose gain exceeds two standard errors, were their seeds to vary as those of fine-tuning do."""
    large = []
    for metric in ("A_a", "A_f"):
        spread = stdev(found["best"].metric("ft", metric).gains)
        pairs = {method: found["table2"].metric(method, metric) for method in found["table2"].methods}
        out = [f"`{m}`" for m, pair in pairs.items() if abs(pair.gain) > 2 * spread / sqrt(len(pair.gains))]
        large.append(f"{_and(out) or 'none'} in {metric}")
    return _and(large)


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
    return kept_table({f"{r.run_config.label}, seed {r.run_config.seed}": r for r in best_kept()})


def early_tasks(method: str, norm: str) -> int:
    """The most tasks in which a run kept an epoch before the first drop of the learning rate."""
    runs = [r for r in best_kept() if r.run_config.names == (method, norm)]
    return max(sum(epoch + 1 <= first_drop() for epoch in r.kept_epochs().values()) for r in runs)


def by_kept_epoch(seed: int) -> dict[str, dict[str, float]]:
    """A_f of the norms in Table 1 by the epoch kept in the last task: "before" the first drop, or "after" it."""
    found: dict[str, dict[str, float]] = {"before": {}, "after": {}}
    for record in (r for r in records_in(TABLE1) if r.run_config.seed == seed):
        when = "after" if last_kept(record) > first_drop() else "before"
        found[when][record.run_config.names[1]] = metrics(record)["A_f"]
    return found


def split_table(seeds: list[int]) -> Table:
    rows = [
        (
            str(seed),
            when,
            f"{fmean(finals.values()):.1f}",
            ", ".join(f"{norm} {value:.1f}" for norm, value in finals.items()),
        )
        for seed in seeds
        for when, finals in by_kept_epoch(seed).items()
    ]
    return Table(("seed", "epoch kept", "mean A_f", "A_f of each"), tuple(rows), align="llrl")


def late_gain(seed: int) -> float:
    """Mean A_f of the norms that kept a late epoch minus that of the others, on one seed."""
    found = by_kept_epoch(seed)
    return fmean(found["after"].values()) - fmean(found["before"].values())


def changed_sides() -> tuple[Table, list[float]]:
    """Norms that kept an early epoch with one seed and a late one with another, and what the late ones gain."""
    rows, gains = [], []
    for norm in sorted({r.run_config.names[1] for r in records_in(TABLE1)}):
        runs = of_norm(norm)
        late = {seed: last_kept(record) > first_drop() for seed, record in runs.items()}
        if len(set(late.values())) > 1:
            finals = {seed: metrics(record)["A_f"] for seed, record in runs.items()}
            sides = [fmean(finals[seed] for seed in runs if late[seed] is side) for side in (True, False)]
            gains.append(sides[0] - sides[1])
            rows.append((norm, each_kept(runs), each_seed(runs, "A_f"), f"{gains[-1]:+.1f}"))
    header = ("norm", "epoch kept in the last task, each seed", "A_f, each seed", "late - early")
    return Table(header, tuple(rows)), gains


# Fine-tuning with the last epoch kept.


def slots_over_seeds() -> Table:
    """The slots of both norms, counted over all seeds, with the range over single seeds."""
    runs = json.loads((ROOT / SLOTS).read_text())
    tables = {
        norm: [slots_table([norm], [_slots([run])]) for run in runs if _norm_of(run) == norm] for norm in ("tbbn", "bn")
    }
    total = slots_table(list(tables), [_slots([run for run in runs if _norm_of(run) == norm]) for norm in tables])
    rows = []
    for number, row in enumerate(total.rows):
        cells = [row[0]]
        for at, cell in enumerate(row[1:]):
            seeds = [float(table.rows[number][1 + at % 2]) for table in list(tables.values())[at // 2]]
            cells.append(f"{cell} ({min(seeds):.0f} to {max(seeds):.0f})")
        rows.append(tuple(cells))
    return replace(total, rows=tuple(rows))


def _slots(runs: list[dict[str, Any]]) -> Slots:
    """The counts of these runs together."""
    total = Slots()
    for run in runs:
        for kind, counts in ((kind, counts) for kind, counts in run.items() if kind != "directory"):
            seen = getattr(total, kind)
            for key, count in counts.items():
                setattr(seen, key, getattr(seen, key) + count)
    return total


def _norm_of(run: dict[str, Any]) -> str:
    """Of an entry in the files of `tbbn slots` and `tbbn drift`, whose folders are METHOD-NORM-SEED."""
    return str(run["directory"]).split("-")[1]


def drift() -> Table:
    """Running statistics against the population, batch norm and TBBN."""
    found = json.loads((ROOT / DRIFT).read_text())
    rows = []
    for norm in ("bn", "tbbn"):
        cells = []
        for view in ("train", "test"):
            seeds = [fmean(layer["mean"] for layer in run["layers"]) for run in found[view] if _norm_of(run) == norm]
            cells.append(f"{fmean(seeds):.3f} ({min(seeds):.3f} to {max(seeds):.3f})")
        rows.append((norm, *cells))
    return Table(("norm", "mean off, sd: images as in training", "as in the test"), tuple(rows))


def errors_after_last_task() -> Table:
    """Error types, and accuracy with the task known, of the runs that kept the last epoch."""
    rows = []
    for norm in ("bn", "tbbn"):
        records = [r for r in records_in(EXPERIMENTS["last"][1]) if r.run_config.norm.name == norm]
        errors = [f"{fmean(r.errors[-1][kind] for r in records):.0f}" for kind in ERROR_TYPES]
        known = fmean(100 * r.metrics["task_il_final_accuracy"] for r in records)
        rows.append((norm, *errors, f"{known:.1f}"))
    return Table(
        ("norm", *ERROR_TYPES, "accuracy with the task known, %"),
        tuple(rows),
        ("C: a class of the newest task, P: of a past one; P->C is a past class taken for a new one.",),
    )


def gain_with_task_known(name: str) -> str:
    """What TBBN gains in A_f where the task is known."""
    found = {
        (r.run_config.norm.name, r.run_config.seed): 100 * r.metrics["task_il_final_accuracy"]
        for r in records_in(EXPERIMENTS[name][1])
    }
    return difference([found["tbbn", seed] - value for (norm, seed), value in found.items() if norm == "bn"])


# All of them.


def all_records() -> list[Any]:
    folders = [*(source for _, source in EXPERIMENTS.values() if (ROOT / source).is_dir()), TABLE1]
    return [record for source in folders for record in records_in(source)] + _without_record()


def fine_tuned() -> list[Any]:
    """The runs of "best" as records."""
    return [*_without_record(), *repeated().values()]


def _without_record() -> list[Any]:
    """The runs of "best" of which only accuracies were kept, as records."""
    layers, _ = find_tables("table1", "cifar100")[0].layers()
    records = []
    for run in (run for run in first_runs() if (run["norm"], run["seed"]) not in repeated()):
        own = {"precision": "bf16", "method.name": run["method"], "norm.name": run["norm"], "seed": run["seed"]}
        record = new_record(resolve(*layers, ("run", own)))
        record.status, record.accuracy, record.task_il = "finished", run["accuracy"], run["task_il"]
        record.task_sizes = 10 * [10]
        records.append(record)
    return records


def listed(seeds: list[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 2 else " and ".join(map(str, seeds))


def with_interval(pair: measured.Paired) -> str:
    low, high = pair.interval
    return f"{pair.gain:+.1f} ({pair.error:.1f}; {low:+.1f} to {high:+.1f})"


def _and(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
