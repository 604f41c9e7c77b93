"""A record that was tampered with, or damaged, is found out; one that was not, is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tinyrun import tiny

from tbbn.cli import main
from tbbn.engine import run
from tbbn.engine.verify import verify
from tbbn.errors import UserError


@pytest.fixture
def done(tmp_path: Path) -> Path:
    run(tiny(norm__name="tbbn"), directory=tmp_path)
    return tmp_path


def problems(directory: Path) -> dict[str, str]:
    return {f.subject: f.problem for f in verify(directory) if f.problem}


def test_a_true_record_has_no_problem(done: Path) -> None:
    findings = verify(done)
    assert {f.problem for f in findings} == {""}
    assert {"accuracy after task 3", "error types after task 1", "metrics", "config.toml", "checkpoint"} <= {
        f.subject for f in findings
    }


def test_an_embellished_accuracy_is_found(done: Path) -> None:
    tree = json.loads((done / "record.json").read_text())
    tree["accuracy"][1][0] += 0.2
    (done / "record.json").write_text(json.dumps(tree))
    assert set(problems(done)) == {"accuracy after task 2", "metrics"}


def test_embellished_metrics_are_found(done: Path) -> None:
    tree = json.loads((done / "record.json").read_text())
    tree["metrics"]["final_accuracy"] = 0.99
    (done / "record.json").write_text(json.dumps(tree))
    assert set(problems(done)) == {"metrics"}


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
    with pytest.raises(UserError, match=r"predictions.safetensors: damaged"):
        verify(done)


def test_another_config_beside_the_record_is_found(done: Path) -> None:
    file = done / "config.toml"
    file.write_text(file.read_text().replace("lr = 0.05", "lr = 0.5"))
    assert set(problems(done)) == {"config.toml"}


def test_the_command_says_true_or_wrong(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(done)]) == 0
    assert ": true; " in capsys.readouterr().out
    (done / "config.toml").write_text("seed = 'x'")
    assert main(["verify", str(done)]) == 1
    assert ": wrong; " in capsys.readouterr().out


def test_resume_goes_on_with_what_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = iter(range(10**6))
    config = tiny(norm__name="tbbn")
    assert run(config, directory=tmp_path / "a", stop=lambda: next(asked) > 9).status == "interrupted"
    assert main(["resume", str(tmp_path), "--quiet", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["status"] == "finished"
    assert entry["metrics"] == run(config).metrics
