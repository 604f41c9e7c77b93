"""What a sweep hands to its runs and takes from them, and what a run leaves where it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinyrun import tiny

from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.ranks import ALONE, Ranks
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.engine.step import Step
from tbbn.bench.loggers import DEFAULT
from tbbn.bench.runs import overwrite, sweep
from tbbn.bench.runs.pending import PendingRun
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved, saved
from tbbn.bench.runs.sweep import run_all
from tbbn.errors import UserError


def runs(folder: Path, n: int, **settings: Any) -> list[PendingRun]:
    return [PendingRun(tiny(seed=seed, **settings), folder / f"run-{seed}") for seed in range(n)]


class Calls(list[Any]):
    """Stands for the function that does a run, or for that which does many."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)

    def record(self, config: Any) -> Record:
        record = new_record(config)
        record.status = self.statuses.pop(0) if self.statuses else "finished"
        return record

    def one(self, config: Any, directory: Path, **given: Any) -> Record:
        self.append((config.seed, directory.name, {k: v for k, v in given.items() if k != "on_event"}))
        given["on_event"]("an event")
        return self.record(config)

    def lanes(self, configs: Any, directories: Any, lanes: int | None, **given: Any) -> None:
        names = [directory.name for directory in directories]
        self.append(([c.seed for c in configs], names, lanes, {k: given[k] for k in ("stop", "overwrite", "log")}))
        for i, config in enumerate(configs):
            given["on_event"](i, "an event")
            given["on_event"](i, "another")
            given["on_end"](i, self.record(config))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    def make(*statuses: str) -> Calls:
        made = Calls(*statuses)
        monkeypatch.setattr(sweep, "run_saved", made.one)
        monkeypatch.setattr(sweep, "run_lanes_saved", made.lanes)
        return made

    return make


def never() -> bool:
    return False


def test_runs_one_by_one_get_what_the_sweep_was_given(calls: Callable[..., Calls], tmp_path: Path) -> None:
    made = calls()
    run_all(runs(tmp_path, 2))
    plain = {"stop": None, "overwrite": False, "ranks": ALONE, "log": DEFAULT}
    assert made == [(0, "run-0", plain), (1, "run-1", plain)]
    made.clear()
    given = {"stop": never, "overwrite": True, "log": ()}
    run_all(runs(tmp_path, 1), lanes=1, **given)  # type: ignore[arg-type]
    assert made == [(0, "run-0", {**given, "ranks": ALONE})]


@pytest.mark.parametrize("lanes", [2, 7, None])
def test_runs_in_lanes_get_what_the_sweep_was_given(
    lanes: int | None, calls: Callable[..., Calls], tmp_path: Path
) -> None:
    made, told = calls(), []
    given = {"stop": never, "overwrite": True, "log": ()}
    records = run_all(
        runs(tmp_path, 2),
        lanes=lanes,
        on_start=lambda run: told.append(("start", run.config.seed)),
        on_event=lambda run, event: told.append((str(event), run.config.seed)),
        on_end=lambda run, record: told.append((record.status, run.config.seed)),
        **given,  # type: ignore[arg-type]
    )
    assert made == [([0, 1], ["run-0", "run-1"], lanes, given)]
    each = [[("start", s), ("an event", s), ("another", s), ("finished", s)] for s in (0, 1)]
    assert told == each[0] + each[1] and [record.config["seed"] for record in records] == [0, 1]
    run_all(runs(tmp_path, 2), lanes=lanes)
    assert made[1][3] == {"stop": None, "overwrite": False, "log": DEFAULT}


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_sweep_told_to_stop_ends_only_if_something_is_left_to_do(
    lanes: int, calls: Callable[..., Calls], tmp_path: Path
) -> None:
    calls("finished", "interrupted")
    with pytest.raises(KeyboardInterrupt):
        run_all(runs(tmp_path, 2), lanes=lanes, stop=lambda: True)
    calls("diverged", "finished")
    asked = iter([False, True])
    assert len(run_all(runs(tmp_path, 2), lanes=lanes, stop=lambda: next(asked, True))) == 2
    calls("interrupted", "interrupted")
    assert [r.status for r in run_all(runs(tmp_path, 2), lanes=lanes, stop=never)] == ["interrupted"] * 2
    calls("interrupted")
    assert [r.status for r in run_all(runs(tmp_path, 1), lanes=lanes)] == ["interrupted"]


def test_the_first_of_two_runs_that_stops_is_the_last_that_is_done(calls: Callable[..., Calls], tmp_path: Path) -> None:
    made = calls("interrupted")
    with pytest.raises(KeyboardInterrupt):
        run_all(runs(tmp_path, 3), stop=lambda: True)
    assert [call[0] for call in made] == [0]


class Two(Ranks):
    size = 2


def test_several_ranks_do_one_run_at_a_time_and_are_checked_first(
    calls: Callable[..., Calls], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ranks, checked = calls(), Two(), []
    monkeypatch.setattr(sweep, "check_ranks", lambda config: checked.append(config.seed))
    for lanes in (None, 1):
        run_all(runs(tmp_path, 2), lanes=lanes, ranks=ranks)
    assert [(call[0], call[2]["ranks"]) for call in made] == [(0, ranks), (1, ranks)] * 2
    assert checked == [0, 1] * 2
    with pytest.raises(UserError, match=r"^several ranks share one run at a time, got --lanes 2; leave --lanes out\.$"):
        run_all(runs(tmp_path, 2), lanes=2, ranks=ranks)
    checked.clear()
    run_all(runs(tmp_path, 1), lanes=1)
    assert checked == [], "a process alone needs no check"


def test_a_logger_that_is_missing_is_found_before_anything_is_trained(
    calls: Callable[..., Calls], tmp_path: Path
) -> None:
    made = calls()
    with pytest.raises(UserError, match="scribe"):
        run_all(runs(tmp_path, 1), log=("scribe",))
    assert made == []


@pytest.mark.parametrize(("n", "recipe", "is_written"), [(2, "# a\n", True), (1, "# a\n", False), (2, "", False)])
def test_the_recipe_of_several_runs_is_written(
    n: int, recipe: str, is_written: bool, calls: Callable[..., Calls], tmp_path: Path
) -> None:
    calls()
    run_all(runs(tmp_path / "deep" / "sweep", n), recipe=recipe)
    file = tmp_path / "deep" / "sweep" / "runs.toml"
    assert file.exists() is is_written and (not is_written or file.read_text() == recipe)


def test_after_a_failure_the_recipe_stays_if_a_run_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: Any, directory: Path, **_: Any) -> Record:
        if config.seed == 0:
            directory.mkdir()
            return new_record(config)
        raise UserError("no")

    monkeypatch.setattr(sweep, "run_saved", fails)
    with pytest.raises(UserError):
        run_all(runs(tmp_path, 2), recipe="# a\n")
    assert (tmp_path / "runs.toml").read_text() == "# a\n"


# Failures. ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception, int], None]:
    """Let the training step of a number fail, counted from 1."""
    real = Step.train

    def at(error: Exception, number: int) -> None:
        steps = iter(range(1, 10**6))

        def train(self: Step, *arguments: Any) -> None:
            if next(steps) == number:
                raise error
            real(self, *arguments)

        monkeypatch.setattr(Step, "train", train)

    return at


def test_a_run_that_fails_on_the_way_gives_the_record_it_left(
    tmp_path: Path, fail: Callable[[Exception, int], None]
) -> None:
    pending = runs(tmp_path, 2, train__epochs=1)
    fail(RuntimeError("out of luck"), 5)  # in the second task
    first, second = run_all(pending)
    assert (first.status, len(first.accuracy)) == ("failed", 1) and second.status == "finished"
    assert first == load_record(pending[0].directory)
    fail(RuntimeError("again"), 1)
    with pytest.raises(RuntimeError, match="again"):
        run_all(pending[:1])


def test_a_failure_that_its_folder_does_not_tell_is_told_by_a_new_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = runs(tmp_path, 2, train__epochs=1, data__stop_after=1)
    asked = iter(range(100))
    run_saved(pending[0].config, pending[0].directory, stop=lambda: next(asked) == 1)
    before = {f.name: f.read_bytes() for f in pending[0].directory.iterdir()}

    def breaks(*_: Any, **__: Any) -> Record:
        raise RuntimeError("before it began")

    monkeypatch.setattr(sweep, "run_saved", breaks)
    first, second = run_all(pending)
    assert (
        (first.status, first.message) == ("failed", "RuntimeError: before it began") == (second.status, second.message)
    )
    assert {f.name: f.read_bytes() for f in pending[0].directory.iterdir()} == before, "a run there stays as it is"
    assert load_record(pending[1].directory).message == "RuntimeError: before it began"
    with pytest.raises(RuntimeError):
        run_all(pending, ranks=Two())


@pytest.mark.parametrize("log", [(), DEFAULT])
def test_a_users_mistake_found_in_training_leaves_nothing(
    log: tuple[str, ...], tmp_path: Path, fail: Callable[[Exception, int], None]
) -> None:
    fail(UserError("no"), 1)
    with pytest.raises(UserError, match="no"):
        run_saved(tiny(), tmp_path / "run", log=log)
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    fail(UserError("no"), 1)
    with pytest.raises(UserError, match="no"):
        run_saved(tiny(), tmp_path / "mine", log=log)
    assert load_record(tmp_path / "mine").status == "failed", "a folder with something in it gets a record"
    fail(RuntimeError("broken"), 1)
    with pytest.raises(RuntimeError, match="broken"):
        run_saved(tiny(), tmp_path / "other", log=log)
    assert load_record(tmp_path / "other").message == "RuntimeError: broken", "what is no user's mistake is recorded"


def test_a_record_that_does_not_fit_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tiny())

    def train(self: Step, *_: Any) -> None:
        run.record.splits.append(1)  # a list longer than there are tasks
        raise RuntimeError("a method failed")

    monkeypatch.setattr(Step, "train", train)
    with pytest.raises(RuntimeError, match="a method failed"):
        list(saved(run, tmp_path))
    assert not (tmp_path / "record.json").exists()


# Overwriting. ---------------------------------------------------------------------------------------------------------


def test_an_overwriting_that_was_killed_while_it_deleted_the_old_files_ends(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("new")
    (tmp_path / "config.toml").write_text("new")
    (tmp_path / ".overwritten.config.toml").write_text("old")
    names = ["config.toml", "predictions.safetensors"]  # the second is gone already
    (tmp_path / overwrite.LIST).write_text(json.dumps({"files": names, "record": "checksum of the old record"}))
    overwrite.settle(tmp_path)
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {"record.json": "new", "config.toml": "new"}


def test_an_overwriting_that_was_killed_before_the_new_record_is_undone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("new")
    (tmp_path / "task-2.safetensors").write_text("new")
    (tmp_path / ".overwritten.config.toml").write_text("old")
    (tmp_path / "notes").write_text("mine")
    names = ["config.toml", "predictions.safetensors"]
    (tmp_path / overwrite.LIST).write_text(json.dumps({"files": names, "record": ""}))
    overwrite.settle(tmp_path)
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {"config.toml": "old", "notes": "mine"}


@pytest.mark.parametrize(
    "content",
    [{"files": [], "record": 3}, {"files": []}, {"record": ""}, {"files": ["a/b"], "record": ""}],
)  # fmt: skip
def test_a_list_of_set_aside_files_that_is_not_as_it_was_written_is_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / overwrite.LIST).write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"\.overwritten\.json: damaged; delete it, and rename the files \.overwritten\."
    ):
        overwrite.settle(tmp_path)


def test_an_empty_folder_is_overwritten_too(tmp_path: Path) -> None:
    record = run_saved(tiny(data__stop_after=1, train__epochs=1), tmp_path, overwrite=True)
    assert record.status == "finished" and load_record(tmp_path).weights == record.weights
    assert not list(tmp_path.glob(".overwritten*"))
