"""Runs still to be done: which of them there are, what stops them, and what an earlier session left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tinyrun import tiny

from tbbn.bench.config import RunConfig
from tbbn.bench.files import NO_SEAL, seal
from tbbn.bench.runs import checkpoint, pending
from tbbn.bench.runs.checkpoint import NEWEST, PREVIOUS
from tbbn.bench.runs.pending import PendingRun, expand, finished_record, runs_of_sweeps
from tbbn.bench.runs.recipe import RECIPE, Axes, recipe_text
from tbbn.bench.runs.record import (
    PREDICTIONS,
    can_be_restored,
    load_predictions,
    load_record,
    save_record,
    update_record,
)
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError
from tbbn.plugins import temporary

LAYER: dict[str, Any] = {"data.name": "synthetic:4x12x4x8", "data.tasks": 2, "device": "cpu"}


def test_more_runs_than_fit_in_a_folder_are_refused_before_any_is_made(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pending, "check", lambda config: pytest.fail("made"))
    with pytest.raises(UserError, match="10001 runs are more than the 10000 that a sweep may have"):
        expand([("test", LAYER)], Axes(seeds=tuple(range(10_001))), tmp_path)


def test_a_missing_plugin_stops_a_new_sweep_and_one_that_is_resumed_only_if_it_is_needed(tmp_path: Path) -> None:
    layers, axes = [("test", {**LAYER, "plugins": ("gone_plugin",)})], Axes(seeds=(0, 1))
    with temporary(fresh=True):
        with pytest.raises(UserError, match="gone_plugin"):
            expand(layers, axes, tmp_path)
        assert len(expand(layers, axes, tmp_path, resumes=True)) == 2
        (tmp_path / RECIPE).write_text(recipe_text(layers, axes))
        assert len(runs_of_sweeps(tmp_path)) == 2
        needed = [("test", {**LAYER, "plugins": ("gone_plugin",), "norm.name": "elsewhere"})]
        with pytest.raises(UserError, match="gone_plugin"):
            expand(needed, axes, tmp_path, resumes=True)


def test_a_folder_names_the_options_that_nothing_else_implies(tmp_path: Path) -> None:
    axes = Axes(
        methods=("eeil", "eeil(kd=2)", "eeil(balanced_lr_factor=0.1)"), norms=("tbbn(rule=uneven)",), seeds=(1,)
    )
    found = expand([("test", {**LAYER, "protocol": "paper", "data.validation": 0.2})], axes, tmp_path)
    assert [run.directory.name for run in found] == [
        "eeil-tbbn_rule=uneven_-1",  # the paper's learning rate of the balanced phase, a hundredth, is not named
        "eeil_kd=2_-tbbn_rule=uneven_-1",
        "eeil_balanced_lr_factor=0.1_-tbbn_rule=uneven_-1",
    ]


def test_the_runs_of_all_sweeps_below_a_folder_are_found_in_order(tmp_path: Path) -> None:
    for name, seeds in (("b/c", (0, 1)), ("a", (2, 3))):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / RECIPE).write_text(recipe_text([("test", LAYER)], Axes(seeds=seeds)))
    found = [(str(run.directory.relative_to(tmp_path)), run.config.seed) for run in runs_of_sweeps(tmp_path)]
    assert found == [("a/ft-bn-2", 2), ("a/ft-bn-3", 3), ("b/c/ft-bn-0", 0), ("b/c/ft-bn-1", 1)]


# What an earlier session left. ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return tiny(data__stop_after=2, train__epochs=1)


@pytest.fixture(scope="module")
def done(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("done")
    run_saved(config, directory)
    return directory


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "run")
    return tmp_path / "run"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of a tensor: the file can still be parsed
    file.write_bytes(content)


def shorten(directory: Path) -> None:
    """Leave the first task's predictions, with a matching checksum."""
    kept = {"task0": load_predictions(directory)["task0"]}
    (directory / PREDICTIONS).write_bytes(seal(save(kept, metadata={"sha256": NO_SEAL})))


def test_a_finished_run_is_restored_if_a_file_beside_its_record_is_not_whole_and_a_checkpoint_has_it(
    copy: Path, config: RunConfig
) -> None:
    record, run = load_record(copy), PendingRun(config, copy)
    good = {name: (copy / name).read_bytes() for name in (PREDICTIONS, "config.toml", NEWEST, PREVIOUS)}

    def restorable() -> bool:
        found = can_be_restored(record, copy)
        assert (finished_record(run) is None) is found
        for name, content in good.items():
            (copy / name).write_bytes(content)
        return found

    assert not restorable(), "nothing is wrong"
    flip(copy / PREDICTIONS)
    assert restorable()
    shorten(copy)
    assert restorable()
    (copy / "config.toml").write_bytes(good["config.toml"] + b"\n")
    assert restorable()
    (copy / PREDICTIONS).unlink()
    assert restorable()
    # Without a checkpoint of the same weights there is nothing to restore it from.
    (copy / PREDICTIONS).unlink()
    for name in (NEWEST, PREVIOUS):
        (copy / name).write_bytes(b"damaged")
    assert not restorable()
    (copy / PREDICTIONS).unlink()
    for name in (NEWEST, PREVIOUS):
        (copy / name).unlink()
    assert not restorable()
    (copy / PREDICTIONS).unlink()
    (copy / NEWEST).write_bytes((copy / "task-2.safetensors").read_bytes())
    assert not restorable(), "a checkpoint after the first task lacks the second"
    (copy / PREDICTIONS).unlink()
    (copy / NEWEST).write_bytes(checkpoint.encode({}, {}))
    assert not restorable(), "a checkpoint without a record"


def test_more_predictions_than_the_record_counts_are_no_damage(copy: Path) -> None:
    record = load_record(copy)
    record.accuracy = record.accuracy[:1]
    assert not can_be_restored(record, copy)


@pytest.mark.parametrize(
    ("there", "now", "is_replaced"),
    [
        (("finished", 2, 0), ("interrupted", 2, 0), False),
        (("interrupted", 2, 0), ("finished", 2, 0), True),
        (("interrupted", 2, 0), ("failed", 2, 0), True),
        (("interrupted", 2, 0), ("finished", 1, 0), False),
        (("interrupted", 1, 0), ("interrupted", 2, 0), True),
        (("finished", 2, 1), ("interrupted", 1, 0), True),  # of another config
    ],
)
def test_a_record_is_replaced_unless_it_is_of_the_same_run_and_knows_more(
    there: tuple[str, int, int], now: tuple[str, int, int], is_replaced: bool, done: Path, tmp_path: Path
) -> None:
    def record(status: str, tasks: int, seed: int, message: str) -> Any:
        made = load_record(done)
        made.status, made.message, made.config = status, message, {**made.config, "seed": seed}
        for name in ("accuracy", "task_il", "calibrated", "errors", "exemplars", "splits", "weights"):
            setattr(made, name, getattr(made, name)[:tasks])
        return made

    save_record(record(*there, "there"), tmp_path)
    update_record(record(*now, "now"), tmp_path)
    assert load_record(tmp_path).message == ("now" if is_replaced else "there")


def test_an_unchanged_file_is_not_written_again(done: Path, tmp_path: Path) -> None:
    record = load_record(done)
    folder = tmp_path / "of" / "a" / "run"
    save_record(record, folder)
    assert {file.name for file in folder.iterdir()} == {"config.toml", "record.json"}, "there are no predictions"
    assert load_predictions(folder) == {}
    record.predictions = {"task0": torch.zeros(3)}
    save_record(record, folder)
    before = {file.name: file.stat().st_ino for file in folder.iterdir()}
    record.message = "other"
    save_record(record, folder)
    after = {file.name: file.stat().st_ino for file in folder.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"record.json"}


def test_a_folder_with_runs_inside_names_them_even_beside_a_checkpoint(copy: Path) -> None:
    (copy / "record.json").unlink()
    for name in ("one", "two/deep"):
        save_record(load_record_of(copy), copy / name)
    with pytest.raises(UserError) as caught:
        load_record(copy)
    assert str(caught.value) == f"{copy}: holds 2 runs; name one of them, such as {copy / 'one'}."


def load_record_of(directory: Path) -> Any:
    from tbbn.bench.runs.record import load_or_restore

    return load_or_restore(directory)
