"""The section of ``docs/results.md`` on the epoch that is kept: its numbers and its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

import results_numbers as numbers
from results_numbers import listed
from tbbn.bench.metrics import final_accuracy
from tbbn.bench.report.interval import quantile
from tbbn.bench.report.tables import Table
from tbbn.paper.measured import Measured, Paired

PAST = 1_000  # test images of a past task
LAST = 9  # the last task, from 0
Effect = tuple[float, float, float]  # a difference and its interval


@dataclass(frozen=True)
class Case:
    """A run after a task, and whether the epoch kept in it is from before the first drop of the learning rate."""

    norm: str
    seed: int
    task: int
    early: bool
    record: Any = None


def section(found: dict[str, Measured]) -> str:
    best, last = found["best"], found["last"]
    same = [s for s in best.seeds("ft") if s in last.seeds("ft")]
    final = {
        norm: Paired(*([100 * final_accuracy(e.runs["ft", norm, s]) for s in same] for e in (best, last)))
        for norm in ("bn", "tbbn")
    }
    some = cases(numbers.records_in(numbers.TABLE1))
    runs = {(case.norm, case.seed) for case in some}
    points, of_new, before, after = (outcome(some, name) for name in list(OUTCOMES)[:4])
    _guard(points, of_new, before, after)
    at_the_end = fmean(case.early for case in some if case.task == LAST)
    assert -at_the_end * points[0] < min(pair.interval[0] for pair in final.values())  # less than the last epoch gains
    return f"""## Which epoch is kept

The authors keep the epoch with the lowest loss on validation rows of the new task. In fine-tuning, this epoch is from before the first drop of
the learning rate in {100 * fmean(case.early for case in some):.0f} % of tasks 2 to 10. PODNet and AFC always keep the last epoch. If the last epoch is kept instead, A_f of
fine-tuning changes by {final["bn"]} points with batch norm ({_means(final["bn"])}) and by {final["tbbn"]} with TBBN ({_means(final["tbbn"])}), on seeds
{listed(same)}. Most runs with the best epoch are older.

{numbers.kept().render("md")}

**An early epoch goes with a lower accuracy.** The {len(runs)} runs of Table 1 with a history have {len(some)} tasks after the first. This is the difference between tasks in
which an early epoch was kept and tasks in which a late one was kept, right after the task:

{effects_table(some).render("md")}

Compared within task, seed and norm, an early epoch goes with {-points[0]:.1f} points less mean accuracy, and with {-of_new[0]:.1f} points less on the new task, though it was
chosen by the loss on that task. The same runs are no worse one task earlier, nor one task later. So these are not just hard runs, and the
network recovers in the next task. It is still an association: what makes an early epoch the best may itself lower accuracy.

A_f depends on the last task alone, where {100 * at_the_end:.0f} % of the runs kept an early epoch; that would be {-at_the_end * points[0]:.1f} points of A_f on average. So part of the
differences in A_f between single runs may come from one choice of epoch. That is less than the last epoch gains for batch norm and TBBN above, so it
is not the whole reason for that. Runs of every norm with the last epoch kept would show how the norms compare without this rule.
"""


def _guard(points: Effect, of_new: Effect, before: Effect, after: Effect) -> None:
    """What the text says in words."""
    assert points[2] < 0 and of_new[2] < 0, "early epochs are not worse"
    assert before[1] < 0 < before[2] and after[1] < 0 < after[2], "early epochs differ in the task before or after"


def _means(pair: Paired) -> str:
    """From the first to the second."""
    return f"{fmean(pair.bn):.1f} to {fmean(pair.tbbn):.1f}"


def cases(records: list[Any]) -> list[Case]:
    """Every task after the first of these runs."""
    found = []
    for record in records:
        norm, seed, kept = record.run_config.names[1], record.run_config.seed, numbers.first_kept(record)
        found += [Case(norm, seed, t, epoch <= numbers.first_drop(), record) for t, epoch in kept.items() if t]
    return found


def _seen(case: Case, task: int) -> float | None:
    """Mean accuracy over the tasks seen so far, after another task."""
    return 100 * fmean(case.record.accuracy[task]) if task <= LAST else None


OUTCOMES: dict[str, Callable[[Case], float | None]] = {
    "mean accuracy over the tasks seen so far": lambda c: _seen(c, c.task),
    "accuracy on the new task": lambda c: 100 * c.record.accuracy[c.task][-1],
    "mean accuracy one task earlier": lambda c: _seen(c, c.task - 1),
    "mean accuracy one task later": lambda c: _seen(c, c.task + 1),
    "mean accuracy on past tasks": lambda c: 100 * fmean(c.record.accuracy[c.task][:-1]),
    "mean accuracy with the task known": lambda c: 100 * fmean(c.record.task_il[c.task]),
    "past images taken for new ones, %": lambda c: 100 * c.record.errors[c.task]["P->C"] / (PAST * c.task),
}


def outcome(some: Sequence[Case], name: str, by_norm: bool = True) -> Effect:
    """The difference in one outcome, over the cases that have it."""
    with_values = [(case, value) for case in some if (value := OUTCOMES[name](case)) is not None]
    return effect([case for case, _ in with_values], [value for _, value in with_values], by_norm)


def effects_table(some: Sequence[Case]) -> Table:
    rows = [(name, *(_shown(outcome(some, name, by_norm)) for by_norm in (False, True))) for name in OUTCOMES]
    header = ("early - late, in points", "same task and seed", "same task, seed and norm")
    note = "Least squares with a constant for each task of each seed, and for each norm; 95 % intervals by the jackknife over runs."
    return Table(header, tuple(rows), (note,))


def effect(some: Sequence[Case], values: Sequence[float], by_norm: bool) -> Effect:
    """The difference of early from late, and its 95 % interval by the jackknife over runs, whose tasks depend on each other."""
    estimate, runs = _early(some, values, by_norm), sorted({(case.norm, case.seed) for case in some})
    without = []
    for run in runs:
        kept = [at for at, case in enumerate(some) if (case.norm, case.seed) != run]
        without.append(_early([some[at] for at in kept], [values[at] for at in kept], by_norm))
    n = len(runs)
    half = quantile(n - 1) * stdev(without) * (n - 1) / n**0.5
    return estimate, estimate - half, estimate + half


def _early(some: Sequence[Case], values: Sequence[float], by_norm: bool) -> float:
    """The coefficient of an early epoch, beside a constant for each task of each seed and, if asked, for each norm."""
    groups = [[(case.task, case.seed) for case in some]] + [[case.norm for case in some]] * by_norm
    columns = [[case.early for case in some]]
    columns += [[own == value for own in group] for group in groups for value in dict.fromkeys(group)]
    solution = np.linalg.lstsq(np.array(columns, float).T, np.array(values), rcond=None)[0]
    return float(solution[0])


def _shown(found: Effect) -> str:
    return "{:+.1f} [{:.1f}, {:.1f}]".format(*found)
