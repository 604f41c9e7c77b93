"""``tbbn verify`` finds damaged and forged runs, and passes intact ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tinyrun import tiny

from tbbn.bench import files
from tbbn.bench.cli.main import main
from tbbn.bench.engine import Event, Stepped
from tbbn.bench.engine.record import new_record
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs import record as rec
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved, save_failure
from tbbn.bench.runs.verify import verify
from tbbn.errors import UserError

FILES = {
    "config.toml",
    "record.json",
    "predictions.safetensors",
    "checkpoint.safetensors",
    "checkpoint.previous.safetensors",
    "task-2.safetensors",
    "task-3.safetensors",
}


@pytest.fixture
def done(tmp_path: Path) -> Path:
    run_saved(tiny(norm__name="tbbn"), tmp_path)
    return tmp_path


def problems(directory: Path, *, evaluate: bool = True) -> dict[str, str]:
    return {f.subject: f.problem for f in verify(directory, evaluate=evaluate) if f.problem}


def test_an_intact_run_has_no_problem(done: Path) -> None:
    findings = verify(done)
    assert {f.problem for f in findings} == {""}
    kinds = ("accuracy", "error types", "task-IL accuracy", "calibrated accuracy", "evaluation")
    by_task = {f"{what} after task {t}" for what in kinds for t in (1, 2, 3)}
    before = {"class order", "task sizes", "data", "skipped images", "splits", "exemplars", "epochs in the history"}
    subjects = {f.subject for f in findings if not f.not_checked}
    assert subjects == {*FILES, *by_task, *before, "metrics", "status", "predictions"}
    assert {file.name for file in done.iterdir()} == FILES | {".lock", "log.jsonl"}


def test_a_run_that_failed_before_it_began_has_no_problem(tmp_path: Path) -> None:
    record = new_record(tiny())
    record.status, record.message = "failed", "OSError: no space"
    save_failure(record, tmp_path)
    assert (tmp_path / "record.json").exists() and problems(tmp_path) == {}


@pytest.mark.parametrize("events", [1, 4, 6, 8])
def test_a_run_stopped_at_any_event_of_its_first_task_has_no_problem(events: int, tmp_path: Path) -> None:
    asked = iter(range(10**6))
    record = run_saved(tiny(), tmp_path, stop=lambda: next(asked) == events - 1)
    assert record.status == "interrupted" and not record.accuracy
    assert problems(tmp_path) == {}
    found, _ = checkpoint.read(tmp_path / checkpoint.NEWEST)
    # Three batches of 8 of the 24 images make an epoch: its three steps, and its end.
    assert found["position"] == {"task": 0, "phase": 0, "epoch": events // 4, "step": events % 4}
    assert len(record.history) == events // 4


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_stopped_in_a_second_phase_has_no_problem(steps: int, tmp_path: Path) -> None:
    seen: list[Event] = []

    def watch(event: Event) -> None:
        seen.extend([event] if isinstance(event, Stepped) and event.phase == "balanced" else [])

    config = tiny(method__name="eeil", method__balanced_epochs=2, batch__size=16)
    record = run_saved(config, tmp_path, on_event=watch, stop=lambda: len(seen) >= steps)
    assert record.status == "interrupted" and len(record.accuracy) == 1
    found, _ = checkpoint.read(tmp_path / checkpoint.NEWEST)
    assert (found["position"]["task"], found["position"]["phase"]) == (1, 1)
    assert problems(tmp_path) == {}


def rewritten(directory: Path, **values: object) -> None:
    """Change values of a record, with a matching checksum."""
    file = directory / "record.json"
    tree = {**json.loads(file.read_text()), **values, "sha256": "0" * 64}
    text = json.dumps(tree, indent=1)
    file.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))


def test_a_forged_accuracy_is_found(done: Path) -> None:
    accuracy = json.loads((done / "record.json").read_text())["accuracy"]
    accuracy[1][0] = 0.97
    rewritten(done, accuracy=accuracy)
    states = {"checkpoint.safetensors", "checkpoint.previous.safetensors", "task-3.safetensors"}
    assert set(problems(done)) == {"accuracy after task 2", "metrics", *states}


def test_forged_metrics_are_found(done: Path) -> None:
    metrics = json.loads((done / "record.json").read_text())["metrics"]
    for forged in ({**metrics, "final_accuracy": 0.99}, {**metrics, "more": 0.5}, {}, [], 1):
        rewritten(done, metrics=forged)
        assert set(problems(done)) == {"metrics"}


def test_a_record_may_lack_a_metric_that_its_version_did_not_have(done: Path) -> None:
    metrics = json.loads((done / "record.json").read_text())["metrics"]
    del metrics["forgetting_past"]
    rewritten(done, metrics=metrics)
    assert problems(done) == {}


def test_an_edited_record_is_found_and_the_wrong_value_named(done: Path) -> None:
    tree = json.loads((done / "record.json").read_text())
    tree["errors"][2]["C->C"] += 1
    (done / "record.json").write_text(json.dumps(tree, indent=1) + "\n")
    found = problems(done)
    assert set(found) == {"record.json", "error types after task 3", "checkpoint.safetensors"}
    assert found["record.json"] == "damaged: its content does not match its checksum."
    del tree["sha256"]
    (done / "record.json").write_text(json.dumps(tree))
    assert problems(done)["record.json"] == "damaged: its checksum is missing."


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_flipped_bit_in_any_file_is_noticed_and_the_file_named(
    name: str, run_once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_once, tmp_path / "run")
    file = tmp_path / "run" / name
    good = file.read_bytes()
    n, header = len(good), int.from_bytes(good[:8], "little") if name.endswith(".safetensors") else 0
    places = {0, 7, 8, 9, 30, header // 2, header + 7, header + 8, n // 3, n // 2, n - 70, n - 2, n - 1}
    for i, place in enumerate(sorted(places)):
        bad = bytearray(good)
        bad[place] ^= 1 << i % 8
        file.write_bytes(bad)
        assert name in problems(tmp_path / "run", evaluate=False), (place, i % 8)
    assert main(["verify", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'run'}: FAILED (") and f"\n  {name}: " in said
    file.write_bytes(good)
    assert problems(tmp_path / "run") == {}


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("once")
    run_saved(tiny(norm__name="tbbn"), directory)
    return directory


def test_a_damaged_record_is_refused_in_one_line_and_restored(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = done / "record.json"
    first = load_record(done)
    file.write_text(file.read_text().replace('"status": "finished"', '"status": "finishes"'))
    assert main(["show", str(done)]) == 2
    assert "record.json: damaged: its content does not match its checksum. To restore it" in capsys.readouterr().err
    file.unlink()
    again = run_saved(tiny(norm__name="tbbn"), done)
    assert (again.accuracy, again.history, again.weights) == (first.accuracy, first.history, first.weights)
    assert problems(done) == {}


def test_a_run_killed_between_two_files_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(norm__name="tbbn")
    real = files.write_atomic

    class Killed(BaseException):
        pass

    writes = 0

    def counted(*arguments: object) -> None:
        nonlocal writes
        writes += 1
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rec, "write_atomic", counted)
    monkeypatch.setattr(checkpoint, "write_atomic", counted)
    run_saved(config, tmp_path / "whole", every=0.0)
    monkeypatch.undo()
    looked_at = 0
    for n in range(1, writes + 1):
        directory = tmp_path / str(n)
        left = iter(range(n))

        def killed(*arguments: object, left: object = left) -> None:
            if next(left, None) is None:  # type: ignore[call-overload]
                raise Killed  # also when the run tries to write its record
            real(*arguments)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(rec, "write_atomic", killed)
            patched.setattr(checkpoint, "write_atomic", killed)
            if n < writes:
                with pytest.raises(Killed):
                    run_saved(config, directory, every=0.0)
        if (directory / "record.json").exists():
            looked_at += 1
            assert problems(directory, evaluate=False) == {}
        if n % 9 == 0:
            assert run_saved(config, directory).status == "finished"
            assert problems(directory) == {}
    assert looked_at > 10


def test_changed_predictions_are_found(done: Path) -> None:
    file = done / "predictions.safetensors"
    predictions = {name: tensor.clone() for name, tensor in load_file(file).items()}
    predictions["task2"][:] = 0
    save_file(predictions, file)
    assert "accuracy after task 3" in problems(done)


def test_missing_and_short_predictions_are_found(done: Path) -> None:
    file = done / "predictions.safetensors"
    predictions = load_file(file)
    save_file({**predictions, "task1": torch.zeros(3, dtype=torch.int16)}, file)
    assert "3 predictions for" in problems(done)["accuracy after task 2"]
    save_file({"task0": predictions["task0"]}, file)
    assert "predictions for: task0" in problems(done)["predictions"]
    file.write_bytes(b"torn")
    assert problems(done)["predictions.safetensors"] == "damaged: its checksum is missing."
    file.unlink()
    assert "predictions for: none" in problems(done)["predictions"]


def test_a_changed_config_file_is_found(done: Path) -> None:
    file = done / "config.toml"
    file.write_text(file.read_text().replace("lr = 0.05", "lr = 0.5"))
    assert set(problems(done)) == {"config.toml"}


def test_a_config_file_with_the_data_in_another_place_is_whole(done: Path) -> None:
    """As a resume leaves it that was killed before it wrote the record; the next one writes the record."""
    file = done / "config.toml"
    file.write_text(file.read_text().replace('root = "data"', 'root = "/mnt/data"'))
    assert not problems(done)
    file.write_text(file.read_text() + "\n")
    assert set(problems(done)) == {"config.toml"}


def test_the_command_says_ok_or_failed(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(done)]) == 0
    said = capsys.readouterr().out
    assert ": OK (32 checks passed)\n" in said
    assert "\n  checked: record.json, predictions.safetensors, config.toml, " in said
    assert " accuracy after task 1, 2, 3, error types after task 1, 2, 3, " in said
    assert "\n  not checked: losses in the history (--retrain-task N trains task N again and compares)\n" in said
    assert main(["verify", str(done), "--no-evaluation"]) == 0
    said = capsys.readouterr().out
    assert ": OK (29 checks passed)\n" in said
    assert "\n  not checked: evaluation after task 1, 2, 3 (--no-evaluation)\n" in said
    with mock.patch("tbbn.bench.runs.verify.load_source", side_effect=UserError("digits: no data.")):
        assert main(["verify", str(done)]) == 0
    said = capsys.readouterr().out
    assert ": files OK, RESULTS NOT RECOMPUTED (" in said and "results against the labels (digits: no data)" in said
    (done / "config.toml").write_text("seed = 'x'")
    assert main(["verify", str(done)]) == 1
    assert ": FAILED (" in capsys.readouterr().out


def test_missing_data_hides_no_problem(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (done / "config.toml").write_text("seed = 'x'")
    with mock.patch("tbbn.bench.runs.verify.load_source", side_effect=UserError("digits: no data.")):
        assert main(["verify", str(done)]) == 1
    assert ": FAILED (1 of " in capsys.readouterr().out
