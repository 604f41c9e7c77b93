"""Task-balanced batch norm for class-incremental learning.

Three lines put it into a training loop of your own::

    model = tbbn.convert(model)                                                  # once
    with tbbn.balance(model, current=48, memory=16, past_tasks=t):               # around the training forward
        loss = criterion(model(images), labels)                                  # rows [0, 48) are the new task
    model = tbbn.revert(model)                                                   # plain batch norm again, to deploy

Importing this package loads nothing, its first use torch alone; the bench (``tbbn run``) needs ``pip install tbbn[bench]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tbbn.bench.api import load, run, sweep
    from tbbn.nn import ReplayBatchSampler, balance, convert, functional, penalty, register_converter, revert, splits
    from tbbn.nn.adab2n import AdaptiveBalancedNorm
    from tbbn.nn.comparison import (
        BatchRenorm,
        ContinualNorm,
        GroupNorm,
        InstanceNorm,
        SwitchableNorm,
    )
    from tbbn.nn.modules import (
        TaskBalancedBatchNorm1d,
        TaskBalancedBatchNorm2d,
        TaskBalancedBatchNorm3d,
        WeightedBatchNorm1d,
        WeightedBatchNorm2d,
        WeightedBatchNorm3d,
    )
    from tbbn.registry import (
        register_augmentation,
        register_backbone,
        register_dataset,
        register_logger,
        register_method,
        register_norm,
    )

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBalancedNorm",
    "BatchRenorm",
    "ContinualNorm",
    "GroupNorm",
    "InstanceNorm",
    "ReplayBatchSampler",
    "SwitchableNorm",
    "TaskBalancedBatchNorm1d",
    "TaskBalancedBatchNorm2d",
    "TaskBalancedBatchNorm3d",
    "WeightedBatchNorm1d",
    "WeightedBatchNorm2d",
    "WeightedBatchNorm3d",
    "balance",
    "convert",
    "functional",
    "load",
    "penalty",
    "register_augmentation",
    "register_backbone",
    "register_converter",
    "register_dataset",
    "register_logger",
    "register_method",
    "register_norm",
    "revert",
    "run",
    "splits",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Import what a public name needs when it is first used: registering needs nothing, the layer torch alone."""
    if name not in (*__all__, "errors", "nn", "options", "plugins", "registry"):
        raise AttributeError(f"module 'tbbn' has no attribute {name!r}")
    if name.startswith("register_") and name != "register_converter":
        return getattr(import_module("tbbn.registry"), name)
    if name in ("load", "run", "sweep"):
        try:
            return getattr(import_module("tbbn.bench.api"), name)
        except ModuleNotFoundError as error:
            raise ImportError(f"tbbn.{name} needs {error.name}; pip install 'tbbn[bench]'") from error
    if name not in __all__:
        return import_module(f"tbbn.{name}")
    for home in map(import_module, ("tbbn.nn.modules", "tbbn.nn.comparison", "tbbn.nn.adab2n", "tbbn.nn")):
        globals().update({public: getattr(home, public) for public in __all__ if hasattr(home, public)})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
