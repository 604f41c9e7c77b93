"""Which layers of a model :func:`tbbn.convert` leaves alone: those the caller skips, and frozen batch norms."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tbbn.errors import UserError

Rule = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
Skip = Rule | Iterable[Rule]


def skipped_modules(model: nn.Module, skip: Skip) -> set[nn.Module]:
    """The modules that a rule of ``skip`` matches, and all modules inside them."""
    rules: list[Any] = [skip] if isinstance(skip, str | type | nn.Module) or callable(skip) else list(skip)
    # A shared module has several names.
    named = list(model.named_modules(remove_duplicate=False))
    found: set[nn.Module] = set()
    for rule in rules:
        matched = {module for name, module in named if _matches(rule, name, module)}
        if not matched and isinstance(rule, str | type | nn.Module):
            kind = f"a {rule.__name__}" if isinstance(rule, type) else f"the {type(rule).__name__} given"
            what = f"has a name that matches {rule!r}" if isinstance(rule, str) else f"is {kind}"
            raise UserError(f"convert: skip: no module of {type(model).__name__} {what}; see model.named_modules().")
        found |= {inner for module in matched for inner in module.modules()}
    return found


def _matches(rule: Any, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    if isinstance(rule, type):
        return isinstance(module, rule)
    if isinstance(rule, nn.Module):
        return module is rule
    if not callable(rule):
        raise TypeError(f"convert: skip takes names, patterns, classes, modules and functions, got {rule!r}.")
    return bool(rule(name, module))


def warn_of_unchanged(model: nn.Module, norms: int, skipped: set[nn.Module]) -> None:
    """Warn of frozen batch norms that were not replaced, or that there was nothing to replace."""
    frozen = Counter(type(m).__name__ for m in model.modules() if _is_frozen(m) and m not in skipped)
    left = ", ".join(f"{count} {name}" for name, count in frozen.items())
    if frozen:
        warnings.warn(f"convert: did not replace {left}, whose statistics are fixed.", stacklevel=3)
    elif not norms and not skipped:
        warnings.warn(f"convert: {type(model).__name__} has no batch norm; nothing was replaced.", stacklevel=3)


def _is_frozen(module: nn.Module) -> bool:
    """Whether it is torchvision's, timm's or detectron2's frozen batch norm. By name: none of them is imported here."""
    return type(module).__name__.startswith("FrozenBatchNorm")
