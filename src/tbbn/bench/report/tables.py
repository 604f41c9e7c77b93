"""Turn records into tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from tbbn.bench.engine.forecast import TaskForecast
from tbbn.bench.engine.record import Record
from tbbn.bench.metrics import FORMULAS
from tbbn.bench.report.columns import LOWER_IS_BETTER, SHORT, SYMBOLS, default_metrics, formulas
from tbbn.bench.report.groups import Group, blocks, groups, repeated_note, stamp
from tbbn.bench.report.table import SPREAD, Table


def percent(values: Sequence[float]) -> str:
    """Mean and sample standard deviation, in percent.

    >>> percent([0.5]), percent([0.5, 0.6])
    ('50.0', '55.0 ± 7.1')
    """
    return mean_std([100 * value for value in values])


def mean_std(points: Sequence[float]) -> str:
    """Mean and sample standard deviation. Every table takes them from here: 100 * mean can round to another digit.

    >>> mean_std([50.0]), mean_std([50.0, 60.0])
    ('50.0', '55.0 ± 7.1')
    """
    mean = f"{statistics.fmean(points):.1f}"
    return mean if len(points) == 1 else f"{mean}{SPREAD}{statistics.stdev(points):.1f}"


def summary_table(records: Sequence[Record], metrics: Sequence[str] = ()) -> Table:
    """One row per group of seeds: metrics of its finished runs, as mean ± standard deviation."""
    metrics = metrics or default_metrics(records)
    found = groups(records)
    rows = [(group.label, *_cells(group, metrics)) for group in found]
    header, rows, align = _with_status(("method + norm",), rows, found, metrics)
    return Table(header, tuple(rows), tuple(_notes(records, found, metrics)), align)


def blocks_table(records: Sequence[Record], metrics: Sequence[str] = ()) -> Table:
    """The summary for print: one block per method, one row per norm, the best mean of each block in bold type."""
    metrics = metrics or default_metrics(records)
    found = groups(records)
    stubs = ("method", "settings", "norm") if any(group.detail for group in found) else ("method", "norm")
    rows: list[tuple[str, ...]] = []
    starts, bold, ordered = [], set(), []
    for block in blocks(found):
        starts.append(len(rows))
        bold |= {(len(rows) + i, len(stubs) + 1 + j) for i, j in best_means(block, metrics)}
        for i, group in enumerate(block):
            names = ("", "") if i else (group.method, group.detail)
            rows.append((*names[: len(stubs) - 1], group.norm, *_cells(group, metrics)))
        ordered += block
    header, rows, align = _with_status(stubs, rows, ordered, metrics)
    data = ", ".join(dict.fromkeys(group.config.data.name for group in found))
    caption = f"{stamp(group.config for group in found)}{data}: mean ± standard deviation over seeds, in percent. "
    caption += "The best mean of each block is bold"
    caption += "." if all(map(_same_seeds, blocks(found))) else ", if all its rows have the same seeds."
    notes = tuple(_notes(records, found, metrics))
    return Table(header, tuple(rows), notes, align, caption, tuple(starts), frozenset(bold))


def _cells(group: Group, metrics: Sequence[str]) -> tuple[str, ...]:
    """The number of seeds, then each metric."""
    values = [record.metrics for record in group.finished]
    return str(len(values)), *(percent([v[m] for v in values]) if values else "-" for m in metrics)


def best_means(block: Sequence[Group], metrics: Sequence[str]) -> list[tuple[int, int]]:
    """The (row, metric) of the best means of a block, including ties as printed; empty if the rows' seeds differ."""
    values = [[record.metrics for record in group.finished] for group in block]
    if not _same_seeds(block):
        return []
    best = []
    for j, metric in enumerate(metrics):
        means = {
            i: round(statistics.fmean(100 * v[metric] for v in found), 1) for i, found in enumerate(values) if found
        }
        if len(means) > 1:
            wanted = (min if metric in LOWER_IS_BETTER else max)(means.values())
            best += [(i, j) for i, mean in means.items() if mean == wanted]
    return best


def _same_seeds(block: Sequence[Group]) -> bool:
    """Whether all groups with finished runs have finished the same seeds."""
    seeds = [{seed for seed, record in group.runs.items() if record.status == "finished"} for group in block]
    return all(own == other for own in seeds for other in seeds if own and other)


def _with_status(
    stubs: tuple[str, ...], rows: list[tuple[str, ...]], found: Sequence[Group], metrics: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
    """Header, rows and alignment, with a status column if not all runs are finished."""
    header = (*stubs, "seeds", *(f"{SHORT[m]} %" for m in metrics))
    align = "l" * len(stubs) + "r" * (1 + len(metrics))
    if all(len(group.finished) == len(group.runs) for group in found):
        return header, rows, align
    return (*header, "status"), [(*r, _status(g.records)) for r, g in zip(rows, found, strict=True)], align + "l"


def _notes(records: Sequence[Record], found: Sequence[Group], metrics: Sequence[str]) -> list[str]:
    scaled = stamp(group.config for group in found).strip()
    notes = [*([scaled] if scaled else []), *formulas(metrics), f"{SYMBOLS} ±: standard deviation over seeds."]
    notes += repeated_note(records, found)
    if any(record.skipped for record in records):
        notes.append(skipped_note(records))
    return notes


def skipped_note(records: Sequence[Record]) -> str:
    """A note on the image files that these runs skipped because they could not be read."""
    files = list(dict.fromkeys(file for record in records for file in record.skipped))
    named = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
    return f"skipped {len(files)} unreadable image files ({named})."


def _status(records: Sequence[Record]) -> str:
    """How the runs of a group ended, such as "2 finished, 1 diverged after 3 of 10 tasks"."""
    states = Counter(
        r.status if r.status == "finished" else f"{r.status} after {len(r.accuracy)} of {len(r.task_sizes)} tasks"
        for r in records
    )
    return ", ".join(f"{n} {state}" for state, n in states.items())


def forecast_table(entries: Sequence[TaskForecast], splits: str = "r*") -> Table:
    """The forecast of a run, one row per task. ``splits`` is the title of the column of r*; if empty, there is none."""
    header = ("task", "classes", "images", "exemplars", "batch", *([splits] if splits else []), "steps/epoch", "steps")
    rows = []
    for e in entries:
        batch = (f"{e.current}+{e.memory}", *([e.splits] if splits else []))
        rows.append(tuple(map(str, (e.task + 1, e.classes, e.images, e.exemplars, *batch, e.steps, e.all_steps))))
    return Table(header, tuple(rows))


def accuracy_table(record: Record) -> Table:
    """The accuracy matrix of one run, one row per task learnt."""
    n = len(record.task_sizes)
    rows = []
    for t, row in enumerate(record.accuracy):
        cells = [f"{100 * a:.1f}" for a in row] + [""] * (n - len(row))
        rows.append((f"after task {t + 1}", *cells, f"{100 * sum(row) / len(row):.1f}", f"{record.exemplars[t]}"))
    header = ("accuracy %", *(f"task {i + 1}" for i in range(n)), "mean", "memory")
    return Table(header, tuple(rows))


def metrics_table(record: Record) -> Table:
    """All metrics of one run with their formulas, and the error types after the last task.

    Those of a run that has not learnt all tasks are not its results, so their title says after how many they were taken.
    """
    learnt, n_tasks = len(record.accuracy), record.run_config.data.tasks
    rows = []
    for name, value in record.metrics.items():
        rows.append((SHORT[name], f"{100 * value:.2f} %", FORMULAS[name].rpartition(" = ")[2]))
    for kind, n in (record.errors or [{}])[-1].items():
        rows.append((kind, str(n), FORMULAS[kind]))
    title = "value" if learnt == n_tasks else f"value after {learnt} of {n_tasks} tasks"
    return Table(("metric", title, "formula"), tuple(rows), align="lrl")
