"""Records and checkpoints that are cut, damaged or behind each other: finished tasks are never lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from killed import uninterrupted
from tinyrun import tiny

from tbbn.bench.cli.main import main
from tbbn.bench.engine import Record
from tbbn.bench.files import LOCK, locked
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.pending import PendingRun
from tbbn.bench.runs.record import load_record, save_record, update_record
from tbbn.bench.runs.saved import run_saved
from tbbn.bench.runs.sweep import run_all
from tbbn.bench.runs.verify import verify
from tbbn.errors import UserError

Capture = pytest.CaptureFixture[str]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != LOCK}


def no_problem(folder: Path) -> bool:
    return not any(finding.problem for finding in verify(folder))


def half_way(directory: Path) -> Record:
    """Stop a run in its third task, with a checkpoint after every epoch."""
    asked = iter(range(10**6))
    return run_saved(tiny(), directory, every=0.0, stop=lambda: next(asked) > 24)


def is_whole(record: Record) -> bool:
    expected = uninterrupted(tiny()).record
    return record.status == "finished" and (record.accuracy, record.history) == (expected.accuracy, expected.history)


# A record has all of a task, or nothing of it.


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    "place",
    [
        "tbbn.bench.metrics.confusion_error_types",
        "tbbn.bench.engine.loop.digest",
        "tbbn.bench.runs.state.save",
    ],
)
def test_an_exception_after_a_task_leaves_a_whole_record(
    place: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = place.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)
    calls = 0

    def failing(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # the second task
            raise error("now")
        return real(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(place, failing)
        with pytest.raises(error, match="now"):
            run_saved(tiny(), tmp_path)
    record = load_record(tmp_path)
    assert len(record.accuracy) == (2 if name == "save" else 1)
    assert record.status == ("failed" if error is RuntimeError else "interrupted")
    assert no_problem(tmp_path)
    assert is_whole(run_saved(tiny(), tmp_path))


def half_appended(directory: Path) -> None:
    record = load_record(directory)
    record.weights.pop()
    save_record(record, directory)


def cut(directory: Path) -> None:
    file = directory / "record.json"
    file.write_bytes(file.read_bytes()[:500])


def flip(directory: Path) -> None:
    file = directory / "record.json"
    file.write_bytes(file.read_bytes().replace(b"0.", b"1.", 1))


def empty(directory: Path) -> None:
    (directory / "record.json").write_bytes(b"")


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("damage", [half_appended, cut, flip, empty])
def test_a_damaged_record_is_restored_from_the_checkpoint(
    damage: Any, is_done: bool, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"
    if is_done:
        run_saved(tiny(), folder)
    else:
        half_way(folder)
    damage(folder)
    for command in ("show", "report"):
        assert main([command, str(folder)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert said.err.endswith(f"To restore it from the checkpoint: tbbn resume {folder}\n")
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert is_whole(load_record(folder)) and no_problem(folder)
    damage(folder)
    (record,) = run_all([PendingRun(tiny(), folder)])  # as tbbn run does
    assert is_whole(record) and is_whole(load_record(folder)) and no_problem(folder)


def test_a_damaged_record_without_a_checkpoint_is_one_line_with_a_way_out(tmp_path: Path, capsys: Capture) -> None:
    half_way(tmp_path)
    empty(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert main(["resume", str(tmp_path), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"tbbn: {tmp_path}/record.json: not a record: empty. No checkpoint can restore it; --overwrite starts the run again.\n"
    )


@pytest.mark.parametrize("damage", ["flip", "delete"])
@pytest.mark.parametrize("name", ["config.toml", "predictions.safetensors"])
def test_the_other_files_of_a_finished_run_are_restored_too(name: str, damage: str, tmp_path: Path) -> None:
    run_saved(tiny(), tmp_path)
    before = contents(tmp_path)
    if damage == "flip":
        (tmp_path / name).write_bytes(before[name].replace(b"s", b"r", 1) + b"#")
    else:
        (tmp_path / name).unlink()
    assert not no_problem(tmp_path)
    (record,) = run_all([PendingRun(tiny(), tmp_path)])
    assert is_whole(record) and no_problem(tmp_path)
    assert contents(tmp_path)[name] == before[name]


def test_a_finished_run_is_not_trained_again_for_a_file_that_no_checkpoint_has(tmp_path: Path) -> None:
    run_saved(tiny(), tmp_path)
    for name in (*checkpoint.CANDIDATES, "predictions.safetensors"):
        (tmp_path / name).unlink(missing_ok=True)
    before = contents(tmp_path)
    (record,) = run_all([PendingRun(tiny(), tmp_path)])
    assert is_whole(record) and contents(tmp_path) == before


def test_a_missing_record_is_restored_from_the_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    half_way(tmp_path / "run")
    (tmp_path / "run" / "record.json").unlink()
    for command in ("show", "report", "verify"):
        assert main([command, str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err
        folder = tmp_path / "run"
        assert said == f"tbbn: {folder}: no record here. To restore it from the checkpoint: tbbn resume {folder}\n"
    assert main(["resume", str(tmp_path), "--quiet"]) == 0
    assert is_whole(load_record(tmp_path / "run")) and no_problem(tmp_path / "run")


def test_a_finished_record_is_not_replaced_by_an_interrupted_one_with_as_many_tasks(tmp_path: Path) -> None:
    record = run_saved(tiny(), tmp_path)
    record.status = "interrupted"
    update_record(record, tmp_path)
    assert is_whole(load_record(tmp_path))


# A refused run keeps its record.


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_run_of_another_process_keeps_its_files(lanes: int, tmp_path: Path) -> None:
    pending = [PendingRun(tiny(), tmp_path / "a"), PendingRun(tiny(seed=1), tmp_path / "b")]
    half_way(tmp_path / "a")
    before = contents(tmp_path / "a")
    with locked(tmp_path / "a"):
        if lanes == 1:
            with pytest.raises(UserError, match="another process"):
                run_all(pending, lanes=1)
        else:
            assert [record.status for record in run_all(pending, lanes=2)] == ["failed", "finished"]
        assert contents(tmp_path / "a") == before
    assert is_whole(run_saved(tiny(), tmp_path / "a"))


def test_lanes_leave_a_run_with_damaged_checkpoints_as_it_is(tmp_path: Path, capsys: Capture) -> None:
    for name in ("a", "b"):
        half_way(tmp_path / name)
    for file in (tmp_path / "a").glob("checkpoint*"):
        file.write_bytes(b"damaged")
    before = contents(tmp_path / "a")
    assert main(["resume", str(tmp_path), "--lanes", "2", "--quiet"]) == 1
    assert contents(tmp_path / "a") == before
    assert len(load_record(tmp_path / "a").accuracy) == 2 and is_whole(load_record(tmp_path / "b"))


def test_a_record_is_not_replaced_by_one_with_fewer_tasks(tmp_path: Path) -> None:
    half_way(tmp_path)
    before = load_record(tmp_path).accuracy
    assert len(before) == 2
    for file in tmp_path.glob("checkpoint*"):
        file.unlink()
    asked = iter(range(10**6))
    behind = run_saved(tiny(), tmp_path, every=0.0, stop=lambda: next(asked) > 12)  # from the start
    assert behind.status == "interrupted" and len(behind.accuracy) == 1
    assert load_record(tmp_path).accuracy == before and no_problem(tmp_path)
    assert is_whole(run_saved(tiny(), tmp_path)) and is_whole(load_record(tmp_path))


# Checkpoints.


def test_a_damaged_checkpoint_does_not_replace_the_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_way(tmp_path)
    (tmp_path / checkpoint.NEWEST).write_bytes(b"damaged")
    good = (tmp_path / checkpoint.PREVIOUS).read_bytes()
    asked = iter(range(10**6))
    run_saved(tiny(), tmp_path, stop=lambda: next(asked) >= 0)  # a step, then a save
    assert (tmp_path / checkpoint.PREVIOUS).read_bytes() == good
    (tmp_path / checkpoint.NEWEST).write_bytes(b"damaged again")
    assert is_whole(run_saved(tiny(), tmp_path))


@pytest.mark.parametrize("has_previous", [True, False])
def test_a_kill_between_the_two_renames_loses_nothing(has_previous: bool, tmp_path: Path) -> None:
    half_way(tmp_path)
    newest = checkpoint.load(tmp_path)
    os.replace(tmp_path / checkpoint.NEWEST, tmp_path / checkpoint.ARRIVING)
    if not has_previous:
        (tmp_path / checkpoint.PREVIOUS).write_bytes(b"damaged")
    found = checkpoint.load(tmp_path)
    assert newest is not None and found is not None and found[0]["position"] == newest[0]["position"]
    assert is_whole(run_saved(tiny(), tmp_path))
    assert not (tmp_path / checkpoint.ARRIVING).exists()


def test_a_checkpoint_of_another_version_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_way(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "SCHEMA", 99)
        checkpoint.save(tmp_path, {}, {})
    before = contents(tmp_path)
    with pytest.raises(UserError, match="has schema 99"):
        run_saved(tiny(), tmp_path)
    assert contents(tmp_path) == before
