"""What is said while runs go on: lines to a stream, bars to a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tbbn.bench.cli.progress import Bars, Lines, Quiet, progress
from tbbn.bench.config import resolve
from tbbn.bench.engine import EpochEnded, Stepped, TaskEnded
from tbbn.bench.engine.events import Position
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.runs.sweep import Job


def job(seed: int = 0, **settings: object) -> Job:
    config = resolve(("test", {"seed": seed, "data.tasks": 2, "train.epochs": 3, **settings}))
    return Job(config, Path("runs") / str(seed))


def ended(job: Job, status: str = "finished", message: str = "") -> Record:
    record = new_record(job.config)
    record.status, record.message, record.task_sizes = status, message, [5, 5]
    record.accuracy = record.task_il = [[0.5], [0.25, 0.75]]
    return record


EVENTS = (
    Stepped(Position(0, 0, 1), "train", 3, 1, 2),
    EpochEnded(Position(0, 0, 1), "train", 3, {"ce": 0.5, "total": 0.5}, None),
    TaskEnded(0, [0.5], 10),
    Stepped(Position(1, 1, 0), "balanced", 2, 1, 2),
    TaskEnded(1, [0.25, 0.75], 10),
)


def test_lines_name_the_run_its_tasks_and_its_accuracy() -> None:
    stream = io.StringIO()
    lines = Lines(2, stream)
    one = job()
    lines.start(one)
    for event in EVENTS:
        lines.event(one, event)
    lines.end(one, ended(one))
    said = stream.getvalue().splitlines()
    assert said[0] == "run 1/2: ft + bn, seed 0"
    assert [line.split(" (")[0] for line in said[1:]] == [
        "  ft + bn, seed 0: task 1/2, mean accuracy 50.0 %",
        "  ft + bn, seed 0: task 2/2, mean accuracy 50.0 %",
    ]


def test_a_long_task_is_heard_of_before_its_end() -> None:
    stream = io.StringIO()
    lines = Lines(1, stream, every=0.0)
    one = job()
    lines.start(one)
    lines.event(one, EVENTS[1])
    assert stream.getvalue().splitlines()[-1] == "  ft + bn, seed 0: task 1 train epoch 2/3: loss 0.500"


def test_only_the_tasks_to_be_learnt_are_counted() -> None:
    stream = io.StringIO()
    lines = Lines(1, stream)
    one = job(**{"data.stop_after": 1})
    lines.start(one)
    lines.event(one, EVENTS[2])
    assert "task 1/1" in stream.getvalue()


def test_what_was_done_before_and_what_failed_is_said() -> None:
    stream = io.StringIO()
    lines = Lines(2, stream)
    lines.end(job(), ended(job()))
    lines.start(job(1))
    lines.end(job(1), ended(job(1), "diverged", "the loss is not finite"))
    said = stream.getvalue().splitlines()
    assert said[0] == "run 1/2: ft + bn, seed 0: finished before, taken from runs/0"
    assert said[1] == "run 2/2: ft + bn, seed 1"
    assert said[2] == "  ft + bn, seed 1: diverged: the loss is not finite"


def test_bars_follow_two_runs_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tbbn.bench.cli.progress._BLINK", 0.0)
    jobs = [job(), job(1), job(2)]
    with Bars(jobs) as bars:
        for one in jobs[:2]:
            bars.start(one)
        for event in EVENTS:
            for one in jobs[:2]:
                bars.event(one, event)
        shown = {task.description: task for task in bars.bars.tasks}
        whole = shown["3 runs"]
        assert (whole.total, whole.completed, whole.fields["count"]) == (6, 4, "4/6 tasks")
        mine = shown["ft + bn, seed 1: task 2/2 balanced"]
        assert mine.fields["note"] == "accuracy 50.0 %" and mine.completed == 0.5
        bars.end(jobs[0], ended(jobs[0]))
        bars.end(jobs[1], ended(jobs[1], "failed", "[red]boom[/red]"))
        bars.end(jobs[2], ended(jobs[2]))
        assert len(bars.bars.tasks) == 1 and whole.completed == 6
    said = capsys.readouterr()
    assert said.out == ""  # progress is for standard error
    assert "ft + bn, seed 0: A_f 50.0 % (0 s)" in said.err
    assert "ft + bn, seed 1: A_f 50.0 % (0 s): failed: [red]boom[/red]" in said.err
    assert "ft + bn, seed 2: A_f 50.0 % (finished before)" in said.err


def test_bars_are_not_drawn_for_every_step_but_for_an_epochs_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("tbbn.bench.cli.progress.time.monotonic", lambda: clock[0])
    one, seen = job(), []
    bars = Bars([one])
    bars.start(one)
    for step, now in ((1, 100.0), (2, 100.05), (3, 100.11), (4, 100.12), (5, 100.13)):
        clock[0] = now
        bars.event(one, Stepped(Position(0, 0, 0, step), "train", 1, step, 5))
        seen.append(bars.bars.tasks[1].completed)
    assert seen == [0.2, 0.2, 0.6, 0.6, 1.0]


def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(progress([job()], quiet=True)) is Quiet
    assert isinstance(progress([job()], quiet=False), Lines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(progress([job()], quiet=False), Bars)
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # rich is not installed
    assert isinstance(progress([job()], quiet=False), Lines)
