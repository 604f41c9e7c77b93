"""Sweeps through submitit, whose local executor stands in for SLURM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from package import package

from tbbn.bench.cli.main import main
from tbbn.bench.engine import Event
from tbbn.bench.runs.pending import PendingRun, expand
from tbbn.bench.runs.recipe import Axes
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.sweep import run_all

package("submitit")

from tbbn.integrations.cluster import Bundle, run_on  # noqa: E402
from tbbn.integrations.slurm import LOGS, SlurmCluster, SlurmJob, Work, slurm_cluster  # noqa: E402

# Runs long enough to be at work when their first event is seen.
SETTINGS: dict[str, Any] = {
    "data.name": "synthetic:6x40x5x8",
    "data.tasks": 3,
    "train.epochs": 400,
    "memory.budget": 12,
}
SETTINGS |= {"device": "cpu", "threads": 1}


def pending(out: Path, seeds: int) -> list[PendingRun]:
    return expand([("test", SETTINGS)], Axes(norms=("tbbn",), seeds=tuple(range(seeds))), out)


def weights(runs: list[PendingRun]) -> list[list[str]]:
    return [load_record(run.directory).weights for run in runs]


def test_jobs_leave_the_records_of_a_local_sweep_and_a_stopped_sweep_goes_on(tmp_path: Path) -> None:
    here, there = pending(tmp_path / "here", 2), pending(tmp_path / "there", 2)
    run_all(here)
    seen: list[Event] = []
    with slurm_cluster(tmp_path / "there", {"timeout_min": 5}, cluster="local") as cluster:
        with pytest.raises(KeyboardInterrupt):
            run_on(cluster, there, on_event=lambda run, event: seen.append(event), stop=lambda: bool(seen))
        stopped = [load_record(run.directory).status for run in there if (run.directory / "record.json").exists()]
        assert "interrupted" in stopped
        records = run_on(cluster, there)
    assert [record.status for record in records] == ["finished"] * 2
    assert weights(there) == weights(here)
    assert list((tmp_path / "there" / LOGS).glob("*.out"))


def test_a_killed_job_is_sent_again(tmp_path: Path) -> None:
    here, there = pending(tmp_path / "here", 1), pending(tmp_path / "there", 1)
    run_all(here)
    jobs: list[SlurmJob] = []
    killed: list[
        SlurmJob
    ] = []  # once: submitit's local controller, asked again while it kills the job, leaves it alive

    class Remembers(SlurmCluster):
        def submit(self, bundle: Bundle) -> SlurmJob:
            jobs.append(super().submit(bundle))
            return jobs[-1]

    def kill_once(run: PendingRun, event: Event) -> None:
        if not killed and not jobs[0].done():
            killed.append(jobs[0])
            jobs[0].job.cancel()

    (record,) = run_on(Remembers(tmp_path / "there", {}, cluster="local"), there, on_event=kill_once)
    assert len(jobs) == 2 and record.status == "finished"
    assert weights(there) == weights(here)


def test_a_job_can_be_queued_again(tmp_path: Path) -> None:
    work = Work(Bundle((), (), 1, tmp_path, tmp_path, 1, False))
    assert work.checkpoint().function is work


def test_without_slurm_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--data", "synthetic:4x12x4x8", "--data.tasks", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--engine", "slurm", "--job", "partition=gpu"]) == 2
    assert "srun is not on this machine" in capsys.readouterr().err
