"""Whether this machine has the compiler of the GPU kernels, and whether it has compiled any yet."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Looked for, not imported: kernels are a matter of CUDA tensors.
TRITON = importlib.util.find_spec("triton") is not None


def nothing_compiled() -> bool:
    """Whether Triton keeps nothing here yet: kernels are compiled at their first use, half a minute's work or more."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache"
    return TRITON and not (Path(folder).is_dir() and any(Path(folder).iterdir()))
