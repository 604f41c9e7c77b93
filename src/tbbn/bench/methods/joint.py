"""Joint training: each task trains on all data so far. It is the upper bound, and needs no memory."""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.methods.ft import FineTune
from tbbn.registry import register_method


@register_method("joint", "all data of all tasks so far: the upper bound")
@dataclass(frozen=True)
class Joint(FineTune):
    uses_memory = False
    all_data = True
