"""``tbbn list``, ``show`` and ``doctor``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from commandline import TINY, Capture, mistake

import tbbn
from tbbn.bench.cli.main import main
from tbbn.bench.runs.record import load_record


@pytest.mark.parametrize("what", ["methods", "norms", "datasets", "backbones", "recipes", "augmentations", "quirks"])
def test_every_list_has_a_line_for_each_entry(what: str, capsys: Capture) -> None:
    assert main(["list", what, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if not line.startswith(" ")]
    assert headings == ([] if what in ("recipes", "quirks") else ["built in:"])
    named = [line for line in lines if re.match("  [^ ]", line)]
    assert sorted(line.split()[0] for line in named) == sorted(entries)
    assert all(entry["line"] for entry in entries.values()) and all(len(line.split(maxsplit=1)) == 2 for line in named)
    assert max(map(len, lines)) <= 80


def test_the_lists_are_the_registries(capsys: Capture) -> None:
    from tbbn.registry import METHODS, NORMS

    for what, registry in (("methods", METHODS), ("norms", NORMS)):
        main(["list", what, "--json"])
        assert set(json.loads(capsys.readouterr().out)) == set(registry)


def test_the_list_of_norms_names_every_option(capsys: Capture) -> None:
    assert main(["list", "norms", "--json"]) == 0
    for name, entry in json.loads(capsys.readouterr().out).items():
        with pytest.raises(tbbn.errors.UserError) as refused:  # the error lists all options
            tbbn.convert(torch.nn.BatchNorm2d(16), name, bias=False)  # bias is that of the layer it replaces
        taken = set(str(refused.value).split(": ")[2].split(".")[0].split(", "))
        assert taken == entry["options"].keys()


def test_lists_show_options_with_defaults_help_and_limits(capsys: Capture) -> None:
    assert main(["list", "norms"]) == 0
    said = capsys.readouterr().out
    assert "\n  gn        group norm\n      groups=16             number of channel groups [at least 1]\n" in said
    assert "\n      eps                   as in the layer it replaces [1e-30 to 1e+30]\n" in said
    assert "\n      rule=paper                   rule for the number of splits (see\n" in said
    assert main(["list", "methods"]) == 0
    said = capsys.readouterr().out
    assert "\n      less_forget=5.0  weight of the feature distillation [at least 0]\n" in said
    assert "\n                             [positive and below 1]\n" in said, "wrapped at 80 columns"


def test_show_prints_the_matrix_and_every_metric(runs: Path, capsys: Capture) -> None:
    assert main(["show", str(runs / "ft-bn-0")]) == 0
    lines = capsys.readouterr().out.splitlines()
    record = load_record(runs / "ft-bn-0")
    assert lines[0] == "ft + bn, synthetic:4x12x4x8, seed 0: finished"
    (row,) = (line.split() for line in lines if line.startswith("after task 2"))
    assert row[3:5] == [f"{100 * a:.1f}" for a in record.accuracy[1]]
    final = next(line.split() for line in lines if line.startswith("A_f "))
    assert final[1] == f"{100 * record.metrics['final_accuracy']:.2f}"
    assert main(["show", str(runs / "ft-bn-0"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == record.accuracy


def test_show_of_a_folder_of_runs_names_one(runs: Path, capsys: Capture) -> None:
    for folder in (runs, runs.parent):
        line = mistake(capsys, "show", str(folder))
        assert line.endswith(f"holds 4 runs; name one of them, such as {runs / 'ft-bn-0'}.")


def test_doctor_says_versions_device_data_and_disk(tmp_path: Path, capsys: Capture) -> None:
    assert main(["doctor", "--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in (
        f"tbbn            {tbbn.__version__}",
        torch.__version__,
        "GiB",
        f"data under {tmp_path}/",
        "not found",
    ):
        assert part in text
    assert main(["doctor", "--root", str(tmp_path), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["data"]["digits"] == "found" and tree["data"]["cifar100"] == "not found"
    assert tree["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize("there", [True, False])
def test_doctor_says_when_torchvisions_ops_are_missing(
    there: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tbbn.bench.vision import torchvision

    monkeypatch.setattr(torchvision().extension, "_has_ops", lambda: there)
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["environment"]["torchvision"]
    missing = (
        "; built for another torch: tbbn works around it, but import torchvision fails in your own code (docs/faq.md)"
    )
    assert re.fullmatch(r"[\d.+a-z]+" + ("" if there else re.escape(missing)), said)


def test_show_says_how_many_tasks_were_learnt(tmp_path: Path, capsys: Capture) -> None:
    data = ("--data", "synthetic:4x12x4x8", "--data.tasks", "2", "--data.stop_after", "1", "--memory.budget", "8")
    words = (
        "run",
        *data,
        "--train.epochs",
        "1",
        "--backbone",
        "small",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--name",
        "x",
        "--quiet",
    )
    assert main(words) == 0
    capsys.readouterr()
    assert main(("show", str(tmp_path / "x"))) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "ft + bn, synthetic:4x12x4x8, seed 0: finished after 1 of 2 tasks"
    assert any(re.fullmatch(r"metric +value after 1 of 2 tasks  formula", line) for line in lines)


def test_show_does_not_take_the_metrics_of_a_run_that_diverged_for_its_results(tmp_path: Path, capsys: Capture) -> None:
    out = ("--out", str(tmp_path), "--name", "x", "--quiet")
    assert main(["run", *TINY, *out, "--train.epochs", "3", "--train.first.lr", "0.1", "--train.lr", "1e30"]) == 3
    capsys.readouterr()
    for form, start in (
        ("text", "metric"),
        ("csv", "metric,value after 1 of 2 tasks"),
        ("md", "| metric | value after 1 of "),
    ):
        assert main(["show", str(tmp_path / "x"), "--format", form]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        assert first.startswith("ft + bn, synthetic:4x12x4x8, seed 0: diverged after 1 of 2 tasks: the loss")
        assert any(line.startswith(start) and "value after 1 of 2 tasks" in line for line in lines), form
