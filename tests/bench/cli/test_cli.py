"""The command line, as a person or a script meets it: output, exit codes, files, and one line for every mistake."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tbbn
from tbbn.bench import config
from tbbn.bench.cli import main as cli
from tbbn.bench.cli.main import main
from tbbn.bench.config.toml import tomllib
from tbbn.bench.data import loading
from tbbn.bench.data.types import Source, Split
from tbbn.bench.runs import sweep
from tbbn.bench.runs.record import load_record

TINY = ("--data", "synthetic:4x12x4x8", "--data.tasks", "2", "--train.epochs", "1", "--memory.budget", "8")
TINY += ("--device", "cpu")
Capture = pytest.CaptureFixture[str]


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def mistake(capsys: Capture, *words: str) -> str:
    """The one line that a mistake prints on standard error; nothing is on standard output."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tbbn: ") and said.err.count("\n") == 1, said.err
    return said.err.strip()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two norms with two seeds each."""
    out = tmp_path_factory.mktemp("runs")
    words = ["run", *TINY, "--norm", "bn,gn(groups=8)", "--seeds", "2", "--out", str(out), "--name", "few", "--quiet"]
    assert main(words) == 0
    return out / "few"


# run.


def test_one_run_leaves_its_record_its_config_and_a_picture(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    folder = tmp_path / "synthetic_4x12x4x8-ft-bn"
    assert {"accuracy.png", "config.toml", "predictions.safetensors", "record.json"} <= set(files(folder))
    record = load_record(folder)
    assert record.status == "finished" and len(record.accuracy) == 2
    lines = said.out.splitlines()
    assert lines[0].split() == ["method", "+", "norm", "seeds", "A_f", "%", "A_a", "%", "F", "%", "A_l", "%"]
    assert lines[2].split()[:4] == ["ft", "+", "bn", "1"]
    assert lines[2].split()[4] == f"{100 * record.metrics['final_accuracy']:.1f}"
    assert "A_f = (1/T) sum_i a[T,i]" in lines
    assert lines[-1] == f"accuracy curves: {folder / 'accuracy.png'}"


def test_data_goes_to_stdout_and_progress_to_stderr(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "run 1/1: ft + bn, seed 0" in said.err and "task 2/2, mean accuracy" in said.err
    assert "task 2/2" not in said.out and "A_f" not in said.err


def test_quiet_says_nothing_but_the_result(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path), "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "ft + bn" in said.out


def test_several_norms_and_seeds_give_one_table_and_one_picture(runs: Path) -> None:
    pictures = [file for file in files(runs) if file.endswith(".png")]
    assert pictures == ["accuracy.png"]
    assert (runs / "accuracy.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    folders = sorted(f.name for f in runs.iterdir() if f.is_dir())
    assert folders == ["ft-bn-0", "ft-bn-1", "ft-gn_groups=8_-0", "ft-gn_groups=8_-1"]


def test_a_finished_run_is_not_run_again(runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run_saved", lambda *_, **__: pytest.fail("ran again"))
    words = ["run", *TINY, "--norm", "bn,gn(groups=8)", "--seeds", "2", "--out", str(runs.parent), "--name", "few"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err.count("finished before, taken from") == 4
    assert "gn(groups=8)" in said.out


def test_another_config_in_the_folder_is_refused_unless_overwritten(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--out", str(tmp_path), "--name", "x", "--quiet"]
    assert main(words) == 0
    before = load_record(tmp_path / "x")
    capsys.readouterr()
    line = mistake(capsys, *words, "--train.lr", "0.2")
    there = load_record(tmp_path / "x").run_config.train.lr
    what = f"holds a run of another config (train.lr = {there!r} there, 0.2 now); use --name or --overwrite."
    assert line == f"tbbn: {tmp_path / 'x'}: {what}"
    assert load_record(tmp_path / "x") == before
    assert main([*words, "--train.lr", "0.2", "--overwrite"]) == 0
    assert load_record(tmp_path / "x").run_config.train.lr == 0.2


def test_json_is_for_machines(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--seeds", "4,", "--out", str(tmp_path), "--name", "x", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["method"], entry["norm"], entry["seed"], entry["status"]) == ("ft", "bn", 4, "finished")
    assert entry["directory"] == str(tmp_path / "x")
    assert entry["metrics"] == load_record(tmp_path / "x").metrics


def test_a_toml_file_is_a_recipe_and_the_command_line_is_over_it(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'method = "er"\n[data]\nname = "synthetic:4x12x4x8"\ntasks = 2\n[train]\nepochs = 5\n[memory]\nbudget = 8\n'
        '[sweep]\nnorms = ["bn", "tbbn"]\nseeds = [0, 1]\n'
    )
    assert main(["run", str(file), "--train.epochs", "1", "--seed", "3", "--out", str(tmp_path), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(e["method"], e["norm"], e["seed"]) for e in entries] == [("er", "bn", 3), ("er", "tbbn", 3)]
    record = load_record(tmp_path / "mine" / "er-bn-3")
    assert record.run_config.train.epochs == 1 and len(record.history) == 2


def test_settings_in_every_way_of_writing_them(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", "--data.name=synthetic", "--norm.name", "gn", "--norm.groups=8", "--data.online", "--dry-run"]
    words += ["--train.milestones", "0.4,0.8", "--data.class_order_seed", "-1", "--quirks", "no-affine", "--json"]
    assert main(words) == 0
    tree = json.loads(capsys.readouterr().out)["config"]
    assert tree["data"]["name"] == "synthetic" and tree["data"]["online"] is True
    assert tree["norm"] == {"name": "gn", "groups": 8, "affine": False}
    assert tree["train"]["milestones"] == [0.4, 0.8] and tree["data"]["class_order_seed"] == -1


def test_without_arguments_it_is_the_demo(capsys: Capture) -> None:
    assert main(["run", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["runs"] == 6 and plan["config"]["data"]["name"] == "digits"
    assert [task["classes"] for task in plan["tasks"]] == [2] * 5
    assert plan["config"]["memory"]["budget"] == 100


def test_lanes_give_what_one_run_after_the_other_gives(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--norm", "bn,gn(groups=8)", "--seeds", "2", "--out", str(tmp_path), "--name", "few"]
    assert main([*words, "--lanes", "3", "--quiet"]) == 0
    for folder in runs.iterdir():
        if folder.is_dir():
            assert load_record(tmp_path / "few" / folder.name).accuracy == load_record(folder).accuracy


# Dry run.


def test_a_dry_run_prints_config_layout_and_steps_and_does_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--norm", "tbbn", "--seeds", "2", "--dry-run", "--out", str(tmp_path / "none")]) == 0
    said = capsys.readouterr()
    head, _, table = said.out.partition("\ntask ")
    printed = config.resolve(("out", config.flatten(tomllib.loads(head))))
    assert printed.norm.name == "tbbn" and printed.data.tasks == 2 and printed.train.epochs == 1
    rows = [line.split() for line in table.splitlines()[2:4]]
    # 24 images in batches of 64 (or 48 + 16): one step; r* of 24 + 16 rows is that of a whole batch, 48 + 16.
    assert rows == [["1", "2", "24", "0", "64+0", "1", "1", "1"], ["2", "2", "24", "8", "48+16", "2", "1", "1"]]
    assert "2 steps in the main phases" in said.out and "1 more like it" in said.out and "nothing was done" in said.out
    assert not (tmp_path / "none").exists()


def test_a_dry_run_of_the_paper_has_its_numbers(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def split(n_each: int) -> Split:
        labels = torch.arange(100).repeat_interleave(n_each)
        return Split(torch.zeros(1, 3, 32, 32, dtype=torch.uint8).expand(len(labels), -1, -1, -1), labels)

    fake = Source("cifar100", split(500), split(100), tuple(map(str, range(100))), (0,) * 100, (0.5,) * 3, (0.5,) * 3)
    monkeypatch.setattr(loading, "load", lambda *_, **__: fake)
    assert main(["run", "--data", "cifar100", "--protocol", "paper", "--norm", "tbbn", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [t["steps"] for t in plan["tasks"]] == [70, 124, 124, 124, 124, 124, 126, 125, 124, 128]
    assert [t["splits"] for t in plan["tasks"]] == [1, 2, 4, 8, 8, 8, 16, 16, 16, 16]
    assert plan["steps"] == 160 * (70 + 6 * 124 + 126 + 125 + 128) and plan["runs"] == 1


# Mistakes: one line, exit code 2, nothing half-written.


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", r"a command is needed: run, sweep, "),
        ("rnu", r"unknown command 'rnu'; .*Did you mean 'run'\?"),
        ("run --train.epoch 3", r"no setting --train\.epoch\. Did you mean --train\.epochs\?"),
        ("run --sed 3", r"no setting --sed\. Did you mean --seed\?"),
        ("run --zzzzzz 3", r"no setting --zzzzzz\. See tbbn run --help\."),
        ("run --dry", r"no setting --dry\. Did you mean --dry-run\?"),
        ("run --train.epochs", r"--train\.epochs needs a value\."),
        ("run --train.epochs x", r"command line: train\.epochs must be a whole number \(default 20\), got 'x'\."),
        ("run --train.lr nan", r"train\.lr must be positive, got nan\."),
        ("run --protocol papr", r"protocol must be clean or paper, got 'papr'\. Did you mean 'paper'\?"),
        ("run --norm tbn", r"unknown norm 'tbn'; .*Did you mean 'tbbn'\?"),
        ("run --norm bn,gn(groups=7)", r"gn: groups=7 does not divide 32 channels"),
        ("run --norm gn(groups", r"norm must look like name or name\(option=value\)"),
        ("run --method fft", r"unknown method 'fft'; .*Did you mean 'ft'\?"),
        ("run --method.kd 1", r"'ft' takes no options, got 'kd'"),
        ("run --seeds x", r"seeds must be a number of seeds or seeds with commas, got 'x'\."),
        ("run --seed 1 --seeds 2", r"--seed and --seeds exclude each other"),
        ("run --lanes 0", r"--lanes must be a number from 1, or auto, got '0'\."),
        ("run --lanes x", r"--lanes must be a number from 1, or auto, got 'x'\."),
        ("run dem", r"unknown recipe 'dem'; .*Did you mean 'demo'\?"),
        ("run missing.toml", r"missing\.toml: no such config file\."),
        ("run demo extra", r"unrecognized arguments: extra"),
        ("run --data sythetic", r"unknown dataset 'sythetic'; .*Did you mean 'synthetic'\?"),
        ("run --data synthetic:4x12x4x8 --data.tasks 3", r"4 classes do not split into 3 equal tasks"),
        ("run --data folder:/nowhere", r"/nowhere"),
        ("run --data mnist --data.download false --data.root /nowhere", r"mnist"),
        ("list method", r"unknown list 'method'; .*Did you mean 'methods'\?"),
        ("run --norm bn tbbn", r"--norm bn tbbn: several values have commas between them: --norm bn,tbbn\."),
        ("run demo --norm bn, tbbn", r"several values have commas between them: --norm bn,tbbn\."),
        ("sweep --method ft er --seeds 2", r"several values have commas between them: --method ft,er\."),
        ("speed --norm bn tbbn", r"several values have commas between them: --norm bn,tbbn\."),
        ("list", r"WHAT is needed: one of methods, norms, .*, quirks; see tbbn list --help\."),
        ("data", r"ACTION is needed: pack or check; see tbbn data --help\."),
        ("data pck", r"invalid choice: 'pck' \(choose from '?pack'?, '?check'?\)"),
        ("data pack x", r"^tbbn: DEST is needed: folder to pack into: .*; see tbbn data pack --help\."),
        ("show", r"RUN is needed: a run's folder, such as runs/demo/ft-tbbn-0; see tbbn show --help\."),
        ("report", r"RUN is needed: runs' folders, or folders of runs; see tbbn report --help\."),
        ("show /nowhere", r"/nowhere: no run here; a run's folder holds a record\.json\."),
        ("report /nowhere", r"/nowhere: no run here"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    words: str, line: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(line, mistake(capsys, *words.split()))
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_recipe_file_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "a.toml"
    for text, line in (
        ("[train]\nepoch = 3\n", r"a\.toml: \[train\] has no option 'epoch'; .*Did you mean 'epochs'\?"),
        ("[sweep]\nnorm = ['bn']\n", r"a\.toml: \[sweep\] has no option 'norm'; it takes: methods, norms, seeds\."),
        ("[sweep]\nnorms = 'bn'\n", r"a\.toml: sweep\.norms must be a list of names, got 'bn'\."),
        ("[sweep]\nseeds = ['0']\n", r"a\.toml: sweep\.seeds must be a list of seeds, got \['0'\]\."),
        ("= 3", r"a\.toml: not a TOML file"),
    ):
        file.write_text(text)
        assert re.search(line, mistake(capsys, "run", str(file), "--out", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert main(["run", *TINY, "--out", str(tmp_path / "file"), "--quiet"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"tbbn: {tmp_path / 'file'}") and said.err.count("\n") == 1


def test_an_interrupt_ends_cleanly_and_says_so(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tbbn.bench.engine.step import Step

    real, count = Step.train, 0

    def interrupted(self: Step, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:  # in the second task
            raise KeyboardInterrupt
        real(self, *arguments)

    words = ["run", *TINY, "--out", str(tmp_path), "--name", "x"]
    with monkeypatch.context() as patched:
        patched.setattr(Step, "train", interrupted)
        assert main(words) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1].startswith("tbbn: interrupted;") and "Traceback" not in said.err
    record = load_record(tmp_path / "x")
    assert record.status == "interrupted" and len(record.accuracy) == 1
    assert main(words) == 0
    assert load_record(tmp_path / "x").status == "finished"


@pytest.mark.parametrize(("lanes", "number"), [("1", signal.SIGINT), ("2", signal.SIGINT), ("1", signal.SIGTERM)])
def test_a_first_signal_lets_the_runs_save_themselves_at_once(
    lanes: str,
    number: signal.Signals,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tbbn.bench.engine.step import Step

    real, count = Step.train, 0

    def signalled(self: Step, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:
            os.kill(os.getpid(), number)
        real(self, *arguments)

    words = ["run", *TINY, "--train.epochs", "3", "--seeds", "2", "--lanes", lanes]
    assert main([*words, "--out", str(tmp_path / "whole"), "--name", "x", "--quiet"]) == 0
    words += ["--out", str(tmp_path), "--name", "x"]
    handler = signal.getsignal(number)
    with monkeypatch.context() as patched:
        patched.setattr(Step, "train", signalled)
        assert main(words) == 130
    assert signal.getsignal(number) is handler
    said = capfd.readouterr()
    assert "tbbn: stopping after this step; once more to stop at once." in said.err
    assert "ft + bn, seed 0: interrupted\n" in said.err
    record = load_record(tmp_path / "x" / "ft-bn-0")
    assert record.status == "interrupted" and count in (4, 5)  # nothing was trained after that step
    assert main(words) == 0
    for seed in (0, 1):
        one, other = (load_record(tmp_path / part / f"ft-bn-{seed}") for part in ("x", "whole/x"))
        assert one.status == "finished" and (one.accuracy, one.history) == (other.accuracy, other.history)


@pytest.mark.parametrize("lanes", ["1", "2"])
def test_resume_begins_the_runs_of_a_sweep_that_had_not_begun(
    lanes: str, runs: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tbbn.bench.engine.step import Step

    def interrupted(self: Step, *_: Any) -> None:
        raise KeyboardInterrupt

    words = ["run", *TINY, "--norm", "bn,gn(groups=8)", "--seeds", "2", "--lanes", lanes, "--quiet"]
    with monkeypatch.context() as patched:
        patched.setattr(Step, "train", interrupted)
        assert main([*words, "--out", str(tmp_path), "--name", "few"]) == 130
    assert len(list(tmp_path.rglob("record.json"))) < 4
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "few"), "--lanes", lanes, "--json", "--quiet"]) == 0
    found = {Path(entry["directory"]): entry["status"] for entry in json.loads(capsys.readouterr().out)}
    assert found == dict.fromkeys((tmp_path / "few" / run.name for run in runs.iterdir() if run.is_dir()), "finished")
    for folder in found:
        assert load_record(folder).accuracy == load_record(runs / folder.name).accuracy


def test_a_run_and_a_sweep_do_not_share_a_folder(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--out", str(tmp_path), "--quiet", "--name"]
    assert main([*words, "one"]) == 0 and main([*words, "two", "--seeds", "2"]) == 0
    capsys.readouterr()
    before = files(tmp_path)
    way_out = "; use another --name, or delete that folder."
    line = mistake(capsys, *words, "one", "--seeds", "2")
    assert line == f"tbbn: {tmp_path / 'one'}: holds a run, and no other fits inside it{way_out}"
    for more in ((), ("--overwrite",)):
        line = mistake(capsys, *words, "two", *more)
        assert line == f"tbbn: {tmp_path / 'two'}: holds a sweep, and no run fits around it{way_out}"
    assert files(tmp_path) == before
    assert main([*words, "one"]) == 0 and main([*words, "two", "--seeds", "3"]) == 0


def test_a_second_signal_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with sweep.stoppable() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.count("tbbn: stopping") == 1


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        with sweep.stoppable() as stop:
            seen.append(stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_diverged_run_has_an_exit_code_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--train.lr", "1e20", "--train.epochs", "3", "--out", str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert "diverged" in said.err and "diverged after 0 of 2 tasks" in said.out


def test_a_failed_run_of_several_has_an_exit_code_too(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sweep.run_saved

    def failing(config: Any, directory: Path, **options: Any) -> Any:
        if config.seed == 0:
            raise RuntimeError("out of luck")
        return real(config, directory, **options)

    monkeypatch.setattr(sweep, "run_saved", failing)
    assert main(["run", *TINY, "--seeds", "2", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "ft + bn, seed 0: failed: RuntimeError: out of luck" in said.err
    assert "1 failed after 0 of 0 tasks, 1 finished" in said.out


# list, show, report, doctor.


@pytest.mark.parametrize("what", ["methods", "norms", "datasets", "backbones", "recipes", "augmentations", "quirks"])
def test_every_list_has_a_line_for_each_entry(what: str, capsys: Capture) -> None:
    assert main(["list", what, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line for line in lines if not line.startswith(" ")]
    assert [line.split("  ")[0] for line in named] == list(entries)
    assert all(entry["line"] for entry in entries.values()) and all(len(line.split(maxsplit=1)) == 2 for line in named)


def test_the_lists_are_the_registries(capsys: Capture) -> None:
    from tbbn.registry import METHODS, NORMS

    for what, registry in (("methods", METHODS), ("norms", NORMS)):
        main(["list", what, "--json"])
        assert set(json.loads(capsys.readouterr().out)) == set(registry)


def test_the_list_of_norms_names_every_option(capsys: Capture) -> None:
    assert main(["list", "norms", "--json"]) == 0
    shared = {"affine", "bias", "eps", "momentum", "track_running_stats"}
    for name, entry in json.loads(capsys.readouterr().out).items():
        with pytest.raises(tbbn.errors.UserError) as refused:  # which names all that are taken
            tbbn.convert(torch.nn.BatchNorm2d(16), name, nothing=1)
        taken = set(str(refused.value).split(": ")[2].split(".")[0].split(", "))
        assert taken - shared == entry["options"].keys() - shared
        assert entry["options"].keys() <= taken


def test_lists_show_options_with_their_defaults(capsys: Capture) -> None:
    assert main(["list", "norms"]) == 0
    assert "gn        group norm\n            groups=16, channels_per_group\n" in capsys.readouterr().out
    assert main(["list", "methods"]) == 0
    assert "less_forget=5.0" in capsys.readouterr().out


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
        assert line.endswith(f"holds 4 runs, not one; give one of them, such as {runs / 'ft-bn-0'}.")


def test_report_in_every_format(runs: Path, capsys: Capture) -> None:
    def report(*words: str) -> str:
        assert main(["report", str(runs), *words]) == 0
        return capsys.readouterr().out

    text = report()
    assert "ft + gn(groups=8)" in text and "±" in text
    assert "| ft + bn |" in report("--format", "md")
    rows = list(csv.DictReader(io.StringIO(report("--format", "csv"))))
    finals = [load_record(runs / f"ft-bn-{seed}").metrics["final_accuracy"] for seed in (0, 1)]
    assert float(rows[0]["A_f %"]) == pytest.approx(50 * sum(finals), abs=0.051)
    assert float(rows[0]["A_f % std"]) == pytest.approx(100 * abs(finals[0] - finals[1]) / 2**0.5, abs=0.051)
    latex = report("--format", "latex")
    assert r"\begin{tabular}{lrrrrr}" in latex and r"A\_f \%" in latex and r"$\pm$" in latex
    entries = json.loads(report("--json"))
    assert [(e["label"], e["seed"], e["status"]) for e in entries[:2]] == [
        ("ft + bn", 0, "finished"),
        ("ft + bn", 1, "finished"),
    ]
    assert "unknown format 'tex'" in mistake(capsys, "report", str(runs), "--format", "tex")


def test_report_counts_a_run_once_and_draws_when_asked(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "new" / "curves.png"
    assert main(["report", str(runs), str(runs / "ft-bn-0"), "--json", "--plot", str(picture)]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 4
    assert picture.exists() and f"accuracy curves: {picture}" in said.err


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
    missing = ", without its compiled ops; models, transforms and data sets work all the same"
    assert re.fullmatch(r"[\d.+a-z]+" + ("" if there else missing), said)


# Help.


def test_help_of_run_names_every_setting_with_its_default(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for key in config.SETTINGS:
        if key not in ("data.name", "norm.name", "method.name"):
            assert f"  --{key}" in text
    assert "--train.epochs 20 " in text and "a single pass over each task" in text
    assert text.rstrip().endswith(
        "example: tbbn run --data cifar100 --protocol paper --norm bn,tbbn --seeds 3 --train.epochs 2"
    )


@pytest.mark.parametrize("command", cli.build_parser()[1])
def test_every_help_ends_with_an_example(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"example: tbbn {command} ")


def test_the_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"tbbn {tbbn.__version__}\n"


# As a process.


def in_terminal(words: list[str], columns: int) -> tuple[int, str]:
    """The exit code and all output of a process on a real pseudo-terminal."""
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover
        os.environ |= {"TERM": "xterm-256color"}
        os.execv(sys.executable, [sys.executable, "-m", "tbbn.bench.cli.main", *words])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    output = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the child has ended
            break
        if not piece:
            break
        output += piece
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.decode()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("columns", "lanes"), [(100, "2"), (40, "1")])
def test_bars_on_a_terminal(columns: int, lanes: str, tmp_path: Path) -> None:
    words = ["run", *TINY, "--seeds", "2", "--method", "eeil(balanced_epochs=2)", "--lanes", lanes]
    code, output = in_terminal([*words, "--out", str(tmp_path)], columns)
    assert code == 0, output
    assert "Traceback" not in output and "\x1b[" in output
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "2 runs" in plain and "━" in plain
    assert "eeil(balanced_epochs=2) + bn, seed 1: A_f" in plain.replace("\r\n", " " if columns < 60 else "\n")
    assert "accuracy.png" in plain.replace("\r\n", "")


def test_an_interrupt_while_torch_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    words = [sys.executable, "-m", "tbbn.bench.cli.main", "list", "norms"]
    places = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": places})
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr.startswith("tbbn: interrupted;") and done.stderr.count("\n") == 1


def test_a_closed_pipe_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tbbn.bench.cli.main", "list", "datasets"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait() == 0 and process.stderr.read() == b""
    process.stderr.close()


def test_who_must_wait_for_kernels_to_be_compiled_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr("tbbn.accelerators.triton.TRITON", True)
    tiny = ["run", "--data", "synthetic:4x12x4x8", "--data.tasks", "2", "--train.epochs", "1", "--memory.budget", "8"]

    def told(name: str, on_gpu: bool) -> bool:
        monkeypatch.setattr("tbbn.bench.cli.train._on_gpu", lambda jobs: on_gpu)
        assert main([*tiny, "--out", str(tmp_path), "--name", name]) == 0
        return "compiled at their first use" in capsys.readouterr().err

    assert told("first", on_gpu=True) and not told("on a CPU", on_gpu=False)
    (cache / "kernel").mkdir(parents=True)
    assert not told("later", on_gpu=True)
