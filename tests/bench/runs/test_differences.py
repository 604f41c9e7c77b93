"""What is said about a task that was trained again, piece by piece: each number is the right one of several."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinyrun import tiny
from torch import Tensor

from tbbn.bench.engine import Event, TaskEnded
from tbbn.bench.engine.record import digest, new_record
from tbbn.bench.runs import checkpoint, retrain
from tbbn.bench.runs.record import load_record, save_record
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError


def weights(mine: dict[str, Tensor], theirs: dict[str, Tensor] | None, recorded: str, folder: Path) -> str:
    """What is said of the weights after the second task, where a checkpoint holds theirs."""
    record = new_record(tiny())
    record.weights = ["", recorded]
    if theirs is not None:
        position = {"task": 2, "phase": 0, "epoch": 0, "step": 0}
        checkpoint.save(folder, {"position": position}, checkpoint.join("network", theirs))
    run: Any = SimpleNamespace(network=SimpleNamespace(state_dict=lambda: mine))
    found = retrain._weights(record, run, 1, folder, "after task 2", "because")
    assert found.subject == "weights after task 2"
    return found.problem


def test_the_largest_difference_of_all_weights_is_named_with_its_place(tmp_path: Path) -> None:
    mine = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(7), "c": torch.tensor([3.0]), "none": torch.zeros(0)}
    theirs = {**mine, "a": torch.tensor([1.0, 2.75]), "c": torch.tensor([2.5])}
    assert weights(mine, theirs, digest(mine), tmp_path) == ""
    assert weights(mine, theirs, "other", tmp_path) == "they differ by up to 0.75, in a; because"
    theirs = {**theirs, "b": torch.tensor(17)}
    assert weights(mine, theirs, "other", tmp_path) == "they differ by up to 10, in b; because"
    del theirs["b"]
    assert weights(mine, theirs, "other", tmp_path) == "they differ; because"
    assert weights(mine, None, "other", tmp_path / "nothing") == "they differ; because"


def test_the_first_epoch_and_the_largest_difference_of_the_losses() -> None:
    def epochs(*totals: float) -> list[dict[str, Any]]:
        return [{"epoch": i, "total": total, "lr": 0.1} for i, total in enumerate(totals)]

    said = retrain._loss_difference
    assert said(epochs(1, 2), epochs(1, 2)) == said([], []) == ""
    assert said(epochs(1, 2, 3, 4), epochs(1, 2.5, 2, 4)) == "differ by up to 1, first in epoch 2 of 4."
    assert said(epochs(1, 2), epochs(1)) == "the record has 2 epochs, retrained: 1."
    other = [{**epochs(1)[0], "lr": 0.2}]
    assert said(epochs(1), other) == "differ by up to 0, first in epoch 1 of 1."


def test_accuracies_of_the_task_that_was_trained_are_compared(tmp_path: Path) -> None:
    record, again = new_record(tiny()), new_record(tiny())
    record.accuracy, again.accuracy = [[0.5], [0.25, 1.0], [0, 0, 0]], [[0.0], [0.5, 0.5], [1, 1, 1]]
    record.history = [{"task": 0, "total": 1.0}, {"task": 1, "total": 2.0}]
    again.history = [{"task": 0, "total": 5.0}, {"task": 1, "total": 2.5}]
    record.weights = ["", digest({}), ""]
    run: Any = SimpleNamespace(network=SimpleNamespace(state_dict=dict), record=again)
    found = {f.subject: f.problem for f in retrain._compared(record, run, 1, tmp_path, "because")}
    assert found == {
        "weights after task 2, retrained": "",
        "accuracy after task 2, retrained": "differs by up to 0.5: the record says [0.25, 1.0], retrained: [0.5, 0.5].",
        "losses of task 2, retrained": "differ by up to 0.5, first in epoch 1 of 1.",
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("done")
    run_saved(tiny(train__epochs=1), directory)
    return directory


def test_events_of_the_training_are_told_and_only_the_task_asked_for_is_trained(done: Path) -> None:
    events: list[Event] = []
    retrain.retrain(done, 1, on_event=events.append)
    assert [event.task for event in events if isinstance(event, TaskEnded)] == [1]
    again: list[Event] = []
    found = retrain.retrain(done, 1, from_start=True, on_event=again.append)
    assert [event.task for event in again if isinstance(event, TaskEnded)] == [0, 1]
    assert "task-2.safetensors" not in {finding.subject for finding in found}


def test_a_run_without_a_task_learnt_has_none_to_train_again(tmp_path: Path) -> None:
    save_record(new_record(tiny()), tmp_path)
    with pytest.raises(UserError, match=rf"^{tmp_path}: the run has learnt no task yet; cannot retrain task 1\.$"):
        retrain.retrain(tmp_path, 0)


def test_a_task_does_not_begin_in_the_state_of_another_task(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done, tmp_path / "run")
    shutil.copy(done / "task-3.safetensors", tmp_path / "run" / "task-2.safetensors")
    with pytest.raises(UserError, match=r"task-2\.safetensors: is not this run's state at the start of task 2\.$"):
        retrain.retrain(tmp_path / "run", 1)


@pytest.mark.parametrize("check", ["require_plugins", "check_unchanged"])
def test_the_plugins_of_a_run_are_looked_at_before_it_is_trained_again(
    check: str, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = load_record(done)

    def refuse(*given: Any) -> None:
        raise UserError(repr(given))

    monkeypatch.setattr(retrain, check, refuse)
    with pytest.raises(UserError) as caught:
        retrain.retrain(done, 0)
    assert str(caught.value) == repr((record.run_config, record.plugins, str(done)))
