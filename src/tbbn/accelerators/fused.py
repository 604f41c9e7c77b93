"""Fused operations for the bench's own networks: convolution, norm, ReLU and shortcut in fewer passes on a GPU.

On a CPU, and for inputs that the kernels do not support, each function here runs the plain torch modules and operations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tbbn.accelerators.backend import find_fused
from tbbn.accelerators.eager import activate
from tbbn.accelerators.triton import TRITON
from tbbn.nn.active import may_be_repeated, recomputing
from tbbn.nn.foreign import ForeignNorm
from tbbn.nn.functional import task_balanced_batch_norm
from tbbn.nn.modules import PlannedNorm, arguments
from tbbn.nn.plan import Plan
from tbbn.nn.private import global_hooks, under_transform

_MOST_CHANNELS = 64
_MOST_PIXELS = 2**17  # in a batch; above this cuDNN is as fast


class FusedBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` with this package's kernels where they apply; :func:`norm_act` fuses it with what follows.

    Unlike cuDNN's, these kernels let runs on several streams share a GPU, and the same input always gives the same bits.
    """

    is_batch_norm_in_eval = True  # so that tbbn.revert makes it nn.BatchNorm2d again
    output_statistics = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return task_balanced_batch_norm(*arguments(self, x, self.plan_of(x)))

    def plan_of(self, x: Tensor) -> Plan | None:
        self._check_input_dim(x)
        return None


_FUSABLE = (PlannedNorm, FusedBatchNorm2d)


def accelerate(module: nn.Module, device: torch.device) -> nn.Module:
    """On a GPU with Triton, turn every ``nn.BatchNorm2d`` in ``module`` into :class:`FusedBatchNorm2d`, in place."""
    if device.type == "cuda" and TRITON:
        for layer in module.modules():
            if type(layer) is nn.BatchNorm2d:
                layer.__class__ = FusedBatchNorm2d  # only the forward differs
    return module


def norm_act(
    norm: nn.Module, x: Tensor, *, relu: bool = True, residual: Tensor | None = None, moments: Tensor | None = None
) -> Tensor:
    """``relu(norm(x) + residual)`` for any norm, in one pass if a backend can; ReLU and residual are optional.

    ``moments`` of ``x``, as :func:`conv_moments` returns them, save the norm a pass.
    """
    if hasattr(norm, "normaliser") and _by_sample(norm, x):
        if not norm.training and getattr(norm, "is_batch_norm_in_eval", False):
            return _eval_act(cast(PlannedNorm, norm), x, relu, residual)
        return _normalise(norm, x, relu, residual, moments)
    if not isinstance(norm, _FUSABLE) or norm.output_statistics or torch.compiler.is_compiling() or _hooked(norm):
        return activate(norm(x), relu, residual)
    if not norm.training:
        return _eval_act(norm, x, relu, residual)
    given = arguments(norm, x, norm.plan_of(x))
    kernels = find_fused(*given[:6])
    if kernels is None:
        return activate(task_balanced_batch_norm(*given), relu, residual)
    return kernels.norm_act(*given, relu=relu, residual=residual, moments=moments)


def _by_sample(norm: Any, x: Tensor) -> bool:
    """Whether to use the kernels for norms with a ``normaliser`` instead of the norm's own forward."""
    return (
        x.is_cuda and TRITON and x.dim() == 4 and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and x.numel() > x.shape[1]  # with a single value per channel a norm raises its own error
        and not torch.compiler.is_compiling() and not under_transform() and not _hooked(norm)
    )  # fmt: skip


def _normalise(norm: Any, x: Tensor, relu: bool, residual: Tensor | None, moments: Tensor | None) -> Tensor:
    """:func:`norm_act` for a norm with a ``normaliser`` (``tbbn.nn.comparison``): the passes over ``x`` are kernels."""
    from tbbn.accelerators.triton import normaliser, sample

    form = norm.form(x) if hasattr(norm, "form") else None
    if form is not None and normaliser.supports(x, norm, form):
        return normaliser.normalise(norm, form, x, relu, residual, moments)
    state = norm.snapshot(x) if hasattr(norm, "snapshot") else ()
    if state is None:
        return activate(norm(x), relu, residual)
    x, mean, var = sample.sample_moments(x, moments)
    # Compiled code cannot tell whether checkpointing is repeating it.
    once = norm.training and not may_be_repeated() and not recomputing()
    if x.is_cuda and once and getattr(norm, "compiles_normaliser", False):
        made = _compiled_normaliser(norm.__class__, str(norm), x.shape)(norm, x, mean, var, *state)
    else:
        made = norm.normaliser(x, mean, var, *state)
    return sample.sample_affine(x, *made, relu=relu, residual=residual)


@cache
def _compiled_normaliser(kind: Any, options: str, shape: torch.Size) -> Callable[..., Any]:
    """``kind.normaliser`` under ``torch.compile``: in eager mode its small tensors take about eighty launches per layer.

    Layers with the same options and input shape share a function. Each function has its own code object, because
    ``torch.compile`` stops compiling a code object after eight variants.
    """
    plain = kind.normaliser
    own = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    # torch.compile would warn that switchable norm's softmax of three weights is too small to be fused.
    compiled = torch.compile(own, dynamic=False, options={"online_softmax": False})

    def call(*given: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice does not concern the user of a norm
            return compiled(*given)

    return call


def _eval_act(norm: nn.BatchNorm2d | PlannedNorm, x: Tensor, relu: bool, residual: Tensor | None) -> Tensor:
    mean, var = norm.running_mean, norm.running_var
    if (relu or residual is not None) and mean is not None and var is not None and not torch.is_grad_enabled():
        kernels = find_fused(x, mean, var, norm.weight, norm.bias, None)
        if kernels is not None:
            return kernels.norm_act(
                x, mean, var, norm.weight, norm.bias, None, 0.0, norm.eps,
                relu=relu, residual=residual, training=False,
            )  # fmt: skip
    return activate(norm(x), relu, residual)


class Convolved(NamedTuple):
    """The result of :func:`conv_moments`."""

    out: Tensor
    x: Tensor  # the input, for the shortcut: the convolution adds the shortcut's gradient to its own in the same pass
    moments: Tensor | None  # (2, N, parts, C): means and variances of equal parts of every output image


def conv_norm(pair: nn.Sequential, x: Tensor) -> Tensor:
    """``pair(x)`` for a convolution and the norm after it."""
    if _hooked(pair):
        return pair(x)
    conv, norm = pair
    out, _, moments = conv_moments(conv, x, norm)
    return norm_act(norm, out, relu=False, moments=moments)


def conv_moments(conv: nn.Module, x: Tensor, norm: nn.Module) -> Convolved:
    """The output of a convolution followed by ``norm``, with moments for :func:`norm_act` if both support them."""
    if isinstance(conv, Conv2d):
        return conv.with_moments(x, moments=_takes_moments(norm))
    return Convolved(conv(x), x, None)


def _takes_moments(norm: nn.Module) -> bool:
    """Whether the norm, in its current mode, needs the moments of its input."""
    if norm.training:
        return isinstance(norm, _FUSABLE) or hasattr(norm, "normaliser")
    return hasattr(norm, "normaliser") and not getattr(norm, "is_batch_norm_in_eval", False)


class Conv2d(nn.Conv2d):
    """``nn.Conv2d`` with kernels for few channels on a GPU, in bf16, fp16 or tf32.

    cuDNN's tiles are made for many channels: with the 16 to 64 channels of a CIFAR network it takes two to four times as long.
    """

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.kernels_for(x)
        return super().forward(x) if kernels is None else self._launch(kernels, x, False).out

    def with_moments(self, x: Tensor, *, moments: bool = True) -> Convolved:
        """The convolution, with the moments of its output if they are wanted and the kernels compute them."""
        kernels = self.kernels_for(x)
        if kernels is None or _hooked(self):
            return Convolved(self(x), x, None)
        return self._launch(kernels, x, moments)

    def _launch(self, kernels: Any, x: Tensor, moments: bool) -> Convolved:
        weight = self.weight.to(_compute_dtype(x))
        if x.dtype == weight.dtype or not x.requires_grad:  # the kernel converts images as it reads them
            return Convolved(*kernels.convolve(x, weight, self.stride[0], moments))
        out, _, found = kernels.convolve(x.to(weight.dtype), weight, self.stride[0], moments)
        return Convolved(out, x, found)  # the shortcut uses the input itself, not its rounded copy

    def kernels_for(self, x: Tensor) -> Any:
        """The kernels' module, if they support this convolution. Importing it imports Triton."""
        if not (isinstance(x, Tensor) and x.is_cuda and TRITON and self.suits(x)):
            return None
        if torch.compiler.is_compiling() or under_transform():
            return None
        from tbbn.accelerators.triton import conv as conv_launch

        dtype = _compute_dtype(x)
        same = (
            torch.is_autocast_enabled(x.device.type) or self.weight.dtype == dtype
        )  # otherwise torch raises its error
        return conv_launch if same and conv_launch.available(dtype) else None

    def suits(self, x: Tensor) -> bool:
        middle = self.kernel_size[0] // 2
        return (
            x.dim() == 4
            and self.kernel_size in ((1, 1), (3, 3))
            and self.stride in ((1, 1), (2, 2))
            and self.padding == (middle, middle)
            and self.padding_mode == "zeros"
            and self.dilation == (1, 1)
            and self.groups == 1
            and self.bias is None
            and max(self.in_channels, self.out_channels) <= _MOST_CHANNELS
            and self.out_channels % 16 == 0
            and (self.in_channels % 16 == 0 or not x.requires_grad)
            and 0 < x.shape[0] * x.shape[2] * x.shape[3] <= _MOST_PIXELS
        )


def _hooked(module: nn.Module) -> bool:
    """Whether calling the module would run hooks or an overridden forward, so that it must be called."""
    return isinstance(module, ForeignNorm) or bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ) or global_hooks()  # fmt: skip


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which autocast would compute a convolution of ``x``."""
    device = x.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast else x.dtype
