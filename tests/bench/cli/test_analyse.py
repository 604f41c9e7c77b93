"""``tbbn shares``, ``drift``, ``epochs`` and ``reproduce fig-oracle`` from the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from commandline import TINY, Capture, mistake

from tbbn.bench.cli.common import in_turn
from tbbn.bench.cli.main import main


def test_shares_train_nothing(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("shares", "--data", "cifar100", "--protocol", "paper", "--norm", "bn,tbbn(rule=current)")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["task", "batch", "r", "bn", "%"] and "tbbn(rule=current) r*" in lines[0]
    assert lines[11].split() == ["10", "48+16", "27", "75.0", "24", "11.1", "10.0"]
    assert not list(tmp_path.iterdir())


def test_shares_are_of_one_method_that_has_a_newest_task(capsys: Capture) -> None:
    assert "shows one method at a time, got ft, eeil(balanced_epochs=1); choose with --method." in mistake(
        capsys, "shares", "--method", "ft,eeil(balanced_epochs=1)"
    )
    said = mistake(capsys, "shares", "--method", "joint")
    assert "joint trains on all tasks at once; its batches have no current and memory rows." in said
    assert "unknown setting --seeds" in mistake(capsys, "shares", "--seeds", "3")
    assert main(("shares", "--seed", "3", "--norm", "bn")) == 0
    plain = capsys.readouterr().out
    assert main(("shares", "--norm", "bn", "--batch.current_from", "union")) == 0
    assert (
        capsys.readouterr().out.removeprefix(plain).startswith("batch.current_from = union: some current rows are of")
    )
    assert main(("shares", "--norm", "bn", "--data.online")) == 0
    assert "batch.memory_from = all: some memory rows are of the newest task" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("drift", "{run}", "--format", "xml"),
        ("drift", "{run}", "--json", "--format", "csv"),
        ("drift", "{run}", "--plot", "x.doc"),
        ("slots", "{run}", "--format", "xml"),
        ("slots", "{run}", "--json", "--format", "csv"),
        ("epochs", *TINY, "--data.validation", "0.25", "--format", "xml"),
        ("epochs", *TINY, "--data.validation", "0.25", "--json", "--format", "csv"),
        ("epochs", *TINY, "--data.validation", "0.25", "--plot", "x.doc"),
        ("epochs", "--from", "{run}", "--json", "--format", "csv"),
        ("report", "{run}", "--json", "--format", "csv"),
        ("shares", "--format", "xml"),
    ],
)
def test_an_output_that_cannot_be_made_is_refused_before_the_work_for_it(
    words: tuple[str, ...], runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in ("drift.drift", "slots.slots", "epochs.score_epochs"):
        monkeypatch.setattr(f"tbbn.bench.analysis.{work}", None)
    said = mistake(capsys, *(word.format(run=runs / "ft-bn-0") for word in words))
    assert "unknown format 'xml'" in said or "are two formats" in said or "x.doc: the picture must end in" in said


def test_drift_of_two_runs(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    folders = [str(runs / f"ft-bn-{seed}") for seed in range(2)]
    picture = tmp_path / "drift.png"
    assert main(("drift", *folders, "--plot", str(picture))) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0].startswith("layer") and "ft-bn-1: mean off" in said.out and picture.exists()
    assert main(("drift", folders[0], "--json", "--task", "1")) == 0
    assert set(json.loads(capsys.readouterr().out)[0]["layers"][0]) == {"layer", "mean", "std", "newest"}
    assert main(("drift", folders[0], "--json")) == 0
    assert json.loads(capsys.readouterr().out)[0]["stamp"] == "", "a whole run"
    assert "drift: ft + gn(groups=8) has no running statistics; leave its runs out." in mistake(
        capsys, "drift", str(runs)
    )


def test_runs_of_the_same_name_are_told_apart(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    here, there = runs / "ft-bn-0", tmp_path / "ft-bn-0"
    shutil.copytree(here, there)
    for words in (("drift", "--images", "1"), ("slots", "--batches", "1")):
        assert main((*words, str(here), str(there))) == 0
        first = capsys.readouterr().out.splitlines()[0]
        assert f"{here}: " in first and f"{there}: " in first


def test_slots_of_a_run(runs: Path, capsys: Capture) -> None:
    folder = str(runs / "ft-bn-0")
    assert main(("slots", folder, "--batches", "1")) == 0
    assert "new, in memory slots" in capsys.readouterr().out
    assert main(("slots", folder, "--json")) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["directory"] == str(runs / "ft-bn-0") and entry["new_in_current"]["images"] > 0
    assert "no exemplars of past tasks" in mistake(capsys, "slots", folder, "--task", "1")
    assert "--batches must be at least 1" in mistake(capsys, "slots", folder, "--batches", "0")


def test_the_choice_of_epoch(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("epochs", *TINY, "--data.validation", "0.25", "--train.epochs", "2", "--norm", "bn", "--quiet")
    assert main((*words, "--plot", str(tmp_path / "epochs.png"))) == 0
    said = capsys.readouterr()
    assert said.out.count("best on the new task") == 2 and (tmp_path / "epochs.png").exists()
    assert main((*words, "--json")) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert [(e["task"], e["epoch"]) for e in entry["epochs"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert main(("epochs", "--from", str(runs / "ft-bn-0"))) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[1:] == ["1", "1", "1"]  # one epoch a task
    assert main(("epochs", "--from", str(runs / "ft-bn-0"), "--json", "--quiet")) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["directory"], entry["run"], entry["seed"]) == (str(runs / "ft-bn-0"), "ft + bn", 0)
    assert entry["kept"] == [{"task": task, "phase": "train", "epoch": 0} for task in range(2)]
    said = mistake(capsys, *words, "--from", str(runs / "ft-bn-0"), "--plot", str(tmp_path / "other.png"))
    assert "--plot draws the score of every epoch, which saved runs do not have; leave --from out" in said
    said = mistake(capsys, "epochs", "demo", "--from", str(runs), "--norm", "bn", "--seeds", "1", "--train.lr", "1")
    assert said.endswith("trains nothing; leave out the recipe, --norm, --seeds, --train.lr.")
    assert main((*words, "--seed", "3", "--json")) == 0
    assert json.loads(capsys.readouterr().out)[0]["seed"] == 3
    assert "data.validation is 0" in mistake(capsys, "epochs", *TINY, "--quiet")


def test_the_choice_of_epoch_of_every_norm_and_phase(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, int] = {}

    def draw(scores: Mapping[str, Sequence[Any]], path: str, stamp: str) -> Path:
        drawn.update({name: len(seeds) for name, seeds in scores.items()})
        return Path(path)

    monkeypatch.setattr("tbbn.bench.analysis.figures.epochs_figure", draw)
    words = ("epochs", *TINY, "--data.validation", "0.25", "--norm", "bn,tbbn", "--seeds", "2", "--quiet")
    words += ("--method", "eeil(balanced_epochs=1)", "--plot", str(tmp_path / "epochs.png"))
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["run", "rule", "task", "phase", "epoch"]
    kept = [line.split("last")[1].split()[:3] for line in lines if " last " in line]
    assert kept == [["1", "train", "1"], ["2", "train", "1"], ["2", "balanced", "1"]] * 2
    assert list(drawn.values()) == [2, 2] and ["tbbn" in name for name in drawn] == [False, True]


def test_the_oracle_figure_is_made_from_two_runs(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ("--data.name", "synthetic:4x12x4x8", "--data.tasks", "2", "--data.validation", "0", "--memory.budget", "8")
    tiny += ("--backbone", "small", "--batch.size", "8", "--batch.augment", "none", "--keep", "last", "--device", "cpu")
    words = ("reproduce", "fig-oracle", *tiny, "--scale", "0.00625", "--seeds", "1", "--quiet")
    assert main((*words, "--lanes", "1")) == 0
    out, err = capsys.readouterr()
    assert "SCALE 0.00625: a fraction" in out and "update mu, sigma, gamma, beta" in out
    assert all(Path(line.split("figure: ")[1]).stat().st_size > 1000 for line in err.splitlines() if "figure: " in line)
    assert main((*words, "--from", "runs")) == 0 and capsys.readouterr().out == out
    assert "not for 'digits'." in mistake(capsys, "reproduce", "fig-oracle", "--data", "digits")


def test_commands_that_take_long_say_where_they_are(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    now = iter([0, 1, 12, 12, 13, 25, 25])
    monkeypatch.setattr("tbbn.bench.cli.common.time.monotonic", lambda: next(now))
    folders = [Path(f"runs/{number}") for number in range(4)]
    assert list(in_turn(folders, "drift")) == folders
    assert capsys.readouterr().err == "drift: 2/4, runs/1\ndrift: 4/4, runs/3\n"


def test_analyses_of_a_part_of_the_training_say_so(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = [*TINY, "--train.epochs", "2", "--train.scale", "0.5", "--data.tasks", "3", "--data.stop_after", "2"]
    assert main(["run", *part, "--out", str(tmp_path), "--name", "x", "--quiet"]) == 0
    mark = "SCALE 0.5: a fraction of the epochs. STOPPED: after 2 of 3 tasks."
    for command in (["epochs", "--from"], ["drift"], ["slots"]):
        capsys.readouterr()
        assert main([*command, str(tmp_path / "x")]) == 0
        assert mark in capsys.readouterr().out
        assert main([*command, str(tmp_path / "x"), "--json"]) == 0
        assert [entry["stamp"] for entry in json.loads(capsys.readouterr().out)] == [mark]
        assert main([*command, str(tmp_path / "x"), "--format", "csv"]) == 0
        header, *rows = capsys.readouterr().out.splitlines()
        assert header.startswith("runs,") and rows and all(row.startswith(f"{mark},") for row in rows)
    assert main(["show", str(tmp_path / "x")]) == 0
    assert capsys.readouterr().out.startswith("SCALE 0.5: a fraction of the epochs. ft + bn")
    drawn: list[Any] = []
    monkeypatch.setattr("tbbn.bench.analysis.figures.save_figure", lambda figure, path: drawn.append(figure))
    words = ["epochs", *part, "--data.validation", "0.2", "--norm", "bn", "--quiet"]
    assert main([*words, "--plot", "epochs.png"]) == 0
    assert mark in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert [entry["stamp"] for entry in json.loads(capsys.readouterr().out)] == [mark]
    assert main(["drift", str(tmp_path / "x"), "--plot", "drift.png"]) == 0
    assert [figure.get_suptitle() for figure in drawn] == [mark, mark]
    assert main(["report", str(tmp_path / "x"), "--files", str(tmp_path / "files")]) == 0
    assert (tmp_path / "files/results.csv").read_text().splitlines()[1].startswith(mark)
    assert (tmp_path / "files/settings.csv").read_text().startswith("setting")
