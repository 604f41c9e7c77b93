"""ONNX Runtime predicts what the network predicts, for every method and for norms of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("filelock")  # the bench

import tbbn
from tbbn.bench.cli.main import main
from tbbn.bench.interchange import export as exporting
from tbbn.errors import UserError

TINY = {"data": "synthetic:4x12x4x8", "data.tasks": 2, "train.epochs": 1, "memory.budget": 8, "device": "cpu"}
METHODS = [
    "ft",
    "eeil",
    "lucir",
    "ssil",
    "podnet",
    "afc",
    "icarl",
    "bic",
    "wa",
    "il2m",
    "er",
    "derpp",
    "balaug",
    "joint",
]
SHORT = {"eeil": "balanced_epochs", "bic": "correction_epochs", "podnet": "finetune_epochs", "afc": "finetune_epochs"}


def exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, norm: str) -> str:
    options = {f"method.{SHORT[method]}": 1} if method in SHORT else {}
    tbbn.run(method, norm, out=tmp_path / "run", quiet=True, **TINY, **options)
    (folder,) = (file.parent for file in (tmp_path / "run").rglob("record.json"))
    capsys.readouterr()
    assert main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_predicts_the_same_in_onnx_runtime(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = exported(tmp_path, capsys, method, "tbbn")
    assert "checked: model.onnx in ONNX Runtime: the same predictions as the network on 16 test images" in said
    assert "not checked" not in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", ["bn", "gn(groups=8)", "in", "cn(groups=8)", "sn", "brn", "adab2n", "weighted"])
def test_every_norm_does(norm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "checked: model.onnx in ONNX Runtime" in exported(tmp_path, capsys, "ft", norm)


@pytest.mark.filterwarnings("ignore")
def test_a_file_with_other_predictions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tbbn.run(out=tmp_path / "run", quiet=True, **TINY)
    (folder,) = (file.parent for file in (tmp_path / "run").rglob("record.json"))
    real = exporting._write_onnx

    def wrong(scores, images, file):  # type: ignore[no-untyped-def]
        scores.mean.add_(0.3)
        real(scores, images, file)

    monkeypatch.setattr(exporting, "_write_onnx", wrong)
    with pytest.raises(UserError, match=r"model\.onnx in ONNX Runtime: \d+ of 16 predictions are those of the network"):
        exporting.export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
