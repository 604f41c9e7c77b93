"""Replace the norms of a model by name, and restore plain batch norm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import Tensor, nn

from tbbn.errors import UserError
from tbbn.nn import comparison
from tbbn.nn import modules as layers
from tbbn.nn.adab2n import AdaptiveBalancedNorm
from tbbn.nn.carrying import carry, carry_lazy, is_made
from tbbn.nn.foreign import ForeignNorm, combine
from tbbn.nn.private import AnyBatchNorm, AnyLazyNorm
from tbbn.nn.selection import Skip, skipped_modules, warn_of_unchanged
from tbbn.options import checked_options, keyword_arguments, options_of
from tbbn.registry import BUILT_IN, NORMS, Entry

_TAKEN = ("weight", "bias", "running_mean", "running_var")  # what a layer takes from the one it replaces
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_BALANCED = (layers.TaskBalancedBatchNorm1d, layers.TaskBalancedBatchNorm2d, layers.TaskBalancedBatchNorm3d)
_WEIGHTED = (layers.WeightedBatchNorm1d, layers.WeightedBatchNorm2d, layers.WeightedBatchNorm3d)
_OVER_RANKS = (layers.RankBatchNorm1d, layers.RankBatchNorm2d, layers.RankBatchNorm3d)  # "bn" with sync=True
# A new layer gets these of the one it replaces, if it takes them.
_OF_THE_OLD = ("eps", "momentum", "affine", "track_running_stats", "device", "dtype")

_NEEDS_NO_LAYOUT = "tbbn_needs_no_layout"  # an attribute of a converted model and of its norms

# A norm is a class for each of BatchNorm1d, 2d and 3d, or one class that replaces all three.
_Classes = type[nn.Module] | tuple[type[nn.Module], ...]
_BUILT_IN: dict[str, tuple[_Classes, str]] = {
    "bn": (_PLAIN, "batch norm"),
    "in": (comparison.InstanceNorm, "instance norm"),
    "gn": (comparison.GroupNorm, "group norm"),
    "sn": (comparison.SwitchableNorm, "switchable norm: a learnt mix of instance, layer and batch statistics"),
    "brn": (comparison.BatchRenorm, "batch renormalisation"),
    "cn": (comparison.ContinualNorm, "continual norm: group norm, then batch norm"),
    "tbbn": (_BALANCED, "task-balanced batch norm"),
    "adab2n": (AdaptiveBalancedNorm, "adaptive balance of batch norm"),
    "weighted": (_WEIGHTED, "batch norm with one set of statistics that weights every task equally"),
}
for _name, (_norm, _description) in _BUILT_IN.items():
    # Importance-weighted batch norm has no splits: of the options it has batch norm's.
    NORMS.register(_name, _norm, _description, options_of(_PLAIN) if _norm is _WEIGHTED else None)


def convert(
    module: nn.Module,
    norm: str = "tbbn",
    *,
    skip: Skip = (),
    sync: bool = False,
    process_group: Any = None,
    **options: Any,
) -> nn.Module:
    """Replace every batch norm in ``module`` by ``norm``, in place; return the module (or its replacement).

    Weights, buffers, hooks, attributes, training mode, device and dtype are kept; a batch norm used in several places stays one
    object. A batch norm class with a forward of its own keeps that forward (see :func:`tbbn.register_converter`).

    Args:
        module: any model.
        norm: the name of the new norm.
        skip: the layers to leave as they are: names or patterns (``"head.*"``), classes, of the layer or of a module around it,
            modules themselves, or functions of a layer's name and the layer.
        sync: take the statistics over the rows of all ranks ("bn", "tbbn", "weighted"); what replaces SyncBatchNorm always does.
        process_group: the ranks that ``sync`` is about, if not all.
        options: passed to the new layers: ``convert(model, "gn", groups=8)``.

    >>> type(convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1]).__name__
    'TaskBalancedBatchNorm2d'
    """
    check_module("convert", module)
    options = checked_options(f"norm {norm!r}", NORMS.options(norm), options)
    if sync or process_group is not None:
        options |= _sync_options(norm, process_group)
    skipped = skipped_modules(module, skip)
    new, norms = _replace(module, lambda old: _make(norm, old, options), skipped)
    if norm != "bn":
        warn_of_unchanged(module, norms, skipped)
    _mark(new, norms > 0 and not any(isinstance(m, layers.BalancedNorm) for m in new.modules()))
    return new


def revert(module: nn.Module) -> nn.Module:
    """Replace the layers made by :func:`convert` by plain batch norm, in place: to deploy, to export, to share.

    To train on with the model, revert a copy: ``revert(copy.deepcopy(model))``. A layer that had a class of its own gets it back.
    Outputs in eval mode and the ``state_dict`` stay the same. Raises for a norm that is not batch norm in eval mode.
    """

    def plain(old: nn.Module) -> nn.Module:
        if type(old) in _PLAIN or getattr(old, "is_batch_norm_in_eval", False) or own_class(old) is type(old):
            return _make("bn", old, {})
        name = old.norm.__name__ if isinstance(old, ForeignNorm) else type(old).__name__
        raise UserError(f"revert: {name} is not batch norm in eval mode and cannot become one.")

    check_module("revert", module)
    new = _replace(module, plain)[0]
    _mark(new, False)
    return new


def check_module(function: str, module: Any) -> None:
    if isinstance(module, list | tuple) and any(isinstance(each, nn.Module) for each in module):
        raise TypeError(
            f"{function}: the first argument must be the model, an nn.Module, got a {type(module).__name__}; "
            "put several models into one: torch.nn.ModuleList([...])."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"{function}: the first argument must be the model, an nn.Module, got {module!r:.60}.")


def _mark(module: nn.Module, needs_no_layout: bool) -> None:
    """Note whether :func:`convert` gave the module norms that need no layout, so that ``balance`` has nothing to do.

    The norms are marked for a ``balance`` of a part of the module, the module for one whose norms are replaced later.
    """
    for each in module.modules():
        vars(each).pop(_NEEDS_NO_LAYOUT, None)
        if needs_no_layout and (each is module or is_norm(each)):
            vars(each)[_NEEDS_NO_LAYOUT] = True


def needs_no_layout(module: nn.Module) -> bool:
    """Whether :func:`convert` gave the module, or one inside it, norms that need no layout."""
    return any(_NEEDS_NO_LAYOUT in vars(each) for each in module.modules())


def _replace(
    module: nn.Module, make: Callable[[nn.Module], nn.Module], skipped: Container[nn.Module] = ()
) -> tuple[nn.Module, int]:
    """The module with its norms replaced, and their number."""
    # Make all layers before replacing any: an error leaves the model unchanged.
    made = {m: make(m) for m in module.modules() if m not in skipped and is_norm(m)}
    for parent in [*module.modules(), *made.values()]:
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
        _replace_in_collections(parent, made)
    return made.get(module, module), len(made)


def _replace_in_collections(parent: nn.Module, made: Mapping[Any, nn.Module]) -> None:
    """Replace layers that a module also holds in a list, tuple or dict of its own, from which its forward may call them."""
    for name, held in list(vars(parent).items()):
        if not isinstance(held, list | tuple | dict):
            continue
        values = held.values() if isinstance(held, dict) else held
        if not any(isinstance(value, nn.Module) and value in made for value in values):
            continue  # it may be of a class that refuses changes
        if isinstance(held, dict):
            held.update({k: made[v] for k, v in held.items() if isinstance(v, nn.Module) and v in made})
        else:
            new = [made.get(value, value) if isinstance(value, nn.Module) else value for value in held]
            if isinstance(held, list):
                held[:] = new
            elif type(held) is tuple:
                vars(parent)[name] = tuple(new)


def is_norm(module: nn.Module) -> bool:
    """Whether :func:`convert` would replace this module, or refuse it."""
    return isinstance(module, AnyBatchNorm) or _registered(module) is not None


def _registered(module: nn.Module) -> Entry[Any] | None:
    """The registered norm that ``module`` is a layer of."""
    for entry in NORMS.registered().values():
        classes: tuple[Any, ...] = entry.value if isinstance(entry.value, tuple) else (entry.value,)
        for cls in classes:
            if isinstance(module, cls) and type(module).forward is cls.forward:
                return entry
    return None


def own_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class that :func:`revert` gives back to a layer; None: plain batch norm."""
    if isinstance(layer, ForeignNorm):
        return layer.own
    cls = type(layer)
    if cls in _PLAIN or not isinstance(layer, AnyBatchNorm) or is_made(layer) or "is_batch_norm_in_eval" in vars(cls):
        return None
    entry = _other_norm(layer)
    return None if entry is not None and entry.origin == BUILT_IN else cls


def _other_norm(layer: nn.Module) -> Entry[Any] | None:
    entry = _registered(layer)
    return None if entry is None or entry.value is _PLAIN else entry


def _classes(norm: str) -> tuple[type[nn.Module], ...]:
    entry = NORMS.get(norm)
    return entry if isinstance(entry, tuple) else (entry,)


@functools.cache
def _check_class(norm: str, cls: Any, options: frozenset[str]) -> None:
    """Refuse a plugin's class that cannot be a norm with these options."""
    if not issubclass(cls, nn.Module):
        raise UserError(f"{NORMS.place(norm)}: must be derived from torch.nn.Module, got {cls.__name__}.")
    for name, called, given, wanted in (
        (
            "__init__",
            (None, 8),
            (*_OF_THE_OLD, *options),
            "(self, num_features), and may take batch norm's arguments",
        ),
        ("forward", (None, None), (), "(self, x)"),
    ):
        function = getattr(cls, name)
        if function is nn.Module.forward:
            raise UserError(f"{NORMS.place(norm)}: has no function forward(self, x).")
        missing = function is nn.Module.__init__  # which takes anything here, and refuses it when called
        got = inspect.signature(function)
        try:
            if missing:
                raise TypeError
            got.bind(*called, **{key: None for key in given if key in got.parameters})
        except TypeError:
            # Inherited functions are torch's: a plugin's author looks for the class.
            is_own = not missing and getattr(function, "__module__", None) == cls.__module__
            where = NORMS.place(norm, function if is_own else None)
            raise UserError(
                f"{where}: must take {name}{wanted}; any other argument needs a default. "
                f"Got {'none' if missing else f'{name}{got}'}."
            ) from None


def _make(norm: str, old: nn.Module, options: dict[str, Any]) -> nn.Module:
    """A layer of kind ``norm`` that replaces ``old`` and shares its parameters and buffers."""
    classes: tuple[Any, ...] = _OVER_RANKS if norm == "bn" and options.get("sync") else _classes(norm)
    if NORMS.entry(norm).origin != BUILT_IN:
        for cls in classes:
            _check_class(norm, cls, frozenset(options))
    cls = classes[_dims(old) - 1] if len(classes) == 3 else classes[0]
    if isinstance(old, AnyLazyNorm):
        return _make_lazy(cls, old, options)
    if "forward" in vars(old):  # it would go on running on the old layer
        raise UserError(
            f"convert: the forward of a {type(old).__name__} was replaced on the object itself; undo that first, put it into "
            "a class, or leave the layer out: tbbn.convert(..., skip=[...])."
        )
    own = own_class(old)
    target = cls if own is None else own if cls in _PLAIN else combine(own, cls)
    if type(old) is target and not options:
        return old
    is_synced = isinstance(old, nn.SyncBatchNorm) or (isinstance(old, layers.PlannedNorm) and old.sync)
    if is_synced and cls not in _PLAIN:
        options = _sync_options(norm, old.process_group) | options
    shared = {
        "momentum": getattr(old, "momentum", 0.1),
        "track_running_stats": getattr(old, "track_running_stats", True),
    }
    if hasattr(old, "eps"):  # a norm of a plugin need have neither of these
        shared["eps"] = old.eps
    if hasattr(old, "weight"):
        shared["affine"] = old.weight is not None
    if getattr(cls, "own_momentum", False):
        del shared["momentum"]
    tensors = (getattr(old, "weight", None), getattr(old, "running_mean", None), *old.parameters(), *old.buffers())
    tensor = next((t for t in tensors if t is not None and t.is_floating_point()), None)
    shared |= {"device": getattr(tensor, "device", None), "dtype": getattr(tensor, "dtype", None)}
    accepted = _accepted(cls)
    channels = old.num_channels if isinstance(old, nn.GroupNorm) else getattr(old, "num_features", None)
    if channels is None:
        raise UserError(
            f"convert: a {type(old).__name__} does not tell its number of channels; set self.num_features in its __init__, or "
            "convert a new network."
        )
    new = cls(channels, **{k: v for k, v in shared.items() if k in accepted} | options)
    if "_parameters" not in vars(new):
        raise UserError(f"{NORMS.place(norm, cls.__init__)}: __init__ must call super().__init__().")
    kept = _asked_otherwise(old, options)
    if NORMS.entry(norm).origin != BUILT_IN:
        _check_shapes(norm, old, new, kept)
    if not issubclass(cls, _PLAIN):
        new.__dict__["norm_dims"] = _dims(old)
    everything = own is not None or is_made(old) or _other_norm(old) is None
    return carry(old, new, target, everything, own=kept)


def _check_shapes(norm: str, old: nn.Module, new: nn.Module, kept: Container[str]) -> None:
    """Refuse a plugin's layer whose parameters have not the shape of those it takes: its forward expects its own."""
    for name in _TAKEN:
        its, taken = getattr(new, name, None), getattr(old, name, None)
        if isinstance(its, Tensor) and isinstance(taken, Tensor) and name not in kept and its.shape != taken.shape:
            raise UserError(
                f"{NORMS.place(norm)}: its {name} has shape {tuple(its.shape)}, but the replaced layer's, which it takes, has "
                f"{tuple(taken.shape)}: use that shape, and {name}.view(...) in forward, or another name."
            )


def _asked_otherwise(old: Any, options: dict[str, Any]) -> set[str]:
    """Parameters and buffers that an option gives the new layer, and ``old`` has not, or takes from it."""
    names: set[str] = set()
    has_weight = getattr(old, "weight", None) is not None
    if options.get("affine", has_weight) != has_weight:
        names |= {"weight", "bias"}
    tracks = getattr(old, "track_running_stats", True)
    if options.get("track_running_stats", tracks) != tracks:
        names |= {"running_mean", "running_var", "num_batches_tracked"}
    if options.get("zero_variance") and not _has_seen_batches(old):
        names.add("running_var")
    return names


def _has_seen_batches(layer: nn.Module) -> bool:
    mean, var, count = (getattr(layer, name, None) for name in ("running_mean", "running_var", "num_batches_tracked"))
    if mean is None or var is None or mean.is_meta:
        return False
    # A state dict of before torch 0.4.1 has statistics without their count.
    return bool(count) or bool(mean.any()) or bool((var != 1).any())


def _sync_options(norm: str, process_group: Any) -> dict[str, Any]:
    if norm != "bn" and not issubclass(_classes(norm)[-1], layers.PlannedNorm):
        raise UserError(
            f"convert: norm {norm!r} does not take its statistics over ranks, as sync=True and SyncBatchNorm do; "
            "use 'bn', 'tbbn' or 'weighted'."
        )
    return {"sync": True, "process_group": process_group}


def _make_lazy(cls: type[nn.Module], old: AnyLazyNorm, options: dict[str, Any]) -> nn.Module:
    """A lazy layer, as ``old``: it takes its number of channels from the first batch."""
    settings = ("eps", "momentum", "affine", "track_running_stats")
    changed = any(name in options and options[name] != getattr(old, name) for name in settings)
    if changed or (cls not in _PLAIN and not issubclass(cls, layers.PlannedNorm)):
        raise UserError(
            f"convert: {type(old).__name__} does not know its channels yet, so it takes neither this norm nor other settings; "
            "run one batch through the model first."
        )
    lazy = type(f"Lazy{cls.__name__}", (AnyLazyNorm, cls), {"cls_to_become": cls, "__module__": cls.__module__})
    new = lazy(old.eps, old.momentum, old.affine, old.track_running_stats)
    if options:
        ready = cls(1, **options)
        for name in ("options", "output_statistics", "sync", "process_group"):
            setattr(new, name, getattr(ready, name))
    return carry_lazy(old, new)


def _dims(module: nn.Module) -> int:
    cls: type[nn.Module] = getattr(type(module), "cls_to_become", type(module))  # the class a lazy module will have
    for dims, plain in enumerate(_PLAIN, start=1):
        if issubclass(cls, plain):
            return dims
    return getattr(module, "norm_dims", 2)


def _accepted(cls: type[nn.Module]) -> set[str]:
    """The keyword arguments of a norm's constructor, including those it passes on to its bases."""
    return set(keyword_arguments(cls))
