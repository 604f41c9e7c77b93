"""Class-incremental methods. Importing this package registers the built-in ones, each in a file of its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tbbn.bench.methods import (  # noqa: F401  each registers its method; a new one is a file and a name here
    afc,
    balaug,
    bic,
    derpp,
    eeil,
    er,
    ft,
    icarl,
    il2m,
    joint,
    lucir,
    podnet,
    ssil,
    wa,
)
from tbbn.bench.methods.base import Losses, Method, Phase, TaskContext, make_method
from tbbn.errors import UserError
from tbbn.registry import METHODS


def method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """The method of that name with these hyper-parameters."""
    kind = METHODS.get(name)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UserError(f"method {name!r} must be a class derived from tbbn.bench.methods.Method, got {kind!r:.60}.")
    if inspect.get_annotations(kind) and "__dataclass_fields__" not in vars(kind):
        raise UserError(f"method {name!r} has options, so its class needs @dataclass(frozen=True).")
    return make_method(name, kind, options or {})


__all__ = ["Losses", "Method", "Phase", "TaskContext", "make_method", "method"]
