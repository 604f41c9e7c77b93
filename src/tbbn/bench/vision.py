"""Import torchvision on demand, even if its compiled ops do not match the installed torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from tbbn.errors import UserError

# Importing torchvision registers shape functions for these ops and fails if they are missing, although models,
# transforms and data sets never call them.
_OPS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def torchvision() -> ModuleType:
    """The torchvision module; `models`, `transforms.v2` and `datasets` can be imported afterwards.

    A torchvision built for CUDA cannot load its library next to a CPU-only torch, and its import fails with
    `operator torchvision::nms does not exist`. Once the missing ops are declared, everything written in Python works; calling
    such an op still raises torchvision's own error.
    """
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        raise UserError("torchvision is required but not installed; pip install torchvision")
    _declare_missing_ops([Path(place) for place in spec.submodule_search_locations or ()])
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, AttributeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"torchvision cannot be imported with torch {torch.__version__} ({reason[0]}); "
            "install the torchvision built for this torch"
        ) from error


def _declare_missing_ops(places: list[Path]) -> None:
    """Declare the ops of `_OPS` that torchvision's library does not define."""
    for place in places:
        for library in sorted([*place.glob("_C*.so"), *place.glob("_C*.pyd")]):
            try:
                # torchvision will load it again itself, which is then a no-op.
                torch.ops.load_library(str(library))
            except (ImportError, OSError):
                continue
    for name, schema in _OPS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
