"""Sweeps on a SLURM cluster, through submitit: ``tbbn sweep recipe.toml --engine slurm --job partition=gpu``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit

from tbbn.errors import UserError
from tbbn.integrations.cluster import Bundle, work

LOGS = "slurm"  # the folder of job scripts and logs, under the runs' folder


@dataclass(frozen=True)
class Work:
    """A bundle as a job. If SLURM preempts it or its time runs out, it is queued again and resumes from the checkpoints."""

    bundle: Bundle

    def __call__(self) -> str:
        return work(self.bundle)

    def checkpoint(self) -> Any:
        return submitit.helpers.DelayedSubmission(self)


@dataclass(frozen=True, eq=False)
class SlurmJob:
    job: Any

    def done(self) -> bool:
        return bool(self.job.done())

    def result(self) -> str:
        return str(self.job.result())

    def drop(self) -> None:
        if self.job.state in ("PENDING", "REQUEUED"):
            self.job.cancel()


@dataclass(frozen=True)
class SlurmCluster:
    """A SLURM cluster; ``cluster="local"`` runs jobs on this machine."""

    folder: Path
    options: Mapping[str, Any]
    cluster: str = "slurm"
    gpus: int | None = None

    def submit(self, bundle: Bundle) -> SlurmJob:
        executor = submitit.AutoExecutor(self.folder / LOGS, cluster=self.cluster)
        gpus = {"gpus_per_node": 1} if bundle.on_gpu and self.cluster == "slurm" else {}
        given = {key if key in _SHARED else f"slurm_{key}": value for key, value in self.options.items()}
        executor.update_parameters(**{"name": "tbbn", "cpus_per_task": bundle.cpus, **gpus, **given})
        return SlurmJob(executor.submit(Work(bundle)))


_SHARED = ("name", "nodes", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")


@contextmanager
def slurm_cluster(folder: Path, options: Mapping[str, Any], cluster: str = "slurm") -> Iterator[SlurmCluster]:
    """The SLURM cluster that this machine belongs to."""
    if cluster == "slurm" and submitit.SlurmExecutor.affinity() < 0:
        raise UserError("--engine slurm needs SLURM: srun is not on this machine; log in where jobs are submitted.")
    yield SlurmCluster(folder, options, cluster)
