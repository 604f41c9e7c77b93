"""A run whose data lie elsewhere now: it is resumed, checked and looked at as before."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import TINY, Capture, interrupted, mistake

from tbbn import register_dataset
from tbbn.bench.cli.main import main
from tbbn.bench.data import loading
from tbbn.bench.runs.recipe import RECIPE
from tbbn.bench.runs.record import load_record
from tbbn.errors import UserError
from tbbn.plugins import temporary

PLACED = ("--data", "placed", *TINY[2:], "--quiet")


@pytest.fixture(autouse=True)
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A data set in a file of the folder ``here``."""
    monkeypatch.chdir(tmp_path)

    with temporary():

        @register_dataset("placed")
        def placed(root: Path) -> Any:
            if not (root / "placed.pt").exists():
                raise UserError(f"placed: nothing under {root}.")
            return torch.load(root / "placed.pt")

        source = loading.load("synthetic:4x12x4x8")
        Path("here").mkdir()
        parts = tuple((part.images, part.labels) for part in (source.train, source.test))
        torch.save(parts, "here/placed.pt")
        yield


def test_a_moved_run_is_resumed_and_checked_where_it_is_now(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ("run", *PLACED, "--norm", "tbbn", "--name", "whole")
    assert main((*whole, "--data.root", "here")) == 0
    interrupted(("run", *PLACED, "--norm", "tbbn", "--name", "x", "--data.root", "here"), monkeypatch)
    Path("here").rename("there")
    capsys.readouterr()
    assert "nothing under here" in mistake(capsys, "resume", "runs/x", "--quiet")
    assert main(("resume", "runs/x", "--quiet", "--data.root", "there")) == 0
    resumed, straight = load_record(Path("runs/x")), load_record(Path("runs/whole"))
    assert resumed.weights == straight.weights and resumed.config["data"]["root"] == "there"
    assert main(("verify", "runs/x", "--retrain-task", "2")) == 0  # the record knows the new place

    Path("there").rename("elsewhere")
    capsys.readouterr()
    assert main(("verify", "runs/x")) == 0 and "RESULTS NOT RECOMPUTED" in capsys.readouterr().out
    for command in ("verify", "drift", "slots"):
        more = ("--retrain-task", "2") if command == "verify" else ()
        assert main((command, "runs/x", *more, "--data.root", "elsewhere")) == 0, capsys.readouterr()
    assert "FAILED" not in capsys.readouterr().out
    with monkeypatch.context() as without_onnx:
        exporting = import_module("tbbn.bench.interchange.export")
        without_onnx.setattr(exporting, "_write_onnx", lambda scores, images, file: file.write_bytes(b"onnx"))
        without_onnx.setattr(exporting, "find_spec", lambda name: None if name == "onnxruntime" else object())
        assert main(("export", "runs/x", "--out", "out", "--data.root", "elsewhere")) == 0
    assert "test images" in capsys.readouterr().out, "not random ones"
    assert main(("report", "runs/x", "runs/whole")) == 0  # one row: they are the same run
    assert "1 of the 2 runs repeat the config and seed of another" in capsys.readouterr().out


def test_the_same_command_with_other_data_root_goes_on(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run", *PLACED, "--name", "x")
    interrupted((*words, "--data.root", "here"), monkeypatch)
    Path("here").rename("there")
    words = (*words, "--data.root", "there", "--data.download", "false")
    assert main((*words, "--dry-run")) == 0
    assert "0 finished and 1 unfinished runs, which would be kept and resumed" in capsys.readouterr().out
    assert main(words) == 0 and load_record(Path("runs/x")).status == "finished"
    capsys.readouterr()
    assert "another config (seed = 0 there, 1 now)" in mistake(capsys, *words, "--seed", "1")


def test_the_place_may_be_edited_in_the_config_file(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(("run", *PLACED, "--name", "x", "--data.root", "here"), monkeypatch)
    Path("here").rename("there")
    file = Path("runs/x/config.toml")
    edited = file.read_text().replace('root = "here"', 'root = "there"').replace("download = true", "download = false")
    assert edited.count("there") == edited.count("download = false") == 1
    file.write_text(edited)
    assert main(("resume", "runs/x", "--quiet")) == 0 and main(("verify", "runs/x")) == 0
    assert load_record(Path("runs/x")).run_config.data.download is False


def test_runs_of_a_moved_sweep_that_never_started_find_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(("run", *PLACED, "--seeds", "2", "--name", "x", "--data.root", "here"), monkeypatch)
    assert Path("runs/x", RECIPE).exists() and not Path("runs/x/ft-bn-1").exists()
    Path("here").rename("there")
    assert main(("resume", "runs/x", "--quiet", "--data.root", "there")) == 0
    assert load_record(Path("runs/x/ft-bn-1")).status == "finished"


def test_other_data_of_the_same_name_are_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(("run", *PLACED, "--name", "x", "--data.root", "here"), monkeypatch)
    Path("other").mkdir()
    parts = torch.load("here/placed.pt")
    torch.save(tuple((255 - images, labels) for images, labels in parts), "other/placed.pt")
    Path("fewer").mkdir()
    torch.save(tuple((images[::2], labels[::2]) for images, labels in parts), "fewer/placed.pt")
    before = Path("runs/x/record.json").read_bytes()
    capsys.readouterr()
    said = mistake(capsys, "resume", "runs/x", "--quiet", "--data.root", "other")
    assert "runs/x: was trained on different data than placed in other (mean: " in said
    assert "set --data.root to the folder of the original data" in said
    assert Path("runs/x/record.json").read_bytes() == before
    said = mistake(capsys, "resume", "runs/x", "--quiet", "--data.root", "fewer")
    assert "was trained on different data than placed in fewer" in said, "not that the checkpoint is to be deleted"
    for command in ("drift", "slots"):
        assert "was trained on different data" in mistake(capsys, command, "runs/x", "--data.root", "other")
    assert main(("resume", "runs/x", "--quiet", "--data.root", "here")) == 0
    assert main(("verify", "runs/x", "--data.root", "other")) == 1
    assert "data: the record says" in capsys.readouterr().out
