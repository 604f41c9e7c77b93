"""Whether plain tensors with memory of their own are being computed on, as the kernels require."""

from __future__ import annotations

import torch


def under_transform() -> bool:
    """True under functorch transforms (grad, vmap), dispatch modes (fake tensors, FLOP counting) or tracing."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )
