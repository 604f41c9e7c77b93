"""Runs on a cluster: bundles, lost workers, failed runs, mistakes and stopping. The cluster here is this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tbbn.bench.engine import Event, TaskEnded
from tbbn.bench.runs.pending import PendingRun, expand
from tbbn.bench.runs.recipe import RECIPE, Axes, recipe_text
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.sweep import run_all
from tbbn.errors import UserError
from tbbn.integrations.cluster import ATTEMPTS, BOARD, Bundle, run_on, work

TINY: dict[str, Any] = {
    "data.name": "synthetic:4x12x4x8",
    "data.tasks": 2,
    "train.epochs": 1,
    "memory.budget": 8,
    "device": "cpu",
}


def pending(out: Path, seeds: int = 3, **settings: Any) -> list[PendingRun]:
    layers = [("test", {**TINY, **{key.replace("__", "."): value for key, value in settings.items()}})]
    return expand(layers, Axes(seeds=tuple(range(seeds))), out)


def weights(runs: list[PendingRun]) -> list[list[str]]:
    return [load_record(run.directory).weights for run in runs]


@dataclass(eq=False)
class DoneJob:
    outcome: Callable[[], str]

    def done(self) -> bool:
        return True

    def result(self) -> str:
        return self.outcome()

    def drop(self) -> None: ...


class Here:
    """Does each bundle when it is submitted; ``lose`` loses the workers of the first few, before or after their work."""

    def __init__(self, gpus: int | None = 0, lose: int = 0, after_work: bool = False) -> None:
        self.gpus, self.lose, self.after_work = gpus, lose, after_work
        self.bundles: list[Bundle] = []

    def submit(self, bundle: Bundle) -> DoneJob:
        self.bundles.append(bundle)
        is_lost = len(self.bundles) <= self.lose
        said = work(bundle) if not is_lost or self.after_work else ""

        def outcome() -> str:
            if is_lost:
                raise RuntimeError("the node died\nwith many words")
            return said

        return DoneJob(outcome)


def test_records_are_those_of_a_local_sweep(tmp_path: Path) -> None:
    here, there = pending(tmp_path / "here"), pending(tmp_path / "there")
    run_all(here)
    seen: list[tuple[str, int]] = []
    records = run_on(
        Here(),
        there,
        on_start=lambda run: seen.append(("start", run.config.seed)),
        on_event=lambda run, event: seen.append((type(event).__name__, run.config.seed)),
        on_end=lambda run, record: seen.append((record.status, run.config.seed)),
        recipe=recipe_text([("test", TINY)], Axes(seeds=(0, 1, 2))),
    )
    assert [record.weights for record in records] == weights(here) == weights(there)
    assert [run.config.seed for run in there] == [seed for kind, seed in seen if kind == "finished"]
    of_one = [kind for kind, seed in seen if seed == 1]
    assert of_one[0] == "start" and of_one[-1] == "finished"
    assert of_one.count("TaskEnded") == of_one.count("EpochEnded") == 2 and "Stepped" in of_one
    assert (tmp_path / "there" / RECIPE).exists() and not (tmp_path / "there" / BOARD).exists()


def test_finished_runs_are_not_sent_out_again(tmp_path: Path) -> None:
    runs = pending(tmp_path)
    run_all(runs[:1])
    cluster = Here()
    ended: list[int] = []
    run_on(cluster, runs, on_end=lambda run, record: ended.append(run.config.seed))
    assert [run.config.seed for bundle in cluster.bundles for run in bundle.runs] == [1, 2]
    assert ended == [0, 1, 2]


@pytest.mark.parametrize("gpus", [0, 2, None])
def test_a_finished_sweep_asks_nothing_of_the_cluster(gpus: int | None, tmp_path: Path) -> None:
    runs = pending(tmp_path)
    run_all(runs)
    cluster = Here(gpus=gpus)
    assert [record.status for record in run_on(cluster, runs, lanes=None)] == ["finished"] * 3
    assert cluster.bundles == [] and not (tmp_path / BOARD).exists()


@pytest.mark.parametrize("after_work", [False, True], ids=["before", "after"])
def test_a_bundle_whose_worker_is_lost_goes_out_again(after_work: bool, tmp_path: Path) -> None:
    cluster = Here(lose=2, after_work=after_work)
    records = run_on(cluster, pending(tmp_path, seeds=1))
    assert [record.status for record in records] == ["finished"]
    assert len(cluster.bundles) == (1 if after_work else 3)  # what the worker finished before it was lost counts


def test_after_some_attempts_a_lost_run_has_failed(tmp_path: Path) -> None:
    cluster = Here(lose=99)
    (record,) = run_on(cluster, pending(tmp_path, seeds=1))
    assert (record.status, record.message) == ("failed", "its worker was lost (the node died)")
    assert len(cluster.bundles) == ATTEMPTS


def test_a_run_that_fails_is_tried_again_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tbbn.bench.methods.ft import FineTune

    loss, failed = FineTune.loss, []

    def once(self: FineTune, batch: Any, *rest: Any) -> Any:
        if batch.n_old_classes and not failed:
            failed.append(True)
            raise OSError("no space left")
        return loss(self, batch, *rest)

    run_all(pending(tmp_path / "here", seeds=1))
    monkeypatch.setattr(FineTune, "loss", once)
    cluster, tasks = Here(), []

    def note(run: PendingRun, event: Event) -> None:
        tasks.extend([event.task] if isinstance(event, TaskEnded) else [])

    (record,) = run_on(cluster, pending(tmp_path / "there", seeds=1), on_event=note)
    assert record.status == "finished" and len(cluster.bundles) == 2
    assert tasks == [0, 1]  # the first task was not learnt again
    assert record.weights == load_record(tmp_path / "here").weights


def test_a_run_that_always_fails_leaves_its_record_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tbbn.bench.engine.loop import Run

    first = Run.__init__

    def init(self: Run, config: Any, *rest: Any) -> None:
        if config.seed == 1:
            raise RuntimeError("no luck")
        first(self, config, *rest)

    monkeypatch.setattr(Run, "__init__", init)
    runs = pending(tmp_path)
    records = run_on(Here(), runs)
    assert [record.status for record in records] == ["finished", "failed", "finished"]
    assert "no luck" in load_record(runs[1].directory).message


def test_a_mistake_ends_the_sweep(tmp_path: Path) -> None:
    runs = [
        replace(run, config=replace(run.config, data=replace(run.config.data, name="folder:/nowhere")))
        for run in pending(tmp_path)
    ]
    cluster = Here()
    with pytest.raises(UserError, match="/nowhere"):
        run_on(cluster, runs, workers=1)
    assert len(cluster.bundles) == 1


def test_stopping_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    here, there = pending(tmp_path / "here", train__epochs=3), pending(tmp_path / "there", train__epochs=3)
    run_all(here)
    stopping: list[bool] = []

    class Stops(Here):
        def submit(self, bundle: Bundle) -> DoneJob:
            if self.bundles:  # the second run finds the wish to stop
                (bundle.board / "stop").touch()
                stopping.append(True)
            return super().submit(bundle)

    with pytest.raises(KeyboardInterrupt):
        run_on(Stops(), there, workers=1, stop=lambda: bool(stopping))
    assert load_record(there[0].directory).status == "finished"
    assert not there[2].directory.exists()
    assert [record.status for record in run_on(Here(), there)] == ["finished"] * 3
    assert weights(there) == weights(here)


def test_a_worker_saves_its_run_when_it_is_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tbbn.integrations import cluster

    monkeypatch.setattr(cluster, "_TALK", 0.0)
    (run,) = pending(tmp_path / "run", seeds=1, train__epochs=3)
    board = tmp_path / "board"
    board.mkdir()
    write = cluster.Board.write

    def write_and_stop(self: Any, number: int, event: Any) -> None:
        write(self, number, event)
        self.ask_to_stop()

    monkeypatch.setattr(cluster.Board, "write", write_and_stop)
    bundle = Bundle((run,), (0,), 1, board, Path.cwd(), 1, False)
    assert work(bundle) == ""
    assert load_record(run.directory).status == "interrupted"
    assert (run.directory / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("lanes", "gpus", "device", "sizes"),
    [
        (1, 0, "cpu", [1] * 7),
        (3, 2, "auto", [3, 3, 1]),
        (None, 2, "auto", [4, 3]),
        (None, 0, "auto", [1] * 7),
        (None, None, "auto", [1] * 7),
        (4, None, "auto", [4, 3]),
        (4, 0, "auto", [1] * 7),
    ],
)
def test_bundles(lanes: int | None, gpus: int | None, device: str, sizes: list[int], tmp_path: Path) -> None:
    cluster = Here(gpus=gpus, lose=99)
    run_on(cluster, pending(tmp_path, seeds=7, device=device), lanes=lanes)
    first = cluster.bundles[: len(sizes)]
    assert [len(bundle.runs) for bundle in first] == sizes
    assert all(bundle.lanes == (lanes if bundle.on_gpu else 1) for bundle in first)
    assert all(bundle.on_gpu == (gpus != 0 and device == "auto") for bundle in first)
