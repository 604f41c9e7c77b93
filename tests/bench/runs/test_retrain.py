"""Retraining a task gives the same result bit for bit, or says how it differs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import same
from tinyrun import finish, tiny

from tbbn.bench.cli.main import main
from tbbn.bench.engine import Run
from tbbn.bench.engine.phase import PhaseSettings
from tbbn.bench.runs import checkpoint, state
from tbbn.bench.runs.record import load_record, save_record
from tbbn.bench.runs.retrain import retrain
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError


def problems(directory: Path, task: int, **options: Any) -> dict[str, str]:
    return {f.subject: f.problem for f in retrain(directory, task, **options) if f.problem}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method__name": "eeil", "method__balanced_epochs": 2},
        {"method__name": "bic", "method__correction_epochs": 3},
        {"method__name": "podnet", "method__finetune_epochs": 2},
        {"method__name": "afc", "method__finetune_epochs": 1},
        {"method__name": "derpp"},
        {"method__name": "il2m"},
        {"method__name": "joint"},
        {"data__online": True, "norm__name": "adab2n"},
        {"data__validation": 0.2, "train__keep": "best", "train__momentum": 0.0},
    ],
    ids=lambda s: s.get("method__name", "-".join(s) or "ft"),
)
def test_every_retrained_task_is_identical(settings: dict[str, Any], tmp_path: Path) -> None:
    run_saved(tiny(**{"norm__name": "tbbn", **settings}), tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for task in range(3):
        found = retrain(tmp_path, task)
        assert {f.problem for f in found} == {""}
        wanted = {f"{what} after task {task + 1}, retrained" for what in ("weights", "accuracy")}
        assert wanted <= {f.subject for f in found}
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before  # nothing was written


def test_the_state_at_a_tasks_start_is_that_of_a_run_stopped_there(tmp_path: Path) -> None:
    config = tiny(method__name="lucir")
    run_saved(config, tmp_path)
    found, tensors = checkpoint.read(tmp_path / "task-3.safetensors")
    assert found["position"] == {"task": 2, "phase": 0, "epoch": 0, "step": 0}
    assert not any(name.startswith(("momentum", "previous", "best")) for name in tensors), "nothing is there twice"
    job = Run(config)
    state.restore(job, found, tensors, "test")
    stopped = finish(tiny(method__name="lucir", data__stop_after=2))
    assert same(job.network.state_dict(), stopped.network.state_dict())
    assert job.previous is not None and stopped.previous is not None
    assert same(job.previous.state_dict(), stopped.previous.state_dict())
    assert job.record.weights == stopped.record.weights and len(set(job.record.weights)) == 2


def test_a_different_training_is_found_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_saved(tiny(), tmp_path)
    real = PhaseSettings.lr_at
    monkeypatch.setattr(PhaseSettings, "lr_at", lambda self, epoch: real(self, epoch) * (1 + 1e-3 * epoch))
    for task in (0, 1, 2):  # the weights after the last one are in the newest checkpoint
        found = problems(tmp_path, task)
        said = found[f"weights after task {task + 1}, retrained"]
        assert said.startswith("they differ by up to ")
        assert said.endswith("; the environment is the same, so they should be equal.")
        assert ", first in epoch 2 of 2." in found[f"losses of task {task + 1}, retrained"]
    for name in ("task-3.safetensors", checkpoint.PREVIOUS):
        (tmp_path / name).unlink()
    assert problems(tmp_path, 1)["weights after task 2, retrained"].startswith("they differ; ")


def test_different_accuracies_are_found(tmp_path: Path) -> None:
    run_saved(tiny(), tmp_path)
    record = load_record(tmp_path)
    (true,) = record.accuracy[0]
    wrong = true - 0.25 if true > 0.5 else true + 0.25
    record.accuracy[0] = [wrong]
    save_record(record, tmp_path)
    apart = f"differs by up to 0.25: the record says [{wrong}], retrained: [{true}]."
    assert problems(tmp_path, 0) == {"accuracy after task 1, retrained": apart}


def test_a_changed_environment_is_named_as_the_likely_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_saved(tiny(), tmp_path)
    record = load_record(tmp_path)
    record.environment |= {"torch": "2.0", "device": "cuda"}
    record.weights[0] = "f" * 64
    save_record(record, tmp_path)
    said = problems(tmp_path, 0)["weights after task 1, retrained"]
    assert "results are bit-identical only in the same environment" in said
    assert f"device was cuda, is cpu, torch was 2.0, is {torch.__version__}" in said
    record.environment |= {"torch": torch.__version__, "device": "cpu"}
    record.resumed = [{"torch": "2.0"}]
    save_record(record, tmp_path)
    assert "resumed in another environment" in problems(tmp_path, 0)["weights after task 1, retrained"]
    # The file of task 2 no longer matches the record's weights after task 1.
    assert problems(tmp_path, 1)["task-2.safetensors"] == "its weights differ from the record's after task 1."


def test_a_retraining_that_diverges_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_saved(tiny(), tmp_path)
    monkeypatch.setattr(PhaseSettings, "lr_at", lambda *_: 1e30)
    assert problems(tmp_path, 1)["task 2, retrained"].startswith("diverged: the loss or a weight is not finite")


def test_a_task_file_takes_no_space_of_its_own(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {}, {"a": torch.zeros(3)}, keep_as="task-2.safetensors")
    assert (tmp_path / "task-2.safetensors").samefile(tmp_path / checkpoint.NEWEST)


def test_task_files_are_copied_where_hard_links_are_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    run_saved(tiny(), tmp_path)
    assert all((tmp_path / f"task-{n}.safetensors").stat().st_nlink == 1 for n in (2, 3))
    assert problems(tmp_path, 2) == {}


@pytest.mark.parametrize(
    ("kept", "limit", "files"), [("none", 2**30, 0), ("small", 2**30, 2), ("small", 100, 0), ("all", 100, 2)]
)
def test_which_networks_keep_task_files(
    kept: str, limit: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "SMALL", limit)
    run_saved(tiny(save__tasks=kept), tmp_path)
    assert len(list(tmp_path.glob("task-*"))) == files


def test_without_a_task_file_the_error_names_the_alternatives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_saved(tiny(save__tasks="none"), tmp_path)
    words = ["verify", str(tmp_path), "--retrain-task"]
    assert main([*words, "3"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"tbbn: {tmp_path / 'task-3.safetensors'}: the state at the start of task 3 was not saved. ")
    assert "Use --from-start to retrain tasks 1 to 3" in said and "--save.tasks all" in said
    assert main([*words, "1", "--json"]) == 0  # needs no file
    (entry,) = json.loads(capsys.readouterr().out)
    assert {"subject": "weights after task 1, retrained", "problem": "", "not_checked": ""} in entry["findings"]
    assert "losses in the history of other tasks" in {finding["subject"] for finding in entry["findings"]}
    assert main([*words, "3", "--from-start"]) == 0
    said = capsys.readouterr().out
    assert ": OK (" in said and "losses in the history" not in said  # of three tasks, all were retrained
    retrained = {f.subject for f in retrain(tmp_path, 2, from_start=True)}
    assert {f"weights after task {t}, retrained" for t in (1, 2, 3)} <= retrained


def test_mistakes_in_retraining_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_saved(tiny(data__stop_after=2), tmp_path / "a")
    run_saved(tiny(data__stop_after=2, seed=1), tmp_path / "b")
    for task in (0, 3):
        assert main(["verify", str(tmp_path / "a"), "--retrain-task", str(task)]) == 2
        assert f"the run has learnt tasks 1 to 2; cannot retrain task {task}." in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "a"), "--from-start"]) == 2
    assert "--from-start needs --retrain-task N." in capsys.readouterr().err
    (tmp_path / "b" / "task-2.safetensors").replace(tmp_path / "a" / "task-2.safetensors")
    with pytest.raises(UserError, match=r"is not this run's state at the start of task 2"):
        retrain(tmp_path / "a", 1)


def test_a_damaged_run_is_not_retrained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_saved(tiny(), tmp_path)
    file = tmp_path / "config.toml"
    file.write_text(file.read_text() + "\n")
    assert main(["verify", str(tmp_path), "--retrain-task", "1"]) == 1
    said = capsys.readouterr()
    assert "config.toml: damaged" in said.out and "retrained" not in said.out


def test_a_run_resumed_in_another_environment_records_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter(range(10**6))
    run_saved(tiny(), tmp_path, stop=lambda: next(asked) > 5)
    assert load_record(tmp_path).resumed == []
    monkeypatch.setattr("tbbn.bench.engine.record.platform.machine", lambda: "another")
    record = run_saved(tiny(), tmp_path)
    assert record.status == "finished" and [e["machine"] for e in record.resumed] == ["another"]
