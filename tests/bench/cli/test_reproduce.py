"""``tbbn reproduce`` from the command line."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from commandline import Capture, mistake

from tbbn.bench.cli import reproduce
from tbbn.bench.cli.common import EXIT_DIVERGED, EXIT_FAILED
from tbbn.bench.cli.main import main

TINY = (
    *("--data.name", "synthetic:4x12x4x8", "--data.tasks", "2", "--data.validation", "0", "--memory.budget", "8"),
    *("--backbone", "small", "--batch.size", "8", "--batch.augment", "none", "--keep", "last", "--device", "cpu"),
    *("--norm", "bn,tbbn", "--seeds", "2", "--quiet", "--lanes", "1"),
)


def test_a_table_is_run_resumed_and_printed_beside_the_papers(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "table1", "--scale", "0.0125", *TINY)  # 2 of 160 epochs
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith("SCALE 0.0125: a fraction of the epochs; not the paper's experiment. Table 1")
    rows = [line.split()[2:5] for line in said.out.splitlines() if line.startswith("ft + ")]
    assert rows == [["bn", "2", "35.41"], ["tbbn", "2", "38.46"]], "the rows that were asked for"
    assert "4 runs, 0 finished" in said.err and "4 to do, " in said.err and "MB on disk" in said.err
    folder = Path("runs/table1-cifar100-keep-last-scale-0.0125")
    assert sorted(file.parent.name for file in folder.glob("*/record.json")) == [
        "ft-bn-0", "ft-bn-1", "ft-tbbn-0", "ft-tbbn-1",
    ]  # fmt: skip

    assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == said.out and "4 runs, 4 finished" in again.err

    shown = ("reproduce", "table1", "--scale", "0.0125", *TINY, "--from", str(folder))
    assert main(shown) == 0 and capsys.readouterr().out == said.out
    assert main((*shown, "--norm", "tbbn", "--seeds", "1,")) == 0
    assert [line.split()[2:4] for line in capsys.readouterr().out.splitlines() if line.startswith("ft + ")] == [
        ["tbbn", "1"]
    ]
    assert main((*shown, "--format", "latex")) == 0
    latex = capsys.readouterr().out
    assert r"\caption{SCALE 0.0125: a fraction" in latex and "\n% A_f = (1/T)" in latex
    assert main((*shown, "--format", "csv")) == 0
    made = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["method + norm"] for row in made] == ["ft + bn", "ft + tbbn"] and made[0]["A_l paper"] == "78.79"
    assert 0 <= float(made[1]["A_f ours"]) <= 100 and len(made[0]) >= 2 + 3 * 4
    assert main((*shown, "--memory.budget", "7")) == 0 and "No finished run" in capsys.readouterr().out
    assert main(("reproduce", "fig-errors", *shown[2:])) == 0
    assert Path(capsys.readouterr().out.split()[-1]).stat().st_size > 1000


def test_one_run_lies_where_it_would_lie_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("reproduce", "table1", *TINY, "--norm", "bn", "--seeds", "0,", "--train.epochs", "1")) == 0
    assert [file.parent.name for file in Path("runs").rglob("record.json")] == ["ft-bn-0"]


def test_a_failure_in_one_table_is_in_the_exit_code_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter((0, EXIT_FAILED, EXIT_DIVERGED, 0))
    monkeypatch.setattr(reproduce, "train", lambda *args, **settings: (next(codes), []))
    assert main(("reproduce", "table3", "--quiet", "--out", str(tmp_path))) == EXIT_FAILED
    assert list(codes) == [], "the other tables are still made"


def test_a_dry_run_trains_nothing(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("reproduce", "table1", *TINY, "--dry-run")) == 0
    said = capsys.readouterr()
    assert said.out == "" and "4 to do, " in said.err and not Path("runs").exists()


def test_the_toy_figure_is_drawn_in_seconds(tmp_path: Path, capsys: Capture) -> None:
    assert main(("reproduce", "fig-toy", "--out", str(tmp_path))) == 0
    assert "TBBN" in capsys.readouterr().out and (tmp_path / "fig-toy.png").exists()


def test_mistakes_are_one_line(capsys: Capture) -> None:
    assert "unknown table or figure 'tabel1'" in mistake(capsys, "reproduce", "tabel1")
    assert "--scale must be above 0" in mistake(capsys, "reproduce", "table1", "--scale", "2")
    assert "unknown norm of table2 'gn'" in mistake(capsys, "reproduce", "table2", "--norm", "gn")
    assert "no run here" in mistake(capsys, "reproduce", "table2", "--from", "/nonexistent")
