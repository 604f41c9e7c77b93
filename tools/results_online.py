"""The section of ``docs/results.md`` on the online scenario: its numbers and its text."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import results_numbers as numbers
from tbbn.bench.report.tables import Table
from tbbn.paper import measured
from tbbn.paper.published import compare, find_tables

FOLDER = "results/cifar100-online"
BACKBONE = "resnet18-reduced"


def section(records: list[Any]) -> str:
    """``records``: the runs in ``FOLDER``."""
    (table,) = find_tables("online", "cifar100")
    beside = compare(table, records, {"backbone": BACKBONE}, missing=False)
    tbbn = {name: paired(records, "tbbn", metric) for name, metric in NUMBERS.items()}
    return f"""## Online

A single pass over 20 tasks, batches of 10 new and 10 stored images, a reservoir of 2000 images, fine-tuning. The network is the survey's reduced
ResNet-18 (20 to 160 channels), on a CPU in float32. The groups of CN (8 and 16) do not divide its channels; `cn(groups=5)` below has four channels a
group in the first stage, as 16 groups have in the paper's network.

{beside.render("md")}

The paper prints a lower A_f with TBBN than with batch norm. Here TBBN minus batch norm is {tbbn["A_f"]} in A_f and {tbbn["A_a"]} in A_a.{_calibrated(records)}
The norms that ran, sorted by A_f, beside batch norm on the same seeds:

{norms_table(records).render("md")}
{_ours(records)}"""


def _calibrated(records: list[Any]) -> str:
    """What is left of the gain without a bias to the newest task."""
    runs = [record for record in records if record.run_config.names[1] in ("bn", "tbbn")]
    if not numbers.all_calibrated(runs):
        return ""
    gain = paired(records, "tbbn", numbers.calibrated)
    return f" With the scores of the newest task\nshifted so that it gets its share of the test images, the difference in A_f is {gain}."


OURS = {
    "tbbn(rule=uneven)": "In a batch of 10 + 10 the paper's rule can only use the divisors of 10 as numbers of splits; this one uses any number.",
    "tbbn(memory=own)": "Memory row `m` is normalised with split `m mod r` only, as in the first preprint, and not with the average over all splits.",
    "cn(groups=5)": "Continual norm with a number of groups that divides the channels.",
    "weighted": "Batch norm with one set of statistics that weights every task equally.",
}


def _ours(records: list[Any]) -> str:
    """A line on each norm that ran and is not the paper's."""
    return (
        "".join(
            f"\n- `{norm}`: not in the paper's table. {text}" for norm, text in OURS.items() if norm in by_norm(records)
        )
        + "\n"
    )


def task_known(record: Any) -> float:
    return fmean(record.task_il[-1])


def _of(metric: Callable[[measured.Matrix], float]) -> Callable[[Any], float]:
    return lambda record: metric(record.accuracy)


NUMBERS: dict[str, Callable[[Any], float]] = {
    **{name: _of(metric) for name, metric in measured.METRICS.items()},
    measured.TASK_KNOWN: task_known,
}


def by_norm(records: list[Any]) -> dict[str, dict[int, Any]]:
    """The records of each norm, by seed."""
    found: dict[str, dict[int, Any]] = {}
    for record in records:
        found.setdefault(record.run_config.names[1], {})[record.run_config.seed] = record
    return found


def paired(records: list[Any], norm: str, number: Callable[[Any], float]) -> measured.Paired:
    """A number of batch norm and of another norm, on the seeds that both have."""
    bn, other = by_norm(records)["bn"], by_norm(records)[norm]
    seeds = sorted(set(bn) & set(other))
    return measured.Paired(*([100 * number(runs[seed]) for seed in seeds] for runs in (bn, other)))


def norms_table(records: list[Any]) -> Table:
    """The means of every norm, best final accuracy first, and its gain over batch norm."""
    rows = []
    for norm, runs in sorted(by_norm(records).items(), key=lambda item: -fmean(map(NUMBERS["A_f"], item[1].values()))):
        means = [f"{100 * fmean(map(number, runs.values())):.1f}" for number in NUMBERS.values()]
        runs_of = list(runs.values())
        means.append(f"{100 * fmean(map(numbers.calibrated, runs_of)):.1f}" if numbers.all_calibrated(runs_of) else "-")
        gains = [str(paired(records, norm, NUMBERS[name])) if norm != "bn" else "" for name in ("A_f", "A_a")]
        rows.append((norm, str(len(runs)), *means, *gains))
    header = ("norm", "seeds", *NUMBERS, "A_f, calibrated", "A_f - bn's", "A_a - bn's")
    notes = (
        "A_f, calibrated: with the newest task's scores shifted so that it gets its share of the test images.",
        "- bn's: mean difference on the same seeds, in points, and its 95 % interval.",
    )
    return Table(header, tuple(rows), notes)
