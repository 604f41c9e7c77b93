"""Avalanche: a plugin that tells the layers which rows of each training batch are current and which are memory.

>>> model = tbbn.convert(model)                                                            # doctest: +SKIP
>>> strategy = Replay(model=model, optimizer=optimizer, plugins=[BalancePlugin()], ...)    # doctest: +SKIP

It uses the labels of the batch, not its order: strategies put memory rows first, last or in between, and a buffer may also hold
rows of the current experience. It works with every strategy that forwards its batch as ``strategy.mb_x`` (Naive, Replay, DER,
iCaRL, LwF, EWC) and with ER-ACE, which forwards the replayed rows separately: the plugin forwards both as one batch, because
rows that are never in the same batch cannot be balanced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor

import tbbn
from tbbn.errors import UserError


class BalancePlugin(SupervisedPlugin):
    """Runs the training forward of a strategy inside :func:`tbbn.balance`.

    A row is current if its class (and its task label) belongs to the current experience. ``past_tasks`` is the number of
    experiences trained before; all parts of an online stream from the same experience count as one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._classes: dict[int, set[int]] = {}  # classes of every experience so far, by its number in the stream
        self._tasks: dict[int, set[int]] = {}  # task labels of every experience so far
        self._replayed: Tensor | None = None  # the output for the rows that the strategy will forward separately

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        experience = _origin(strategy.experience)
        number = experience.current_experience
        classes = {int(c) for c in experience.classes_in_this_experience}
        tasks = {int(t) for t in getattr(experience, "task_labels", ())}
        for other in self._classes.keys() - {number}:
            common = classes & self._classes[other]
            if common and tasks == self._tasks[other]:
                raise UserError(
                    f"BalancePlugin: class {min(common)} is in experiences {other} and {number}, so labels do not tell "
                    "current rows from memory rows; call tbbn.balance(..., is_memory=...) in a strategy of your own."
                )
        self._classes[number], self._tasks[number] = classes, tasks

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        # Enter `balance` in the forward itself, not in before_forward: between before_forward and after_forward some strategies
        # add the memory rows, and other plugins forward their own rows.
        self._restore(strategy)
        inner = strategy.model.forward

        def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
            return self._forward(strategy, inner, x, *args, **kwargs)

        strategy.model.forward = forward

    def after_forward(self, strategy: Any, **kwargs: Any) -> None:
        self._restore(strategy)

    def _restore(self, strategy: Any) -> None:
        vars(strategy.model).pop("forward", None)
        self._replayed = None

    def _forward(self, strategy: Any, inner: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
        if strategy.model.training and x is strategy.mb_x:
            if (
                getattr(strategy, "mb_buffer_x", None) is not None
                and getattr(strategy, "replay_loader", None) is not None
            ):
                return self._forward_both(strategy, inner, x, *args)
            with self._balance(strategy, strategy.mb_y, strategy.mb_task_id):
                return inner(x, *args, **kwargs)
        if self._replayed is not None and x is strategy.mb_buffer_x:
            output, self._replayed = self._replayed, None
            return output
        return inner(x, *args, **kwargs)  # another plugin's rows, whose tasks are unknown: batch norm

    def _forward_both(self, strategy: Any, inner: Callable[..., Any], x: Tensor, *tasks: Tensor) -> Tensor:
        """Run the batch and the replayed rows in one forward, and keep the latter's output for the strategy's own call."""
        task_ids = torch.cat([strategy.mb_task_id, strategy.mb_buffer_tid])
        with self._balance(strategy, torch.cat([strategy.mb_y, strategy.mb_buffer_y]), task_ids):
            output = inner(torch.cat([x, strategy.mb_buffer_x]), *(task_ids for _ in tasks))
        if not isinstance(output, Tensor):
            raise UserError(f"BalancePlugin: expected the model to return a tensor, got {type(output).__name__}.")
        self._replayed = output[len(x) :]
        return output[: len(x)]

    def _balance(self, strategy: Any, labels: Tensor, task_ids: Tensor) -> tbbn.balance:
        number = _origin(strategy.experience).current_experience
        is_memory = ~_is_in(labels, self._classes[number])
        if self._tasks[number]:
            is_memory |= ~_is_in(task_ids, self._tasks[number])
        return tbbn.balance(strategy.model, is_memory=is_memory, past_tasks=len(self._classes) - 1)


def _origin(experience: Any) -> Any:
    """The experience that this part of an online stream comes from."""
    return getattr(experience, "origin_experience", experience)


def _is_in(values: Tensor, known: set[int]) -> Tensor:
    return torch.isin(values, torch.tensor(sorted(known), device=values.device))
