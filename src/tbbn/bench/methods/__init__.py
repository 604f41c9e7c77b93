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
from tbbn.bench.methods.base import Losses, Method, Phase, TaskContext
from tbbn.errors import UserError
from tbbn.options import checked_options
from tbbn.registry import METHODS


def method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """The method of that name with these hyper-parameters; an unknown one or a wrong value is an error."""
    kind = METHODS.get(name)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UserError(f"method {name!r} must be a class derived from tbbn.bench.methods.Method, got {kind!r:.60}.")
    if inspect.get_annotations(kind) and "__dataclass_fields__" not in vars(kind):
        raise UserError(f"method {name!r} has options, so its class needs @dataclass(frozen=True).")
    with METHODS.blame(name):
        return kind(**checked_options(f"method {name!r}", METHODS.options(name), options or {}))


__all__ = ["Losses", "Method", "Phase", "TaskContext", "method"]
