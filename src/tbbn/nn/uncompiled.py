"""Forwards that must run uncompiled. Importing this module imports the compiler, so import it in compiled code only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def run_uncompiled(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` in Python, and have ``layer`` do so from now on.

    Re-entrant checkpointing, ``checkpoint(compiled, x, use_reentrant=True)``, runs a forward without gradients and repeats it in
    backward, outside its block. Compiled code cannot tell that it is a repetition; Python code can, and finds the layout again.
    """
    layer._uncompiled = True
    return forward(layer, *args, **kwargs)
