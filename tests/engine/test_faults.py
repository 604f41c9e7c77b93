"""Runs die in every way a run can die; nothing is lost and nothing is misreported."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killed import left_alone, same
from tinyrun import tiny

from tbbn.engine import Run, checkpoint, run, state
from tbbn.engine.events import Position
from tbbn.errors import UserError
from tbbn.record import load_record

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "method", ["ft", "eeil(balanced_epochs=4)", "bic(correction_epochs=8)", "podnet(finetune_epochs=4)"]
)
def test_a_run_killed_eight_times_ends_as_if_it_had_been_left_alone(method: str, tmp_path: Path) -> None:
    program = [sys.executable, str(HERE / "killed.py"), method, str(tmp_path / "run"), "8", "3"]
    done = subprocess.run(
        program, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["kills"] == 8
    assert found["status"] == "finished"
    assert found["record"] == []
    assert found["weights"]
    assert found["predictions"]


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
        {"data__validation": 0.2, "train__keep": "best", "train__momentum": 0.0},
    ],
    ids=lambda s: s.get("method__name", "-".join(s) or "ft"),
)
def test_a_run_stopped_after_any_step_continues_exactly(settings: dict[str, Any], tmp_path: Path) -> None:
    config = tiny(norm__name=settings.pop("norm__name", "tbbn"), **settings)
    expected = left_alone(config)
    places = set()
    for pause in (1, 2, 3, 5, 8, 13, 21, 1000):
        asked = iter(range(1, 10**6))
        record = run(config, directory=tmp_path, stop=lambda asked=asked, pause=pause: next(asked) >= pause)  # type: ignore[misc]
        if record.status == "finished":
            break
        saved = checkpoint.load(tmp_path)
        assert saved is not None
        places.add(tuple(saved[0]["position"].values()))
    assert record.status == "finished"
    assert len(places) >= 3, "the run was stopped in several places"
    resumed = Run(config)
    assert state.load(resumed, tmp_path)
    assert same(resumed.network.state_dict(), expected.network.state_dict())
    assert record.accuracy == expected.record.accuracy
    assert record.history == expected.record.history
    assert record.exemplars == expected.record.exemplars


def test_a_finished_directory_is_not_trained_again(tmp_path: Path) -> None:
    first = run(tiny(), directory=tmp_path)
    events: list[object] = []
    again = run(tiny(), directory=tmp_path, on_event=events.append)
    assert events == []
    assert again.accuracy == first.accuracy
    assert again.status == "finished"


def test_a_directory_of_another_config_is_refused(tmp_path: Path) -> None:
    run(tiny(), directory=tmp_path)
    with pytest.raises(UserError, match="holds a run of another config"):
        run(tiny(seed=1), directory=tmp_path)


def _half_way(directory: Path) -> None:
    """Two checkpoints: after the first task, and after some steps of the second."""
    asked = iter(range(10**6))
    run(tiny(), directory=directory, every=0.0, stop=lambda: next(asked) > 12)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(damage: str, tmp_path: Path) -> None:
    _half_way(tmp_path)
    file = tmp_path / checkpoint.NEWEST
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4] ^= 0x10
    file.write_bytes(
        {"truncated": content[: len(content) // 2], "flipped": content, "empty": b"", "foreign": b"x" * 99}[damage]
    )
    record = run(tiny(), directory=tmp_path)
    expected = left_alone(tiny())
    assert record.status == "finished"
    assert record.history == expected.record.history


def test_two_damaged_checkpoints_are_named_in_one_line(tmp_path: Path) -> None:
    _half_way(tmp_path)
    for name in (checkpoint.NEWEST, checkpoint.BEFORE):
        (tmp_path / name).write_bytes(b"not a checkpoint")
    with pytest.raises(
        UserError, match=r"checkpoint.safetensors: damaged.*checkpoint.previous.safetensors: damaged"
    ) as error:
        run(tiny(), directory=tmp_path)
    assert "\n" not in str(error.value)


def test_every_flipped_byte_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    _half_way(tmp_path)
    file = tmp_path / checkpoint.NEWEST
    good = file.read_bytes()
    (tmp_path / checkpoint.BEFORE).unlink()
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
    with pytest.raises(UserError, match="has schema 99; this version reads 1"):
        checkpoint.load(tmp_path)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _half_way(tmp_path)
    before = checkpoint.load(tmp_path)
    assert before is not None

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tbbn.record.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run(tiny(), directory=tmp_path, every=0.0)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*.safetensors.*")), "nothing half-written is left"
    after = checkpoint.load(tmp_path)
    assert after is not None
    assert after[0]["position"] == before[0]["position"]
    assert run(tiny(), directory=tmp_path).history == left_alone(tiny()).record.history


def test_a_second_process_is_told_that_the_run_is_taken(tmp_path: Path) -> None:
    with checkpoint.locked(tmp_path), pytest.raises(UserError, match="another process is working on this run"):
        run(tiny(), directory=tmp_path)
    assert run(tiny(), directory=tmp_path).status == "finished"  # the lock went with its holder


def test_a_diverged_run_says_where_and_stops_within_the_epoch(tmp_path: Path) -> None:
    record = run(tiny(train__lr=1e30, train__epochs=50), directory=tmp_path)
    assert record.status == "diverged"
    assert "not finite in task 1, phase 'train', epoch" in record.message
    assert "since step" in record.message
    assert "largest gradient in" in record.message
    assert len(record.history) < 3
    assert load_record(tmp_path).status == "diverged"


def test_saving_does_not_change_a_run(tmp_path: Path) -> None:
    often = run(tiny(), directory=tmp_path, every=0.0)
    assert often.history == left_alone(tiny()).record.history


def test_a_fresh_run_starts_at_the_beginning() -> None:
    assert Run(tiny()).position == Position(0, 0, 0, 0)
