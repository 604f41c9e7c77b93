"""Log runs to Weights & Biases. Its environment variables apply: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline, ..."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tbbn.bench.loggers.base import RunInfo, Scalars, missing


class WeightsAndBiases:
    """One W&B run per run, grouped by sweep; a resumed run continues its W&B run."""

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise missing("wandb", "wandb") from None
        self.wandb: Any = wandb

    def start(self, run: RunInfo) -> None:
        # The id is kept in a file so that a resumed run finds it, even after a kill; a run that starts again gets a new one.
        known = run.directory / "wandb" / "run-id"
        if not run.resumed or not known.exists():
            known.parent.mkdir(exist_ok=True)
            known.write_text(secrets.token_hex(8))
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tbbn"),
            id=known.read_text().strip(),
            resume="allow",
            name=run.name,
            group=run.directory.parent.name,
            dir=str(run.directory.resolve()),
            config=dict(run.config),
            reinit="create_new",  # runs in lanes are active simultaneously
        )
        self.run.define_metric("epochs")
        self.run.define_metric("*", step_metric="epochs")

    def epoch(self, number: int, values: Mapping[str, Any]) -> None:
        losses = {k: v for k, v in values.items() if k not in ("task", "phase", "epoch", "lr")}
        named = {"lr": values["lr"], "task": values["task"] + 1, **{f"loss/{k}": v for k, v in losses.items()}}
        self.run.log({"epochs": number, **named})

    def task(self, epoch: int, number: int, accuracy: Sequence[float], metrics: Scalars) -> None:
        tasks = {f"accuracy/task {i + 1}": value for i, value in enumerate(accuracy)}
        self.run.log({"epochs": epoch, **tasks, **{f"metrics/{name}": value for name, value in metrics.items()}})

    def finish(self, status: str, metrics: Scalars) -> None:
        self.run.summary.update({"status": status, **metrics})
        self.run.finish(exit_code=0 if status in ("finished", "interrupted") else 1)
