"""The norms of the comparison in three launches forward and three backward, with the passes of task-balanced batch norm.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tbbn.accelerators.triton import norm_backward, norm_forward, normaliser_kernels
from tbbn.accelerators.triton.launch import device_of, launch_options
from tbbn.accelerators.triton.norm_launch import part_sums, strided_like, work_for
from tbbn.accelerators.triton.norm_tiles import MOST_PARTS, geometry_of
from tbbn.nn.adab2n import ByTask
from tbbn.nn.comparison import Groups, Mixture, Renorm

_MOST = 8192  # moments of a batch that one program holds

Form = Groups | Mixture | Renorm | ByTask


def supports(x: Tensor, norm: Any, form: Form) -> bool:
    """Whether the kernels support this norm in its current mode; in eval mode, only without a gradient.

    In training one program holds all moments of the batch. It sums by halving, so channels must be a power of two.
    """
    rows, channels = x.shape[:2]
    if channels & (channels - 1) or rows * channels == 0:
        return False
    if norm.training:
        return (1 << (rows - 1).bit_length()) * channels <= _MOST
    uses_running = not isinstance(form, Groups) or form.then_batch
    if isinstance(form, Renorm) or (uses_running and norm.running_mean is None):
        return False
    return channels <= _MOST and not torch.is_grad_enabled()


class _Statistics(NamedTuple):
    """The running statistics, updated in the forward pass."""

    mean: Tensor
    var: Tensor
    momentum: float
    batches: Tensor


def normalise(norm: Any, form: Form, x: Tensor, relu: bool, residual: Tensor | None, moments: Tensor | None) -> Tensor:
    """``relu(norm(x) + residual)``; in eval mode without a gradient."""
    if moments is not None and moments.shape[2] > MOST_PARTS:
        moments = None
    running = None
    tracks = not isinstance(form, Groups) or form.then_batch
    # As in torch, eval mode uses the running statistics if they exist.
    if tracks and norm.running_mean is not None and (norm.track_running_stats or not norm.training):
        running = _Statistics(norm.running_mean, norm.running_var, norm.momentum, norm.num_batches_tracked)
    logits = (None, None)
    if isinstance(form, Mixture):
        logits = norm.mean_weight, norm.var_weight
    elif isinstance(form, ByTask):
        logits = norm.task_logits, None
    residual = None if residual is None else residual.to(x.dtype)
    given = (x, norm.weight, norm.bias, residual, *logits, form, norm.eps, running, relu, moments, not norm.training)
    y, penalty = _Normalised.apply(*given)
    if isinstance(form, ByTask):
        norm.penalty = penalty if form.strength else None
    return y


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        mean_logits: Tensor | None, var_logits: Tensor | None, form: Form, eps: float, running: _Statistics | None,
        relu: bool, moments: Tensor | None, fixed: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        x, geometry = geometry_of(x, 1, limit=0)
        strides, tiles, rows, channels, pixels, _ = geometry
        y, stats = torch.empty_like(x), x.new_empty((2, rows, channels), dtype=torch.float32)
        by_task = isinstance(form, ByTask)
        kept = x.new_empty((2, channels), dtype=torch.float32) if by_task or isinstance(form, Renorm) else None
        penalty = x.new_empty((), dtype=torch.float32) if by_task else None
        parts = tiles.parts if moments is None else moments.shape[2]
        work = work_for(2, geometry, parts if moments is None else 1, y, stats)
        mean, var = stats.unbind()
        residual = None if residual is None else strided_like(residual, x)
        moving = _Statistics(mean, var, 0.0, mean) if running is None else running
        held = min(tiles.batch, 64, max(1, _MOST // channels)) if fixed else tiles.batch  # rows of a program
        options, s, t = launch_options(x), tiles.sums, tiles.apply
        with device_of(x):
            if moments is None:
                part_mean, part_var = part_sums(2, work, parts, y)
                norm_forward.moments[s.over(rows, channels, parts)](
                    x, part_mean, part_var, rows, channels, pixels, pixels // parts, *strides, *s,
                    num_warps=s.warps, **options,
                )  # fmt: skip
            else:
                part_mean, part_var = moments.unbind()
            normaliser_kernels.forward[(-(-rows // held),)](
                x, part_mean, part_var, work[0], work[1], *_given(mean, weight, bias), mean, var,
                *_given(mean, kept, mean_logits, var_logits), *moving, eps, *_limits(form), _instance(form, pixels),
                *_tasks(form, penalty, mean), rows, pixels, strides[2],
                held, channels, _groups(form, channels), parts, moments is not None,
                weight is not None, bias is not None, *_flags(form), _power(form), running is not None, fixed,
                num_warps=_warps(held * channels), **options,
            )  # fmt: skip
            norm_forward.affine[t.grid(rows, channels, pixels)](
                x, y, x if residual is None else residual, work[0], work[1], rows, channels, pixels, *strides, *t,
                relu, residual is not None, num_warps=t.warps, **options,
            )  # fmt: skip
        if running is not None and not fixed:
            moved = (running.mean, running.var, running.batches)
            torch.autograd.graph.increment_version((*moved, form.rate) if isinstance(form, ByTask) else moved)
        sign = y if residual is not None else work[:2]
        ctx.save_for_backward(x, weight, bias, mean_logits, var_logits, stats, kept, sign if relu else None)
        ctx.form, ctx.eps, ctx.adds = form, eps, residual is not None
        ctx.set_materialize_grads(False)
        return y, penalty

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, dpenalty: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean_logits, var_logits, stats, kept, sign = ctx.saved_tensors
        form: Form = ctx.form
        x, geometry = geometry_of(x, 1, limit=0)
        strides, tiles, rows, channels, pixels, _ = geometry
        grad = torch.zeros_like(x) if grad is None else strided_like(grad, x)
        dx, (mean, var) = torch.empty_like(x), stats.unbind()
        own = [None if p is None else torch.empty_like(p) for p in (weight, bias, mean_logits, var_logits)]
        shares = ctx.adds and sign is not None  # without ReLU the residual's gradient is the output's
        dresidual = torch.empty_like(x) if shares else grad
        work = work_for(3, geometry, tiles.parts, dx, stats)
        part_g, part_gx = part_sums(3, work, tiles.parts, dx)
        relu = sign is not None
        table = relu and not ctx.adds  # see norm_backward
        output = sign if relu else x
        options, s, t = launch_options(x), tiles.sums, tiles.apply
        with device_of(x):
            norm_backward.row_sums[s.over(rows, channels, tiles.parts)](
                grad, x, output, mean, part_g, part_gx, rows, channels, pixels, pixels // tiles.parts, *strides, *s,
                relu, table, num_warps=s.warps, **options,
            )  # fmt: skip
            normaliser_kernels.backward[(1,)](
                part_g, part_gx, *work[:3].unbind(), *_given(mean, weight), mean, var,
                *_given(mean, kept, mean_logits, var_logits, *own), ctx.eps, _instance(form, pixels),
                *_task_gradients(form, dpenalty, mean), rows, pixels,
                tiles.batch, channels, _groups(form, channels), tiles.parts, weight is not None, bias is not None,
                *_flags(form), _power(form), _power(form, every=True), num_warps=_warps(tiles.batch * channels), **options,
            )  # fmt: skip
            norm_backward.affine_backward[t.grid(rows, channels, pixels)](
                grad, x, output, dx, dresidual, mean, *work[:3].unbind(), rows, channels, pixels, *strides, *t,
                relu, table, shares, num_warps=t.warps, **options,
            )  # fmt: skip
        dweight, dbias, *dlogits = own
        return dx, dweight, dbias, dresidual if ctx.adds else None, *dlogits, None, None, None, None, None, None


def _given(other: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Tensors as kernel arguments; for None, some tensor that the kernel will not touch."""
    return [other if t is None else t for t in tensors]


def _groups(form: Form, channels: int) -> int:
    return form.groups if isinstance(form, Groups) else channels


def _limits(form: Form) -> tuple[float, float]:
    return (float(form.r_max), float(form.d_max)) if isinstance(form, Renorm) else (1.0, 0.0)


def _instance(form: Form, pixels: int) -> float:
    """The factor of the rows' variances in a mixture. For a single value the unbiased variance is NaN."""
    if not isinstance(form, Mixture) or not form.unbiased:
        return 1.0
    return pixels / (pixels - 1) if pixels > 1 else nan


def _tasks(form: Form, penalty: Tensor | None, other: Tensor) -> tuple[Any, ...]:
    """The arguments ``member`` to ``strength`` of the forward kernel."""
    if not isinstance(form, ByTask):
        return other, 0, other, other, 0.0, 0.0, 0.0
    return form.member, form.member.shape[1], form.rate, penalty, form.first_rate, form.decay, form.strength


def _task_gradients(form: Form, dpenalty: Tensor | None, other: Tensor) -> tuple[Any, ...]:
    """The arguments ``member`` to ``strength`` of the backward kernel."""
    if not isinstance(form, ByTask):
        return other, 0, 0, other, 0.0
    strength = 0.0 if dpenalty is None else form.strength  # 0: the value passed for dpenalty does not matter
    return form.member, form.member.shape[1], form.max_tasks, _given(other, dpenalty)[0], strength


def _power(form: Form, every: bool = False) -> int:
    """The power of two that holds the tasks of the batch or, with ``every``, the norm's ``max_tasks``; 0 for other norms."""
    if not isinstance(form, ByTask):
        return 0
    return 1 << ((form.max_tasks if every else form.member.shape[1]) - 1).bit_length()


def _flags(form: Form) -> tuple[bool, bool, bool, bool]:
    """THEN_BATCH, MIXTURE, RENORM, ON_STD."""
    then_batch = isinstance(form, Groups) and form.then_batch
    on_std = isinstance(form, Renorm) and form.eps_on_std
    return then_batch, isinstance(form, Mixture), isinstance(form, Renorm), on_std


def _warps(values: int) -> int:
    """The number of warps for eight values of each table per thread."""
    return max(1, min(16, values // 256))
