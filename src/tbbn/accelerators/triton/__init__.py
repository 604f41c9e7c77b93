"""Kernels for CUDA tensors. This file imports neither Triton nor torch: it says whether Triton is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Triton itself is imported for CUDA tensors only.
TRITON = importlib.util.find_spec("triton") is not None


def nothing_compiled() -> bool:
    """Whether Triton's cache is empty: kernels are compiled at their first use, which takes half a minute or more."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache"
    return TRITON and not (Path(folder).is_dir() and any(Path(folder).iterdir()))
