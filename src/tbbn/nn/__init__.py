"""Normalisation layers: task-balanced batch norm and what it is compared with."""

from tbbn.nn.comparison import penalty
from tbbn.nn.convert import DESCRIPTIONS, NORMS, balance, convert, is_balanced, register, revert
from tbbn.nn.modules import normed
from tbbn.nn.plan import splits

__all__ = [
    "DESCRIPTIONS",
    "NORMS",
    "balance",
    "convert",
    "is_balanced",
    "normed",
    "penalty",
    "register",
    "revert",
    "splits",
]
