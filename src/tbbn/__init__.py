"""Task-balanced batch norm for class-incremental learning.

Three lines put it into a training loop of your own::

    model = tbbn.convert(model)                                                  # once
    with tbbn.balance(model, current=48, memory=16, past_tasks=t):               # around the training forward
        loss = criterion(model(images), labels)                                  # rows [0, 48) are the new task
    model = tbbn.revert(model)                                                   # plain batch norm again, to deploy

Importing this package loads torch and nothing else; the bench (``tbbn run``) needs ``pip install tbbn[bench]``.
"""

from tbbn.norm import balance, convert, functional, penalty, revert, splits
from tbbn.norm.layers import (
    TaskBalancedBatchNorm1d,
    TaskBalancedBatchNorm2d,
    TaskBalancedBatchNorm3d,
    WeightedBatchNorm1d,
    WeightedBatchNorm2d,
    WeightedBatchNorm3d,
)
from tbbn.norm.variants import (
    AdaptiveBalancedNorm,
    BatchRenorm,
    ContinualNorm,
    GroupNorm,
    InstanceNorm,
    SwitchableNorm,
)

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBalancedNorm",
    "BatchRenorm",
    "ContinualNorm",
    "GroupNorm",
    "InstanceNorm",
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
    "penalty",
    "revert",
    "splits",
]
