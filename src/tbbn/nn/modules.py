"""The layer: batch norm whose training statistics are balanced over tasks.

``TaskBalancedBatchNorm1d/2d/3d`` are ``torch.nn.BatchNorm1d/2d/3d`` with the same constructor and the same ``state_dict``.
They differ in one place: a training forward inside :func:`tbbn.balance` is normalised by the plan of that batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tbbn.accelerators.native.binding import intercepted
from tbbn.errors import UserError
from tbbn.nn.functional import activated, cuda_kernels, move, statistics_dtype, task_balanced_batch_norm
from tbbn.nn.plan import Layout, Plan, PlanOptions, whole_batch


class BalancedNorm(_BatchNorm):
    """A norm that takes a layout from :func:`tbbn.balance`; without one, in eval mode, or with no memory it is batch norm."""

    is_batch_norm_in_eval = True  # so tbbn.revert can make it one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layout: Layout | None = None
        self._prepared: Any = None  # what this layer made of it
        self._last_layout: Layout | None = None  # of the last training forward, for activation checkpointing

    def prepare(self, layout: Layout) -> Any:
        """What the layer's forward needs to know of ``layout``; raises where it cannot take it."""
        raise NotImplementedError

    def set_layout(self, layout: Layout | None, prepared: Any) -> None:
        self._layout, self._prepared = layout, prepared

    def prepared(self, layout: Layout) -> Any:
        return self._prepared if layout is self._layout else self.prepare(layout)

    def layout_of(self, x: Tensor) -> Layout | None:
        """The layout that applies to this forward, checked against the batch."""
        if not self.training:
            return None
        layout = self._layout
        if not torch.compiler.is_compiling():
            # Activation checkpointing repeats the forward inside backward, when the block has usually been left.
            if layout is None and recomputing():
                layout = self._last_layout
            else:
                self.__dict__["_last_layout"] = layout  # past Module.__setattr__, which is slow
        if layout is not None and x.shape[0] != layout.rows:
            raise UserError(
                f"{type(self).__name__}: the layout covers {layout.current} + {layout.memory} = {layout.rows} rows but the "
                f"input has {x.shape[0]}; call tbbn.balance with the counts of the batch being forwarded."
            )
        return layout

    def plain(self, x: Tensor) -> Tensor:
        """Batch norm of a batch with nothing to balance; a repeated forward does not count its batch a second time."""
        if self.running_mean is None or self.running_var is None or not self.track_running_stats or not recomputing():
            return super().forward(x)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(x, mean, var, self.weight, self.bias, training=True, eps=self.eps)

    def next_momentum(self) -> float | Tensor:
        """Count this batch; the weight of its statistics in the running ones (a cumulative average for momentum=None)."""
        batches, momentum = self.num_batches_tracked, self.momentum  # once each: a module looks its tensors up slowly
        if batches is not None:
            batches.add_(1)
        if momentum is not None:
            return momentum
        assert batches is not None and self.running_mean is not None
        return batches.to(statistics_dtype(self.running_mean)).reciprocal()

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle made inside the block must not carry the block's layout away.
        return {**vars(self), "_layout": None, "_prepared": None, "_last_layout": None}


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing is repeating it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def normed(
    norm: nn.Module, x: Tensor, *, relu: bool = True, residual: Tensor | None = None, moments: Tensor | None = None
) -> Tensor:
    """``relu(norm(x) + residual)`` with any norm, in one pass where the norm can; moments that are known spare it one."""
    if isinstance(norm, PlannedNorm):
        return norm(x, relu=relu, residual=residual, moments=moments)
    return activated(norm(x), relu, residual)


class PlannedNorm(BalancedNorm):
    """A balanced norm that is fully described by a plan: see :class:`tbbn.nn.plan.PlanOptions` for what can be varied."""

    kind = "tbbn"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        output_statistics: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)  # torch's own argument is newer than the oldest torch supported
        self.options = PlanOptions(kind=self.kind, **options)
        self.output_statistics = output_statistics

    def prepare(self, layout: Layout) -> Plan | None:
        tensor = self.weight if self.weight is not None else self.running_mean
        if tensor is None:
            return layout.plan(self.options)  # moved to the input's place in the forward
        return layout.plan(self.options, tensor.device, statistics_dtype(tensor))

    def forward(
        self, x: Tensor, *, relu: bool = False, residual: Tensor | None = None, moments: Tensor | None = None
    ) -> Tensor:
        """The norm, or ``relu(norm(x) + residual)``, which a GPU does in the same pass.

        A convolution may have taken ``moments`` (2, N, parts, C) of ``x`` along: see :class:`tbbn.bench.models.Conv2d`.
        """
        self._check_input_dim(x)
        if not self.training and (relu or residual is not None):
            done = self._at_test_time(x, relu, residual)
            if done is not None:
                return done
        layout = self.layout_of(x)
        plan = None if layout is None else self.prepared(layout)
        kernels = cuda_kernels(x, plan) if self.training else None
        if plan is None:
            if kernels is None or x.numel() <= self.num_features:  # batch norm's own error for a single value a channel
                return activated(super().forward(x) if layout is None else self.plain(x), relu, residual)
            plan = whole_batch(x.shape[0], x.device)
        mean = var = None
        if self.track_running_stats and not recomputing():  # a repeated forward must not count its batch a second time
            mean, var = self.running_mean, self.running_var
        if kernels is not None and not self.output_statistics:
            counted = self.momentum is not None and mean is not None
            momentum = self.momentum if counted or mean is None else self.next_momentum()
            batches = self.num_batches_tracked if counted else None
            weight, bias, eps = self.weight, self.bias, self.eps
            plan = plan.to(x.device, torch.float32)
            return kernels.planned_norm(
                x, weight, bias, plan, eps, mean, var, momentum,
                batches=batches, relu=relu, residual=residual, moments=moments,
            )[0]  # fmt: skip
        momentum = self.next_momentum() if mean is not None else 0.0
        if mean is None or not self.output_statistics:
            y = task_balanced_batch_norm(x, mean, var, self.weight, self.bias, plan, momentum, self.eps)
        else:
            y = task_balanced_batch_norm(x, None, None, self.weight, self.bias, plan, momentum, self.eps)
            self._run_with_output(y.detach(), momentum)
        return activated(y, relu, residual)

    def _at_test_time(self, x: Tensor, relu: bool, residual: Tensor | None) -> Tensor | None:
        """Batch norm and what follows it in one launch, where there are kernels and nobody asks for gradients."""
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or intercepted():
            return None
        kernels = cuda_kernels(x, None)
        if kernels is None or (residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape)):
            return None
        return kernels.launches.fixed(x, mean, var, self.weight, self.bias, self.eps, relu, residual)

    @torch.no_grad()
    def _run_with_output(self, y: Tensor, momentum: float | Tensor) -> None:
        """Running statistics of the layer's output: what the released ablation code did for case 2."""
        assert self.running_mean is not None and self.running_var is not None
        var, mean = torch.var_mean(y.to(statistics_dtype(y)).transpose(0, 1).flatten(1), 1)
        move(self.running_mean, mean, momentum)
        move(self.running_var, var, momentum)

    def extra_repr(self) -> str:
        changed = [f"{k}={v!r}" for k, v in vars(self.options).items() if v != getattr(PlanOptions, k) and k != "kind"]
        if self.output_statistics:
            changed.append("output_statistics=True")
        return ", ".join([super().extra_repr(), *changed])


class TaskBalancedBatchNorm1d(PlannedNorm, nn.BatchNorm1d):
    """Task-balanced batch norm over (N, C) or (N, C, L) input. See :class:`TaskBalancedBatchNorm2d`."""


class TaskBalancedBatchNorm2d(PlannedNorm, nn.BatchNorm2d):
    r"""Task-balanced batch norm over (N, C, H, W) input.

    In a training forward inside :func:`tbbn.balance`, the current rows are divided into :math:`r` splits, all memory rows
    join every split, and with :math:`\mu_j, \sigma_j^2` the mean and biased variance of split :math:`j`

    .. math::
        y_n = \gamma \frac{x_n - \mu_{n \bmod r}}{\sqrt{\sigma^2_{n \bmod r} + \epsilon}} + \beta
        \quad\text{(current)}, \qquad
        y_m = \gamma\,\frac{1}{r}\sum_j \frac{x_m - \mu_j}{\sqrt{\sigma_j^2 + \epsilon}} + \beta
        \quad\text{(memory)}.

    The running statistics move towards the averages of :math:`\mu_j` and of the unbiased :math:`\sigma_j^2`. Everywhere
    else (eval mode, no ``balance``, no memory rows, the first task) the layer is ``nn.BatchNorm2d``.

    Each sample's gradient reaches :math:`\gamma` and :math:`\beta` once, as in batch norm: the gradient of :math:`\beta`
    equals batch norm's. What is balanced is the statistics.

    Args: as ``nn.BatchNorm2d``, and by keyword ``rule`` ("paper", "current", "uneven": see :func:`tbbn.splits`), ``case``
    (ablations 1 to 4), ``memory`` ("averaged" or "own"), ``total_variance`` (add the variance between splits to the running
    variance), ``output_statistics`` (take the running statistics from the output, an error of the released ablation code).

    Shape: input and output (N, C, H, W), any memory format.

    Example::

        >>> layer = TaskBalancedBatchNorm2d(16)
        >>> x = torch.randn(64, 16, 8, 8)
        >>> with tbbn.balance(layer, current=48, memory=16, past_tasks=3):
        ...     y = layer(x)
    """


class TaskBalancedBatchNorm3d(PlannedNorm, nn.BatchNorm3d):
    """Task-balanced batch norm over (N, C, D, H, W) input. See :class:`TaskBalancedBatchNorm2d`."""


class WeightedBatchNorm1d(PlannedNorm, nn.BatchNorm1d):
    """Importance-weighted batch norm over (N, C) or (N, C, L) input. See :class:`WeightedBatchNorm2d`."""

    kind = "weighted"


class WeightedBatchNorm2d(PlannedNorm, nn.BatchNorm2d):
    """Batch norm over (N, C, H, W) with one set of statistics in which every task weighs the same, exactly.

    The mean and variance are those of ``1/t`` of the current rows and ``(t-1)/t`` of the memory rows for task number ``t``.
    """

    kind = "weighted"


class WeightedBatchNorm3d(PlannedNorm, nn.BatchNorm3d):
    """Importance-weighted batch norm over (N, C, D, H, W) input. See :class:`WeightedBatchNorm2d`."""

    kind = "weighted"
