"""Whether this machine has the compiler of the GPU kernels."""

from __future__ import annotations

import importlib.util

# Looked for, not imported: kernels are a matter of CUDA tensors.
TRITON = importlib.util.find_spec("triton") is not None
