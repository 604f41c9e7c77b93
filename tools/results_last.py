"""The analyses of fine-tuning with the last epoch kept, for ``docs/results.md``: slots, drift and the bias towards new classes."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean
from typing import Any

from results_numbers import EXPERIMENTS, ROOT, records_in
from tbbn.bench.analysis.slots import NAMES, Slots, slots_table
from tbbn.bench.report.tables import Table

DRIFT = "results/cifar100-ft-last-drift.json"  # tbbn drift --images 200 --json of the same networks, by --view
SLOTS = "results/cifar100-ft-last-slots.json"  # tbbn slots --json of the networks of "last", which are not kept here


def runs() -> list[Any]:
    return records_in(EXPERIMENTS["last"][1])


def slots_over_seeds() -> Table:
    """The slots of both norms, counted over all seeds, with the range over single seeds."""
    runs = json.loads((ROOT / SLOTS).read_text())
    of_norm = {norm: [run for run in runs if _norm_of(run) == norm] for norm in ("tbbn", "bn")}
    total = slots_table(list(of_norm), [_slots(some) for some in of_norm.values()])
    rows = []
    for kind, row in zip(NAMES, total.rows, strict=True):
        cells = [row[0]]
        for at, cell in enumerate(row[1:]):
            counts = [run[kind] for run in list(of_norm.values())[at // 2]]
            seeds = [100 * count[("right", "past")[at % 2]] / count["images"] for count in counts]
            cells.append(f"{cell} ({min(seeds):.0f} to {max(seeds):.0f})")
        rows.append(tuple(cells))
    return replace(total, rows=tuple(rows))


def slot_images() -> str:
    """The least and the most images of a row of the table of slots, in one run."""
    counts = {run[kind]["images"] for run in json.loads((ROOT / SLOTS).read_text()) for kind in NAMES}
    return f"{min(counts)} to {max(counts)}"


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
    rows = []
    for norm in ("bn", "tbbn"):
        cells = []
        for view in ("train", "test"):
            seeds = _off_population(norm, view)
            cells.append(f"{fmean(seeds):.3f} ({min(seeds):.3f} to {max(seeds):.3f})")
        rows.append((norm, *cells, f"{newest_in_statistics(norm):.2f}"))
    header = ("norm", "mean off, sd: images as in training", "as in the test", "share of the newest task")
    return Table(header, tuple(rows))


def _off_population(norm: str, view: str) -> list[float]:
    """The distance of the running means from the population's, mean over layers, of each seed."""
    runs = json.loads((ROOT / DRIFT).read_text())[view]
    return [fmean(layer["mean"] for layer in run["layers"]) for run in runs if _norm_of(run) == norm]


def off_population(norm: str, view: str) -> float:
    return fmean(_off_population(norm, view))


def newest_in_statistics(norm: str) -> float:
    """The share of the newest task in the running statistics, by their place between its mean and that of the others."""
    runs = [run for run in json.loads((ROOT / DRIFT).read_text())["train"] if _norm_of(run) == norm]
    return fmean(layer["newest"] for run in runs for layer in run["layers"])


def said_new(norm: str) -> float:
    """The share of test images, in percent, that runs with the last epoch kept take for one of the newest task's classes."""
    records = [r for r in runs() if r.run_config.norm.name == norm]
    images, of_new = 10_000, 1_000  # test images of CIFAR-100, and of a task of ten classes
    found = (of_new - record.errors[-1]["C->P"] + record.errors[-1]["P->C"] for record in records)
    return 100 * fmean(found) / images
