"""The loggers with their packages: what TensorBoard, Weights & Biases and MLflow hold after a run, and after a resume."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("filelock")  # the bench

from tbbn.bench.cli.main import main
from tbbn.bench.config import resolve
from tbbn.bench.engine.record import Record
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved

TINY = ("--data", "synthetic:4x12x4x8", "--data.tasks", "2", "--train.epochs", "2", "--memory.budget", "8")
TINY += ("--device", "cpu", "--threads", "1")


def train(out: Path, logger: str, *more: str) -> Record:
    assert (
        main(["run", *TINY, "--norm", "tbbn", "--out", str(out), "--name", "x", "--quiet", "--log", logger, *more]) == 0
    )
    return load_record(out / "x")


def expected(record: Record) -> dict[str, list[float]]:
    """The curves of a run, by name."""
    curves: dict[str, list[float]] = {"lr": [e["lr"] for e in record.history]}
    curves["loss/total"] = [e["total"] for e in record.history]
    for i in range(len(record.accuracy)):
        curves[f"accuracy/task {i + 1}"] = [row[i] for row in record.accuracy[i:]]
    return curves


def tensorboard_curves(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_curves_of_the_record(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    record = train(tmp_path, "tensorboard")
    curves = tensorboard_curves(tmp_path / "x")
    for name, values in expected(record).items():
        assert curves[name] == pytest.approx(values, rel=1e-6), name
    assert curves["metrics/final_accuracy"][-1] == pytest.approx(record.metrics["final_accuracy"])
    # Another run in the same folder replaces the curves.
    again = train(tmp_path, "tensorboard", "--seed", "1", "--overwrite")
    assert tensorboard_curves(tmp_path / "x")["loss/total"] == pytest.approx(expected(again)["loss/total"], rel=1e-6)


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: blocks of 32 KiB after a header of 7 bytes, as in a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too short for a header: padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            item = wandb_internal_pb2.Record()
            item.ParseFromString(whole)
            whole = b""
            yield item


def test_weights_and_biases_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("PROJECT", "mine")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    record = train(tmp_path, "wandb")
    (file,) = (tmp_path / "x").rglob("run-*.wandb")
    rows, names, project = [], set(), ""
    for item in wandb_records(file):
        if item.HasField("run"):
            project = item.run.project
            names |= {update.key for update in item.run.config.update}
        if item.HasField("history"):
            rows.append(
                {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in item.history.item}
            )
    assert project == "mine" and {"train.epochs", "norm.name"} <= names
    for name, values in expected(record).items():
        assert [row[name] for row in rows if name in row] == pytest.approx(values), name
    assert [row["epochs"] for row in rows if "lr" in row] == [1, 2, 3, 4]


def test_runs_in_lanes_have_a_run_of_weights_and_biases_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert (
        main(["run", *TINY, "--seeds", "2", "--lanes", "2", "--out", str(tmp_path), "--quiet", "--log", "wandb"]) == 0
    )
    assert len({file.parent.name.rpartition("-")[2] for file in tmp_path.rglob("run-*.wandb")}) == 2


def test_a_resumed_run_is_the_same_run_of_weights_and_biases_and_a_new_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = {"data": "synthetic:4x12x4x8", "data.tasks": 2, "train.epochs": 2, "memory.budget": 8}
    epochs = iter(range(100))
    run_saved(resolve(**settings), tmp_path, every=0, stop=lambda: next(epochs) > 2, log=("wandb",))

    def ids() -> list[str]:
        return [file.stem for file in sorted(tmp_path.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime)]

    run_saved(resolve(**settings), tmp_path, log=("wandb",))
    assert len(set(ids())) == 1 and load_record(tmp_path).status == "finished"
    run_saved(resolve(**settings), tmp_path, overwrite=True, log=("wandb",))
    assert len(set(ids())) == 2


@pytest.mark.filterwarnings("ignore")  # of MLflow about its own store
def test_mlflow_has_one_run_of_an_interrupted_and_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = resolve(
        **{"data": "synthetic:4x12x4x8", "data.tasks": 2, "train.epochs": 2, "memory.budget": 8, "norm": "tbbn"}
    )
    epochs = iter(range(100))
    first = run_saved(config, tmp_path / "x", every=0, stop=lambda: next(epochs) > 2, log=("mlflow",))
    assert first.status == "interrupted" and len(first.history) == 2
    record = run_saved(config, tmp_path / "x", log=("mlflow",))
    client = MlflowClient()
    (number,) = [e.experiment_id for e in client.search_experiments() if e.name == "tbbn"]
    (run,) = client.search_runs([number])
    assert run.info.status == "FINISHED" and run.info.run_name == "ft + tbbn, seed 0"
    assert run.data.params["norm.name"] == "tbbn" and run.data.tags["tbbn.status"] == "finished"
    for name, values in expected(record).items():
        curve = [metric.value for metric in client.get_metric_history(run.info.run_id, name)]
        assert curve == pytest.approx(values), name
