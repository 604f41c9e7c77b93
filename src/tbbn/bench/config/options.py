"""The options of norms and methods, defaults included: a config writes them all, so that a later default changes no old run."""

from __future__ import annotations

from typing import Any

from tbbn.registry import BACKBONES, BUILT_IN, METHODS, NORMS

REGISTRIES = {"norm": NORMS, "method": METHODS}
# A norm takes these from the batch norm it replaces. In the backbones of this package every batch norm has these values.
BATCH_NORM = {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}


def default_options(kind: str, name: str, *, backbone: str = "small") -> dict[str, Any]:
    """Every option of a norm or method with its default.

    Empty for an unknown name: a record may be read without its plugin. In a backbone of another package each batch norm may
    have values of its own; an option that is not given then keeps them, and is not listed.

    >>> default_options("method", "ssil")
    {'kd': 1.0, 'temperature': 2.0, 'kd_last_task_only': False}
    """
    registry = REGISTRIES[kind]
    if name not in registry:
        return {}
    own = BACKBONES.entry(backbone).origin == BUILT_IN if backbone in BACKBONES else False
    found = {}
    for option, known in registry.options(name).items():
        if known.default is not None:
            found[option] = known.default
        elif kind == "norm" and own and option in BATCH_NORM:
            found[option] = BATCH_NORM[option]
    return found
