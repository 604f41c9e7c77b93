"""Normalisation layers: task-balanced batch norm and the norms it is compared with."""

from tbbn.nn.adab2n import penalty
from tbbn.nn.balancing import balance, is_balanced, wants_task_ids
from tbbn.nn.convert import convert, revert
from tbbn.nn.foreign import register_converter
from tbbn.nn.plan import splits
from tbbn.nn.sampler import ReplayBatchSampler

__all__ = [
    "ReplayBatchSampler",
    "balance",
    "convert",
    "is_balanced",
    "penalty",
    "register_converter",
    "revert",
    "splits",
    "wants_task_ids",
]
