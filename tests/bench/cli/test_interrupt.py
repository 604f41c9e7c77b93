"""Ctrl-C, SIGTERM and ``tbbn resume``: what was done is kept, and the same command continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import TINY, Capture, mistake
from tinyrun import tiny

from tbbn.bench.cli.main import main
from tbbn.bench.engine import run
from tbbn.bench.runs.interrupt import stop_on_signal
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved


@pytest.fixture(autouse=True)
def hang_up() -> Iterator[None]:
    """As in a terminal: nohup, under which tests may run, ignores the signal, and so does what it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_an_interrupt_in_a_step_is_one_line_and_the_run_resumes(
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


@pytest.mark.parametrize(
    ("lanes", "number"), [("1", signal.SIGINT), ("2", signal.SIGINT), ("1", signal.SIGTERM), ("2", signal.SIGHUP)]
)
def test_after_the_first_signal_runs_save_themselves_and_resume(
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
    quits = {signal.SIGINT: "press Ctrl-C again to quit", signal.SIGTERM: "a second SIGTERM quits"}
    assert f"tbbn: stopping after this step and saving; {quits.get(number, 'SIGTERM quits')} now.\n" in said.err
    assert "ft + bn, seed 0: interrupted\n" in said.err
    record = load_record(tmp_path / "x" / "ft-bn-0")
    assert record.status == "interrupted" and count in (4, 5)  # nothing was trained after that step
    assert main(words) == 0
    for seed in (0, 1):
        one, other = (load_record(tmp_path / part / f"ft-bn-{seed}") for part in ("x", "whole/x"))
        assert one.status == "finished" and (one.accuracy, one.history) == (other.accuracy, other.history)


def test_resume_finishes_an_interrupted_run(tmp_path: Path, capsys: Capture) -> None:
    asked = iter(range(10**6))
    config = tiny(norm__name="tbbn")
    assert run_saved(config, tmp_path / "a", stop=lambda: next(asked) > 9).status == "interrupted"
    assert main(["resume", str(tmp_path), "--quiet", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["status"] == "finished"
    assert entry["metrics"] == run(config).metrics


@pytest.mark.parametrize("lanes", ["1", "2"])
def test_resume_starts_the_runs_of_a_sweep_that_had_not_started(
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


def test_the_second_signal_interrupts_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_on_signal() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.count("tbbn: stopping") == 1


def test_signals_are_not_handled_outside_the_main_thread() -> None:
    seen: list[bool] = []

    def work() -> None:
        with stop_on_signal() as stop:
            seen.append(stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_an_interrupt_during_the_import_of_torch_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    words = [sys.executable, "-m", "tbbn.bench.cli.main", "list", "norms"]
    places = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": places})
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr.startswith("tbbn: interrupted;") and done.stderr.count("\n") == 1


def test_resuming_with_an_edited_config_is_refused_and_names_the_changes(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "x"
    run_saved(tiny(), folder, stop=iter([False, True, True]).__next__)
    file, untouched = folder / "config.toml", (folder / "config.toml").read_text()
    edits = {"epochs = 2": "epochs = 7", "momentum = 0.9": "momentum = -1.0"}
    assert all(untouched.count(old) == 1 for old in edits)
    edited = untouched
    for old, new in edits.items():
        edited = edited.replace(old, new)
    file.write_text(edited)
    line = mistake(capsys, "resume", str(folder))
    assert f"tbbn: {file}: was edited (train.epochs = 2 in the run, 7 in the file; train.momentum = 0.9 in the" in line
    assert line.endswith(
        f"To resume it, undo the edit or delete the file; to train with the file, start a new run: tbbn run {file} --name NAME."
    )
    assert file.read_text() == edited and load_record(folder).status == "interrupted"
    file.write_text("no TOML [")  # damaged, not edited: it is written again
    assert main(["resume", str(folder), "--quiet"]) == 0
    capsys.readouterr()
    assert file.read_text() == untouched and load_record(folder).status == "finished"
    file.write_text(untouched.replace("epochs = 2", "epochs = 7"))
    assert "was edited (train.epochs" in mistake(capsys, "resume", str(folder)), "also where nothing is left to train"


@pytest.mark.parametrize("lanes", ["1", "2"])
def test_after_the_time_limit_runs_save_themselves_and_the_same_command_goes_on(
    lanes: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tbbn.bench.cli import train
    from tbbn.bench.engine.step import Step

    now, real = 0.0, Step.train

    def slow(self: Step, *arguments: Any) -> None:
        nonlocal now
        now += 20
        real(self, *arguments)

    words = ["run", *TINY, "--seeds", "2", "--lanes", lanes, "--out", str(tmp_path), "--name", "x"]
    with monkeypatch.context() as patched:
        patched.setattr(train.time, "monotonic", lambda: now)
        patched.setattr(Step, "train", slow)
        assert main([*words, "--time-limit", "50s"]) == 75
        said = capsys.readouterr()
        assert said.out == "" and "time limit reached, everything is saved" in said.err.splitlines()[-1]
        assert "interrupted" in {load_record(file.parent).status for file in tmp_path.rglob("record.json")}
        assert main([*words, "--time-limit", "1h"]) == 0
    assert {load_record(tmp_path / "x" / f"ft-bn-{seed}").status for seed in (0, 1)} == {"finished"}
    assert main([*words[:-1], "y"]) == 0
    for seed in (0, 1):
        stopped, alone = (load_record(tmp_path / name / f"ft-bn-{seed}") for name in "xy")
        assert stopped.weights == alone.weights and stopped.accuracy == alone.accuracy


@pytest.mark.parametrize("text", ["9", "m", "-5m", "1.5h", "0s", "9 minutes", "99999999999d"])
def test_a_time_limit_that_is_no_duration_is_refused(text: str, tmp_path: Path, capsys: Capture) -> None:
    said = mistake(capsys, "run", *TINY, "--out", str(tmp_path), f"--time-limit={text}")
    assert "--time-limit takes a duration such as 45s, 9m or 1h30m" in said


def test_a_closing_terminal_may_send_several_signals_and_nohup_ignores_them() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with stop_on_signal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)
