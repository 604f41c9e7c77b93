"""AdaB2N, adaptive balance of batch norm: the one norm of the comparison that uses the task of each row."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F

from tbbn.errors import UserError
from tbbn.nn.active import may_be_repeated, recomputing
from tbbn.nn.comparison import AnyDims, Normaliser, apply_affine, pixels_last
from tbbn.nn.functional import averaged, statistics_dtype, task_balanced_batch_norm
from tbbn.nn.modules import BalancedNorm, RowsPerSample, arguments, as_leaf, with_pixels
from tbbn.nn.plan import Layout
from tbbn.options import Option


class ByTask(NamedTuple):
    """AdaB2N's parameters for kernels: the tasks of the rows (B, tasks), and how the running statistics move."""

    member: Tensor
    max_tasks: int
    rate: Tensor
    first_rate: float
    decay: float
    strength: float


class AdaptiveBalancedNorm(AnyDims, BalancedNorm):
    """AdaB2N (Lyu et al., NeurIPS 2023): learnt task weights and an adaptive momentum.

    With ``c_k`` rows of task ``k`` in the batch, the weight of task ``k`` is ``(exp(w_k) + c_k) / sum`` with learnable ``w``,
    shared equally by its rows. The momentum of the running statistics falls from ``m^kappa`` towards ``1 - (1 - m)^kappa``.
    ``penalty`` is ``strength`` times the squared distance between batch and running statistics; :func:`tbbn.penalty` sums it
    over a model, for the loss.

    The task of each row comes from ``balance(..., task_ids=...)``. Without it, memory rows count as spread evenly over the
    past tasks.
    """

    wants_task_ids = True
    compiles_normaliser = True

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
        max_tasks: Annotated[int, Option(help="maximum number of tasks", least=1, most=2**20)] = 100,
        kappa: Annotated[
            float, Option(help="decay of the running rate: 1 keeps it constant, 0 is a cumulative average", least=0)
        ] = 1.0,
        strength: Annotated[
            float, Option(help="weight of the penalty on the distance between batch and running statistics", least=0)
        ] = 0.1,
    ) -> None:
        if momentum is None or not track_running_stats:
            raise UserError("adab2n: needs running statistics and a momentum, such as 0.1.")
        super().__init__(num_features, eps, momentum, affine, True, device, dtype)
        self.task_logits = nn.Parameter(torch.zeros(max_tasks, device=device, dtype=dtype))
        self.register_buffer("rate", torch.zeros((), device=device))
        self.max_tasks, self.kappa, self.strength = max_tasks, kappa, strength
        self.penalty: Tensor | None = None

    def prepare(self, layout: Layout) -> Tensor:
        n_tasks = layout.past_tasks + 1
        if n_tasks > self.max_tasks:
            raise UserError(f"adab2n: max_tasks is {self.max_tasks} but this is task {n_tasks}; raise it.")
        # Checked on the CPU only: on another device it would be a host sync.
        if layout.task_ids is not None and layout.task_ids.is_cpu and layout.rows:
            low, high = (int(t) for t in layout.task_ids.aminmax())
            if low < 0 or high >= n_tasks:
                raise UserError(
                    f"balance: task_ids must lie in 0..{n_tasks - 1} for past_tasks={n_tasks - 1}, got {low}..{high}."
                )
        device = self.task_logits.device
        if device.type == "meta":  # functional_call may supply the weights
            device = torch.device("cpu") if layout.task_ids is None else layout.task_ids.device
        return layout.membership(device, statistics_dtype(self.task_logits))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "penalty": None}

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if isinstance(x, Proxy):
            return as_leaf(self, x)
        if not self.training:
            return super().forward(x)  # batch norm
        if self.must_run_uncompiled():
            from tbbn.nn.uncompiled import run_uncompiled

            return run_uncompiled(AdaptiveBalancedNorm.forward, self, x)
        self._check_input_dim(x)
        try:
            layout, member = self.find_layout(x)
        except RowsPerSample as several:
            return with_pixels(x, several.args[1], lambda x: AdaptiveBalancedNorm.forward(self, x))
        self.penalty = None
        if layout is None or not layout.past_tasks:
            return task_balanced_batch_norm(*arguments(self, x, None))  # batch norm
        rows = pixels_last(x)
        weights = self._weights(member.to(rows.device, rows.dtype))
        mean = (weights * rows.mean(2)).sum(0)  # (C,)
        centred = rows - mean.view(1, -1, 1)
        var = (weights * centred.square().mean(2)).sum(0)
        self._follow(mean, var)
        y = centred * (var + self.eps).rsqrt().view(1, -1, 1)
        return apply_affine(y, self.weight, self.bias).view(x.shape).to(x.dtype)

    def form(self, x: Tensor) -> ByTask | None:
        """The layer's :class:`ByTask`; None if rows are not samples, if it acts as batch norm, or under checkpointing."""
        # Checkpointing runs a forward twice: both must take the same path, and looking up the layout is counted.
        if recomputing() or may_be_repeated():
            return None
        member = self._members(x)
        if member is None:
            return None
        assert self.momentum is not None and isinstance(self.rate, Tensor)
        self.penalty = None
        first, decay = self.momentum**self.kappa, (1 - self.momentum) ** self.kappa
        return ByTask(member.contiguous(), self.max_tasks, self.rate, first, decay, self.strength)

    def snapshot(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """The weights of the rows, and copies of the statistics that the forward changes.

        None if rows are not samples, or if the layer acts as batch norm.
        """
        member = self._members(x)
        if member is None:
            return None
        assert self.running_mean is not None and self.running_var is not None and isinstance(self.rate, Tensor)
        weights = self._weights(member.to(x.device, statistics_dtype(x)))
        return weights, self.running_mean.clone(), self.running_var.clone(), self.rate.clone()

    def _members(self, x: Tensor) -> Tensor | None:
        """The task of each row (B, tasks); None if rows are not samples, or if the layer acts as batch norm."""
        if not self.training:
            return None
        try:
            layout, member = self.find_layout(x)
        except RowsPerSample:
            return None
        return None if layout is None or not layout.past_tasks else member

    def normaliser(self, x: Tensor, mean: Tensor, var: Tensor, *state: Tensor) -> Normaliser:
        weights, *running = state
        self.penalty = None
        batch_mean = (weights * mean).sum(0)
        batch_var = (weights * (var + (mean - batch_mean).square())).sum(0)
        self._follow(batch_mean, batch_var, *running)
        return Normaliser.of(batch_mean, (batch_var + self.eps).rsqrt(), self)

    def _weights(self, member: Tensor) -> Tensor:
        """The weight of each row (B, 1) from its task (B, tasks)."""
        counts = member.sum(0)
        concentration = self.task_logits[: member.shape[1]].to(member.dtype).exp() + counts
        share = concentration / concentration.sum() / counts.clamp_min(torch.finfo(counts.dtype).tiny)
        # An absent task keeps its share, as published. No matrix products: autocast would round them.
        return (member * torch.where(counts > 0, share, 0)).sum(1, keepdim=True)

    def _follow(self, mean: Tensor, var: Tensor, *state: Tensor) -> None:
        """Update the running statistics, and set ``penalty`` from their distance to the batch's.

        ``state`` is the running mean, running variance and rate before the update; by default the layer's own.
        """
        assert self.momentum is not None and isinstance(self.rate, Tensor)
        assert self.running_mean is not None and self.running_var is not None
        running_mean, running_var, rate = state or (self.running_mean, self.running_var, self.rate)
        if not recomputing():
            with torch.no_grad():
                first = torch.full_like(rate, self.momentum**self.kappa)
                rate = torch.where(rate == 0, first, rate / (rate + (1 - self.momentum) ** self.kappa))
                self.rate.copy_(rate)
                running_mean, running_var = (
                    averaged(running, value, rate) for running, value in ((running_mean, mean), (running_var, var))
                )
                self.running_mean.copy_(running_mean)
                self.running_var.copy_(running_var)
                self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        if self.strength:
            # Copies: the running statistics may be the layer's own, which change before the backward.
            targets = (running_mean.to(mean.dtype, copy=True), running_var.to(var.dtype, copy=True))
            self.penalty = self.strength * (F.mse_loss(mean, targets[0]) + F.mse_loss(var, targets[1]))


def penalty(module: nn.Module) -> Tensor:
    """The sum of the layers' penalties in the last training forward, to add to the loss; 0 if no layer has one."""
    found = penalties(module)
    if found:
        return torch.stack(found).sum()
    parameter = next(module.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device)


def penalties(module: nn.Module) -> list[Tensor]:
    """The penalty of each layer that had one in its last training forward."""
    return [m.penalty for m in module.modules() if isinstance(m, AdaptiveBalancedNorm) and m.penalty is not None]
