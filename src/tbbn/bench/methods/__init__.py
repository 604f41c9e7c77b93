"""Class-incremental methods, one file each. Importing this package registers the built-in ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tbbn.bench.methods import (  # noqa: F401  each registers its method; add the file of a new method here
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
    """The method with this name and these hyper-parameters. Raises for an unknown hyper-parameter or an invalid value."""
    kind = METHODS.get(name)
    check_class(name, kind)
    with METHODS.blame(name):
        made: Method = kind(**checked_options(f"method {name!r}", METHODS.options(name), options or {}))
    check_signatures(name, made)
    return made


__all__ = ["Losses", "Method", "Phase", "TaskContext", "method"]
