"""Dark experience replay++ (Buzzega et al., 2020): memory rows keep their labels and the logits they had when stored.

L = mean_current CE + alpha mean_memory |z - z_stored|^2 + beta mean_memory CE; the square is also averaged over the logits.

- Stored logits are computed at the end of the task that stored the row, without augmentation. The head grows, so they cover
  only the classes known then; only those are compared.
- Both memory terms use the memory rows of the batch; the original draws memory rows twice.
- A row stored during the current pass of an online stream has no logits yet and is left out of the square.

Dark experience replay without "++" is this method with ``beta = 0``. It has no separate name here, because "DER" also stands for
dynamically expandable representation (Yan et al., 2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, TaskContext
from tbbn.bench.methods.terms import cross_entropy
from tbbn.bench.models import Output
from tbbn.options import option
from tbbn.registry import register_method

ROWS, LOGITS, WIDTHS = "dark_rows", "dark_logits", "dark_widths"  # (M,) ascending, (M, classes), (M,) classes stored


def _places(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The position of each wanted row in the ascending `rows`, and whether `rows` contains it."""
    place = torch.searchsorted(rows, wanted).clamp(max=len(rows) - 1)
    return place, rows[place] == wanted


@register_method("derpp", "dark experience replay++: replayed rows also match the logits stored with them")
@dataclass(frozen=True)
class DarkExperienceReplay(Method):
    alpha: float = option(0.1, "weight of the distance to the stored logits", least=0)
    beta: float = option(0.5, "weight of the cross-entropy on memory rows", least=0)

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        losses = {"ce": cross_entropy(output.logits[batch.current], batch.labels[batch.current])}
        if batch.n_memory:
            logits = output.logits[batch.memory]
            if ROWS in output.state:
                losses["dark"] = self.alpha * self._dark(logits, batch.index[batch.memory], output)
            losses["replay"] = self.beta * cross_entropy(logits, batch.labels[batch.memory])
        return losses

    def _dark(self, logits: Tensor, rows: Tensor, output: Output) -> Tensor:
        place, stored = _places(output.state[ROWS], rows)
        table = output.state[LOGITS][place]
        known = torch.arange(table.shape[1], device=table.device) < output.state[WIDTHS][place, None]
        compared = known & stored[:, None]
        squares = (logits[:, : table.shape[1]] - table).square().masked_fill(~compared, 0.0)
        return squares.sum() / compared.sum().clamp(min=1)

    def after_task(self, context: TaskContext) -> None:
        if not len(context.memory):
            return
        rows = context.memory.index.sort().values
        logits = context.outputs(rows).logits.float()
        rows = rows.to(logits.device)
        widths = torch.full_like(rows, context.n_classes)
        state = context.network.state
        if ROWS in state:
            place, stored = _places(state[ROWS], rows)
            earlier = F.pad(state[LOGITS], (0, context.n_classes - state[LOGITS].shape[1]))[place]
            logits = torch.where(stored[:, None], earlier, logits)
            widths = torch.where(stored, state[WIDTHS][place], widths)
        for name, tensor in ((ROWS, rows), (LOGITS, logits), (WIDTHS, widths)):
            context.network.remember(name, tensor)
