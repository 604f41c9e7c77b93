"""The native backend: task-balanced batch norm on a CPU, with one C call for forward and one for backward.

In tensor operations the norm takes about fifty calls, batch norm two; at small sizes the number of calls determines the time. The
C library is built with the package (``building.py``). Without it the eager backend is used, and :func:`status` says why.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import torch
from torch import Tensor, nn

from tbbn.accelerators.eager import reference_gradients
from tbbn.accelerators.native import loading
from tbbn.nn.plan import Plan
from tbbn.nn.private import is_wrapped, under_transform

_PLAIN = (Tensor, nn.Parameter)  # subclasses may have no memory of their own
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_MEMORY = "task_balanced_batch_norm: no memory for the sums of its rows."

_pack = struct.Struct("11P4q2d").pack  # struct Arguments of kernel.c: passing one object is cheaper than seventeen
_ELEMENTS_A_THREAD = 32768  # below this, waking another thread costs more than it saves

_lock = threading.Lock()
_kernels: Any = None  # the library, once it is loaded
_status: str | None = None
_remedy = ""


def status() -> str:
    """How the C kernel was built and runs, or why the PyTorch form is used; in a few words."""
    library()
    assert _status is not None
    return _status


def diagnosis() -> str:
    """:func:`status` for ``tbbn doctor``: also says what a missing kernel costs and how to get it."""
    return "; ".join([status(), *([] if library() else [loading.COST]), *([_remedy] if _remedy else [])])


def library() -> ctypes.CDLL | None:
    """The C kernel, or None. Loading is tried once in a process, at the first call."""
    global _kernels, _status, _remedy
    if _status is None:
        with _lock:
            if _status is None:
                try:
                    _kernels, _status = loading.load()
                except loading.CannotLoad as error:
                    _kernels, _remedy, _status = None, error.remedy, str(error)
    return _kernels


# -- The protocol -------------------------------------------------------------------------------------------------------


def supports(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
) -> bool:  # fmt: skip
    """Whether the inputs are dense CPU tensors with their own storage, of any type but float64."""
    if plan is None or not (x.dtype in _DTYPES and x.is_cpu and type(x) in _PLAIN and x.dim() > 1 and x.numel() > 0):
        return False
    channels = x.size(1)
    for t in (weight, bias, running_mean, running_var):
        if t is not None and not (t.dtype in _DTYPES and t.is_cpu and type(t) in _PLAIN and t.numel() == channels):
            return False
    for t in (running_mean, running_var):
        if t is not None and not (t.dtype == torch.float32 and t.is_contiguous()):  # written in place
            return False
    # A tensor may still be wrapped after its functorch transform has ended.
    if plan.blend is not None or is_wrapped(x) or library() is None:
        return False
    return x.is_contiguous() or _channels_last(x)


def norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, plan: Plan | None,
    momentum: float | Tensor, eps: float, batches: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if batches is not None:
        batches.add_(1)
    weight, bias = _parameter(weight), _parameter(bias)
    if running_mean is None or running_var is None:
        return _apply(x, weight, bias, (plan, eps, None, None, 0.0))
    y = _apply(x, weight, bias, (plan, eps, running_mean, running_var, float(momentum)))
    if not running_mean.is_inference():  # inference tensors have no version
        torch.autograd.graph.increment_version((running_mean, running_var))
    return y


def _channels_last(x: Tensor) -> bool:
    """Whether channels are contiguous, in pixels without gaps."""
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


# -- The plan as the kernels read it ------------------------------------------------------------------------------------


class _Sparse(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("index", ctypes.c_void_p), ("value", ctypes.c_void_p))


class _CPlan(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        *((name, _Sparse) for name in ("gather", "gather_shared", "scatter_back", "scatter_back_shared")),
        *((name, _Sparse) for name in ("scatter", "gather_back")),
        ("like", ctypes.c_void_p),
        ("running", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("shared_total", ctypes.c_double),
        ("total_variance", ctypes.c_int64),
    )


class _SparsePlan:
    """A plan's matrices in compressed rows and double precision, and the memory that holds them."""

    def __init__(self, plan: Plan) -> None:
        self._kept: list[Tensor] = []
        # Rows of the plan sum to one, but only approximately in float32, which would show for a mean of 1e4.
        plan = plan.to(torch.device("cpu"), torch.float64)
        gather, scatter = (m / m.sum(1, keepdim=True) for m in (plan.gather, plan.scatter))
        groups = torch.cat([gather.t(), scatter], 1).tolist()
        first: dict[tuple[float, ...], int] = {}
        like = [first.setdefault(tuple(row), b) for b, row in enumerate(groups)]
        shared, rest = _in_common(gather)
        back_shared, back_rest = _in_common(scatter.t())
        self._struct = _CPlan(
            plan.rows,
            gather.shape[0],
            *(self._sparse(m) for m in (rest, shared, back_rest, back_shared, scatter, gather.t())),
            self._at(torch.tensor(like, dtype=torch.int32)),
            self._at(plan.running / plan.running.sum()),
            self._at(plan.sizes),
            shared.sum().item() or 1.0,
            plan.total_variance,
        )
        self.address = ctypes.addressof(self._struct)
        self._saved: dict[int, Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_sparse_plan, ()

    def statistics(self, channels: int) -> Tensor:
        """Memory for what a forward saves. ``empty_like`` of a template is the fastest way to make a tensor."""
        pattern = self._saved.get(channels)
        if pattern is None:
            size = 1 + 2 * self._struct.groups, channels
            pattern = self._saved[channels] = torch.empty(size, dtype=torch.float32, device="cpu")
        return torch.empty_like(pattern)

    def _sparse(self, m: Tensor) -> _Sparse:
        there = m != 0
        start = nn.functional.pad(there.sum(1).cumsum(0), (1, 0))
        return _Sparse(self._at(start.int()), self._at(there.nonzero()[:, 1].int()), self._at(m[there]))

    def _at(self, t: Tensor) -> int:
        self._kept.append(t.contiguous())
        return self._kept[-1].data_ptr()


def _in_common(m: Tensor) -> tuple[Tensor, Tensor]:
    """The part common to all rows of ``m`` (1, B), and the rest of each row, so that memory rows are summed only once."""
    shared = m.amin(0, keepdim=True)
    rest = m - shared
    return shared, rest.where(rest > 1e-12, 0.0)


def _sparse_plan(plan: Plan) -> _SparsePlan:
    found = plan.__dict__.get("_native")
    if found is None:
        found = plan.__dict__["_native"] = _SparsePlan(plan)
    return found


def _no_sparse_plan() -> None:
    """None, for copies of a plan: addresses cannot be copied, so a copy makes its own."""


# -- Autograd -----------------------------------------------------------------------------------------------------------


class _NativeNorm(torch.autograd.Function):
    """Saves the input and 1 + 2r values per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, others: tuple[Any, ...]) -> Tensor:
        plan, eps, running_mean, running_var, momentum = others
        rows = x if x.dtype == torch.float32 else x.float()
        last = not rows.is_contiguous()
        sparse, channels, elements = _sparse_plan(plan), x.size(1), x.numel()
        threads = min(torch.get_num_threads(), 1 + elements // _ELEMENTS_A_THREAD)
        shape = channels, elements // (channels * plan.rows), last, threads
        y, saved = torch.empty_like(rows), sparse.statistics(channels)
        arguments = _pack(
            sparse.address, rows.data_ptr(), 0, y.data_ptr(), _address(weight), _address(bias), saved.data_ptr(),
            _address(running_mean), _address(running_var), 0, 0, *shape, momentum, eps,
        )  # fmt: skip
        if _kernels.tbbn_forward(arguments):
            raise MemoryError(_NO_MEMORY)
        ctx.save_for_backward(x, weight, bias, saved)
        ctx.plan, ctx.eps, ctx.shape = plan, eps, shape
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or type(grad) is not Tensor or under_transform() or is_wrapped(grad):
            x, weight, bias, _ = ctx.saved_tensors
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                return *reference_gradients(grad, x, weight, bias, ctx.plan, ctx.eps, ctx.needs_input_grad[:3]), None
        x, weight, bias, saved = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        # Hooks on saved tensors may have changed their strides.
        weight, saved = _parameter(weight), saved.contiguous()
        (rows, last), (channels, pixels, _, threads) = _dense(x), ctx.shape
        g = grad if grad.dtype == rows.dtype and grad.stride() == rows.stride() else torch.empty_like(rows).copy_(grad)
        dx = torch.empty_like(rows) if need_x else None
        grad_weight = torch.empty_like(weight) if weight is not None and need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        arguments = _pack(
            _sparse_plan(ctx.plan).address, rows.data_ptr(), g.data_ptr(), _address(dx), _address(weight), 0,
            saved.data_ptr(), 0, 0, _address(grad_weight), _address(grad_bias),
            channels, pixels, last, threads, 0.0, 0.0,
        )  # fmt: skip
        if _kernels.tbbn_backward(arguments):
            raise MemoryError(_NO_MEMORY)
        if dx is not None and dx.dtype != x.dtype:
            dx = dx.to(x.dtype)
        return dx, grad_weight, grad_bias, None


# Function.apply without its checks for functorch, whose tensors never come here: saves a tenth of a small layer's time.
_apply = super(torch.autograd.Function, _NativeNorm).apply


def _parameter(t: Tensor | None) -> Tensor | None:
    """A weight or bias in contiguous float32. The cast is part of the autograd graph."""
    if t is None or (t.dtype == torch.float32 and t.is_contiguous()):
        return t
    return t.float().contiguous()


def _dense(x: Tensor) -> tuple[Tensor, bool]:
    """``x`` in float32, and whether its channels are contiguous; otherwise its pixels are."""
    rows = x if x.dtype == torch.float32 else x.float()
    if rows.is_contiguous():
        return rows, False
    return (rows, True) if _channels_last(rows) else (rows.contiguous(), False)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
