"""Transfer the parameters, buffers, attributes, child modules and hooks of a replaced layer to the new one."""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

from torch import nn

from tbbn.nn.private import WrappedHook

_STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_PLAIN = vars(nn.BatchNorm1d(1))
TORCH_ATTRIBUTES = vars(nn.Module())  # torch's own attributes of a module: containers, hooks, the training flag
_ADDED = "_added_by_convert"  # the attributes that a norm adds to batch norm's; the next conversion drops them


def is_made(layer: nn.Module) -> bool:
    """Whether ``tbbn.convert`` made this layer."""
    return _ADDED in vars(layer)


def carry(
    old: nn.Module, new: nn.Module, cls: type[nn.Module], everything: bool, own: Collection[str] = ()
) -> nn.Module:
    """Make ``new``, a layer just built, the successor of ``old``: set its class to ``cls`` and give it what ``old`` has.

    ``new`` keeps the settings of its norm, parameters and buffers that ``old`` lacks, and those named in ``own``.
    ``everything=False`` leaves the attributes of ``old`` behind, for a norm whose attributes are its settings.
    """
    before, after = vars(old), dict(vars(new))
    dropped = {*before.get(_ADDED, ()), *_runtime_names(old)}
    added = {*after, *after["_parameters"], *after["_buffers"]} - {*_PLAIN, *_STATE}
    if everything:
        added -= {*before, *before["_parameters"], *before["_buffers"]} - dropped
        after = {k: v for k, v in before.items() if k not in dropped and k != _ADDED} | after
    after |= {
        k: before[k] for k in TORCH_ATTRIBUTES if k in before
    }  # hooks stay the same objects, so that their handles still work
    for container in ("_parameters", "_buffers"):
        after[container] = _merge(old, new, container, dropped, everything, own)
    after["_modules"] = {**vars(new)["_modules"], **(before["_modules"] if everything else {})}
    names = before["_non_persistent_buffers_set"] | vars(new)["_non_persistent_buffers_set"]
    after["_non_persistent_buffers_set"] = names & set(after["_buffers"])
    if type(new) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        after[_ADDED] = frozenset(added)
    new.__class__ = cls
    new.__dict__.update(after)
    _rebind_hooks(old, new)
    return new


def carry_lazy(old: nn.Module, new: nn.Module) -> nn.Module:
    """Copy the state, hooks and attributes of a lazy layer to another, which has lazy hooks of its own."""
    after = vars(new)
    after["_parameters"], after["_buffers"] = vars(old)["_parameters"], vars(old)["_buffers"]
    for name, value in vars(old).items():
        if name not in after:
            after[name] = value
        elif name.endswith("_hooks"):
            given = {key: hook for key, hook in value.items() if getattr(_inner(hook), "__self__", None) is not old}
            after[name].update({key: _rebound(hook, old, new) for key, hook in given.items()})
    return new.train(old.training)


def _inner(hook: Any) -> Any:
    return hook.hook if isinstance(hook, WrappedHook) else hook


def _runtime_names(layer: nn.Module) -> set[str]:
    """Attributes that the forward of this package's norms sets: those that their classes declare with a default."""
    ours = [cls for cls in type(layer).__mro__ if cls.__module__.startswith("tbbn.")]
    return {name for name in vars(layer) if any(name in vars(cls) for cls in ours)}


def _merge(
    old: nn.Module, new: nn.Module, container: str, dropped: set[str], everything: bool, own: Collection[str]
) -> dict[str, Any]:
    before, after = vars(old)[container], dict(vars(new)[container])
    for name in after.keys() - own:
        if name in before and name not in dropped:
            after[name] = before[name]
        elif name in _STATE and hasattr(old, name):
            if getattr(old, name) is None:  # set by hand, not registered
                after[name] = None
            else:  # computed by a parametrization or a pruning hook
                del after[name]
    if everything:
        after |= {k: v for k, v in before.items() if k not in after and k not in dropped and k not in _STATE}
    return after


def _rebind_hooks(old: nn.Module, new: nn.Module) -> None:
    """Make hooks that hold the old layer, as a bound method or for ``with_module=True``, hold the new one."""
    for name in TORCH_ATTRIBUTES:
        if not name.endswith("_hooks"):
            continue
        hooks = vars(new)[name]
        changed = {key: _rebound(hook, old, new) for key, hook in hooks.items()}
        if any(changed[key] is not hook for key, hook in hooks.items()):
            vars(new)[name] = type(hooks)(changed)


def _rebound(hook: Any, old: nn.Module, new: nn.Module) -> Any:
    if isinstance(hook, WrappedHook):
        inner = _rebound(hook.hook, old, new)
        return (
            hook
            if inner is hook.hook and not hook.with_module
            else WrappedHook(inner, new if hook.with_module else None)
        )
    if getattr(hook, "__self__", None) is old and hasattr(hook, "__func__"):
        return types.MethodType(hook.__func__, new)
    return hook
