"""``tbbn verify`` finds forgeries with valid checksums, and says what it cannot find."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from tinyrun import tiny

from tbbn.bench import metrics
from tbbn.bench.engine.setup import load_source, scenario_of
from tbbn.bench.files import NO_SEAL, seal
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import load_record, save_record
from tbbn.bench.runs.saved import run_saved
from tbbn.bench.runs.verify import verify

Change = Callable[[dict[str, Any]], None]
CONFIG = {"norm__name": "tbbn", "method__name": "eeil", "method__balanced_epochs": 1}
BY_TASK = ("accuracy", "task_il", "calibrated", "errors", "exemplars", "splits", "weights")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    run_saved(tiny(**CONFIG), directory)
    return directory


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped in its third task, between two steps of an epoch."""
    directory, asked = tmp_path_factory.mktemp("stopped"), iter(range(10**6))
    run_saved(tiny(**CONFIG), directory, stop=lambda: next(asked) > 30)
    state = checkpoint.read(directory / checkpoint.NEWEST)[0]
    assert len(load_record(directory).accuracy) == 2 and state["position"]["step"] > 0
    return directory


def problems(directory: Path) -> dict[str, str]:
    return {f.subject: f.problem for f in verify(directory) if f.problem}


def forge_record(directory: Path, change: Change) -> None:
    record = load_record(directory)
    record.predictions = load_file(directory / "predictions.safetensors")
    change(vars(record))
    save_record(record, directory)


def forge_state(file: Path, change: Change, **tensors: torch.Tensor) -> None:
    state, held = checkpoint.read(file)
    change(state)
    text = json.dumps(state)
    file.unlink()  # it may be a link to another checkpoint
    file.write_bytes(seal(save({**held, **tensors}, metadata={"state": text, "sha256": NO_SEAL})))


def forge_everywhere(directory: Path, change: Change) -> None:
    """Change the record, and its copy in every checkpoint as far as that has learnt the task."""
    forge_record(directory, change)
    for file in directory.glob("*.safetensors"):
        if file.name != "predictions.safetensors":
            forge_state(file, lambda state: change(state["record"]))


def set_last(name: str, value: Any) -> Change:
    def change(tree: dict[str, Any]) -> None:
        if len(tree["accuracy"]) == 3:
            tree[name][2] = value

    return change


def set_value(name: str, value: Any) -> Change:
    return lambda tree: tree.update({name: value})


def first_epoch(**values: Any) -> Change:
    return lambda tree: tree["history"][0].update(values)


def test_honest_runs_pass(finished: Path, stopped: Path) -> None:
    assert problems(finished) == problems(stopped) == {}


def test_a_network_inside_a_task_is_not_taken_for_that_of_the_task_before(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    for file in (tmp_path / "run").glob("task-*"):
        file.unlink()
    (tmp_path / "run" / checkpoint.PREVIOUS).unlink(missing_ok=True)
    assert problems(tmp_path / "run") == {}
    found = {f.subject: f.not_checked for f in verify(tmp_path / "run")}
    assert found["evaluation after task 2"] == "the network after this task is not saved"


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        (set_last("task_il", [1.0, 1.0, 1.0]), "evaluation after task 3"),
        (set_last("task_il", [0.0, 0.0, 0.0]), "task-IL accuracy after task 3"),
        (set_last("calibrated", [0.0, 0.0, 0.0]), "evaluation after task 3"),
        (set_last("calibrated", [1.0, 1.0, 1.0]), "calibrated accuracy after task 3"),
        (set_value("task_sizes", [1, 2, 3]), "task sizes"),
        (set_value("class_order", [0, 1, 2, 3, 4, 5]), "class order"),
        (set_value("skipped", ["train/a.png"]), "skipped images"),
        (lambda tree: tree["data"].update(mean=[0.1, 0.1, 0.1]), "data"),
        (set_last("splits", 4), "splits"),
        (set_last("exemplars", 11), "exemplars"),
        (first_epoch(lr=0.2), "epochs in the history"),
        (first_epoch(epoch=1), "epochs in the history"),
        (first_epoch(phase="balanced"), "epochs in the history"),
        (lambda tree: tree["history"].pop(0), "epochs in the history"),
        (lambda tree: tree["history"].append(tree["history"][-1]), "epochs in the history"),
    ],
)
def test_a_value_forged_in_every_file_is_found(change: Change, subject: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    forge_everywhere(tmp_path / "run", change)
    assert subject in problems(tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        set_last("task_il", [1.0, 1.0, 1.0]),
        set_last("calibrated", []),
        set_last("weights", "0" * 64),
        first_epoch(total=0.001),
        lambda tree: tree["environment"].update(torch="9.9"),
    ],
)
def test_a_value_forged_in_the_record_differs_from_the_checkpoint(
    change: Change, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    forge_record(tmp_path / "run", change)
    assert " differs from the record's" in problems(tmp_path / "run")["checkpoint.safetensors"]


def test_perfect_predictions_in_every_file_are_not_those_of_the_network(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    run = tmp_path / "run"
    scenario = scenario_of(tiny(**CONFIG), load_source(tiny(**CONFIG)))
    labels = scenario.test_labels[torch.cat([task.test for task in scenario.tasks])].to(torch.int16)

    def change(tree: dict[str, Any]) -> None:
        if len(tree["accuracy"]) == 3:
            tree["accuracy"][2] = tree["task_il"][2] = tree["calibrated"][2] = [1.0, 1.0, 1.0]
            confusion = torch.diag(torch.full((6,), 5)).tolist()
            tree["errors"][2] = metrics.confusion_error_types(confusion, 4)
        if "predictions" in tree:
            tree["predictions"]["task2"] = labels

    forge_everywhere(run, change)
    forge_state(run / checkpoint.NEWEST, lambda state: None, **{"predictions.task2": labels})
    assert problems(run).keys() == {"evaluation after task 3"}
    # Without the network, only the checks say that nobody looked.
    not_checked = {f.subject for f in verify(run, evaluate=False) if f.not_checked}
    assert "evaluation after task 3" in not_checked


def test_an_interrupted_run_called_finished(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    forge_everywhere(tmp_path / "run", set_value("status", "finished"))
    assert problems(tmp_path / "run")["status"] == "the record says finished, but has 2 of 3 tasks."


def cut(tree: dict[str, Any]) -> None:
    """Leave the first task."""
    tree.update({name: tree[name][:1] for name in BY_TASK})
    tree["history"] = [entry for entry in tree["history"] if entry["task"] == 0]
    tree["predictions"] = {"task0": tree["predictions"]["task0"]}


@pytest.mark.parametrize("status", ["finished", "interrupted"])
@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_run_cut_to_its_first_task(status: str, has_checkpoints: bool, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    forge_record(tmp_path / "run", lambda tree: (cut(tree), tree.update(status=status)))  # type: ignore[func-returns-value]
    if not has_checkpoints:
        for file in tmp_path.glob("run/*.safetensors"):
            if file.name != "predictions.safetensors":
                file.unlink()
    found = problems(tmp_path / "run")
    assert ("status" in found) == (status == "finished")
    assert (checkpoint.NEWEST in found) == has_checkpoints
    if has_checkpoints:
        assert found[checkpoint.NEWEST] == "has learnt 3 tasks, the record 1."


def test_checkpoints_of_other_runs(finished: Path, tmp_path: Path) -> None:
    run_saved(tiny(**CONFIG, seed=1), tmp_path / "other")
    shutil.copytree(finished, tmp_path / "run")
    for name in (checkpoint.NEWEST, checkpoint.PREVIOUS, "task-2.safetensors"):
        shutil.copy(tmp_path / "other" / name, tmp_path / "run" / name)
    found = problems(tmp_path / "run")
    assert found[checkpoint.NEWEST] == found["task-2.safetensors"] == "is of a run with another config."
    shutil.copytree(finished, tmp_path / "moved")
    shutil.copy(finished / "task-3.safetensors", tmp_path / "moved/task-2.safetensors")
    assert "is not the state at the start of its task" in problems(tmp_path / "moved")["task-2.safetensors"]


def test_other_weights_memory_and_steps_in_a_checkpoint(finished: Path, stopped: Path, tmp_path: Path) -> None:
    tensors = checkpoint.read(finished / checkpoint.NEWEST)[1]
    name = next(name for name, tensor in tensors.items() if name.startswith("network.") and tensor.dim() == 4)
    cases: list[tuple[Path, Change, dict[str, torch.Tensor], str]] = [
        (finished, lambda state: None, {name: tensors[name] * 1.01}, "its weights are not those of the record"),
        (finished, lambda state: None, {"memory.index": tensors["memory.index"][1:]}, "its memory has 11 rows"),
        (finished, lambda state: state.update(task_sizes=[2, 2, 3]), {}, "its network has tasks of"),
        (stopped, lambda state: state["position"].update(step=99), {}, "steps of the epoch, but is at step 99."),
        (stopped, lambda state: state["position"].update(epoch=9), {}, "but it is at epoch 10."),
        (stopped, lambda state: state["position"].update(task=1), {}, "is at task 2, but its record has 2 tasks."),
        (stopped, lambda state: state.update(position=None), {}, "does not fit this run (TypeError"),
    ]
    for i, (source, change, more, line) in enumerate(cases):
        shutil.copytree(source, tmp_path / str(i))
        forge_state(tmp_path / str(i) / checkpoint.NEWEST, change, **more)
        assert line in problems(tmp_path / str(i)).get(checkpoint.NEWEST, ""), line


def test_losses_forged_in_every_file_are_said_not_to_be_checked(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    forge_everywhere(tmp_path / "run", first_epoch(total=0.001))
    assert problems(tmp_path / "run") == {}
    (finding,) = [f for f in verify(tmp_path / "run") if f.subject == "losses in the history"]
    assert finding.not_checked == "--retrain-task N trains task N again and compares"


def test_in_another_environment_rounding_may_change_a_few_predictions(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tbbn.bench.runs import crosscheck

    shutil.copytree(finished, tmp_path / "run")
    forge_everywhere(tmp_path / "run", lambda tree: tree["environment"].update(torch="9.9"))
    real = crosscheck.evaluate
    n_changed = 1

    def rounded(*arguments: Any) -> Any:
        result = real(*arguments)
        result.predictions[:n_changed] = (result.predictions[:n_changed] + 1) % 2
        return result

    monkeypatch.setattr(crosscheck, "evaluate", rounded)
    monkeypatch.setattr(crosscheck, "ROUNDING", 0.1)
    assert problems(tmp_path / "run") == {}
    assert "evaluation after task 3" in problems(finished)
    n_changed = 4
    problem = problems(tmp_path / "run")["evaluation after task 3"]
    assert problem.startswith("13.3 % of the saved network's predictions differ")
    assert "here torch was 9.9, is" in problem
    monkeypatch.setattr(crosscheck, "evaluate", lambda *a: real(*a)._replace(predictions=torch.zeros(7)))
    assert problems(finished)["evaluation after task 3"].startswith("100 % of the saved network's predictions differ")
