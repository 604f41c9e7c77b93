"""Batch norms of other packages: classes with their own forward, such as a norm that includes its activation.

``tbbn.convert`` replaces a layer of such a class ``C`` by one of a class made on the fly, with the bases ``(C, N)``, where ``N``
is the new norm. ``C`` keeps its forward, attributes, child modules and ``state_dict``; only the normalisation inside that forward
is ``N``'s. How ``N`` is called depends on ``C``:

- ``C.forward`` calls ``super().forward(x)``: ``N`` comes next in the method resolution order;
- ``C.forward`` calls ``F.batch_norm`` or ``nn.BatchNorm2d.forward``: that call is replaced while ``C.forward`` runs;
- ``C`` has a function registered with :func:`register_converter`: it replaces ``C.forward``. All other classes need one.

A forward that never reaches the normalisation is an error, never a wrong result.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tbbn.errors import UserError
from tbbn.nn.active import recomputing
from tbbn.nn.functional import task_balanced_batch_norm
from tbbn.nn.modules import BalancedNorm, PlannedNorm, RowsPerSample, as_leaf, with_pixels
from tbbn.nn.private import AnyBatchNorm

Normalise = Callable[[Tensor], Tensor]
Converter = Callable[[Any, Normalise, Tensor], Tensor]
_T = TypeVar("_T", bound=Converter)
_CONVERTERS: dict[type | str, Converter] = {}  # by the class that defines the forward, or its full name

_seen = threading.local()  # .norm: whether the running forward has reached the normalisation
_COMBINED: dict[tuple[type, type], type[nn.Module]] = {}  # the classes made so far


def register_converter(norm: type[nn.Module]) -> Callable[[_T], _T]:
    """Say what a batch norm class does around its normalisation, so that :func:`tbbn.convert` keeps it.

    Needed only for a class whose forward neither calls ``super().forward(x)`` nor ``F.batch_norm``::

        @tbbn.register_converter(NormThenActivation)
        def forward(layer, normalise, x):
            return layer.act(normalise(x))

    The function replaces the class's forward in training and in eval mode. :func:`tbbn.revert` restores the class.
    """
    if not (isinstance(norm, type) and issubclass(norm, AnyBatchNorm)):
        raise UserError(f"register_converter: expected a subclass of torch's batch norm, got {norm!r}.")

    def register(function: _T) -> _T:
        _CONVERTERS[_forward_class(norm)] = function
        _COMBINED.clear()
        return function

    return register


def _norm_drop_act(layer: Any, normalise: Normalise, x: Tensor) -> Tensor:
    return layer.act(layer.drop(normalise(x)))


# By name: timm is not imported here. Its forward calls F.batch_norm, and a converter is faster than replacing that call.
_CONVERTERS["timm.layers.norm_act.BatchNormAct2d"] = _norm_drop_act
_CONVERTERS["timm.layers.norm_act.SyncBatchNormAct"] = _norm_drop_act
# Its forward is batch norm over all ranks, which the layers that replace it implement themselves.
_CONVERTERS[nn.SyncBatchNorm] = lambda layer, normalise, x: normalise(x)


class ForeignNorm:
    """Base of the made classes: a layer of class ``own`` with the normalisation of class ``norm``."""

    own: type[nn.Module]
    norm: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class has no name that pickle could import
        state = getattr(self, "__getstate__", lambda: vars(self))()
        return _blank, (self.own, self.norm), state


class _OwnForward(ForeignNorm):
    """Runs the forward of ``own``, and raises if that did not reach ``norm``."""

    replaces_call: bool  # whether F.batch_norm is replaced during the forward
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Proxy):
            return as_leaf(self, given)
        if not self.training and getattr(self, "is_batch_norm_in_eval", False):
            return self.own.forward(self, *args, **kwargs)
        if isinstance(self, BalancedNorm) and self.must_run_uncompiled():
            from tbbn.nn.uncompiled import run_uncompiled

            return run_uncompiled(_OwnForward.forward, self, *args, **kwargs)
        outer, _seen.norm = getattr(_seen, "norm", False), False
        try:
            with _ReplacedCall(self) if self.replaces_call else nullcontext():
                y = self.own.forward(self, *args, **kwargs)
            reached = _seen.norm
        finally:
            _seen.norm = outer
        if not reached:
            raise UserError(
                f"{self.own.__name__}: its forward did not reach the normalisation that tbbn.convert replaced; "
                "use tbbn.register_converter, or tbbn.convert(..., skip=[...])."
            )
        return y


class _Mark:
    """Stands between ``own`` and ``norm`` in the method resolution order, to see that ``own`` calls ``super().forward(x)``."""

    def forward(self, input: Tensor) -> Tensor:
        _seen.norm = True
        return super().forward(input)  # type: ignore[misc]


class _ReplacedCall(TorchFunctionMode):
    """Replaces ``F.batch_norm`` by the task-balanced form inside the forward of one layer, in the calling thread."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = self._batch_norm if func is F.batch_norm else func
        return function(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        _seen.norm = True
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        try:
            plan = self.layer.plan_of(input)
        except RowsPerSample as several:
            others = (running_mean, running_var, weight, bias, True, momentum, eps)
            return with_pixels(input, several.args[1], lambda x: self._batch_norm(x, *others))
        if recomputing() and running_mean is not None and running_var is not None:  # do not count the batch twice
            running_mean, running_var = running_mean.clone(), running_var.clone()
        return task_balanced_batch_norm(input, running_mean, running_var, weight, bias, plan, momentum, eps)


class _Converted(ForeignNorm):
    """Runs the registered function in place of the forward of ``own``."""

    converter: Converter

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if isinstance(x, Proxy):
            return as_leaf(self, x)
        return type(self).converter(self, lambda x: self.norm.forward(self, x), x)


def combine(own: type[nn.Module], norm: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer that is an ``own`` except for its normalisation, which is ``norm``'s."""
    if (own, norm) not in _COMBINED:
        _COMBINED[own, norm] = _combine(own, norm)
    return _COMBINED[own, norm]


def _combine(own: type[nn.Module], norm: type[nn.Module]) -> type[nn.Module]:
    bases: tuple[type, ...] = (ForeignNorm, own, norm)
    members: dict[str, Any] = {"own": own, "norm": norm, "__module__": norm.__module__}
    if has_own_forward(own):
        converter = find_converter(own)
        if converter is not None:
            bases, members["converter"] = (_Converted, own, norm), staticmethod(converter)
        else:
            bases, members["replaces_call"] = (_OwnForward, own, _Mark, norm), _replaces_call(own, norm)
    else:
        members["forward"] = norm.forward
    return type(f"{norm.__name__}_{own.__name__}", bases, members)


def has_own_forward(cls: type[nn.Module]) -> bool:
    return cls.forward is not AnyBatchNorm.forward


def _replaces_call(own: type[nn.Module], norm: type[nn.Module]) -> bool:
    """Whether the forward of ``own`` normalises by ``F.batch_norm`` (True) or by ``super().forward`` (False)."""
    for base in own.__mro__:
        if "forward" not in vars(base):
            continue
        if base is AnyBatchNorm and issubclass(norm, AnyBatchNorm):
            return False
        code = getattr(inspect.unwrap(vars(base)["forward"]), "__code__", None)
        names = () if code is None else code.co_names
        if "super" in names and "batch_norm" not in names:
            continue  # it only calls the next forward, so look at that one
        # It calls F.batch_norm, directly or through nn.BatchNorm2d.forward(self, x).
        if (
            ("batch_norm" in names or "forward" in names)
            and "super" not in names
            and norm.forward is PlannedNorm.forward
        ):
            return True
        break
    raise UserError(
        f"convert: {own.__name__} is a batch norm with a forward of its own, and it is not clear how that normalises; "
        "register it with tbbn.register_converter, or leave the layer out: tbbn.convert(..., skip=[...])."
    )


def find_converter(own: type[nn.Module]) -> Converter | None:
    cls = _forward_class(own)
    return _CONVERTERS.get(cls) or _CONVERTERS.get(f"{cls.__module__}.{cls.__qualname__}")


def _forward_class(cls: type[nn.Module]) -> type[nn.Module]:
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def _blank(own: type[nn.Module], norm: type[nn.Module]) -> nn.Module:
    cls = combine(own, norm)
    return cls.__new__(cls)
