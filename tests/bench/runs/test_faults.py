"""Runs that are killed, interrupted, damaged or diverge: nothing is lost or misreported."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed import run_in_pieces, same, uninterrupted
from tinyrun import tiny
from torch import Tensor

from tbbn.bench.cli.main import main
from tbbn.bench.engine import EpochEnded, Event, Run
from tbbn.bench.engine.events import Position
from tbbn.bench.engine.step import Step
from tbbn.bench.files import locked
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved
from tbbn.bench.runs.verify import verify
from tbbn.errors import UserError

HELPERS = Path(__file__).parents[2] / "helpers"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


# By default a method with two phases; below, more methods are stopped at many steps in this process.
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("ft", marks=pytest.mark.nightly),
        "eeil(balanced_epochs=4)",
        pytest.param("bic(correction_epochs=8)", marks=pytest.mark.nightly),
        pytest.param("podnet(finetune_epochs=4)", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_resumes_with_identical_results(method: str, tmp_path: Path) -> None:
    program = [sys.executable, str(HELPERS / "killed.py"), method, str(tmp_path), "8", "3"]
    done = subprocess.run(program, capture_output=True, text=True, env=ONE_THREAD, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    places = {"main": 3, "herding": 3, "evaluation": 3, "writing": 3, "renaming": 3, "random": 8}
    assert found["kills"] == (places if method == "ft" else {**places, "second": 2})
    assert found["different"] == {"random": [], "everywhere": []}
    for name in ("random", "everywhere"):
        assert not list((tmp_path / name).glob(".*.*.*")), "what the killed left behind is gone"


# By default test_interrupt sends them to this process, and test_terminal sends one to a process.
@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_gets_a_signal_saves_itself_and_exits_with_130(number: int, tmp_path: Path) -> None:
    words = ["--data", "synthetic:6x40x5x8", "--data.tasks", "2", "--train.epochs", "12", "--norm", "tbbn"]
    words += ["--threads", "1", "--device", "cpu", "--out", str(tmp_path), "--name", "x"]
    program = [sys.executable, "-m", "tbbn.bench.cli.main", "run", *words]
    with subprocess.Popen(
        program, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ONE_THREAD
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("run 1/1")  # printed at the first step
        process.send_signal(number)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "stopping after this step" in said and "interrupted; run the same command again to resume" in said
    stopped = load_record(tmp_path / "x")
    assert stopped.status == "interrupted" and verify(tmp_path / "x")
    saved = checkpoint.load(tmp_path / "x")
    assert saved is not None and saved[0]["position"] != {"task": 0, "phase": 0, "epoch": 0, "step": 0}
    record = run_saved(stopped.run_config, tmp_path / "x")
    assert record.status == "finished"
    assert record.history == uninterrupted(stopped.run_config).record.history


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method__name": "eeil", "method__balanced_epochs": 2},
        {"method__name": "bic", "method__correction_epochs": 3},
        {"method__name": "podnet", "method__finetune_epochs": 2},
        {"method__name": "afc", "method__finetune_epochs": 1},
        {"method__name": "derpp"},
        {"method__name": "icarl"},
        {"method__name": "il2m"},
        {"data__online": True, "norm__name": "adab2n", "train__epochs": 1},
        {"data__online": True, "method__name": "eeil", "method__unbalanced_phase": True, "method__balanced_epochs": 2},
        {"data__online": True, "method__name": "bic", "batch__memory_from": "past"},
        {"data__online": True, "method__name": "podnet", "memory__budget": 24},
        {"data__validation": 0.2, "train__keep": "best", "train__momentum": 0.0},
        {"train__optimizer": "adamw", "train__schedule": "cosine", "train__warmup": 1, "train__first": {"epochs": 3}},
    ],
    ids=lambda s: s.get("method__name", "-".join(s) or "ft"),
)
def test_a_run_stopped_after_any_step_resumes_with_identical_results(settings: dict[str, Any], tmp_path: Path) -> None:
    config = tiny(norm__name=settings.pop("norm__name", "tbbn"), **settings)
    expected = uninterrupted(config)
    resumed, places = run_in_pieces(config, tmp_path, (1, 2, 3, 5, 8, 13, 21))
    assert places >= 3, "the run was stopped in several places"
    assert same(resumed.network.state_dict(), expected.network.state_dict())
    assert resumed.record.accuracy == expected.record.accuracy
    assert resumed.record.history == expected.record.history
    assert resumed.record.exemplars == expected.record.exemplars


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = run_saved(tiny(), tmp_path)
    events: list[object] = []
    again = run_saved(tiny(), tmp_path, on_event=events.append)
    assert events == []
    assert again.accuracy == first.accuracy
    assert again.status == "finished"


def test_a_folder_with_another_config_is_refused(tmp_path: Path) -> None:
    run_saved(tiny(), tmp_path)
    with pytest.raises(UserError, match="holds a run with another config"):
        run_saved(tiny(seed=1), tmp_path)


def _half_way(directory: Path) -> None:
    """Two checkpoints: after the first task, and after some steps of the second."""
    asked = iter(range(10**6))
    run_saved(tiny(), directory, every=0.0, stop=lambda: next(asked) > 12)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(damage: str, tmp_path: Path) -> None:
    _half_way(tmp_path)
    file = tmp_path / checkpoint.NEWEST
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4] ^= 0x10
    file.write_bytes(
        {"truncated": content[: len(content) // 2], "flipped": content, "empty": b"", "foreign": b"x" * 99}[damage]
    )
    record = run_saved(tiny(), tmp_path)
    expected = uninterrupted(tiny())
    assert record.status == "finished"
    assert record.history == expected.record.history


def test_two_damaged_checkpoints_are_named_in_one_line(tmp_path: Path) -> None:
    _half_way(tmp_path)
    for name in (checkpoint.NEWEST, checkpoint.PREVIOUS):
        (tmp_path / name).write_bytes(b"not a checkpoint")
    with pytest.raises(
        UserError, match=r"checkpoint.safetensors: damaged.*checkpoint.previous.safetensors: damaged"
    ) as error:
        run_saved(tiny(), tmp_path)
    assert "\n" not in str(error.value)


def test_every_flipped_byte_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    _half_way(tmp_path)
    file = tmp_path / checkpoint.NEWEST
    good = file.read_bytes()
    (tmp_path / checkpoint.PREVIOUS).unlink()
    for place in range(0, len(good), max(1, len(good) // 60)):
        bad = bytearray(good)
        bad[place] ^= 0x01
        file.write_bytes(bad)
        with pytest.raises(UserError, match=r"damaged|schema"):
            checkpoint.load(tmp_path)


def test_a_checkpoint_of_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA", 99)
    checkpoint.save(tmp_path, {"a": 1}, {})
    monkeypatch.undo()
    with pytest.raises(UserError, match="has schema 99; this version reads 2"):
        checkpoint.load(tmp_path)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _half_way(tmp_path)
    before = checkpoint.load(tmp_path)
    assert before is not None

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tbbn.bench.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_saved(tiny(), tmp_path, every=0.0)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*.safetensors.*")), "nothing half-written is left"
    after = checkpoint.load(tmp_path)
    assert after is not None
    assert after[0]["position"] == before[0]["position"]
    assert run_saved(tiny(), tmp_path).history == uninterrupted(tiny()).record.history


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes, if this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("room", [0, 20_000, 200_000])
def test_a_real_full_disk_leaves_the_last_good_checkpoint(
    room: int, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = small_disk / "run"
    _half_way(directory)
    before = checkpoint.load(directory)
    record = load_record(directory)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - room))
    assert main(["resume", str(directory), "--quiet"]) == 2
    *others, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tbbn: {directory}") and "No space left on device" in line
    assert [other for other in others if "logger 'jsonl' failed and is off" not in other] == []
    after = checkpoint.load(directory)
    assert before is not None and after is not None
    assert after[0]["position"] == before[0]["position"]
    assert [f.problem for f in verify(directory)] == [""] * len(verify(directory))
    assert load_record(directory).accuracy[:1] == record.accuracy  # a record may fit where a checkpoint does not
    assert not list(directory.glob(".*.*.*")), "nothing half-written takes up room"
    filler.unlink()
    assert run_saved(tiny(), directory).history == uninterrupted(tiny()).record.history


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="another process is working on it"):
        run_saved(tiny(), tmp_path)
    assert run_saved(tiny(), tmp_path).status == "finished"  # the lock was released


def test_a_diverged_run_says_where_and_stops_within_the_epoch(tmp_path: Path) -> None:
    record = run_saved(tiny(train__lr=1e30, train__epochs=50), tmp_path)
    assert record.status == "diverged"
    assert "not finite in task 1, phase 'train', epoch" in record.message
    assert "since step" in record.message
    assert "largest gradient in" in record.message
    assert len(record.history) < 3
    assert load_record(tmp_path).status == "diverged"


@pytest.mark.parametrize("pause", [0, 12])
def test_the_message_of_a_diverged_run_names_the_step_also_after_a_resume(
    pause: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(data__name="synthetic:6x32x5x8", train__epochs=4)  # 8 steps per epoch in the first task
    if pause:
        asked = iter(range(10**6))
        # stop is called after each step and at the end of each epoch.
        assert run_saved(config, tmp_path, stop=lambda: next(asked) >= pause).status == "interrupted"
    real, done = Step.losses, iter(range(pause, 10**6))

    def spoilt(self: Step, *arguments: Any) -> dict[str, Tensor]:
        terms = real(self, *arguments)
        return {name: term * float("nan") for name, term in terms.items()} if next(done) == 8 + 5 else terms

    monkeypatch.setattr(Step, "losses", spoilt)
    record = run_saved(config, tmp_path)
    assert record.status == "diverged"
    assert "task 1, phase 'train', epoch 2, since step 6 of its batch layout" in record.message
    assert "largest gradient in backbone." in record.message and "(nan)" in record.message


def test_other_runs_of_a_sweep_continue_when_one_diverges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Step.losses

    def spoilt(self: Step, *arguments: Any) -> dict[str, Tensor]:
        factor = float("inf") if "renorm" in type(self.network.backbone.norms[0]).__name__.lower() else 1.0
        return {name: term * factor for name, term in real(self, *arguments).items()}

    monkeypatch.setattr(Step, "losses", spoilt)
    words = ["--data", "synthetic:4x12x4x8", "--data.tasks", "2", "--train.epochs", "1", "--memory.budget", "8"]
    assert main(["run", *words, "--norm", "bn,brn,tbbn", "--quiet", "--out", str(tmp_path), "--name", "x"]) == 3
    capsys.readouterr()
    states = {norm: load_record(tmp_path / "x" / f"ft-{norm}-0").status for norm in ("bn", "brn", "tbbn")}
    assert states == {"bn": "finished", "brn": "diverged", "tbbn": "finished"}


def test_a_folder_that_is_deleted_during_a_run_is_written_again(tmp_path: Path) -> None:
    folder, deleted = tmp_path / "run", []

    def delete(event: Event) -> None:
        if isinstance(event, EpochEnded) and not deleted:
            shutil.rmtree(folder)
            deleted.append(event)

    record = run_saved(tiny(), folder, on_event=delete, every=0.0)
    assert deleted and record.status == "finished" and load_record(folder).accuracy == record.accuracy
    assert not any(finding.problem for finding in verify(folder))


def test_saving_does_not_change_a_run(tmp_path: Path) -> None:
    often = run_saved(tiny(), tmp_path, every=0.0)
    assert often.history == uninterrupted(tiny()).record.history


def test_a_fresh_run_starts_at_the_beginning() -> None:
    assert Run(tiny()).position == Position(0, 0, 0, 0)
