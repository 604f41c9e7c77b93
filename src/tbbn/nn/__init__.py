"""Normalisation layers: task-balanced batch norm and what it is compared with."""

from tbbn.nn.comparison import penalty
from tbbn.nn.convert import balance, convert, is_balanced, revert
from tbbn.nn.modules import normed
from tbbn.nn.plan import splits

__all__ = [
    "balance",
    "convert",
    "is_balanced",
    "normed",
    "penalty",
    "revert",
    "splits",
]
