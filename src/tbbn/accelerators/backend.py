"""The protocol of a backend, and the order in which backends are tried: triton, native, eager.

A backend is a module with the functions ``supports`` and ``norm``, and ``norm_act`` if it can fuse the norm with what follows.
All take the arguments of :func:`tbbn.nn.functional.task_balanced_batch_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from tbbn.accelerators import eager
from tbbn.accelerators.native import binding as native
from tbbn.accelerators.triton import TRITON
from tbbn.nn.plan import Plan
from tbbn.nn.private import exporting, functorch_active, under_transform
from tbbn.nn.sync import RankPlan


class Backend(Protocol):
    def supports(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
    ) -> bool:  # fmt: skip
        """Whether the backend can take these inputs. ``plan=None`` is plain batch norm."""

    def norm(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
        momentum: float | Tensor, eps: float, batches: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The norm in training mode. Running statistics and the count ``batches`` are updated in place, if given."""


class FusedBackend(Backend, Protocol):
    def norm_act(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
        momentum: float | Tensor, eps: float, batches: Tensor | None = None, *,
        relu: bool, residual: Tensor | None, moments: Tensor | None = None, training: bool = True,
    ) -> Tensor:  # fmt: skip
        """``relu(norm(x) + residual)``; ReLU and residual are optional.

        ``moments`` (2, N, parts, C), if given, are the means and variances of equal parts of each row; they may save a pass.
        ``training=False``, only with ``plan=None``, is batch norm in eval mode, without gradients.
        """


def find(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
) -> Backend | None:  # fmt: skip
    """The first backend that supports these inputs; None if only the reference does."""
    if under_transform() or isinstance(plan, RankPlan):  # no backend computes statistics over ranks
        return None
    for backend in backends(x.is_cuda) if _only is None else _only:
        if backend.supports(x, running_mean, running_var, weight, bias, plan):
            return backend
    return None


def find_fused(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
) -> FusedBackend | None:  # fmt: skip
    """The backend that :func:`find` returns, if it can fuse the norm with what follows; otherwise None."""
    backend: Any = find(x, running_mean, running_var, weight, bias, plan)
    return backend if hasattr(backend, "norm_act") else None


def find_for_compiler(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
) -> Backend | None:  # fmt: skip
    """The backend for these inputs in code that ``torch.compile`` compiles for a GPU; None: use the reference."""
    if not TRITON or exporting() or functorch_active() or isinstance(plan, RankPlan):
        return None
    from tbbn.accelerators.triton import compiled

    return compiled if compiled.supports(x, running_mean, running_var, weight, bias, plan) else None


@cache
def backends(cuda: bool) -> tuple[Backend, ...]:
    """The backends for CUDA tensors or for all others, fastest first. Triton is imported for CUDA tensors only."""
    if cuda and TRITON:
        from tbbn.accelerators.triton import norm as triton

        return triton, native, eager
    return native, eager


_only: tuple[Backend, ...] | None = None


@contextmanager
def only(*chosen: Backend) -> Iterator[None]:
    """Use only these backends, for tests and benchmarks. Without any, the reference is used."""
    global _only
    before, _only = _only, chosen
    try:
        yield
    finally:
        _only = before
