"""Default values of the options of norms and methods.

A config contains every option, so that old configs keep their meaning if a default changes.
"""

from __future__ import annotations

from typing import Any

from tbbn.registry import BACKBONES, BUILT_IN, METHODS, NORMS

REGISTRIES = {"norm": NORMS, "method": METHODS}
# A norm takes these from the batch norm that it replaces. All batch norms in the built-in backbones have these values.
BATCH_NORM = {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}


def default_options(kind: str, name: str, *, backbone: str = "small") -> dict[str, Any]:
    """Every option of a norm or method with its default.

    Empty for an unknown name, so that a record can be read without its plugin. The batch norms of a plugin's backbone may have
    other values for the options in ``BATCH_NORM``; these options are then left out, so that the layers keep their values.

    >>> default_options("method", "ssil")
    {'kd': 1.0, 'temperature': 2.0, 'kd_last_task_only': False}
    """
    registry = REGISTRIES[kind]
    if name not in registry:
        return {}
    from_layer = BATCH_NORM if backbone in BACKBONES and BACKBONES.entry(backbone).origin == BUILT_IN else {}
    defaults = {
        o: from_layer.get(o) if known.default is None else known.default for o, known in registry.options(name).items()
    }
    return {option: default for option, default in defaults.items() if default is not None}
