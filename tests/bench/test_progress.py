"""What is said while runs go on: lines to a stream, bars to a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tbbn.bench.config import resolve
from tbbn.bench.engine import EpochEnded, Loading, Stepped, TaskEnded
from tbbn.bench.engine.events import Position
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.progress import RunBars, RunLines, RunProgress, counter, run_progress
from tbbn.bench.runs.pending import PendingRun


def pending(seed: int = 0, **settings: object) -> PendingRun:
    config = resolve(("test", {"seed": seed, "data.tasks": 2, "train.epochs": 3, **settings}))
    return PendingRun(config, Path("runs") / str(seed))


def ended(run: PendingRun, status: str = "finished", message: str = "") -> Record:
    record = new_record(run.config)
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
    lines = RunLines(2, stream)
    one = pending()
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


def test_a_long_task_prints_an_epoch_every_thirty_seconds() -> None:
    stream, clock = io.StringIO(), [0.0]
    lines = RunLines(1, stream, every=30.0, clock=lambda: clock[0])
    one = pending()
    lines.start(one)
    clock[0] = 29.0
    lines.event(one, EVENTS[1])
    assert len(stream.getvalue().splitlines()) == 1
    clock[0] = 30.0
    lines.event(one, EVENTS[1])
    assert stream.getvalue().splitlines()[-1] == "  ft + bn, seed 0: task 1 train epoch 2/3: loss 0.500"


def test_images_that_are_decoded_for_long_are_counted() -> None:
    stream, clock = io.StringIO(), [0.0]
    lines = RunLines(1, stream, every=30.0, clock=lambda: clock[0])
    one = pending()
    lines.start(one)
    for second in (2.0, 31.0):
        clock[0] = second
        lines.event(one, Loading(10 * int(second), 400))
    assert stream.getvalue().splitlines()[1:] == ["  ft + bn, seed 0: 310 of 400 images decoded"]
    with RunBars([one]) as bars:
        bars.start(one)
        bars.event(one, Loading(10, 40))
        shown = {task.description: task for task in bars.bars.tasks}["ft + bn, seed 0: decoding"]
        assert (shown.completed, shown.total, shown.fields["count"]) == (10, 40, "10/40 images")


def test_only_the_tasks_to_be_learnt_are_counted() -> None:
    stream = io.StringIO()
    lines = RunLines(1, stream)
    one = pending(**{"data.stop_after": 1})
    lines.start(one)
    lines.event(one, EVENTS[2])
    assert "task 1/1" in stream.getvalue()


def test_what_was_done_before_and_what_failed_is_said() -> None:
    stream = io.StringIO()
    lines = RunLines(2, stream)
    lines.end(pending(), ended(pending()))
    lines.start(pending(1))
    lines.end(pending(1), ended(pending(1), "diverged", "the loss is not finite"))
    said = stream.getvalue().splitlines()
    assert said[0] == "run 1/2: ft + bn, seed 0: already finished, read from runs/0"
    assert said[1] == "run 2/2: ft + bn, seed 1"
    assert said[2] == "  ft + bn, seed 1: diverged: the loss is not finite"


def test_bars_follow_two_runs_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [pending(), pending(1), pending(2)]
    with RunBars(runs, redraw=0.0) as bars:
        for one in runs[:2]:
            bars.start(one)
        for event in EVENTS:
            for one in runs[:2]:
                bars.event(one, event)
        shown = {task.description: task for task in bars.bars.tasks}
        whole = shown["3 runs"]
        assert (whole.total, whole.completed, whole.fields["count"]) == (6, 4, "4/6 tasks")
        mine = shown["ft + bn, seed 1: task 2/2 balanced"]
        assert mine.fields["note"] == "accuracy 50.0 %" and mine.completed == 0.5
        bars.end(runs[0], ended(runs[0]))
        bars.end(runs[1], ended(runs[1], "failed", "[red]boom[/red]"))
        bars.end(runs[2], ended(runs[2]))
        assert len(bars.bars.tasks) == 1 and whole.completed == 6
    said = capsys.readouterr()
    assert said.out == ""  # progress is for standard error
    assert "ft + bn, seed 0: A_f 50.0 % (0 s)" in said.err
    assert "ft + bn, seed 1: A_f 50.0 % (0 s): failed: [red]boom[/red]" in said.err
    assert "ft + bn, seed 2: A_f 50.0 % (already finished)" in said.err


def test_bars_are_not_drawn_for_every_step_but_for_an_epochs_last() -> None:
    clock = [100.0]
    one, seen = pending(), []
    bars = RunBars([one], redraw=0.1, clock=lambda: clock[0])
    bars.start(one)
    for step, now in ((1, 100.0), (2, 100.05), (3, 100.11), (4, 100.12), (5, 100.13)):
        clock[0] = now
        bars.event(one, Stepped(Position(0, 0, 0, step), "train", 1, step, 5))
        seen.append(bars.bars.tasks[1].completed)
    assert seen == [0.2, 0.2, 0.6, 0.6, 1.0]


def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(run_progress([pending()], quiet=True)) is RunProgress
    assert isinstance(run_progress([pending()], quiet=False), RunLines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(run_progress([pending()], quiet=False), RunBars)
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # rich is not installed
    assert isinstance(run_progress([pending()], quiet=False), RunLines)


def test_quiet_still_says_why_a_run_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with run_progress([pending()], quiet=True) as progress:
        progress.start(pending())
        progress.end(pending(), ended(pending()))
        progress.end(pending(), ended(pending(), "failed", "no space\n"))
    assert capsys.readouterr().err == "tbbn: ft + bn, seed 0: failed: no space\\n\n"


def test_a_notebook_has_bars_if_rich_can_draw_them_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tbbn.bench.progress.find_spec", lambda name: object())  # ipywidgets is installed
    assert isinstance(run_progress([pending()], quiet=False), RunLines)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert isinstance(run_progress([pending()], quiet=False), RunBars)
    monkeypatch.setattr("tbbn.bench.progress.find_spec", lambda name: None)
    assert isinstance(run_progress([pending()], quiet=False), RunLines)


def test_a_counter_prints_a_line_every_ten_seconds_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    with counter("packing", "images", clock=lambda: clock[0]) as count:
        assert count is not None
        for second, done in enumerate((40, 41, 44, 50, 60, 70), 1):  # 40 were done before
            clock[0] = 4.0 * second
            count(done, 70)
    assert capsys.readouterr().err.splitlines() == [
        "packing: 44 of 70 images, 0 per second",
        "packing: 70 of 70 images, 1 per second",
    ]


def test_a_counter_with_nothing_to_do_or_to_say_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with counter("packing", "images") as count:
        assert count is not None
        count(70, 70)  # all of it was done before
    with counter("packing", "images", quiet=True) as count:
        assert count is None
    said = capsys.readouterr()
    assert not said.err and not said.out


@pytest.mark.parametrize(("unit", "shown"), [("images", "3/4"), ("bytes", "3/4 bytes")])
def test_a_counter_is_a_bar_in_a_terminal(unit: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with counter("checking", unit) as count:
        assert count is not None
        count(3, 4)
    assert "checking" in stream.getvalue() and shown in stream.getvalue()
