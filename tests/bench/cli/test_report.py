"""``tbbn report``: formats, metrics, figures, pages and files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from commandline import Capture, files, mistake

from tbbn.bench.cli.main import main
from tbbn.bench.runs.record import load_record

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def report(runs: Path, capsys: Capture):
    def said(*words: str) -> str:
        assert main(["report", str(runs), *words]) == 0
        return capsys.readouterr().out

    return said


def test_text_markdown_and_latex_have_a_row_for_each_group(report) -> None:
    text = report()
    assert "ft + gn(groups=8)" in text and "±" in text
    assert "| ft + bn |" in report("--format", "md")
    latex = report("--format", "tex")
    assert latex == report("--format", "latex")
    assert r"\begin{tabular}{llrrrrrr}" in latex and r"$A_f$ \%" in latex and r"$\pm$" in latex and r"\textbf" in latex


def test_csv_and_json_have_every_run(report, runs: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(report("--format", "csv"))))
    entries = json.loads(report("--json"))
    assert report("--format", "json") == report("--json")
    assert len(rows) == len(entries) == 4
    for row, entry in zip(rows, entries, strict=True):
        record = load_record(entry["directory"])
        assert entry["accuracy"] == record.accuracy and entry["metrics"] == record.metrics
        assert float(row["a[2,1]"]) == record.accuracy[1][0]
        assert (row["method"], row["data"], row["seed"]) == ("ft", "synthetic:4x12x4x8", str(entry["seed"]))
    assert [(e["norm"], e["seed"]) for e in entries] == [("bn", 0), ("bn", 1), ("gn(groups=8)", 0), ("gn(groups=8)", 1)]


def test_a_folder_that_is_named_twice_counts_once(report, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    assert len(json.loads(report(runs.name, str(runs / ".." / runs.name), "--json"))) == 4


def test_the_metrics_asked_for_are_shown_in_that_order(report) -> None:
    header, *_ = report("--metrics", "A_l,FM").splitlines()
    assert header.split() == ["method", "+", "norm", "seeds", "A_l", "%", "FM", "%"]
    entries = json.loads(report("--metrics", "A_l,FM", "--json"))
    assert all(list(entry["metrics"]) == ["learning_accuracy", "forgetting_past"] for entry in entries)


def test_mistakes_are_one_line_and_leave_nothing(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    def wrong(*words: str) -> str:
        return mistake(capsys, "report", str(runs), *words)

    assert "unknown format 'texx'; choose one of: csv, json, latex, md, text." in wrong("--format", "texx")
    assert "unknown metric 'A_x'" in wrong("--metrics", "A_f,A_x")
    assert "--drift adds a section to a page; name the page: --html FILE" in wrong("--drift", "5")
    assert "unknown kind of figure 'pie'" in wrong("--plot", str(tmp_path / "x.png"), "--kind", "pie")
    assert wrong("--html", str(tmp_path / "x.txt")).endswith("x.txt'.")
    assert "--drift takes a number of images, at least 1, got 0." in wrong(
        "--html", str(tmp_path / "x.html"), "--drift", "0"
    )
    picture = ("--plot", str(tmp_path / "x.png"))  # could be drawn, but comes before what is wrong
    assert wrong(*picture, "--html", str(tmp_path / "x.txt")).endswith("x.txt'.")
    assert "got 0." in wrong(*picture, "--files", str(tmp_path / "all"), "--drift", "0")
    assert files(tmp_path) == []


def test_a_run_counts_once_and_is_drawn_when_asked(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "new" / "matrix.svg"
    words = ["report", str(runs), str(runs / "ft-bn-0"), "--json", "--plot", str(picture), "--kind", "matrix"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 4
    assert picture.read_text().startswith("<?xml") and f"figure: {picture}" in said.err


def test_a_page_and_all_its_files(report, tmp_path: Path) -> None:
    page, folder = tmp_path / "new" / "page.html", tmp_path / "files"
    report("--html", str(page), "--files", str(folder), "--drift", "4")
    assert page.read_text().startswith("<!doctype html>")
    figures = [
        f"{name}.{suffix}"
        for name in ("accuracy", "drift", "errors", "forgetting", "gain", "matrix")
        for suffix in ("png", "svg")
    ]
    tables = ["cost", "drift", "environment", "errors", "gain", "results", "runs", "settings", "shares"]
    assert files(folder) == sorted([*figures, *(f"{name}.{suffix}" for name in tables for suffix in ("csv", "tex"))])


def test_a_page_of_runs_of_the_paper_has_its_tables_beside_them(tmp_path: Path) -> None:
    run, page = REPOSITORY / "results" / "cifar100-table2" / "eeil-cn-0", tmp_path / "page.html"
    assert main(["report", str(run), "--html", str(page), "--files", str(tmp_path)]) == 0
    assert "Comparison with the paper" in page.read_text()
    (row,) = list(csv.reader((tmp_path / "paper.csv").read_text().splitlines()))[1:]
    assert row[:4] == ["eeil + cn", "1", "39.98", f"{100 * load_record(run).metrics['final_accuracy']:.1f}"]


def test_files_among_the_folders_are_left_out_with_a_note(runs: Path, capsys: Capture) -> None:
    picture = runs.parent / "fig-toy.png"  # tbbn reproduce fig-toy writes it there
    picture.write_bytes(b"")
    try:
        assert main(["report", str(picture), str(runs)]) == 0
        said = capsys.readouterr()
        assert said.err == f"not folders of runs, left out: {picture}\n" and "ft + " in said.out
        assert "no run here" in mistake(capsys, "report", str(picture))
    finally:
        picture.unlink()


def test_folders_keep_the_order_in_which_they_are_first_named(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    assert main(["report", runs.name, str(runs / "ft-bn-0"), "--json"]) == 0
    found = [entry["directory"] for entry in json.loads(capsys.readouterr().out)]
    assert found == sorted(found) and found[0] == f"{runs.name}/ft-bn-0"


def test_folders_are_shown_as_they_are_first_named(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    assert main(["report", runs.name, str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["directory"] == f"{runs.name}/ft-bn-0"
