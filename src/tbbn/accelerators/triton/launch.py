"""Device guard and programmatic dependent launch (PDL), for all kernel launches.

With PDL (compute capability 9.0 and above) the blocks of a small kernel are scheduled while the kernel before it still runs, and
wait there. Kernels of a few microseconds then follow each other without a launch gap. ``TBBN_PDL=0`` in the environment turns
it off.

Importing this module imports Triton; import it only for CUDA tensors.
"""

# mypy: allow-untyped-defs
# Kernel arguments are device pointers and numbers, for which Python has no types.

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbbn.nn.private import current_device

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def dependent_launch(PDL: tl.constexpr):
    """Programmatic dependent launch: wait for earlier writes, then release the next kernel.

    Every kernel calls it before any read or write. The kernel after the next waits for the next one, and therefore for this one
    too.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


_PDL_LIMIT = 2**21  # values; with six times as many, PDL was slower (docs/speed.md)


def launch_options(x: Tensor) -> dict[str, Any]:
    """Keyword arguments that turn PDL on or off for a kernel over a tensor like ``x``."""
    return {"PDL": True, "launch_pdl": True} if x.numel() <= _PDL_LIMIT and supports_pdl(x.device) else {"PDL": False}


@cache
def supports_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or gdc_wait is None or os.environ.get("TBBN_PDL") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


_HERE = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of ``x`` current: kernels are launched on the current device."""
    if x.is_cuda and x.device.index != current_device():
        return torch.cuda.device(x.device)
    return _HERE
