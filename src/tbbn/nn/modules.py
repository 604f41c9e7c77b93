"""The layers: batch norm whose training statistics are balanced over tasks.

``TaskBalancedBatchNorm1d/2d/3d`` are ``torch.nn.BatchNorm1d/2d/3d`` with the same constructor and the same ``state_dict``. They
differ in one place: a training forward inside ``tbbn.balance(...)`` is normalised by the plan of that batch. Everywhere else
(eval mode, no ``balance``, no memory rows, the first task) they are batch norm.

A *layout* says which rows of a batch are current and which are memory. A *plan* is made from it: two matrices that say which rows
share statistics. ``balance`` gives every layer the layout; the layer turns it into the plan that its options ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from tbbn.errors import UserError
from tbbn.nn.active import Forward, Forwards, find, may_be_repeated, recomputing
from tbbn.nn.functional import statistics_dtype, task_balanced_batch_norm, update_average
from tbbn.nn.mistakes import Watched, forward_outside
from tbbn.nn.plan import RULES, Layout, Plan, PlanOptions
from tbbn.nn.private import AnyBatchNorm
from tbbn.nn.sync import RankLayout, ranks_in, unbalanced_plan
from tbbn.options import Option


class RowsPerSample(UserError):
    """Raised for an input with several rows per sample. Its arguments: a message for callers that cannot fold, the number."""

    def __str__(self) -> str:
        return self.args[0]


def with_pixels(x: Tensor, per_sample: int, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """``forward`` of ``x`` (N k, C, ...), with the k consecutive rows of a sample folded into its pixels: (N, C, k ...)."""
    parts = x.unflatten(0, (-1, per_sample)).transpose(1, 2)  # (N, C, k, ...)
    y = forward(parts if x.dim() == 2 else parts.flatten(2, 3)).reshape(parts.shape)
    return y.transpose(1, 2).reshape(x.shape)


class BalancedNorm(Watched, AnyBatchNorm):
    """A batch norm to which :func:`tbbn.balance` gives the layout of the batch within its ``with`` block."""

    is_batch_norm_in_eval = True  # so that tbbn.revert can replace it by batch norm
    wants_task_ids = False  # whether it uses the ``task_ids`` of a layout

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forwards = Forwards()
        self._uncompiled = False  # whether compiled code leaves its forwards to Python: see tbbn.nn.uncompiled

    def prepare(self, layout: Layout) -> Any:
        """What the forward needs from ``layout``, made once on entering the block. Raises if the layer cannot take the layout."""
        raise NotImplementedError

    def find_layout(self, x: Tensor) -> tuple[Layout | None, Any]:
        """The layout for this training forward, and what :meth:`prepare` made of it; None and None outside ``balance``."""
        block = find(self)
        layout, prepared = (None, None) if block is None else (block.layout, block.prepared[self])
        if recomputing():
            forward = self._forwards.repeated(type(self).__name__, x)
            layout = None if forward is None else forward.layout
            prepared = None if layout is None else self.prepare(layout)
            if forward is not None and layout is not None and forward.folded and x.shape[0] > layout.rows:
                raise self._folds(x.shape[0] // layout.rows)
        elif block is not None and block.rows_per_sample != 1 and (per_sample := block.folds(x.shape[0])) > 1:
            if not torch.compiler.is_compiling() and may_be_repeated():
                self._forwards.append(Forward.of(block, x))  # a repetition first arrives here with unfolded rows
            raise self._folds(per_sample)
        if torch.compiler.is_compiling():
            return layout, prepared  # the plan's shape checks the row count; comparing numbers would compile them in
        if may_be_repeated() and not recomputing():
            self._forwards.append(Forward.of(block, x))
        if layout is None:
            forward_outside(self)
        if layout is not None and x.shape[0] != layout.rows:
            raise UserError(
                f"{type(self).__name__}: the layout covers {layout.current} + {layout.memory} = {layout.rows} rows but the "
                f"input has {x.shape[0]}; call tbbn.balance with the counts of the batch being forwarded. Where rows are not "
                "samples (tokens, boxes, frames): rows_per_sample=, or tbbn.convert(..., skip=[...])."
            )
        return layout, prepared

    def must_run_uncompiled(self) -> bool:
        """Whether compiled code must leave this forward to Python: see ``tbbn.nn.uncompiled``."""
        if not torch.compiler.is_compiling():
            return False
        return self._uncompiled or (self.training and not torch.is_grad_enabled() and find(self) is not None)

    def _folds(self, per_sample: int) -> RowsPerSample:
        name = type(self).__name__
        return RowsPerSample(
            f"{name}: takes one row a sample, got {per_sample}; use tbbn.convert(..., skip=[...]).", per_sample
        )

    @property
    def needs_layout(self) -> bool:
        """Whether the layer is plain batch norm without a layout."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in vars(Watched)}
        return {**state, "_forwards": Forwards(), "_uncompiled": False}

    def __prepare_scriptable__(self) -> Any:
        raise UserError(
            f"torch.jit.script: {type(self).__name__} cannot be scripted; script tbbn.revert(model), or use torch.compile."
        )

    def _replicate_for_data_parallel(self) -> Any:
        if find(self) is not None:
            raise UserError(
                "balance: nn.DataParallel splits the batch, so the layout fits no part; use DistributedDataParallel."
            )
        return super()._replicate_for_data_parallel()


class PlannedNorm(BalancedNorm):
    """:func:`task_balanced_batch_norm` as a module. The options from ``rule`` to ``total_variance`` choose the plan."""

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
        rule: Annotated[str, Option(help="rule for the number of splits (see tbbn.splits)", choices=RULES)] = "paper",
        case: Annotated[int, Option(help="ablation of the paper, 1 to 4; 0 is the full layer", least=0, most=4)] = 0,
        memory: Annotated[
            str,
            Option(
                help="normalise memory rows with statistics averaged over all splits, or with their own",
                choices=("averaged", "own"),
            ),
        ] = "averaged",
        total_variance: Annotated[bool, Option(help="add the variance between splits to the running variance")] = False,
        output_statistics: Annotated[
            bool, Option(help="error of the released code: running statistics of the output")
        ] = False,
        sync: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)  # torch's own argument is newer than the oldest torch supported
        self.options = PlanOptions(self.kind, rule, case, memory, total_variance)
        if sync and output_statistics:
            raise UserError("tbbn: output_statistics is not synchronised over ranks; leave out sync=True.")
        self.output_statistics = output_statistics
        self.sync, self.process_group = sync, process_group

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if isinstance(x, Proxy):
            return as_leaf(self, x)
        if not self.training:
            return super().forward(x)  # batch norm by the running statistics
        if self.must_run_uncompiled():
            from tbbn.nn.uncompiled import run_uncompiled

            return run_uncompiled(PlannedNorm.forward, self, x)
        try:
            plan = self.plan_of(x)
        except RowsPerSample as several:
            return with_pixels(x, several.args[1], lambda x: PlannedNorm.forward(self, x))
        if plan is not None and self.output_statistics:
            return self._track_output(x, plan)
        return task_balanced_batch_norm(*arguments(self, x, plan))

    def plan_of(self, x: Tensor) -> Plan | None:
        """The plan for this training forward; None if there is nothing to balance."""
        self._check_input_dim(x)
        layout, plan = self.find_layout(x)
        if layout is None and self.sync and ranks_in(self.process_group) > 1:
            return unbalanced_plan(x.shape[0], self.process_group, x.device, statistics_dtype(x))
        return plan

    def prepare(self, layout: Layout) -> Plan | None:
        tensor = self.weight if self.weight is not None else self.running_mean
        if self.sync and isinstance(layout, RankLayout) and self.process_group in layout.counts:
            where = (
                (torch.device("cpu"), torch.float64) if tensor is None else (tensor.device, statistics_dtype(tensor))
            )
            return layout.rank_plan(self.process_group, self.options, *where)
        if tensor is None or tensor.is_meta:  # meta: functional_call may supply the weights
            return layout.plan(self.options)
        return layout.plan(self.options, tensor.device, statistics_dtype(tensor))

    def _track_output(self, x: Tensor, plan: Plan) -> Tensor:
        """Take the running statistics from the layer's output, as the released ablation code did for case 2."""
        _, mean, var, weight, bias, _, momentum, eps, batches = arguments(self, x, plan)
        y = task_balanced_batch_norm(x, None, None, weight, bias, plan, momentum, eps, batches)
        if mean is not None:
            with torch.no_grad():
                new_var, new_mean = torch.var_mean(y.detach().to(statistics_dtype(y)).transpose(0, 1).flatten(1), 1)
                update_average(mean, new_mean, momentum)
                update_average(var, new_var, momentum)
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.process_group)] = self.process_group  # a process group cannot be copied
        # Before the state is copied: hooks and attributes may hold the layer itself.
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(deepcopy(self.__getstate__(), memo))
        return new

    @property
    def needs_layout(self) -> bool:
        return self.kind != "plain"

    def extra_repr(self) -> str:
        changed = [f"{k}={v!r}" for k, v in vars(self.options).items() if v != getattr(PlanOptions, k) and k != "kind"]
        changed += [f"{name}=True" for name in ("output_statistics", "sync") if getattr(self, name)]
        return ", ".join([super().extra_repr(), *changed])


def arguments(norm: AnyBatchNorm, x: Tensor, plan: Plan | None) -> tuple[Any, ...]:
    """The arguments of :func:`task_balanced_batch_norm`, in its order, for a training forward of ``norm``."""
    mean = var = batches = None
    momentum: float | Tensor | None = norm.momentum
    if norm.track_running_stats:
        buffers = norm._buffers  # attributes would go through Module.__getattr__, which is slow
        mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        if recomputing() and mean is not None:  # do not count the batch twice
            mean, var, batches = mean.clone(), cast(Tensor, var).clone(), None
        elif momentum is None and batches is not None:  # cumulative average, as a tensor to avoid a host sync
            batches.add_(1)
            momentum = batches.to(torch.float64 if batches.is_cpu else torch.float32).reciprocal()
            batches = None
    return x, mean, var, norm.weight, norm.bias, plan, 0.0 if momentum is None else momentum, norm.eps, batches


def as_leaf(layer: Any, x: Proxy) -> Any:
    """A call of ``layer`` as one node of a ``torch.fx`` graph, which would otherwise trace its forward."""
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), (x,), {})


class TaskBalancedBatchNorm1d(PlannedNorm, nn.BatchNorm1d):
    """Task-balanced batch norm over (N, C) or (N, C, L) input. See :class:`TaskBalancedBatchNorm2d`."""


class TaskBalancedBatchNorm2d(PlannedNorm, nn.BatchNorm2d):
    r"""Task-balanced batch norm over (N, C, H, W) input.

    In a training forward inside :func:`tbbn.balance`, the current rows are divided into :math:`r` splits and all memory rows
    join every split. With :math:`\mu_j, \sigma_j^2` the mean and biased variance of split :math:`j`

    .. math::
        y_n = \gamma \frac{x_n - \mu_{n \bmod r}}{\sqrt{\sigma^2_{n \bmod r} + \epsilon}} + \beta
        \quad\text{(current)}, \qquad
        y_m = \gamma\,\frac{1}{r}\sum_j \frac{x_m - \mu_j}{\sqrt{\sigma_j^2 + \epsilon}} + \beta
        \quad\text{(memory)}.

    The running statistics move towards the averages of :math:`\mu_j` and of the unbiased :math:`\sigma_j^2`. Everywhere
    else (eval mode, no ``balance``, no memory rows, the first task) the layer is ``nn.BatchNorm2d``.

    Each sample's gradient reaches :math:`\gamma` and :math:`\beta` once, as in batch norm: the gradient of :math:`\beta`
    equals batch norm's. Only the statistics are balanced.

    Args: as ``nn.BatchNorm2d``, and by keyword ``rule`` ("paper", "current", "uneven": see :func:`tbbn.splits`; "paper" becomes
    "uneven" where ``balance`` gets one value per row, because counts then vary), ``case`` (ablations 1 to 4), ``memory``
    ("averaged" or "own"), ``total_variance`` (add the variance between splits to the running variance), ``output_statistics``
    (take the running statistics from the output, an error of the released ablation code), ``sync`` and ``process_group``
    (statistics over all ranks).

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
    """Batch norm over (N, C, H, W) with one set of statistics in which every task has exactly the same weight.

    In the ``t``-th task the current rows together have weight ``1/t`` and the memory rows together ``(t-1)/t``.
    """

    kind = "weighted"


class WeightedBatchNorm3d(PlannedNorm, nn.BatchNorm3d):
    """Importance-weighted batch norm over (N, C, D, H, W) input. See :class:`WeightedBatchNorm2d`."""

    kind = "weighted"


class RankBatchNorm1d(PlannedNorm, nn.BatchNorm1d):
    """Batch norm over the rows of all ranks. See :class:`RankBatchNorm2d`."""

    kind = "plain"


class RankBatchNorm2d(PlannedNorm, nn.BatchNorm2d):
    """Batch norm with one set of statistics over the rows of all ranks: ``tbbn.convert(model, "bn", sync=True)``.

    Unlike ``nn.SyncBatchNorm`` it also runs on a CPU. Inside :func:`tbbn.balance` a forward does not exchange counts; otherwise a
    layout changes nothing.
    """

    kind = "plain"


class RankBatchNorm3d(PlannedNorm, nn.BatchNorm3d):
    """Batch norm over the rows of all ranks. See :class:`RankBatchNorm2d`."""

    kind = "plain"
