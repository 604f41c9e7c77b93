"""Runs as JSON and CSV: what is read back is what was measured, to the last bit."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from records import record

from tbbn.bench.report.export import runs_csv, runs_json

THIRD = 1 / 3
RUNS = {
    Path("a"): record([[0.1], [THIRD, 0.7]], seed=3, norm__name="gn", norm__groups=8),
    Path("=b"): record([[0.9]], "interrupted", data__name="a\x1b[31m\nb"),
}


def test_json_has_every_run_with_names_matrix_and_metrics() -> None:
    whole, broken = json.loads(runs_json(RUNS))
    assert {k: whole[k] for k in ("directory", "method", "norm", "data", "seed", "status")} == {
        "directory": "a", "method": "ft", "norm": "gn(groups=8)", "data": "digits", "seed": 3, "status": "finished",
    }  # fmt: skip
    assert whole["accuracy"] == [[0.1], [THIRD, 0.7]] and broken["accuracy"] == [[0.9]]
    assert whole["metrics"] == RUNS[Path("a")].metrics and whole["task_sizes"] == [2, 2]


def test_json_has_the_metrics_asked_for_in_their_order() -> None:
    whole, _ = json.loads(runs_json(RUNS, ("learning_accuracy", "final_accuracy")))
    assert list(whole["metrics"]) == ["learning_accuracy", "final_accuracy"]


def test_csv_has_a_row_a_run_and_a_column_for_each_entry_of_the_matrix() -> None:
    whole, broken = csv.DictReader(io.StringIO(runs_csv(RUNS)))
    assert [float(whole[f"a[{place}]"]) for place in ("1,1", "2,1", "2,2")] == [0.1, THIRD, 0.7]
    assert (broken["a[1,1]"], broken["a[2,1]"], broken["a[2,2]"]) == ("0.9", "", "")
    assert float(whole["final_accuracy"]) == RUNS[Path("a")].metrics["final_accuracy"]
    assert (whole["method"], whole["norm"], whole["data"], whole["seed"]) == ("ft", "gn(groups=8)", "digits", "3")
    assert broken["directory"] == "'=b", "a spreadsheet must not run it"
    assert broken["data"] == r"a\x1b[31m\nb", "nor a terminal"


def test_csv_has_the_metrics_asked_for_in_their_order() -> None:
    header = runs_csv(RUNS, ("forgetting_past", "final_accuracy")).splitlines()[0]
    names = "directory,label,method,norm,data,protocol,keep,scale,seed,class_order_seed,status"
    assert header.startswith(f"{names},forgetting_past,final_accuracy,seconds,")


def test_no_runs_are_no_rows() -> None:
    assert json.loads(runs_json({})) == [] and len(runs_csv({}).splitlines()) == 1


def test_json_has_a_line_for_each_value() -> None:
    lines = runs_json(RUNS).splitlines()
    assert lines[0] == "[" and lines[1] == " {" and lines[2] == '  "directory": "a",' and lines[-1] == "]"
