"""Normalisation layers: task-balanced batch norm and what it is compared with."""

from tbbn.norm.convert import DESCRIPTIONS, NORMS, balance, convert, is_balanced, register, revert
from tbbn.norm.layers import normed
from tbbn.norm.plan import splits
from tbbn.norm.variants import penalty

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
