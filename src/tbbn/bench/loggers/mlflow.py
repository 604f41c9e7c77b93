"""Log runs to MLflow. Its environment variables apply: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ..."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tbbn.bench.loggers.base import RunInfo, Scalars, missing

_FOLDER_TAG = "tbbn.folder"  # by which a resumed run finds its earlier MLflow run
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}  # others: FAILED
_LONGEST = 500  # characters of a parameter's value that every store accepts


class MLflow:
    """One MLflow run per run: settings as parameters, losses over epochs, accuracies over tasks.

    Uses the client with an explicit run id instead of MLflow's active run, because runs in lanes are active simultaneously.
    """

    def __init__(self) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise missing("mlflow", "mlflow") from None
        self.make_client = MlflowClient

    def start(self, run: RunInfo) -> None:
        self.client = self.make_client()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tbbn")
        known = self.client.get_experiment_by_name(experiment)
        place = str(run.directory.resolve())
        number = self.client.create_experiment(experiment) if known is None else known.experiment_id
        wanted = f"tags.`{_FOLDER_TAG}` = '{_plain(place)}'"
        begun = self.client.search_runs([number], wanted, max_results=1) if run.resumed else []
        if begun:
            self.id = begun[0].info.run_id
            self.client.update_run(self.id, "RUNNING")
            return
        tags = {_FOLDER_TAG: _plain(place), "mlflow.runName": run.name, "tbbn.sweep": run.directory.parent.name}
        self.id = self.client.create_run(number, tags=tags).info.run_id
        for name, value in run.config.items():
            self.client.log_param(self.id, name, str(value)[:_LONGEST])

    def epoch(self, number: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name not in ("task", "phase", "epoch"):
                self._metric(name if name == "lr" else f"loss/{name}", value, number)

    def task(self, epoch: int, number: int, accuracy: Sequence[float], metrics: Scalars) -> None:
        for i, value in enumerate(accuracy):
            self._metric(f"accuracy/task {i + 1}", value, number + 1)
        for name, value in metrics.items():
            self._metric(f"metrics/{name}", value, number + 1)

    def _metric(self, name: str, value: float, step: int) -> None:
        self.client.log_metric(self.id, re.sub(r"[^\w./ -]", "_", name), value, step=step)

    def finish(self, status: str, metrics: Scalars) -> None:
        self.client.set_tag(self.id, "tbbn.status", status)
        self.client.set_terminated(self.id, _STATUS.get(status, "FAILED"))


def _plain(path: str) -> str:
    return path.replace("'", "_")  # MLflow's queries cannot escape a quote
