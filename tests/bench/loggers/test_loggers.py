"""Loggers: what they are told, the default one's file, a logger that fails, plugins, and following a run."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import TINY, Capture, mistake
from tinyrun import tiny

import tbbn
from tbbn.bench.cli.follow import follow
from tbbn.bench.cli.main import main
from tbbn.bench.loggers import LOG, RunInfo, read_lines
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError
from tbbn.plugins import temporary

CALLS: list[tuple[str, Any]] = []


@pytest.fixture
def spy() -> Iterator[None]:
    """A logger named "spy" that keeps what it is told in CALLS, and one named "broken" that fails at its third call."""

    class Spy:
        limit = 10**9

        def note(self, *call: Any) -> None:
            CALLS.append(call)
            if len(CALLS) == self.limit:
                raise ConnectionError("no server\nat all")

        def start(self, run: RunInfo) -> None:
            self.note("start", run)

        def epoch(self, number: int, values: Any) -> None:
            self.note("epoch", number, dict(values))

        def task(self, epoch: int, number: int, accuracy: Any, metrics: Any) -> None:
            self.note("task", epoch, number, list(accuracy), metrics)

        def finish(self, status: str, metrics: Any) -> None:
            self.note("finish", status, metrics)

    class Broken(Spy):
        limit = 3

    CALLS.clear()
    with temporary():
        tbbn.register_logger("spy")(Spy)
        tbbn.register_logger("broken")(Broken)
        yield


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


@pytest.mark.usefixtures("spy")
def test_a_logger_hears_of_every_epoch_and_task(tmp_path: Path) -> None:
    config = tiny(data__stop_after=2)
    record = run_saved(config, tmp_path / "run", log=("spy",))
    assert [call[0] for call in CALLS] == ["start", "epoch", "epoch", "task", "epoch", "epoch", "task", "finish"]
    info = CALLS[0][1]
    assert (info.name, info.directory, info.tasks, info.resumed) == ("ft + bn, seed 0", tmp_path / "run", 2, False)
    assert info.config["train.epochs"] == 2 and info.config["norm.name"] == "bn"
    assert [(call[1], call[2]) for call in CALLS if call[0] == "epoch"] == list(enumerate(record.history, 1))
    assert [call[1:4] for call in CALLS if call[0] == "task"] == [
        (2, 0, record.accuracy[0]),
        (4, 1, record.accuracy[1]),
    ]
    assert CALLS[-1] == ("finish", "finished", record.metrics)
    assert not (tmp_path / "run" / LOG).exists()


@pytest.mark.usefixtures("spy")
@pytest.mark.parametrize("lanes", ["1", "2"])
def test_a_logger_that_fails_is_one_line_and_the_run_goes_on(lanes: str, tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--out", str(tmp_path), "--name", "x", "--quiet", "--lanes", lanes, "--log", "broken"]
    assert main(words) == 0
    said = capsys.readouterr().err
    wanted = (
        r"tbbn: logger 'broken' of .*test_loggers.*, test_loggers\.py line \d+ failed and is off for this run: (.*)\n"
    )
    found = re.fullmatch(wanted, said)
    assert found and found[1] == "ConnectionError: no server"
    assert len(CALLS) == 3 and load_record(tmp_path / "x").status == "finished"
    assert lines(tmp_path / "x")[-1]["event"] == "end"


def test_every_run_leaves_a_line_for_each_epoch_and_task(tmp_path: Path) -> None:
    record = run_saved(tiny(), tmp_path)
    log = lines(tmp_path)
    assert [line["event"] for line in log] == ["start", *["epoch", "epoch", "task"] * 3, "end"]
    epochs = [line for line in log if line["event"] == "epoch"]
    assert [{k: line[k] for k in record.history[i]} for i, line in enumerate(epochs)] == record.history
    assert [line["accuracy"] for line in log if line["event"] == "task"] == record.accuracy
    assert log[-1]["status"] == "finished" and log[-1]["metrics"] == record.metrics
    assert [line["time"] for line in log] == sorted(line["time"] for line in log)


def test_a_resumed_run_goes_on_in_its_log_and_a_new_one_replaces_it(tmp_path: Path) -> None:
    steps = iter(range(10**6))
    run_saved(tiny(), tmp_path, every=0, stop=lambda: next(steps) > 30)
    with (tmp_path / LOG).open("a") as file:
        file.write('{"event": "ep')  # a kill may cut a line
    before = len(lines_that_are_whole(tmp_path))
    run_saved(tiny(), tmp_path)
    log = lines_that_are_whole(tmp_path)
    assert log[before]["event"] == "start" and log[before]["resumed"] and log[before - 1]["status"] == "interrupted"
    assert [line["number"] for line in log if line["event"] == "epoch"] == list(range(1, 7))
    run_saved(tiny(seed=1), tmp_path, overwrite=True)
    assert lines(tmp_path)[0]["name"] == "ft + bn, seed 1"
    assert [line["event"] for line in lines(tmp_path)].count("start") == 1


def lines_that_are_whole(folder: Path) -> list[dict[str, Any]]:
    return [event for event, _ in read_lines(folder / LOG)]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("tensrboard", r"unknown logger 'tensrboard'; .*Did you mean 'tensorboard'\?"),
        ("wandb", r"logger 'wandb' needs wandb; pip install 'tbbn\[wandb\]'\."),
        ("mlflow", r"logger 'mlflow' needs mlflow; pip install 'tbbn\[mlflow\]'\."),
        ("tensorboard", r"logger 'tensorboard' needs tensorboard; pip install 'tbbn\[tensorboard\]'\."),
    ],
)
def test_what_cannot_log_is_refused_before_training(
    log: str, line: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("wandb", "mlflow", "mlflow.tracking", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    said = mistake(capsys, "run", *TINY, "--out", str(tmp_path / "runs"), "--log", log)
    assert re.search(line, said)
    assert not (tmp_path / "runs").exists()


def test_the_logger_of_the_documentation_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/logging.md").read_text()
    (tmp_path / "mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    words = ["run", *TINY, "--out", str(tmp_path), "--name", "x", "--quiet", "--log", "worst"]
    with temporary():
        assert main([*words, "--plugin", str(tmp_path / "mine.py")]) == 0
    assert float((tmp_path / "x/worst.txt").read_text()) == min(load_record(tmp_path / "x").accuracy[-1])


def test_logging_from_python_needs_a_folder(tmp_path: Path) -> None:
    settings = {"data": "synthetic:4x6x2x8", "data.tasks": 2, "train.epochs": 1, "memory.budget": 4, "quiet": True}
    with pytest.raises(UserError, match=r"log needs a folder for the runs; set out"):
        tbbn.run(log="tensorboard", **settings)
    tbbn.run(out=tmp_path / "with", **settings)
    tbbn.run(out=tmp_path / "without", log="none", **settings)
    found = [file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob(LOG)]
    assert found == ["with"]


def test_a_finished_run_can_be_followed_to_its_end(tmp_path: Path, capsys: Capture) -> None:
    record = run_saved(tiny(), tmp_path)
    assert main(["show", str(tmp_path), "--follow"]) == 0
    title, *rows, end = capsys.readouterr().out.splitlines()
    assert title == "ft + bn, seed 0: accuracy % on each task after each task" and end == "finished"
    for t, row in enumerate(rows):
        numbers = " ".join(f"{100 * value:5.1f}" for value in record.accuracy[t])
        assert row.startswith(f"  {t + 1}/3: {numbers}   mean ")
    assert "no log.jsonl here" in mistake(capsys, "show", str(tmp_path / "nowhere"), "--follow")


def test_following_waits_for_a_run_and_notices_that_it_is_gone(tmp_path: Path, capsys: Capture) -> None:
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    start = {"event": "start", "name": "x", "tasks": 2, "resumed": False, "host": platform.node()}

    def write(*events: dict[str, Any]) -> None:
        with (tmp_path / LOG).open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    write({**start, "pid": os.getpid()})
    later = [
        lambda: write({"event": "epoch", "task": 0, "phase": "train", "epoch": 0, "total": 1.0}),
        lambda: write({"event": "task", "task": 0, "accuracy": [0.5]}),
        lambda: write({**start, "pid": over.pid}),
    ]
    assert follow(tmp_path, sleep=lambda _: later.pop(0)()) == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        later == []
        and said[1] == "  1/2:  50.0   mean 50.0"
        and said[-1].startswith("the process of this run has ended")
    )
