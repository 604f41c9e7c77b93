"""The metrics of a table: their short names, which ones are shown, and whether lower is better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tbbn.bench.engine.record import Record
from tbbn.bench.metrics import FORMULAS
from tbbn.errors import UserError, unknown_name

SHORT = {
    "final_accuracy": "A_f",
    "average_accuracy": "A_a",
    "forgetting": "F",  # as in the paper's code and tables
    "forgetting_text": "F_text",  # the formula of the paper's text
    "learning_accuracy": "A_l",
    "forgetting_past": "FM",
    "backward_transfer": "BWT",
    "weighted_final_accuracy": "A_f^w",
    "weighted_average_accuracy": "A_a^w",
    "task_il_final_accuracy": "A_f task-IL",
    "task_il_average_accuracy": "A_a task-IL",
}
HEADLINE = ("final_accuracy", "average_accuracy", "forgetting", "forgetting_text", "learning_accuracy")
WEIGHTED = ("weighted_final_accuracy", "weighted_average_accuracy")
SYMBOLS = "a[t,i]: accuracy on task i after learning task t, among all classes seen so far."  # in the formulas
# A metric at the beginning of a column's title: its letter, subscript and superscript.
METRIC = re.compile(r"(A|F)(?:_([a-z]+))?(?:\^([a-z]))?(?=$| )")
LOWER_IS_BETTER = ("forgetting", "forgetting_text", "forgetting_past")


def default_metrics(records: Iterable[Record]) -> tuple[str, ...]:
    """The headline metrics, plus the class-weighted accuracies if tasks differ in their number of classes."""
    uneven = any(len(set(record.task_sizes)) > 1 for record in records)
    return HEADLINE + (WEIGHTED if uneven else ())


def parse_metrics(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of short or long names of metrics, keeping its order.

    >>> parse_metrics("A_f,FM,learning_accuracy")
    ('final_accuracy', 'forgetting_past', 'learning_accuracy')
    """
    long = {short: name for name, short in SHORT.items()}
    chosen = []
    for word in (word.strip() for word in text.split(",")):
        name = long.get(word, word)
        if name not in SHORT:
            raise unknown_name("metric", word, [*long, *SHORT])
        chosen.append(name)
    if len(set(chosen)) < len(chosen):
        raise UserError(f"--metrics: each metric once, got {text!r:.60}.")
    return tuple(chosen)


def formulas(metrics: Sequence[str]) -> list[str]:
    """One line per metric: its short name and its formula."""
    return [f"{SHORT[m]}: {FORMULAS[m]}" if " = " not in FORMULAS[m] else FORMULAS[m] for m in metrics]
