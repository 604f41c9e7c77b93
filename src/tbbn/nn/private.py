"""Names of torch that are not public, each with a fallback for a torch without it.

A fallback errs on the safe side: the layer becomes slower but stays correct. No other module of this package uses a private
name of torch. ``tests/nn/test_private.py`` checks both rules.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
    from torch.nn.modules.batchnorm import _LazyNormBase as AnyLazyNorm
else:
    AnyBatchNorm, AnyLazyNorm = nn.BatchNorm2d.__base__, nn.LazyBatchNorm2d.__bases__[0]

_hook_tables = [
    table
    for name, table in vars(nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("_hooks") and isinstance(table, dict)
]


class _NoWrappedHook:
    """No hook of a module is wrapped."""


FALLBACKS: dict[str, tuple[str, Any]] = {  # a name in this module: its name in torch, and the fallback
    "functorch_active": ("_C._are_functorch_transforms_active", lambda: True),
    "dispatch_modes": ("_C._len_torch_dispatch_stack", lambda: 1),
    "tracing_state": ("_C._get_tracing_state", lambda: True if torch.jit.is_tracing() else None),
    "is_wrapped": ("_C._functorch.is_functorch_wrapped_tensor", lambda x: True),
    # Without it, activation checkpointing repeats a forward correctly only inside its tbbn.balance block.
    "graph_task": ("_C._current_graph_task_id", lambda: -1),
    "saved_tensors_hooks": ("_C._autograd._top_saved_tensors_default_hooks", lambda ignore_tracing: True),
    "global_hooks": ("nn.modules.module._has_any_global_hook", lambda: not _hook_tables or any(_hook_tables)),
    "raw_stream": ("_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream),
    "current_device": ("_C._cuda_getDevice", torch.cuda.current_device),
    "binary": ("_C.__file__", None),
    "WrappedHook": ("nn.modules.module._WrappedHook", _NoWrappedHook),
}


def _find(name: str) -> Any:
    path, fallback = FALLBACKS[name]
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return fallback


functorch_active: Callable[[], bool] = _find("functorch_active")  # inside grad, vmap or another transform of torch.func
dispatch_modes: Callable[[], int] = _find("dispatch_modes")  # how many are active: fake tensors, FLOP counting
tracing_state: Callable[[], Any] = _find("tracing_state")  # None outside torch.jit.trace
is_wrapped: Callable[[Any], bool] = _find("is_wrapped")  # a tensor of torch.func, without memory of its own
graph_task: Callable[[], int] = _find("graph_task")  # -1 outside a backward pass
saved_tensors_hooks: Callable[[bool], Any] = _find("saved_tensors_hooks")  # None without active hooks
global_hooks: Callable[[], bool] = _find("global_hooks")  # whether any hook is set for all modules
raw_stream: Callable[[int], int] = _find("raw_stream")  # the handle of a device's current stream
current_device: Callable[[], int] = _find("current_device")
binary: str | None = _find("binary")  # torch's library of Python bindings; None: search the symbols of the process
WrappedHook: Any = _find("WrappedHook")  # a hook that holds its module weakly


def exporting() -> bool:
    """Whether torch.export is tracing. In torch 2.11 the public ``is_exporting`` is also true under ``torch.compile``."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


def under_transform() -> bool:
    """Whether functorch transforms (grad, vmap), dispatch modes (fake tensors, FLOP counting) or tracing are active.

    Tensors may then lack storage of their own, which kernels require.
    """
    return bool(functorch_active() or dispatch_modes() or tracing_state() is not None)
