"""Sweeps on a real Ray: two nodes, one of them killed; Ctrl-C; failed runs; the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from package import package

from tbbn.bench.cli.main import main
from tbbn.bench.engine import EpochEnded, Event, TaskEnded
from tbbn.bench.runs.pending import PendingRun, expand
from tbbn.bench.runs.recipe import Axes
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.sweep import run_all

package("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from tbbn.integrations.cluster import run_on  # noqa: E402
from tbbn.integrations.ray import ray_cluster  # noqa: E402

SETTINGS = {"data.name": "synthetic:6x40x5x8", "data.tasks": 3, "train.epochs": 4, "memory.budget": 12}
SETTINGS |= {"device": "cpu", "threads": 1}
WORDS = [word for key, value in SETTINGS.items() for word in (f"--{key}".replace(".name", ""), str(value))]


def pending(out: Path, seeds: int, **settings: Any) -> list[PendingRun]:
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return expand([("test", {**SETTINGS, **given})], Axes(norms=("tbbn",), seeds=tuple(range(seeds))), out)


def weights(runs: list[PendingRun]) -> list[list[str]]:
    return [load_record(run.directory).weights for run in runs]


@pytest.fixture(scope="module")
def nodes():
    """A cluster of a head without CPUs and one worker node with one CPU; more can be added."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1"])
def test_no_cluster_at_an_address(address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["sweep", *WORDS, "--engine", "ray", "--address", address, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"--address {address}: no Ray cluster there" in said and said.count("\n") == 1


def test_a_killed_node_costs_no_run(nodes: Cluster, tmp_path: Path) -> None:
    here, there = pending(tmp_path / "here", 3), pending(tmp_path / "there", 3)
    run_all(here)
    doomed = nodes.add_node(num_cpus=1)
    tasks: list[tuple[int, int]] = []

    def kill_a_node(run: PendingRun, event: Event) -> None:
        if isinstance(event, TaskEnded):
            tasks.append((run.config.seed, event.task))
            if len({seed for seed, _ in tasks}) == 2 and doomed in nodes.worker_nodes:  # both nodes are at work
                nodes.remove_node(doomed, allow_graceful=False)

    with ray_cluster(nodes.address) as cluster:
        records = run_on(cluster, there, on_event=kill_a_node)
    assert doomed not in nodes.worker_nodes
    assert [record.status for record in records] == ["finished"] * 3
    assert weights(there) == weights(here)
    assert sorted(tasks) == sorted(set(tasks))  # what was saved was not learnt again


def test_stopping_saves_every_run_and_the_same_call_goes_on(nodes: Cluster, tmp_path: Path) -> None:
    here, there = (pending(tmp_path / name, 2, train__epochs=300) for name in ("here", "there"))
    run_all(here)
    seen: list[Event] = []

    def is_epoch(event: Event) -> bool:  # after the first one there is something to save
        return isinstance(event, EpochEnded)

    with ray_cluster(nodes.address) as cluster:
        with pytest.raises(KeyboardInterrupt):
            run_on(
                cluster, there, on_event=lambda run, event: seen.append(event), stop=lambda: any(map(is_epoch, seen))
            )
        assert load_record(there[0].directory).status == "interrupted"
        assert (there[0].directory / "checkpoint.safetensors").exists() and not there[1].directory.exists()
        run_on(cluster, there)
    assert weights(there) == weights(here)


def test_runs_share_a_gpu_in_lanes(nodes: Cluster, tmp_path: Path) -> None:
    """Ray counts GPUs but does not look for them: here the runs find none and train on the CPU, in the lanes of one process."""
    here, there = (pending(tmp_path / name, 4, device="auto") for name in ("here", "there"))
    run_all(here)
    node = nodes.add_node(num_cpus=1, num_gpus=1)
    processes: set[str] = set()

    def look(run: PendingRun, event: Event) -> None:
        processes.update(file.name for file in (tmp_path / "there").glob(".board/*/*-*"))

    with ray_cluster(nodes.address) as cluster:
        assert cluster.gpus == 1
        run_on(cluster, there, lanes=4, on_event=look)
    nodes.remove_node(node)
    assert weights(there) == weights(here)
    assert len(processes) == 1


BROKEN_ONCE = """
from dataclasses import dataclass
from pathlib import Path
import tbbn
from tbbn.bench.methods.ft import FineTune

@tbbn.register_method("broken-once", "fails in the second task, the first time")
@dataclass(frozen=True)
class BrokenOnce(FineTune):
    def loss(self, batch, output, previous):
        mark = Path(__file__).with_suffix(".mark")
        if batch.n_old_classes and not mark.exists():
            mark.touch()
            raise OSError("a disk that comes back")
        return super().loss(batch, output, previous)
"""


def test_the_command_line_and_a_run_that_fails_once(
    nodes: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(BROKEN_ONCE)
    words = ["sweep", *WORDS, "--plugin", str(plugin), "--method", "ft,broken-once", "--out", str(tmp_path)]
    assert main([*words, "--name", "there", "--engine", "ray", "--address", nodes.address]) == 0
    said = capsys.readouterr()
    assert "broken-once + bn" in said.out and "run 2/2" in said.err and "task 3/3" in said.err
    assert main([*words, "--name", "here", "--quiet"]) == 0
    for name in ("ft-bn-0", "broken-once-bn-0"):
        one, other = load_record(tmp_path / "there" / name), load_record(tmp_path / "here" / name)
        assert one.weights == other.weights and one.environment == other.environment
    assert main(["verify", str(tmp_path / "there")]) == 0


def test_ctrl_c_in_a_terminal_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """The signal goes to all processes of the terminal: Ray's own, too, as it starts them here."""
    words = ["sweep", *WORDS, "--train.epochs", "2000", "--engine", "ray", "--out", str(tmp_path), "--name", "x"]
    command = [sys.executable, "-m", "tbbn", *words, "--seeds", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("run 1/2"))
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=120) == 130, line + rest
    assert "interrupted; run the same command again to resume" in rest
    begun = list(tmp_path.rglob("checkpoint.safetensors"))
    assert begun and all(load_record(file.parent).status == "interrupted" for file in begun)
