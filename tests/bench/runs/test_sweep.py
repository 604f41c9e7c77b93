"""Sweeps: folders, recipes, and runs that are skipped, refused, overwritten or fail."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tbbn.bench import files
from tbbn.bench.engine import Stepped
from tbbn.bench.engine.record import Record
from tbbn.bench.runs import sweep
from tbbn.bench.runs.pending import PendingRun, expand, finished_record, runs_of_sweeps
from tbbn.bench.runs.recipe import RECIPE, Axes, recipe_text
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.sweep import run_all
from tbbn.errors import UserError

TINY: dict[str, Any] = {
    "data.name": "synthetic:4x12x4x8",
    "data.tasks": 2,
    "train.epochs": 1,
    "memory.budget": 8,
    "device": "cpu",
}


def pending(out: Path, *, norms: tuple[str, ...] = (), seeds: tuple[int, ...] = (), **more: Any) -> list[PendingRun]:
    layer = {**TINY, **{key.replace("__", "."): value for key, value in more.items()}}
    return expand([("test", layer)], Axes(norms=norms, seeds=seeds), out)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_every_combination_has_a_folder_of_its_own(tmp_path: Path) -> None:
    layer = {**TINY, "method.name": "er"}
    axes = Axes(methods=("ft", "eeil(kd=2)"), norms=("bn", "gn(groups=8)"), seeds=(0, 4))
    made = expand([("test", layer)], axes, tmp_path)
    assert len(made) == 8 and len({run.directory for run in made}) == 8
    assert all(run.directory.parent == tmp_path for run in made)
    last = made[-1]
    assert str(last.config.method) == "eeil(kd=2)" and last.config.seed == 4
    assert last.directory.name == "eeil_kd=2_-gn_groups=8_-4"


def test_a_single_run_uses_the_folder_itself(tmp_path: Path) -> None:
    (run,) = pending(tmp_path / "one")
    assert run.directory == tmp_path / "one"


def test_a_wrong_combination_is_found_before_any_run_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gn: groups=7 does not divide"):
        pending(tmp_path, norms=("bn", "gn(groups=7)"))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("lanes", [1, 2])
def test_callbacks_are_called_for_each_run_in_order(lanes: int, tmp_path: Path) -> None:
    said: list[tuple[str, int]] = []
    made = pending(tmp_path, seeds=(0, 1))
    records = run_all(
        made,
        lanes=lanes,
        on_start=lambda run: said.append(("start", run.config.seed)),
        on_event=lambda run, event: said.append((type(event).__name__, run.config.seed)),
        on_end=lambda run, record: said.append((record.status, run.config.seed)),
    )
    assert [record.status for record in records] == ["finished", "finished"]
    order = ["start 0", "finished 0", "start 1", "finished 1"]
    if lanes == 2:  # at the same time
        order = ["start 0", "start 1", "finished 0", "finished 1"]
    assert [f"{what} {seed}" for what, seed in said if what in ("start", "finished")] == order
    for seed in (0, 1):
        assert said.count(("TaskEnded", seed)) == 2 and said.count(("EpochEnded", seed)) == 2
    for run, record in zip(made, records, strict=True):
        assert load_record(run.directory).accuracy == record.accuracy


def test_finished_runs_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_all(pending(tmp_path, seeds=(0, 1)))
    before = contents(tmp_path)
    monkeypatch.setattr(sweep, "run_saved", lambda *_, **__: pytest.fail("ran again"))
    ended: list[int] = []
    again = run_all(pending(tmp_path, seeds=(0, 1)), on_end=lambda run, _: ended.append(run.config.seed))
    assert [r.accuracy for r in again] == [r.accuracy for r in first]
    assert ended == [0, 1] and contents(tmp_path) == before


def test_an_unfinished_run_is_resumed(tmp_path: Path) -> None:
    (run,) = pending(tmp_path / "run")
    (whole,) = run_all([run])

    class Stop(Exception):
        pass

    def stop(_: PendingRun, event: object) -> None:
        if isinstance(event, Stepped) and event.position.task == 1:
            raise Stop

    (other,) = pending(tmp_path / "broken")
    with pytest.raises(Stop):
        run_all([other], on_event=stop)
    assert load_record(other.directory).status == "interrupted"
    assert finished_record(other) is None
    (record,) = run_all([other])
    assert record.status == "finished" and record.accuracy == whole.accuracy


def test_a_folder_with_another_config_is_refused_and_unchanged(tmp_path: Path) -> None:
    run_all(pending(tmp_path / "run"))
    before = contents(tmp_path)
    with pytest.raises(
        UserError, match=r"run: holds a run with another config \(train\.lr = .* there, 0\.2 now\); use --name"
    ):
        run_all(pending(tmp_path / "run", train__lr=0.2))
    assert contents(tmp_path) == before


def test_overwrite_starts_again_and_keeps_foreign_files(tmp_path: Path) -> None:
    (run,) = pending(tmp_path / "run")
    run_all([run])
    (run.directory / "notes.txt").write_text("mine")
    (other,) = pending(tmp_path / "run", train__lr=0.2)
    events: list[object] = []
    (record,) = run_all([other], overwrite=True, on_event=lambda _, event: events.append(event))
    assert record.status == "finished" and record.run_config.train.lr == 0.2
    assert load_record(other.directory).run_config.train.lr == 0.2
    assert sum(isinstance(event, Stepped) for event in events) > 0
    assert (run.directory / "notes.txt").read_text() == "mine"
    events.clear()
    run_all([other], overwrite=True, on_event=lambda _, event: events.append(event))
    assert sum(isinstance(event, Stepped) for event in events) > 0


def test_a_failing_run_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweep.run_saved

    def failing(config: Any, directory: Path, **options: Any) -> Record:
        if config.seed == 1:
            raise RuntimeError("out of luck")
        return real(config, directory, **options)

    monkeypatch.setattr(sweep, "run_saved", failing)
    records = run_all(pending(tmp_path, seeds=(0, 1, 2)))
    assert [r.status for r in records] == ["finished", "failed", "finished"]
    assert records[1].message == "RuntimeError: out of luck"
    assert load_record(tmp_path / "ft-bn-1").status == "failed"
    with pytest.raises(RuntimeError, match="out of luck"):  # a single run raises
        run_all(pending(tmp_path / "alone", seed=1))


def test_a_user_error_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"4 classes cannot fill 5 tasks"):
        run_all(pending(tmp_path, seeds=(0, 1), data__tasks=5))


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_full_disk_does_not_end_the_other_runs(lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.atomic_writer

    def full(path: Path) -> Any:
        if path.parent.name == "ft-bn-0":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path)

    monkeypatch.setattr(files, "atomic_writer", full)
    records = run_all(pending(tmp_path, seeds=(0, 1)), lanes=lanes)
    assert [record.status for record in records] == ["failed", "finished"] and "No space left" in records[0].message


# The recipe of a sweep.


def test_the_recipe_of_a_sweep_gives_the_same_runs(tmp_path: Path) -> None:
    axes = Axes(methods=("ft", "eeil(kd=2)"), norms=("bn", "gn(groups=8)"), seeds=(0, 4))
    file = {**TINY, "protocol": "paper", "quirks": ("no-affine",), "train.milestones": (0.2, 0.9), "train.lr": 0.3}
    given = {"norm.eps": 1e-4, "train.nesterov": False, "train.lr": 0.2, "data.root": 'a "b" \\ c'}
    layers = [("mine.toml", file), ("command line", given)]
    (tmp_path / RECIPE).write_text(recipe_text(layers, axes))
    assert runs_of_sweeps(tmp_path) == expand(layers, axes, tmp_path)


def test_a_sweeps_recipe_separates_options_of_one_norm_from_those_of_all(tmp_path: Path) -> None:
    axes = Axes(methods=("eeil", "ft"), norms=("cn", "gn", "cn(groups=4)"))
    file = {
        **TINY,
        "norm.name": "cn",
        "norm.groups": 8,
        "method.name": "eeil",
        "method.kd": 2,
        "method.temperature": 3.0,
    }
    layers = [("mine.toml", file), ("command line", {"norm.eps": 1e-4})]
    wanted = expand(layers, axes, tmp_path)
    assert {str(run.config.norm) for run in wanted} == {
        "cn(eps=0.0001, groups=8)",
        "gn(eps=0.0001)",
        "cn(eps=0.0001, groups=4)",
    }
    assert {str(run.config.method) for run in wanted} == {"eeil(kd=2, temperature=3)", "ft"}
    (tmp_path / RECIPE).write_text(recipe_text(layers, axes))
    assert runs_of_sweeps(tmp_path) == wanted


@pytest.mark.parametrize(
    "change", [lambda text: text.replace("seeds = [\n    0", "seeds = [\n    5"), lambda text: text[:-80]]
)
def test_a_sweep_with_a_changed_recipe_is_not_resumed(change: Any, tmp_path: Path) -> None:
    text = recipe_text([("test", TINY)], Axes(seeds=(0, 1)))
    assert change(text) != text
    (tmp_path / RECIPE).write_text(change(text))
    message = r"runs\.toml: was changed or damaged after the sweep wrote it\. Run the sweep's own command again .* --name NAME"
    with pytest.raises(UserError, match=message):
        runs_of_sweeps(tmp_path)


def test_the_recipe_is_written_before_the_first_run_and_removed_if_none_could_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pending(tmp_path / "new" / "sweep", seeds=(0, 1))
    text = recipe_text([("test", TINY)], Axes(seeds=(0, 1)))
    seen: list[list[PendingRun]] = []

    def mistaken(*_: Any, **__: Any) -> Record:
        seen.append(runs_of_sweeps(tmp_path))
        raise UserError("no such data")

    monkeypatch.setattr(sweep, "run_saved", mistaken)
    with pytest.raises(UserError, match="no such data"):
        run_all(made, recipe=text)
    assert seen == [made] and list(tmp_path.iterdir()) == []


def test_a_refused_sweep_leaves_the_recipe_that_was_there(tmp_path: Path) -> None:
    run_all(pending(tmp_path, seeds=(0, 1)), recipe="# as it was\n")
    with pytest.raises(UserError, match="holds a run with another config"):
        run_all(pending(tmp_path, seeds=(0, 1), train__lr=0.2), recipe="# another\n")
    assert (tmp_path / RECIPE).read_text() == "# as it was\n"
