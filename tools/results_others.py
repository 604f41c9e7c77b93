"""The section of ``docs/results.md`` on runs that have no section of their own, in any other folder of ``results/``."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import results_numbers as numbers
import results_online
from tbbn.bench.report.groups import Group, groups
from tbbn.bench.report.tables import Table
from tbbn.paper.measured import METRICS, Paired


def section() -> str:
    return f"""## Other runs

The folders of `results/` that have no section of their own. Each run has its settings in `config.toml`. PODNet and
SS-IL are discussed under [Table 2](#the-papers-table-2). `cifar100-online-first` has the first runs of seeds 0 to 2.
They were made on a CPU that the records do not name, and differ from the repetitions under [Online](#online), which are of one CPU.

{table({folder: numbers.records_in(folder) for folder in others()}).render("md")}
"""


def others() -> list[str]:
    shown = {source for _, source in numbers.EXPERIMENTS.values()} | {numbers.TABLE1, results_online.FOLDER}
    folders = sorted({f"results/{file.parts[-3]}" for file in (numbers.ROOT / "results").glob("*/*/record.json")})
    return [folder for folder in folders if folder not in shown]


def table(folders: dict[str, list[Any]]) -> Table:
    """The means of every row, and its gain over batch norm in runs of the same settings, wherever these lie."""
    everything = [*numbers.all_records(), *(record for records in folders.values() for record in records)]
    bn = {group.apart_from_norm: group for group in groups(everything) if group.norm == "bn"}
    rows = []
    for folder, own in ((folder, group) for folder, records in folders.items() for group in groups(records)):
        means = [f"{fmean(numbers.metrics(record)[name] for record in own.finished):.1f}" for name in METRICS]
        gains = [_gain(own, bn.get(own.apart_from_norm), name) for name in ("A_f", "A_a")]
        name = folder.removeprefix("results/")
        rows.append((name, own.label, str(len(own.finished)), *means, _calibrated(own), *gains))
    header = ("folder", "method + norm", "seeds", *METRICS, "A_f calibrated", "A_f - bn's", "A_a - bn's")
    notes = (
        "A_f calibrated: with the newest task's scores shifted so that it gets its share of the test images.",
        "- bn's: mean difference on the same seeds, in points, and its 95 % interval.",
    )
    return Table(header, tuple(rows), notes, align="ll" + 8 * "r")


def _gain(own: Group, bn: Group | None, name: str) -> str:
    seeds = [seed for seed in own.runs if bn and seed in bn.runs]
    if not bn or not seeds or own.norm == "bn":
        return ""
    return str(Paired(*([numbers.metrics(group.runs[seed])[name] for seed in seeds] for group in (bn, own))))


def _calibrated(own: Group) -> str:
    if not numbers.all_calibrated(own.finished):
        return "-"
    return f"{100 * fmean(map(numbers.calibrated, own.finished)):.1f}"
