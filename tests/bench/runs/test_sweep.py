"""Several runs from one description: names, seeds, folders, what is skipped, refused, overwritten or fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tbbn.bench.config import Choice
from tbbn.bench.engine import Stepped
from tbbn.bench.engine.record import Record
from tbbn.bench.runs import sweep
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.sweep import (
    PLAN,
    Axes,
    Job,
    expand,
    finished,
    parse_choice,
    parse_seeds,
    plan,
    planned,
    run_all,
    split_names,
)
from tbbn.errors import UserError

TINY: dict[str, Any] = {
    "data.name": "synthetic:4x12x4x8",
    "data.tasks": 2,
    "train.epochs": 1,
    "memory.budget": 8,
    "device": "cpu",
}


def jobs(out: Path, *, norms: tuple[str, ...] = (), seeds: tuple[int, ...] = (), **more: Any) -> list[Job]:
    layer = {**TINY, **{key.replace("__", "."): value for key, value in more.items()}}
    return expand([("test", layer)], Axes(norms=norms, seeds=seeds), out)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_names_are_split_at_commas_outside_brackets() -> None:
    assert split_names("bn, cn(groups=8,eps=1e-5),tbbn,") == ("bn", "cn(groups=8,eps=1e-5)", "tbbn")


def test_a_choice_with_options() -> None:
    assert parse_choice("norm", "cn(groups=8, affine=false)") == {
        "norm.name": "cn",
        "norm.groups": 8,
        "norm.affine": False,
    }
    assert parse_choice("method", "ft") == {"method.name": "ft"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cn(groups=8", r"norm must look like name or name\(option=value\), got 'cn\(groups=8'\."),
        ("cn(8)", r"norm 'cn': options look like option=value, got '8'\."),
        ("cn(=8)", r"norm 'cn': options look like option=value, got '=8'\."),
    ],
)
def test_a_choice_that_cannot_be_read_is_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        parse_choice("norm", text)


def test_seeds_are_a_number_of_them_or_themselves() -> None:
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("0, 5") == (0, 5)
    assert parse_seeds("7,") == (7,)


@pytest.mark.parametrize("text", ["x", "1,x", "1.5"])
def test_seeds_that_are_no_numbers(text: str) -> None:
    with pytest.raises(UserError, match=rf"seeds must be a number of seeds or seeds with commas, got '{text}'\."):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["1,1", "-1,2", ","])
def test_seeds_that_cannot_be(text: str) -> None:
    with pytest.raises(UserError, match=r"seeds must be different numbers, none negative"):
        parse_seeds(text)


def test_no_seeds_are_not_the_seed_0() -> None:
    with pytest.raises(UserError, match=r"0 is a number of seeds, and none; the seed 0 is '0,' with a comma\."):
        parse_seeds("0")
    assert parse_seeds("0,") == (0,)


def test_every_combination_has_a_folder_of_its_own(tmp_path: Path) -> None:
    layer = {**TINY, "method.name": "er"}
    axes = Axes(methods=("ft", "eeil(kd=2)"), norms=("bn", "gn(groups=8)"), seeds=(0, 4))
    made = expand([("test", layer)], axes, tmp_path)
    assert len(made) == 8 and len({job.directory for job in made}) == 8
    assert all(job.directory.parent == tmp_path for job in made)
    last = made[-1]
    assert last.config.method == Choice("eeil", (("kd", 2),)) and last.config.seed == 4
    assert last.directory.name == "eeil_kd=2_-gn_groups=8_-4"


def test_one_run_alone_has_the_folder_itself(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path / "one")
    assert job.directory == tmp_path / "one"


def test_a_wrong_combination_is_found_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gn: groups=7 does not divide"):
        jobs(tmp_path, norms=("bn", "gn(groups=7)"))
    assert not any(tmp_path.iterdir())


def test_events_and_ends_are_told_for_each_run_in_order(tmp_path: Path) -> None:
    said: list[tuple[str, int]] = []
    made = jobs(tmp_path, seeds=(0, 1))
    records = run_all(
        made,
        on_start=lambda job: said.append(("start", job.config.seed)),
        on_event=lambda job, event: said.append((type(event).__name__, job.config.seed)),
        on_end=lambda job, record: said.append((record.status, job.config.seed)),
    )
    assert [record.status for record in records] == ["finished", "finished"]
    assert [s for s in said if s[0] in ("start", "finished")] == [
        ("start", 0),
        ("finished", 0),
        ("start", 1),
        ("finished", 1),
    ]
    assert said.count(("TaskEnded", 0)) == 2 and said.count(("EpochEnded", 1)) == 2
    for job, record in zip(made, records, strict=True):
        assert load_record(job.directory).accuracy == record.accuracy


def test_what_is_finished_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_all(jobs(tmp_path, seeds=(0, 1)))
    before = contents(tmp_path)
    monkeypatch.setattr(sweep, "run_saved", lambda *_, **__: pytest.fail("ran again"))
    ended: list[int] = []
    again = run_all(jobs(tmp_path, seeds=(0, 1)), on_end=lambda job, _: ended.append(job.config.seed))
    assert [r.accuracy for r in again] == [r.accuracy for r in first]
    assert ended == [0, 1] and contents(tmp_path) == before


def test_an_unfinished_run_is_run_to_its_end(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path / "run")
    (whole,) = run_all([job])

    class Stop(Exception):
        pass

    def stop(_: Job, event: object) -> None:
        if isinstance(event, Stepped) and event.position.task == 1:
            raise Stop

    (other,) = jobs(tmp_path / "broken")
    with pytest.raises(Stop):
        run_all([other], on_event=stop)
    assert load_record(other.directory).status == "interrupted"
    assert finished(other) is None
    (record,) = run_all([other])
    assert record.status == "finished" and record.accuracy == whole.accuracy


def test_a_folder_with_another_config_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run_all(jobs(tmp_path / "run"))
    before = contents(tmp_path)
    with pytest.raises(
        UserError, match=r"run: holds a run of another config \(train\.lr = .* there, 0\.2 now\); use --name"
    ):
        run_all(jobs(tmp_path / "run", train__lr=0.2))
    assert contents(tmp_path) == before


def test_overwriting_begins_anew_and_keeps_what_is_not_the_runs(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path / "run")
    run_all([job])
    (job.directory / "notes.txt").write_text("mine")
    (other,) = jobs(tmp_path / "run", train__lr=0.2)
    events: list[object] = []
    (record,) = run_all([other], overwrite=True, on_event=lambda _, event: events.append(event))
    assert record.status == "finished" and record.run_config.train.lr == 0.2
    assert load_record(other.directory).run_config.train.lr == 0.2
    assert sum(isinstance(event, Stepped) for event in events) > 0
    assert (job.directory / "notes.txt").read_text() == "mine"
    events.clear()
    run_all([other], overwrite=True, on_event=lambda _, event: events.append(event))
    assert sum(isinstance(event, Stepped) for event in events) > 0


def test_a_failing_run_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweep.run_saved

    def failing(config: Any, directory: Path, **options: Any) -> Record:
        if config.seed == 1:
            raise RuntimeError("out of luck")
        return real(config, directory, **options)

    monkeypatch.setattr(sweep, "run_saved", failing)
    records = run_all(jobs(tmp_path, seeds=(0, 1, 2)))
    assert [r.status for r in records] == ["finished", "failed", "finished"]
    assert records[1].message == "RuntimeError: out of luck"
    assert load_record(tmp_path / "ft-bn-1").status == "failed"
    with pytest.raises(RuntimeError, match="out of luck"):  # alone, it is a traceback
        run_all(jobs(tmp_path / "alone", seed=1))


def test_what_the_user_has_to_mend_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"4 classes do not split into 3 equal tasks"):
        run_all(jobs(tmp_path, seeds=(0, 1), data__tasks=3))


# The plan of a sweep.


def test_a_plan_is_a_recipe_of_the_same_runs(tmp_path: Path) -> None:
    axes = Axes(methods=("ft", "eeil(kd=2)"), norms=("bn", "gn(groups=8)"), seeds=(0, 4))
    file = {**TINY, "protocol": "paper", "quirks": ("no-affine",), "train.milestones": (0.2, 0.9), "train.lr": 0.3}
    given = {"norm.eps": 1e-4, "train.nesterov": False, "train.lr": 0.2, "data.root": 'a "b" \\ c'}
    layers = [("mine.toml", file), ("command line", given)]
    (tmp_path / PLAN).write_text(plan(layers, axes))
    assert planned(tmp_path) == expand(layers, axes, tmp_path)


def test_a_plan_is_there_before_the_first_run_and_gone_if_none_could_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, text = jobs(tmp_path / "new" / "sweep", seeds=(0, 1)), plan([("test", TINY)], Axes(seeds=(0, 1)))
    seen: list[list[Job]] = []

    def mistaken(*_: Any, **__: Any) -> Record:
        seen.append(planned(tmp_path))
        raise UserError("no such data")

    monkeypatch.setattr(sweep, "run_saved", mistaken)
    with pytest.raises(UserError, match="no such data"):
        run_all(made, plan=text)
    assert seen == [made] and list(tmp_path.iterdir()) == []


def test_a_refused_sweep_leaves_the_plan_that_was_there(tmp_path: Path) -> None:
    run_all(jobs(tmp_path, seeds=(0, 1)), plan="# as it was\n")
    with pytest.raises(UserError, match="holds a run of another config"):
        run_all(jobs(tmp_path, seeds=(0, 1), train__lr=0.2), plan="# another\n")
    assert (tmp_path / PLAN).read_text() == "# as it was\n"
