"""Log curves for TensorBoard: ``tensorboard --logdir runs``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from tbbn.bench.loggers.base import RunInfo, Scalars, missing

FOLDER = "tensorboard"  # in the folder of the run
_PLACE = ("task", "phase", "epoch")  # the position of an epoch; all other values are curves


class TensorBoard:
    """Losses and learning rate over epochs, accuracies and metrics over tasks, and the config as text."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing("tensorboard", "tensorboard") from None
        self.make_writer = SummaryWriter

    def start(self, run: RunInfo) -> None:
        folder = run.directory / FOLDER
        if not run.resumed:
            shutil.rmtree(folder, ignore_errors=True)
        self.writer = self.make_writer(str(folder))
        rows = (f"| {key} | {value} |" for key, value in run.config.items())
        self.writer.add_text("config", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def epoch(self, number: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name not in _PLACE:
                self.writer.add_scalar(name if name == "lr" else f"loss/{name}", value, number)
        self.writer.flush()

    def task(self, epoch: int, number: int, accuracy: Sequence[float], metrics: Scalars) -> None:
        for i, value in enumerate(accuracy):
            self.writer.add_scalar(f"accuracy/task {i + 1}", value, number + 1)
        self.writer.add_scalar("accuracy/mean", sum(accuracy) / len(accuracy), number + 1)
        for name, value in metrics.items():
            self.writer.add_scalar(f"metrics/{name}", value, number + 1)
        self.writer.flush()

    def finish(self, status: str, metrics: Scalars) -> None:
        self.writer.add_text("status", status)
        self.writer.close()
