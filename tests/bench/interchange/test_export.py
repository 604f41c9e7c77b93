"""``tbbn export``: files that hold the network, a card that says how to use it, and folders that are never half written."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import Capture, mistake
from tinyrun import tiny
from torch import nn

import tbbn
from tbbn.bench import files
from tbbn.bench.cli.main import main
from tbbn.bench.files import folder_writer
from tbbn.bench.interchange import export as exporting
from tbbn.bench.interchange.export import load_export
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved

FILES = ["README.md", "model.json", "model.onnx", "model.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_saved(tiny(norm__name="tbbn", method__name="lucir"), folder)
    return folder


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a few bytes instead of an ONNX file, and find no onnxruntime: an ONNX file takes seconds."""
    real = exporting.find_spec
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    monkeypatch.setattr(exporting, "_write_onnx", lambda scores, images, file: file.write_bytes(b"onnx"))


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_onnx_file_gives_the_scores_of_the_network(run: Path, tmp_path: Path, capsys: Capture) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    net = tbbn.load(run)[0].network()
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    loaded = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (scores,) = ReferenceEvaluator(loaded).run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(scores), net(images), rtol=1e-4, atol=1e-4)
    assert {node.domain for node in loaded.graph.node} == {""}, "operators of the standard alone"
    assert names(tmp_path / "out") == FILES


@pytest.mark.usefixtures("no_onnx")
def test_the_weights_load_as_the_same_network_with_plain_batch_norm(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    net, wanted = load_export(tmp_path / "out"), tbbn.load(run)[0].network()
    images = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(net(images), wanted(images)) and net.predict(images) == wanted.predict(images)
    norms = [type(layer) for layer in net.modules() if "Norm" in type(layer).__name__]
    assert set(norms) == {nn.BatchNorm2d}
    assert re.match(r"model\.safetensors: the same predictions as the network on 30 test images", found["checked"][0])
    assert re.match(r"model\.onnx: onnxruntime is not installed", found["not_checked"][0])
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o077


@pytest.mark.usefixtures("no_onnx")
def test_the_card_says_what_a_user_needs(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--task", "2"]) == 0
    card, record = (tmp_path / "out" / "README.md").read_text(), load_record(run)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["task_sizes"] == [2, 2] and about["classes"] == [str(c) for c in record.class_order[:4]]
    for line in (
        "| method | lucir |",
        "| norm in training | tbbn; plain batch norm in these files |",
        "| network | small, input 3x8x8 |",
        f"| {' | '.join(f'{100 * value:.1f}' for value in record.accuracy[1])} |",
        f"| 3 | {record.class_order[3]} | 2 |",
        "- Not checked: model.onnx: onnxruntime is not installed; pip install 'tbbn[export]'.",
    ):
        assert line in card.splitlines(), line
    assert "float32 (N, 3, 8, 8), values in [0, 1], RGB" in card and "over the whole run" not in card


@pytest.mark.usefixtures("no_onnx")
def test_the_metrics_of_a_whole_run_are_those_of_the_tables(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    lines, (a, b, c) = (tmp_path / "out" / "README.md").read_text().splitlines(), load_record(run).accuracy
    forgotten = (max(a[0], b[0]) - c[0] + b[1] - c[1]) / 3
    assert "| over the whole run | |" in lines and f"| A_f | {100 * sum(c) / 3:.2f} % |" in lines
    assert f"| F | {100 * forgotten:.2f} % |" in lines
    assert "- `F = (1/T) sum_{i<T} (max_{t<T} a[t,i] - a[T,i])`" in lines
    assert any(line.startswith("- a[t,i]: accuracy on task i") for line in lines)


@pytest.mark.usefixtures("no_onnx")
def test_norms_that_are_not_batch_norm_are_kept(tmp_path: Path) -> None:
    run_saved(tiny(norm__name="gn", data__stop_after=1, train__epochs=1), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert "kept: it is not batch norm in eval mode" in (tmp_path / "out" / "README.md").read_text()
    assert "GroupNorm" in {type(layer).__name__ for layer in load_export(tmp_path / "out").modules()}


@pytest.mark.usefixtures("no_onnx")
def test_weights_or_scores_that_differ_are_not_exported(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, wrong = exporting.load_export, load_record(run)

    def shaken(folder: Path) -> Any:
        net = real(folder)
        next(net.network.head.parameters()).mul_(-1)
        return net

    monkeypatch.setattr(exporting, "load_export", shaken)
    said = mistake(capsys, "export", str(run), "--out", str(tmp_path / "out"))
    assert re.search(r"model\.safetensors: \d+ of 30 predictions are those of the network, scores differ by", said)
    assert not list(tmp_path.iterdir())
    wrong.weights[-1] = "0" * 64
    monkeypatch.setattr(exporting, "load_record", lambda _: wrong)
    assert "the saved weights are not those of the record after task 3" in mistake(capsys, "export", str(run))


@pytest.mark.usefixtures("no_onnx")
def test_what_cannot_be_exported_is_one_line(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--task must be from 1 to 3, the tasks learnt, got 4" in mistake(capsys, "export", str(run), "--task", "4")
    assert "no run here" in mistake(capsys, "export", "nowhere")
    Path("mine").mkdir()
    Path("mine/notes.txt").touch()
    said = mistake(capsys, "export", str(run), "--out", "mine", "--overwrite")
    assert "mine: is not an export; choose another folder" in said and names(Path("mine")) == ["notes.txt"]
    assert main(["export", str(run)]) == 0 and names(Path("exports/tiny")) == FILES
    assert main(["export", str(run)]) == 0  # of the same run: replaced
    run_saved(tiny(seed=1, data__stop_after=1, train__epochs=1), "tiny")
    capsys.readouterr()
    said = mistake(capsys, "export", "tiny")
    assert "exports/tiny: holds the export of another run; choose another folder with --out, or add --overwrite" in said
    assert main(["export", "tiny", "--overwrite"]) == 0 and "seed 1" in Path("exports/tiny/README.md").read_text()
    capsys.readouterr()
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    said = mistake(capsys, "export", str(run))
    assert said == "tbbn: tbbn export needs onnx and onnxscript; pip install 'tbbn[export]'."


def test_a_task_whose_network_is_not_saved_is_named(tmp_path: Path, capsys: Capture) -> None:
    run_saved(tiny(save__tasks="none", train__epochs=1), tmp_path / "run")
    said = mistake(capsys, "export", str(tmp_path / "run"), "--task", "1")
    assert "the network after task 1 is not saved; --save.tasks all keeps it for every task" in said


def test_two_numbers_that_round_alike_may_change_places() -> None:
    wanted = torch.tensor([[1.0, 1.0 + 1e-5], [0.0, 5.0]])
    assert exporting._compared("x", wanted.flip(1)[:1], wanted[:1], 1e-3, "1 image").startswith("x: the same")
    with pytest.raises(tbbn.errors.UserError, match=r"x: 0 of 2 predictions are those of the network"):
        exporting._compared("x", torch.tensor([[1.0, 1.0], [5.0, 0.0]]), wanted, 1e-3, "2 images")
    with pytest.raises(tbbn.errors.UserError, match="scores differ by nan"):
        exporting._compared("x", wanted * float("nan"), wanted, 1e-3, "2 images")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_is_replaced_whole_and_leftovers_are_removed(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:  # a system that cannot exchange two folders
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    place = tmp_path / "deep" / "place"
    for text in ("old", "new"):
        with folder_writer(place) as folder:
            (folder / text).write_text(text)
        assert names(place) == [text] and names(place.parent) == ["place"]
    (place.parent / ".place-new-999999999").mkdir()
    (place.parent / f".place-new-{os.getppid()}").mkdir()  # of a process that is alive
    with pytest.raises(FileNotFoundError), folder_writer(place) as folder:
        (folder / "half" / "way").touch()
    assert names(place) == ["new"] and names(place.parent) == [f".place-new-{os.getppid()}", "place"]
    with pytest.raises(FileNotFoundError), folder_writer(tmp_path / "other" / "place") as folder:
        (folder / "half" / "way").touch()
    assert names(tmp_path) == ["deep"]
