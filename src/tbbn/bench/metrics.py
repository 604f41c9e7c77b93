"""Metrics for class-incremental learning: pure functions of the accuracy matrix or of a confusion matrix.

The accuracy matrix is lower triangular: row t has t + 1 entries, and a[t][i] is the accuracy on task i's test images after
learning task t. Code counts tasks from 0; the formulas in `FORMULAS` count them from 1 to T, as the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from tbbn.errors import UserError

Matrix = Sequence[Sequence[float]]

FORMULAS: dict[str, str] = {
    "final_accuracy": "A_f = (1/T) sum_i a[T,i]",
    "average_accuracy": "A_a = (1/T) sum_t (1/t) sum_{i<=t} a[t,i]",
    "forgetting": "F = (1/T) sum_{i<T} (max_{t<T} a[t,i] - a[T,i])",
    "forgetting_text": "F_text = (1/T) sum_{i<T} max_{t>i} (a[i,i] - a[t,i])",
    "forgetting_past": "FM = (1/(T-1)) sum_{i<T} (max_{t<T} a[t,i] - a[T,i])",
    "learning_accuracy": "A_l = (1/T) sum_i a[i,i]",
    "backward_transfer": "BWT = (1/(T-1)) sum_{i<T} (a[T,i] - a[i,i])",
    "weighted_final_accuracy": "A_f^w = sum_i c_i a[T,i] / sum_i c_i, c_i classes in task i",
    "weighted_average_accuracy": "A_a^w = (1/T) sum_t (sum_{i<=t} c_i a[t,i] / sum_{i<=t} c_i), c_i classes in task i",
    "task_il_final_accuracy": "A_f with the task id given: argmax over the classes of the image's own task",
    "task_il_average_accuracy": "A_a with the task id given: argmax over the classes of the image's own task",
    "C->C": "errors: current (newest) task, predicted as another class of the current task",
    "C->P": "errors: current task, predicted as a class of a past task",
    "P->C": "errors: past task, predicted as a class of the current task",
    "P->P": "errors: past task, predicted as another class of a past task",
}

ERROR_TYPES = ("C->C", "C->P", "P->C", "P->P")


def _checked(accuracy: Matrix) -> Matrix:
    if not accuracy:
        raise UserError("accuracy matrix: needs at least one row, got none.")
    for t, row in enumerate(accuracy):
        if len(row) != t + 1:
            raise UserError(f"accuracy matrix: row {t} must have {t + 1} entries (tasks 0 to {t}), got {len(row)}.")
    return accuracy


def _mean(row: Sequence[float], weights: Sequence[float] | None) -> float:
    """Mean of a row, or with weights w_i: sum_i w_i a_i / sum_i w_i over the tasks in the row."""
    if weights is None:
        return fsum(row) / len(row)
    used = weights[: len(row)]
    return fsum(w * a for w, a in zip(used, row, strict=True)) / fsum(used)


def _checked_weights(accuracy: Matrix, weights: Sequence[float] | None) -> Sequence[float] | None:
    if weights is not None and (len(weights) != len(accuracy) or min(weights) <= 0):
        raise UserError(
            f"metrics: weights must be {len(accuracy)} positive numbers (classes per task), got {list(weights)}."
        )
    return weights


def final_accuracy(accuracy: Matrix, weights: Sequence[float] | None = None) -> float:
    """A_f: mean accuracy over all tasks after the last one. `weights` (classes per task) makes it a mean over classes.

    >>> final_accuracy([[0.75], [0.5, 1.0]])
    0.75
    >>> final_accuracy([[0.75], [0.5, 1.0]], weights=[3, 1])
    0.625
    """
    _checked(accuracy)
    return _mean(accuracy[-1], _checked_weights(accuracy, weights))


def average_accuracy(accuracy: Matrix, weights: Sequence[float] | None = None) -> float:
    """A_a: mean over t of the mean accuracy after task t. `weights` (classes per task) makes each a mean over classes.

    >>> average_accuracy([[1.0], [0.25, 0.75]])
    0.75
    >>> average_accuracy([[1.0], [0.25, 0.75]], weights=[3, 1])
    0.6875
    """
    _checked(accuracy)
    weights = _checked_weights(accuracy, weights)
    return fsum(_mean(row, weights) for row in accuracy) / len(accuracy)


def forgetting(accuracy: Matrix, *, from_text: bool = False) -> float:
    """F: mean drop in accuracy on a task since it was learnt, over all T tasks. The last task counts as 0.

    As in the paper's code and tables, it is the drop from the best earlier accuracy to the final one,
    max_{t<T} a[t][i] - a[T][i]. `from_text=True` uses the formula of the paper's text, F_text: the largest drop below the
    accuracy right after learning, max_{t>i} (a[i][i] - a[t][i]). They agree if accuracy only falls. A task that only improves
    counts as negative.

    >>> rows = [[0.5], [0.25, 1.0], [0.375, 0.5, 1.0]]
    >>> forgetting(rows), forgetting(rows, from_text=True)
    (0.20833333333333334, 0.25)
    """
    _checked(accuracy)
    last = len(accuracy) - 1
    drops = []
    for i in range(last):
        if from_text:
            drops.append(accuracy[i][i] - min(accuracy[t][i] for t in range(i + 1, last + 1)))
        else:
            drops.append(max(accuracy[t][i] for t in range(i, last)) - accuracy[last][i])
    return fsum(drops) / len(accuracy)


def forgetting_past(accuracy: Matrix) -> float:
    """FM, the usual forgetting measure (Chaudhry et al., 2018): like F, but averaged over the T - 1 past tasks.

    0 for a single task.

    >>> forgetting_past([[1.0], [0.25, 0.5]])
    0.75
    """
    mean_of_all, n_past = forgetting(accuracy), len(accuracy) - 1
    return mean_of_all * len(accuracy) / n_past if n_past else 0.0


def learning_accuracy(accuracy: Matrix) -> float:
    """A_l: mean accuracy on each task right after learning it.

    >>> learning_accuracy([[1.0], [0.25, 0.5]])
    0.75
    """
    return fsum(row[-1] for row in _checked(accuracy)) / len(accuracy)


def backward_transfer(accuracy: Matrix) -> float:
    """BWT: mean change in accuracy from right after learning a task to the end, over all tasks but the last.

    Negative means forgetting. 0 for a single task.

    >>> backward_transfer([[1.0], [0.25, 0.5]])
    -0.75
    """
    _checked(accuracy)
    n_past = len(accuracy) - 1
    if n_past == 0:
        return 0.0
    return fsum(accuracy[-1][i] - accuracy[i][i] for i in range(n_past)) / n_past


def confusion_error_types(confusion: Sequence[Sequence[int]], first_current: int) -> dict[str, int]:
    """Count errors by whether the true and the predicted class are current (C) or past (P).

    `confusion[label][prediction]` counts test images. Classes from `first_current` on belong to the newest task. The four
    counts add up to all errors. "P->C": a past class predicted as a current one.

    >>> confusion_error_types([[5, 1, 2], [0, 6, 3], [4, 0, 9]], first_current=2)
    {'C->C': 0, 'C->P': 4, 'P->C': 5, 'P->P': 1}
    """
    n = len(confusion)
    if not 0 <= first_current <= n:
        raise UserError(f"error types: first_current must be in 0..{n} (classes seen), got {first_current}.")
    counts = dict.fromkeys(ERROR_TYPES, 0)
    for label, row in enumerate(confusion):
        if len(row) != n:
            raise UserError(f"confusion matrix: must be square, but row {label} has {len(row)} entries, not {n}.")
        true = "C" if label >= first_current else "P"
        right = int(row[label])
        past, current = int(sum(row[:first_current])), int(sum(row[first_current:]))
        counts[f"{true}->P"] += past - (right if true == "P" else 0)
        counts[f"{true}->C"] += current - (right if true == "C" else 0)
    return counts


def summary(
    accuracy: Matrix, *, weights: Sequence[float] | None = None, task_il: Matrix | None = None
) -> dict[str, float]:
    """All metrics, by their names in `FORMULAS`.

    Class-weighted metrics need `weights` (classes per task). Task-IL metrics need `task_il`, the accuracy matrix with the
    task id given.

    >>> summary([[1.0], [0.25, 0.5]])["forgetting"]
    0.375
    """
    metrics = {
        "final_accuracy": final_accuracy(accuracy),
        "average_accuracy": average_accuracy(accuracy),
        "forgetting": forgetting(accuracy),
        "forgetting_text": forgetting(accuracy, from_text=True),
        "forgetting_past": forgetting_past(accuracy),
        "learning_accuracy": learning_accuracy(accuracy),
        "backward_transfer": backward_transfer(accuracy),
    }
    if weights is not None:
        metrics["weighted_final_accuracy"] = final_accuracy(accuracy, weights)
        metrics["weighted_average_accuracy"] = average_accuracy(accuracy, weights)
    if task_il is not None:
        metrics["task_il_final_accuracy"] = final_accuracy(task_il)
        metrics["task_il_average_accuracy"] = average_accuracy(task_il)
    return metrics
