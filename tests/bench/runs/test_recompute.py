"""What ``tbbn verify`` computes again, piece by piece: what each finding says, and where it cannot say anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import finish, tiny

import tbbn
from tbbn.bench.engine.record import Record, new_record, source_digest
from tbbn.bench.engine.setup import load_source, scenario_of
from tbbn.bench.methods import Phase
from tbbn.bench.methods.ft import FineTune
from tbbn.bench.runs import recompute
from tbbn.bench.runs.crosscheck import ENVIRONMENT, explanation, is_elsewhere
from tbbn.plugins import temporary


def learnt(config: Any, tasks: int, status: str = "interrupted") -> Record:
    """A record that has learnt so many tasks, as far as they count here."""
    record = new_record(config)
    record.status, record.accuracy = status, [[0.5] * (t + 1) for t in range(tasks)]
    return record


@pytest.mark.parametrize(
    ("settings", "tasks", "status", "problem"),
    [
        ({}, 3, "finished", ""),
        ({}, 2, "finished", "the record says finished, but has 2 of 3 tasks."),
        ({}, 4, "finished", "the record says finished, but has 4 of 3 tasks."),
        ({}, 0, "interrupted", ""),
        ({}, 3, "interrupted", ""),
        ({}, 4, "failed", "the record has 4 tasks, the config 3."),
        ({"data__stop_after": 2}, 2, "finished", ""),
        ({"data__stop_after": 2}, 3, "diverged", "the record has 3 tasks, the config 2."),
        ({"data__stop_after": 1}, 0, "finished", "the record says finished, but has 0 of 1 tasks."),
    ],
)
def test_a_finished_run_has_every_task_and_no_run_more(
    settings: dict[str, Any], tasks: int, status: str, problem: str
) -> None:
    assert recompute.status(learnt(tiny(**settings), tasks, status)).problem == problem


@pytest.mark.parametrize(
    ("status", "names", "is_right"),
    [
        ("finished", "task0 task1", True),
        ("finished", "task0 task1 task2", False),
        ("interrupted", "task0 task1 task2", True),  # killed between the two files
        ("interrupted", "task0 task1 task3", False),
        ("interrupted", "task0 task2", False),
        ("finished", "task0", False),
        ("finished", "", False),
    ],
)
def test_there_are_predictions_for_every_task(status: str, names: str, is_right: bool) -> None:
    given = {name: torch.zeros(1) for name in names.split()}
    found = recompute.predictions_present(learnt(tiny(), 2, status), given)
    said = f"the record has 2 tasks, but there are predictions for: {names.replace(' ', ', ') or 'none'}."
    assert found.problem == ("" if is_right else said)


def exemplars(tasks: int, **settings: Any) -> list[int]:
    config = tiny(**settings)
    source = load_source(config)
    scenario = scenario_of(config, source)
    return [recompute._n_exemplars(config, recompute.method_of(config), scenario, t) for t in range(tasks)]


def test_the_number_of_exemplars_by_hand() -> None:
    # Three tasks of two classes with 12 images each.
    assert exemplars(3) == [12, 12, 12]
    assert exemplars(3, memory__budget=15) == [14, 12, 12]  # 7, 3 and 2 of each class
    assert exemplars(3, memory__budget=100) == [24, 48, 72]  # all there are; then 16 of each class at most
    assert exemplars(3, memory__budget=5, memory__per_class=True) == [10, 20, 30]
    assert exemplars(3, memory__budget=0) == exemplars(3, method__name="joint") == [0, 0, 0]
    assert exemplars(3, memory__budget=30, data__online=True) == [24, 30, 30]


def epochs(record: Record) -> str:
    """What is said about the history."""
    found = recompute._epochs(record, recompute.method_of(record.run_config), record.exemplars)
    return found.problem or found.not_checked


def test_what_is_said_about_a_history_that_does_not_fit() -> None:
    record = finish(tiny(data__stop_after=2, train__schedule="constant")).record
    assert len(record.history) == 4 and epochs(record) == ""
    right = [dict(entry) for entry in record.history]
    second = "task 0, phase train, epoch 1, lr 0.05"
    record.history[1]["lr"] = 0.5
    assert epochs(record) == f"entry 2 is task 0, phase train, epoch 1, lr 0.5; the config asks for {second}."
    record.history = right[:3]
    assert epochs(record) == "entry 4 is nothing; the config asks for task 1, phase train, epoch 1, lr 0.05."
    record.history = [*right, {"task": 2, "phase": "train", "epoch": 0, "lr": 0.05}]
    assert epochs(record) == "", "the next task may have begun"
    record.history = [*right[:1], {**right[1], "validation": 0.5}, *right[2:]]
    assert epochs(record) == f"entry 2 is {second}; the config asks for {second}."
    record.history = [*right, *({"task": 2, "phase": "train", "epoch": e, "lr": 0.05} for e in range(3))]
    assert epochs(record) == "entry 7 is task 2, phase train, epoch 2, lr 0.05; the config asks for nothing."


def test_phases_that_need_the_network_are_not_checked() -> None:
    with temporary(fresh=True):

        @tbbn.register_method("asking", "its phases depend on the network")
        @dataclass(frozen=True)
        class Asking(FineTune):
            def phases(self, context: Any) -> list[Phase]:
                assert context.network.n_classes
                return [Phase()]

        record = finish(tiny(method__name="asking", data__stop_after=1, train__epochs=1)).record
        assert epochs(record) == "the phases of asking need its network"


def test_every_file_of_code_counts_in_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str:
        source_digest.cache_clear()
        return source_digest()

    monkeypatch.setattr(tbbn, "__file__", str(tmp_path / "__init__.py"))
    seen = {found()}
    for name, text in (("a.py", "1"), ("a.py", "2"), ("deep/a.py", "2"), ("deep/b.c", ""), ("deep/b.h", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        assert found() not in seen
        seen.add(found())
    (tmp_path / "notes.txt").write_text("no code")
    (tmp_path / "deep/.#a.py").symlink_to("somebody@host.1:2")  # Emacs has a.py open with unsaved changes
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/a-checkpoint.py").write_text("old")
    assert found() in seen
    monkeypatch.undo()
    source_digest.cache_clear()


def test_changed_code_is_named_and_tolerates_nothing() -> None:
    record = new_record(tiny())
    here = dict(record.environment)
    assert explanation(record, here) == "" and not is_elsewhere(record, here)
    record.environment["source"] = "before"
    assert explanation(record, here) == f"The code has changed: source was before, is {source_digest()}."
    assert not is_elsewhere(record, here)
    del record.environment["source"]  # a record of an earlier version
    assert explanation(record, here) == ""
    assert is_elsewhere(record, {**here, "torch": "2.0"})
    record.resumed = [{**here, "source": "between"}, dict(here)]
    assert not is_elsewhere(record, here), "only the code changed"
    record.environment["source"] = "before"
    assert explanation(record, here) == f"The code has changed: source was before, then between, is {source_digest()}."
    record.resumed = [{**here, "threads": 99}]
    assert is_elsewhere(record, here)


def test_another_cpu_kernel_may_explain_a_difference_in_training() -> None:
    record = new_record(tiny())
    here = {**record.environment, "cpu_kernel": "avx2"}
    assert explanation(record, here) == "", (
        "the norm of the run does not use it, or the record is of an earlier version"
    )
    record.environment["cpu_kernel"] = "off"
    assert explanation(record, here).endswith("; here cpu_kernel was off, is avx2.")
    assert explanation(record, {**here, "cpu_kernel": "off"}) == ""
    record.resumed = [dict(here)]
    said = "the run was resumed in another environment, which may explain it."
    assert explanation(record, dict(record.environment)) == said
    assert not is_elsewhere(record, here), "an evaluation does not depend on it"
    del here["cpu_kernel"]
    assert explanation(record, here) == ""


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_every_part_of_the_environment_may_explain_a_difference(name: str) -> None:
    record = new_record(tiny())
    record.environment = dict.fromkeys(ENVIRONMENT, "same") | {"device": "cpu"}
    here = dict(record.environment)
    assert explanation(record, here) == ""
    assert explanation(record, {**here, name: "other"}) == (
        f"results are bit-identical only in the same environment; here {name} was {here[name]}, is other."
    )
    del here[name]
    assert f"{name} was {record.environment[name]}, is None" in explanation(record, here)
    record.resumed = [{}]
    assert explanation(record, dict(record.environment)).startswith("the run was resumed in another environment")
    named = {"device", "gpu", "torch", "cuda", "cudnn", "machine", "cpu", "threads", "ranks", "tbbn"}
    assert set(ENVIRONMENT) == named


def test_the_cpu_matters_to_runs_on_it() -> None:
    """CPUs that all call their machine x86_64 take sums in different orders."""
    record = new_record(tiny())
    assert "AVX" in record.environment["cpu"] or record.environment["machine"] != "x86_64"
    for device, matters in (("cpu", True), ("cuda", False)):
        record.environment["device"] = device
        here = record.environment | {"cpu": "another"}
        assert is_elsewhere(record, here) is matters and bool(explanation(record, here)) is matters


def test_without_a_plugin_what_needs_it_is_not_checked() -> None:
    config = tiny()
    source = load_source(config)
    record = learnt(config, 0)
    record.config["norm"] = {"name": "elsewhere"}
    found = list(recompute.known_before_training(record, source, scenario_of(config, source)))
    last = found[-1]
    assert (last.subject, last.problem) == ("splits, exemplars and epochs", "")
    assert last.not_checked == "norm 'elsewhere' comes from a plugin that is not loaded"
    assert "splits" not in {finding.subject for finding in found}
