"""Joint training: each task trains on all data so far. The upper bound; it keeps no memory because it forgets no data."""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.methods.ft import FineTune


@dataclass(frozen=True)
class Joint(FineTune):
    name = "joint"
    description = "all data of all tasks so far: the upper bound"
    uses_memory = False
    all_data = True
