"""Balanced augmentation: balance the tasks by adding views of the memory rows, not by the norm.

With 3 current rows per memory row, 3 (t - 1) views of each memory row at task t give every past task as many rows, in
expectation, as the current one: 48 + 16 rows become 48 + 48 (t - 1). The first view is augmented like any training row, the
others strongly. The loss is that of fine-tuning; the norm sees the larger batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.methods.ft import FineTune
from tbbn.options import option
from tbbn.registry import register_method


@register_method("balaug", "fine-tuning on batches balanced by strongly augmented views of the memory")
@dataclass(frozen=True)
class BalancedAugmentation(FineTune):
    views_per_task: int = option(
        3, "views of each memory row per past task: the ratio of current to memory rows in a batch", least=1
    )

    def memory_views(self, past_tasks: int) -> int:
        return max(1, self.views_per_task * past_tasks)
