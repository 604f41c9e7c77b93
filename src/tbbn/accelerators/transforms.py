"""Whether plain tensors with memory of their own are being computed on, as the kernels require."""

from __future__ import annotations

from tbbn.nn.private import dispatch_modes, functorch_active, tracing_state


def under_transform() -> bool:
    """True under functorch transforms (grad, vmap), dispatch modes (fake tensors, FLOP counting) or tracing."""
    return bool(functorch_active() or dispatch_modes() or tracing_state() is not None)
