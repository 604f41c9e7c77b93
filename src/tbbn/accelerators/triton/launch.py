"""What all launches of kernels share: the device they go to, and the turn they take.

On cards that can (compute capability 9.0 and above) a small kernel is put in place while the one before it still works, and
waits for it there: kernels that take a few microseconds follow each other without the gap of a launch. ``TBBN_EARLY=0`` in the
environment forbids it.

Importing this module imports Triton; import it only where there is a CUDA tensor to use it on.
"""

# mypy: allow-untyped-defs
# The arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def take_turn(AHEAD: tl.constexpr):
    """First thing in every kernel: wait until all before it is done and to be seen, then let the next be put in place.

    Nothing may be read or written before this. What comes after the next kernel waits for that one, and so for this one.
    """
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()


_SMALL = 2**21  # values; with six times as many, kernels that wait in place were slower (docs/speed.md)


def turn(x: Tensor) -> dict[str, Any]:
    """The arguments of a launch on the device of ``x``, and about its size, for a kernel that takes its turn."""
    return {"AHEAD": True, "launch_pdl": True} if x.numel() <= _SMALL and _can(x.device) else {"AHEAD": False}


@cache
def _can(device: torch.device) -> bool:
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or gdc_wait is None
        or os.environ.get("TBBN_EARLY") == "0"
    ):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels go to the current device; make it that of ``x``."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()
