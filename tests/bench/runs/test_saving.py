"""When a run is saved, and the numbers that limit what is written and read: as docs/reliability.md has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinyrun import tiny

from tbbn.bench import files
from tbbn.bench.engine.events import EpochEnded, Event, Position, Stepped, TaskEnded
from tbbn.bench.runs import checkpoint, crosscheck, recipe, record, saved, state
from tbbn.bench.runs.pending import PendingRun, expand, finished_record
from tbbn.bench.runs.recipe import Axes, check_number
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError

EPOCH, STEP, TASK = (
    EpochEnded(Position(), "train", 1, {}, None),
    Stepped(Position(), "train", 1, 1, 2),
    TaskEnded(0, [], 0),
)


class Clock:
    """A run whose events come at given times, and files that take a given time to save."""

    def __init__(self, events: list[tuple[float, Event]], seconds: float, status: str) -> None:
        self.now, self.coming, self.seconds = 0.0, events, seconds
        self.saves: list[float] = []
        self.run: Any = self
        self.record: Any = self
        self.status = status

    def events(self, stop: Any) -> Iterator[Event]:
        for at, event in self.coming:
            self.now = max(self.now, at)
            yield event

    def save(self) -> None:
        self.saves.append(self.now)
        self.now += self.seconds


def save_times(
    monkeypatch: pytest.MonkeyPatch,
    events: list[tuple[float, Event]],
    every: float,
    seconds: float,
    status: str = "finished",
) -> list[float]:
    clock: Any = Clock(events, seconds, status)
    monkeypatch.setattr("tbbn.bench.runs.saved.time.monotonic", lambda: clock.now)
    assert list(saved._with_checkpoints(clock, every, None)) == [event for _, event in events]
    return clock.saves


def test_a_run_is_saved_at_the_end_of_an_epoch_a_minute_after_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: list[tuple[float, Event]] = [(float(t), EPOCH) for t in range(10, 401, 10)]
    # A save of half a second: 100 times that is less than the minute.
    assert save_times(monkeypatch, epochs, 60.0, 0.5) == [60.0, 130.0, 200.0, 270.0, 340.0]
    assert save_times(monkeypatch, epochs, 60.0, 0.0) == [60.0, 120.0, 180.0, 240.0, 300.0, 360.0]
    steps: list[tuple[float, Event]] = [(at, STEP) for at, _ in epochs]
    assert save_times(monkeypatch, steps, 60.0, 0.5) == []


def test_where_saving_is_slow_the_pause_is_a_hundred_times_as_long_and_ten_minutes_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs: list[tuple[float, Event]] = [(float(t), EPOCH) for t in range(10, 2001, 10)]
    # After a save of 2 s that ends at 62 the next is due 200 s later.
    assert save_times(monkeypatch, epochs[:60], 60.0, 2.0) == [60.0, 270.0, 480.0]
    assert save_times(monkeypatch, epochs, 60.0, 8.0) == [60.0, 670.0, 1280.0, 1890.0]


def test_a_run_is_saved_after_every_task_and_without_a_pause_after_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_times(monkeypatch, [(1.0, EPOCH), (2.0, TASK), (3.0, EPOCH), (4.0, TASK)], 60.0, 9.0) == [2.0, 11.0]
    assert save_times(monkeypatch, [(1.0, EPOCH), (2.0, STEP), (20.0, EPOCH)], 0.0, 9.0) == [1.0, 20.0]


@pytest.mark.parametrize(
    ("last", "status", "wanted"),
    [(STEP, "interrupted", [5.0]), (EPOCH, "interrupted", [5.0]), (TASK, "interrupted", [5.0]), (STEP, "finished", [])],
)
def test_a_run_that_stops_is_saved_once(
    last: Event, status: str, wanted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save_times(monkeypatch, [(5.0, last)], 60.0, 1.0, status) == wanted


def test_the_limits_are_those_of_the_documentation() -> None:
    assert saved.SAVE_EVERY == 60 and state.SMALL == 8 * 1024 * 1024 and crosscheck.ROUNDING == 0.01
    assert (record.LARGEST, checkpoint.LARGEST) == (268_435_456, 68_719_476_736)  # 256 MiB and 64 GiB
    assert (recipe.MANY_RUNS, recipe.MOST_RUNS) == (1000, 10000)
    assert files._CHUNK == 16 * 1024 * 1024
    assert [checkpoint.task_file(n) for n in (0, 9)] == ["task-1.safetensors", "task-10.safetensors"]


def test_ten_thousand_runs_are_a_sweep_and_one_more_is_too_many() -> None:
    check_number(10_000)
    with pytest.raises(UserError, match="10001 runs are more than the 10000 that a sweep may have"):
        check_number(10_001)
    assert [Axes(*given).n_runs for given in ((), (("a", "b"),), (("a", "b"), ("c",) * 3, (1, 2, 3, 4)))] == [1, 2, 24]


def test_another_config_in_a_folder_is_named_by_three_settings_and_a_number(tmp_path: Path) -> None:
    run_saved(tiny(data__stop_after=1, train__epochs=1), tmp_path)

    def said(**settings: Any) -> str:
        with pytest.raises(UserError) as caught:
            finished_record(PendingRun(tiny(data__stop_after=1, **{"train__epochs": 1, **settings}), tmp_path))
        return str(caught.value)

    assert said(seed=3) == (
        f"{tmp_path}: holds a run with another config (seed = 0 there, 3 now); use --name, --out or --overwrite."
    )
    three = said(seed=3, train__epochs=2, batch__size=9)
    assert three.count(" now") == 3 and " more" not in three
    five = said(seed=3, train__epochs=2, batch__size=9, train__lr=0.5, memory__budget=1)
    assert five.count(" now") == 3 and "; and 2 more)" in five


def test_a_run_of_a_sweep_has_a_folder_of_its_own_and_a_single_run_the_folder_itself(tmp_path: Path) -> None:
    layers = [("test", {"data.name": "synthetic:4x12x4x8", "data.tasks": 2, "seed": 5})]
    (alone,) = expand(layers, Axes(), tmp_path)
    assert alone.directory == tmp_path and alone.config.seed == 5
    (alone,) = expand(layers, Axes(seeds=(0,)), tmp_path)
    assert alone.directory == tmp_path and alone.config.seed == 0
    runs = expand(layers, Axes(("ft", "er"), ("bn", "gn(groups=8)")), tmp_path)
    assert [run.directory.name for run in runs] == ["ft-bn-5", "ft-gn_groups=8_-5", "er-bn-5", "er-gn_groups=8_-5"]
    assert [(run.config.method.name, run.config.norm.name) for run in runs] == [
        ("ft", "bn"),
        ("ft", "gn"),
        ("er", "bn"),
        ("er", "gn"),
    ]
    assert {run.directory.parent for run in runs} == {tmp_path}
    with pytest.raises(
        UserError, match=r"2 runs have the same folder .*ft-bn-5; name each method, norm and seed once\."
    ):
        expand(layers, Axes(("ft", "ft")), tmp_path)


def test_runs_alone_and_in_lanes_are_saved_with_the_options_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str, dict[str, Any]]] = []

    def watched(run: Any, directory: Path, **options: Any) -> Iterator[Event]:
        seen.append((run.config.seed, directory.name, options))
        yield from run.events(options["stop"])

    monkeypatch.setattr(saved, "saved", watched)
    configs = [tiny(seed=seed, data__stop_after=1, train__epochs=1) for seed in (0, 1)]

    def stop() -> bool:
        return False

    given = {"stop": stop, "overwrite": True, "log": ("jsonl",)}
    run_saved(configs[0], tmp_path / "alone", every=7.0, **given)  # type: ignore[arg-type]
    assert seen.pop() == (0, "alone", {**given, "every": 7.0}) and not seen
    run_saved(configs[0], tmp_path / "alone")
    (_, _, options) = seen.pop()
    assert (options["every"], options["stop"], options["overwrite"]) == (60.0, None, False)
    saved.run_lanes_saved(configs, [tmp_path / "a", tmp_path / "b"], 2, **given)  # type: ignore[arg-type]
    assert seen == [(0, "a", given), (1, "b", given)]
