"""Forwards that compiled code leaves to Python. Importing this module imports the compiler; import it in compiled code only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def run_uncompiled(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a layer that checkpointing may repeat, and of the same layer ever after.

    Re-entrant checkpointing, ``checkpoint(compiled, x, use_reentrant=True)``, runs a forward without gradients and repeats it in
    backward, outside its block. Compiled code cannot know that it is repeated; Python code can, and finds the layout again.
    """
    layer._uncompiled = True
    return forward(layer, *args, **kwargs)
