"""Class-incremental methods. Importing this package registers the built-in ones, each in a file of its own."""

from __future__ import annotations

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
from tbbn.bench.methods.contract import check_class, check_signatures
from tbbn.options import checked_options
from tbbn.registry import METHODS


def method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """The method of that name with these hyper-parameters; an unknown one or a wrong value is an error."""
    kind = METHODS.get(name)
    check_class(name, kind)
    with METHODS.blame(name):
        made: Method = kind(**checked_options(f"method {name!r}", METHODS.options(name), options or {}))
    check_signatures(name, made)
    return made


__all__ = ["Losses", "Method", "Phase", "TaskContext", "method"]
