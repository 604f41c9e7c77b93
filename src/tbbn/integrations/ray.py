"""Sweeps on a Ray cluster: ``tbbn sweep recipe.toml --engine ray --address auto``."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from tbbn.errors import UserError
from tbbn.integrations.cluster import Bundle, work


@dataclass(frozen=True, eq=False)
class RayJob:
    reference: Any

    def done(self) -> bool:
        return bool(ray.wait([self.reference], timeout=0)[0])

    def result(self) -> str:
        return ray.get(self.reference)

    def drop(self) -> None:
        """Do nothing: a worker that starts after a stop returns at once, and cancelling would interrupt a running one."""


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster that this process is connected to."""

    gpus: int
    most_cpus: int  # CPUs of the largest machine: a task that requests more would wait for ever

    def submit(self, bundle: Bundle) -> RayJob:
        needs = {"num_cpus": min(bundle.cpus, self.most_cpus), "num_gpus": int(bundle.on_gpu)}
        # No retries by Ray: the driver replaces lost workers, so that attempts are counted in one place.
        task = ray.remote(work).options(**needs, max_retries=0, name=f"tbbn {bundle.runs[0].config.label}")
        return RayJob(task.remote(bundle))


@contextmanager
def ray_cluster(address: str | None) -> Iterator[RayCluster]:
    """Connect to the cluster at ``address`` ("auto": one on this machine); without an address, start Ray on this machine."""
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        host, _, port = where.rpartition(":")
        if port.isdecimal() and "/" not in host:  # Ray itself would keep trying for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=where, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except OSError as error:  # also Ray's own error, a ConnectionError
        reason = (str(error).strip().splitlines() or ["no answer"])[0].rstrip(".")
        raise UserError(
            f"--address {where}: no Ray cluster there ({reason}); start one with ray start --head, or leave --address out."
        ) from error
    try:
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        yield RayCluster(int(ray.cluster_resources().get("GPU", 0)), max(1, *cpus))
    finally:
        ray.shutdown()
