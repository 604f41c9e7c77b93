"""Checkpoints: which file is read, what an error says about it, and what a run takes from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as to_bytes
from tinyrun import tiny

from tbbn.bench.config import to_toml
from tbbn.bench.engine.loop import Run
from tbbn.bench.files import NO_SEAL, seal
from tbbn.bench.runs import checkpoint, state
from tbbn.bench.runs.checkpoint import ARRIVING, NEWEST, PREVIOUS
from tbbn.bench.runs.record import load_or_restore
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError


def at(task: int, **more: int) -> dict[str, Any]:
    return {"position": {"task": task, "phase": 0, "epoch": 0, "step": 0, **more}}


def write(file: Path, values: dict[str, Any]) -> None:
    file.write_bytes(checkpoint.encode(values, {}))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_the_first_readable_file_is_loaded_and_nothing_is_moved(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    for i, name in enumerate((PREVIOUS, ARRIVING, NEWEST)):  # each is preferred to those before it
        write(tmp_path / name, at(i))
        found = checkpoint.load(tmp_path)
        assert found is not None and found[0]["position"]["task"] == i
    (tmp_path / NEWEST).write_bytes(b"damaged")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    found = checkpoint.load(tmp_path)
    assert found is not None and found[0]["position"]["task"] == 1
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    found = checkpoint.load(tmp_path, repair=True)
    assert found is not None and found[0]["position"]["task"] == 1
    assert names(tmp_path) == {NEWEST, PREVIOUS} and (tmp_path / NEWEST).read_bytes() == before[ARRIVING]
    checkpoint.load(tmp_path, repair=True)
    assert names(tmp_path) == {NEWEST, PREVIOUS}, "a good newest one stays"


def test_damaged_files_are_all_named_with_what_is_wrong_and_a_way_out(tmp_path: Path) -> None:
    (tmp_path / NEWEST).write_bytes(b"x")
    write(tmp_path / PREVIOUS, at(0))
    content = bytearray((tmp_path / PREVIOUS).read_bytes())
    content[-2] ^= 1
    (tmp_path / PREVIOUS).write_bytes(content)
    with pytest.raises(UserError) as caught:
        checkpoint.load(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / NEWEST}: damaged: its checksum is missing. "
        f"{tmp_path / PREVIOUS}: damaged: its content does not match its checksum. "
        "Delete the folder of the run to start again."
    )


def test_a_file_with_a_valid_checksum_that_holds_something_else_is_damaged() -> None:
    def sealed(metadata: dict[str, str]) -> bytes:
        return seal(to_bytes({}, metadata={**metadata, "sha256": NO_SEAL}))

    cases = {
        "KeyError": sealed({}),
        "JSONDecodeError": sealed({"state": "{"}),
        "TypeError": sealed({"state": "[]"}),
        "RecursionError": sealed({"state": "[" * 100_000}),
    }
    for name, content in cases.items():
        with pytest.raises(UserError) as caught:
            checkpoint.decode(content, "here")
        assert str(caught.value) == f"here: damaged, or not a checkpoint ({name})."
    with pytest.raises(UserError, match=r"^here: damaged, or not a checkpoint \(\w+\)\.$"):
        checkpoint.decode(seal(f'{{"sha256": "{NO_SEAL}"}}'.encode()), "here")


def test_tensors_that_share_their_numbers_are_saved_each(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    given = {"whole": whole, "part": whole[1:], "turned": whole.T}
    checkpoint.save(tmp_path, at(0), given)
    _, found = checkpoint.read(tmp_path / NEWEST)
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)


def test_the_state_after_a_task_is_that_of_its_file_or_of_a_checkpoint_at_this_place(tmp_path: Path) -> None:
    def found(tasks: int) -> int:
        return checkpoint.after_task(tmp_path, tasks)[0]["mark"]

    unsaved = rf"{tmp_path}: the network after task 2 is not saved; --save\.tasks all keeps it for every task\.$"
    with pytest.raises(UserError, match=unsaved):
        found(2)
    write(tmp_path / PREVIOUS, {**at(2), "mark": 1})
    assert found(2) == 1
    write(tmp_path / NEWEST, {**at(2, step=1), "mark": 2})
    assert found(2) == 1, "one inside a task is another network"
    write(tmp_path / ARRIVING, {**at(2), "mark": 3})
    assert found(2) == 3
    write(tmp_path / "task-3.safetensors", {**at(2), "mark": 4})
    assert found(2) == 4
    with pytest.raises(UserError, match="the network after task 3 is not saved"):
        found(3)
    (tmp_path / "task-3.safetensors").write_bytes(b"x")
    assert found(2) == 3, "a damaged one is passed over"
    for name in (ARRIVING, PREVIOUS):
        (tmp_path / name).write_bytes(b"y")
    with pytest.raises(UserError, match=r"task-3\.safetensors: damaged: its checksum is missing\.$"):
        found(2)  # the first problem is named


# What a run takes from it. --------------------------------------------------------------------------------------------


def test_a_state_is_of_a_run_with_its_config_in_whatever_words() -> None:
    config, text = tiny(), to_toml(tiny())
    assert state.is_of({"config": text}, config)
    assert state.is_of({"config": f"# as an older version wrote it\n{text}"}, config)
    for other in (to_toml(tiny(seed=1)), None, 3, "[", "seed = 'x'", ""):
        assert not state.is_of({"config": other}, config)
    assert not state.is_of({}, config)


@pytest.mark.parametrize(
    ("position", "is_right"),
    [
        ({"task": 3}, True),  # after the last task
        ({"task": 4}, False),
        ({"task": -1}, False),
        ({"task": 1.0}, False),
        ({"task": True}, False),
        ({"step": -1}, False),
        ({"epoch": "0"}, False),
        ({"task": 1, "phase": 1, "epoch": 1, "step": 1}, True),
    ],
)
def test_a_position_is_of_whole_numbers_and_not_after_the_last_task(position: dict[str, Any], is_right: bool) -> None:
    run = Run(tiny())
    run.position = checkpoint.Position(**position)
    if is_right:
        state._check(run, {})
    else:
        with pytest.raises(ValueError, match=r"there is no position \("):
            state._check(run, {})


@pytest.mark.parametrize("name", ["memory.index", "rows.current", "rows.memory"])
def test_rows_are_those_of_the_data_set(name: str) -> None:
    run = Run(tiny())
    n = len(run.source.train.labels)
    for rows in ([], [0], [n - 1], [0, n - 1]):
        state._check(run, {name: torch.tensor(rows, dtype=torch.int64)})
    for rows in ([-1], [n], [0, n], [-1, 0]):
        with pytest.raises(ValueError, match=f"{name} has rows outside the data set"):
            state._check(run, {name: torch.tensor(rows)})


def test_a_network_of_exactly_the_limit_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tiny(save__tasks="small"))
    size = sum(tensor.numel() * tensor.element_size() for tensor in run.network.state_dict().values())
    for limit, keeps in ((size, True), (size - 1, False)):
        monkeypatch.setattr(state, "SMALL", limit)
        assert state._keeps_tasks(run) is keeps


def test_an_environment_is_recorded_once_however_often_a_run_is_resumed_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(pause: int = 2) -> list[str]:
        asked = iter(range(10**6))
        record = run_saved(tiny(), tmp_path, stop=lambda: next(asked) == pause)
        return [found["machine"] for found in record.resumed]

    assert session() == session() == []
    for machine, wanted in (("a", ["a"]), ("a", ["a"]), ("b", ["a", "b"]), ("a", ["a", "b"])):
        monkeypatch.setattr("tbbn.bench.engine.record.platform.machine", lambda machine=machine: machine)
        assert session() == wanted
    monkeypatch.undo()
    assert session() == ["a", "b"]


def test_a_record_restored_from_a_checkpoint_is_not_finished_whatever_that_says(tmp_path: Path) -> None:
    run_saved(tiny(data__stop_after=1, train__epochs=1), tmp_path)
    (tmp_path / "record.json").unlink()
    values, tensors = checkpoint.read(tmp_path / NEWEST)
    values["record"]["status"] = "finished"
    (tmp_path / NEWEST).write_bytes(checkpoint.encode(values, tensors))
    assert load_or_restore(tmp_path).status == "interrupted"
    assert json.loads(json.dumps(values))["record"]["accuracy"] == load_or_restore(tmp_path).accuracy
