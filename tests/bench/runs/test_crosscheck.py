"""A checkpoint against its record: each rule alone, with one that just holds and one that just does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tinyrun import tiny
from torch import Tensor

from tbbn.bench.engine.events import Position
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.engine.setup import load_source, scenario_of
from tbbn.bench.files import NO_SEAL, seal
from tbbn.bench.runs import checkpoint, crosscheck, recompute
from tbbn.bench.runs.record import load_predictions, load_record, save_record
from tbbn.bench.runs.saved import run_saved
from tbbn.bench.runs.verify import verify
from tbbn.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three tasks, with the state at the start of each."""
    directory = tmp_path_factory.mktemp("run")
    run_saved(tiny(train__epochs=1), directory)
    return directory


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def problems(directory: Path) -> dict[str, str]:
    return {finding.subject: finding.problem for finding in verify(directory, evaluate=False) if finding.problem}


def change(file: Path, values: Callable[[dict[str, Any]], object], **tensors: Tensor) -> None:
    """Write a checkpoint again with other values and tensors."""
    state, held = checkpoint.read(file)
    values(state)
    file.unlink()  # it may be a link to another
    file.write_bytes(checkpoint.encode(state, {**held, **tensors}))


# Of a history of so many epochs of tasks and phases, the position may be ...
@pytest.mark.parametrize(
    ("history", "position", "wanted"),
    [
        ([], (0, 0, 0), 0),
        ([], (0, 0, 1), None),
        ([], (0, 1, 0), 0),  # the first phase had no epoch
        ([(0, 0)], (0, 0, 1), 1),
        ([(0, 0)], (0, 0, 0), None),
        ([(0, 0)], (0, 1, 0), 1),
        ([(0, 0)], (0, 2, 0), 1),
        ([(0, 0)], (0, 0, 2), None),
        ([(0, 0), (0, 1)], (0, 0, 2), 2),
        ([(0, 0), (0, 1)], (0, 1, 0), 2),
        ([(0, 0), (0, 1)], (0, 0, 1), None),
        ([(0, 0), (0, 1), (0, 0)], (0, 1, 1), 1),  # an epoch of the second phase
        ([(0, 0), (0, 1), (0, 0)], (0, 1, 2), None),
        ([(0, 0), (0, 1)], (1, 0, 0), 0),
        ([(0, 0), (0, 1)], (1, 0, 2), None),
        ([(0, 0), (0, 1)], (1, 1, 0), 0),
        ([(0, 0), (1, 0)], (1, 0, 1), 1),
        ([(0, 0), (1, 0)], (1, 1, 0), 1),
    ],
)
def test_the_epochs_of_a_history_lead_to_the_position(
    history: list[tuple[int, int]], position: tuple[int, int, int], wanted: int | None
) -> None:
    record = new_record(tiny())
    record.history = [{"task": task, "epoch": epoch} for task, epoch in history]
    found = crosscheck._position_problem(Position(*position, step=0), record, [])
    assert (found == "") == (wanted is not None)
    if found:
        epochs = next((e + 1 for t, e in reversed(history) if t == position[0]), 0)
        assert found == f"its history has {epochs} epochs of the phase, but it is at epoch {position[2] + 1}."


def test_the_steps_that_were_counted_lead_to_the_position() -> None:
    totals = [{"count": 2}, {"count": 3}]
    assert crosscheck._position_problem(Position(step=5), new_record(tiny()), totals) == ""
    for step in (4, 6):
        found = crosscheck._position_problem(Position(step=step), new_record(tiny()), totals)
        assert found == f"it counted 5 steps of the epoch, but is at step {step}."


@pytest.mark.parametrize(
    ("status", "tasks", "is_right"),
    [("finished", 3, True), ("finished", 2, False), ("interrupted", 2, True), ("interrupted", 1, False)],
)
def test_a_checkpoint_is_one_task_ahead_of_an_unfinished_record_at_most(
    status: str, tasks: int, is_right: bool, copy: Path
) -> None:
    record = load_record(copy)
    for name in ("accuracy", "task_il", "calibrated", "errors", "exemplars", "splits", "weights"):
        setattr(record, name, getattr(record, name)[:tasks])
    record.status, record.history = status, [entry for entry in record.history if entry["task"] < tasks]
    found = {f.subject: f.problem for f in crosscheck.compared(record, {}, states(copy))}
    assert found[checkpoint.NEWEST] == ("" if is_right else f"has learnt 3 tasks, the record {tasks}.")


def states(directory: Path) -> dict[str, crosscheck.State]:
    return {name: checkpoint.read(directory / name) for name in (checkpoint.NEWEST, "task-2.safetensors")}


def test_without_checkpoints_and_only_then_it_is_said_that_there_are_none(copy: Path) -> None:
    def said() -> list[str]:
        return [f.not_checked for f in verify(copy, evaluate=False) if f.subject == "checkpoints"]

    assert said() == []
    for file in [*copy.glob("checkpoint*"), *copy.glob("task-*")]:
        file.unlink()
    assert said() == ["there are none"] and problems(copy) == {}


def test_a_file_of_a_tasks_start_holds_no_other_state(copy: Path) -> None:
    change(copy / "task-2.safetensors", lambda values: values["position"].update(step=1))
    shutil.copy(copy / "task-2.safetensors", copy / "task-3.safetensors")
    found = problems(copy)
    assert found.keys() == {"task-2.safetensors", "task-3.safetensors"}
    assert set(found.values()) == {
        "is not the state at the start of its task, but that at Position(task=1, phase=0, epoch=0, step=1)."
    }


def test_what_differs_between_a_checkpoint_and_its_record_is_named(copy: Path) -> None:
    file = copy / checkpoint.NEWEST
    content = file.read_bytes()
    network = next(name for name in checkpoint.read(file)[1] if name.startswith("network."))
    other = torch.full((20,), -1, dtype=torch.int16)
    cases: list[tuple[Any, dict[str, Tensor], str]] = [
        (lambda v: v["record"].update(skipped=["a"]), {}, "its skipped differs from the record's."),
        (lambda v: v["record"]["exemplars"].__setitem__(1, 3), {}, "its exemplars differs from the record's, first in entry 2."),
        (lambda v: v["position"].update(task=2), {}, "is at task 3, but its record has 3 tasks."),
        (lambda v: v.update(task_sizes=[2, 2]), {}, "its network has tasks of [2, 2] classes, the record of [2, 2, 2]."),
        (lambda v: v.update(config="seed = 3"), {}, "is of a run with another config."),
        (lambda v: v.update(config=3), {}, "is of a run with another config."),
        (lambda v: None, {"predictions.task1": other}, "its predictions differ from those of the run, in task1."),
        (lambda v: None, {"memory.index": torch.arange(11)}, "its memory has 11 rows, the record 12."),
        (lambda v: None, {network: torch.zeros(3)}, "its weights are not those of the record after task 3."),
    ]  # fmt: skip
    for values, tensors, line in cases:
        change(file, values, **tensors)
        assert problems(copy) == {checkpoint.NEWEST: line}
        file.write_bytes(content)
    assert problems(copy) == {}


# What is computed again. ----------------------------------------------------------------------------------------------


def test_a_network_is_found_by_the_tasks_it_has_learnt(copy: Path) -> None:
    def checked() -> list[str]:
        return [f.subject[-1] for f in verify(copy) if f.subject.startswith("evaluation") and not f.not_checked]

    assert checked() == ["1", "2", "3"]
    (copy / checkpoint.PREVIOUS).unlink()
    (copy / "task-2.safetensors").unlink()
    assert checked() == ["2", "3"]
    (copy / checkpoint.NEWEST).unlink()
    assert checked() == ["2"]


def test_what_is_said_of_a_network_that_gives_something_else_ends_without_a_space(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = crosscheck.evaluate

    def last(text: str) -> str:
        (problem,) = [f.problem for f in verify(copy) if f.subject == "evaluation after task 1"]
        assert problem.startswith(text)
        return problem[-1]

    monkeypatch.setattr(crosscheck, "evaluate", lambda *a: real(*a)._replace(task_il=[-1.0] * (a[0].number + 1)))
    assert last("task-IL accuracy: the record says [") == "."
    monkeypatch.setattr(crosscheck, "evaluate", lambda *a: real(*a)._replace(calibrated=[-1.0] * (a[0].number + 1)))
    assert last("calibrated accuracy: the record says [") == "."
    monkeypatch.setattr(crosscheck, "evaluate", lambda *a: real(*a)._replace(predictions=torch.zeros(7)))
    assert last("100 % of the saved network's predictions differ from the stored ones.") == "."


def predicted(directory: Path, **tensors: Tensor) -> None:
    """Write the predictions again, with others in their place, in all files."""
    record = load_record(directory)
    record.predictions = {**load_predictions(directory), **tensors}
    save_record(record, directory)
    for file in [*directory.glob("checkpoint*"), *directory.glob("task-*")]:
        file.unlink()


@pytest.mark.parametrize(
    ("task", "values", "line"),
    [
        ("task1", [0] * 3, "3 predictions for 20 test images."),
        ("task1", [0] * 19 + [-1], "there are predictions outside the 4 classes."),
        ("task1", [0] * 19 + [4], "there are predictions outside the 4 classes."),
    ],
)
def test_predictions_that_cannot_be_are_one_finding_and_the_other_tasks_are_checked(
    task: str, values: list[int], line: str, copy: Path
) -> None:
    predicted(copy, **{task: torch.tensor(values, dtype=torch.int16)})
    assert problems(copy) == {"accuracy after task 2": line}
    checked = {finding.subject for finding in verify(copy)}
    assert {"accuracy after task 1", "accuracy after task 3", "error types after task 3"} <= checked


def test_predictions_may_be_the_first_and_the_last_class(copy: Path) -> None:
    predicted(copy, task0=torch.tensor([0, 1] * 5, dtype=torch.int16))
    assert set(problems(copy)) <= {"accuracy after task 1", "error types after task 1", "task-IL accuracy after task 1"}
    assert "outside" not in str(problems(copy))


def test_a_record_without_facts_about_its_data_is_of_an_earlier_version(copy: Path) -> None:
    record = load_record(copy)
    record.data, record.predictions = {}, load_predictions(copy)
    save_record(record, copy)
    found = {f.subject: (f.problem, f.not_checked) for f in verify(copy, evaluate=False)}
    assert found["data"] == ("", "the record is from a version that did not write it")


def test_a_method_lists_its_phases_again_with_the_memory_it_had() -> None:
    seen: list[tuple[int, int]] = []

    class Asking:
        uses_memory = True

        def phases(self, context: Any) -> list[Any]:
            seen.append((context.number, len(context.memory)))
            return []

    record = new_record(tiny())
    record.accuracy = [[1.0], [1.0, 1.0]]
    recompute._epochs(record, Asking(), [7, 9])  # type: ignore[arg-type]
    assert seen == [(0, 0), (1, 7), (2, 9)]


# The files of a run. --------------------------------------------------------------------------------------------------


def reseal(file: Path, tree: dict[str, Any]) -> None:
    file.write_bytes(seal(json.dumps({**tree, "sha256": NO_SEAL}).encode()))


def test_a_whole_record_that_cannot_be_read_is_an_error_and_a_damaged_one_a_finding(copy: Path) -> None:
    file = copy / "record.json"
    tree = json.loads(file.read_bytes())
    reseal(file, {**tree, "schema": 99})
    with pytest.raises(UserError, match="written by a newer version"):
        verify(copy)
    file.write_text(json.dumps({**tree, "schema": 99}))
    found = problems(copy)
    assert found["record.json"] == "damaged: its content does not match its checksum."
    assert found["contents"].startswith("cannot be recomputed: record.json: written by a newer version")
    assert found.keys() == {"record.json", "contents"}
    reseal(file, {**tree, "class_order": [0] * 6, "history": [{}]})  # nothing of this is a user's mistake
    assert "contents" in problems(copy) or "epochs in the history" in problems(copy)
    del tree["config_sha256"]
    reseal(file, tree)
    assert problems(copy) == {"config.toml": "damaged: its content does not match the checksum in the record."}


def test_a_check_that_fails_by_itself_is_a_finding(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(record: Record) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(recompute, "status", fails)
    assert problems(copy) == {"contents": "cannot be recomputed: by zero"}


def test_a_record_without_metrics_has_none_to_check_before_its_first_task(tmp_path: Path) -> None:
    asked = iter(range(100))
    run_saved(tiny(), tmp_path, stop=lambda: next(asked) == 2)
    tree = json.loads((tmp_path / "record.json").read_bytes())
    assert tree.pop("metrics") == {}
    reseal(tmp_path / "record.json", tree)
    assert problems(tmp_path) == {}


def test_predictions_with_a_checksum_that_are_none_are_named(copy: Path) -> None:
    file = copy / "predictions.safetensors"
    file.write_bytes(seal(f'{{"sha256": "{NO_SEAL}"}}'.encode()))
    assert problems(copy)["predictions.safetensors"].startswith(f"{file}: damaged (")
    good = save({"task0": torch.zeros(3)}, metadata={"sha256": NO_SEAL})
    file.write_bytes(good)  # not sealed
    assert problems(copy)["predictions.safetensors"] == "damaged: its content does not match its checksum."


def test_files_are_read_again_where_the_record_has_changed_meanwhile(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, real, reads = load_record(copy), checkpoint.read, []
    record.predictions = load_predictions(copy)

    def meanwhile(file: Path) -> Any:
        reads.append(file.name)
        if len(reads) == 2:
            record.message = "written by another process"
            save_record(record, copy)
        return real(file)

    monkeypatch.setattr(checkpoint, "read", meanwhile)
    assert problems(copy) == {}
    assert reads == [checkpoint.NEWEST, checkpoint.PREVIOUS, "task-2.safetensors", "task-3.safetensors"] * 2


def test_a_failed_run_that_had_begun_is_checked(copy: Path) -> None:
    record = load_record(copy)
    record.status, record.class_order, record.predictions = "failed", [0, 1, 2, 3, 4, 5], load_predictions(copy)
    save_record(record, copy)
    assert "class order" in problems(copy)


def test_no_data_is_downloaded_to_check_a_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tbbn.bench.runs import verify as module

    asked: list[Any] = []

    def watched(config: Any, **options: Any) -> Any:
        asked.append(options)
        return load_source(config)

    monkeypatch.setattr(module, "load_source", watched)
    assert problems(copy) == {} and asked == [{"download": False}]
    assert scenario_of(tiny(), load_source(tiny())).task_sizes == (2, 2, 2)
