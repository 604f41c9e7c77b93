"""Many runs from one thread: each is what it is alone, and one that fails leaves the others untouched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import finish, results, tiny

from tbbn.bench.engine import Event, Stepped, TaskEnded, run_lanes
from tbbn.bench.engine import lanes as lanes_module
from tbbn.bench.engine.events import EpochEnded, Position, Waiting
from tbbn.bench.engine.lanes import LaneTuner
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.record import Record
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_lanes_saved
from tbbn.errors import UserError
from tbbn.registry import METHODS

CONFIGS = [
    tiny(),
    tiny(seed=1, norm__name="tbbn", method__name="icarl"),
    tiny(seed=2, method__name="eeil", method__balanced_epochs=1, data__tasks=2),
    tiny(seed=3, data__online=True, train__epochs=1),
    tiny(seed=4, train__optimizer="adamw", data__tasks=2),
]


def test_a_record_from_a_lane_is_that_of_the_run_alone() -> None:
    together = run_lanes(CONFIGS, 3)
    for config, record in zip(CONFIGS, together, strict=True):
        assert record.status == "finished"
        assert results(record) == results(finish(config).record)


def test_runs_take_turns_and_a_free_lane_takes_the_next() -> None:
    turns: list[int] = []
    ends: list[int] = []

    def event(number: int, event: Event) -> None:
        if isinstance(event, Stepped):
            turns.append(number)

    def end(number: int, record: Record) -> None:
        ends.append(number)

    run_lanes([tiny(), tiny(seed=1), tiny(seed=2)], 2, on_event=event, on_end=end)
    assert turns[:6] == [0, 1, 0, 1, 0, 1]
    assert turns.index(2) > max(turns.index(0), turns.index(1))
    assert turns.index(2) > turns.count(0)  # not before one of the first two has ended
    assert sorted(ends) == [0, 1, 2] and ends[-1] == 2


def test_a_lane_that_waits_is_asked_until_its_result_is_there() -> None:
    asked: list[int] = []
    log: list[str] = []

    def done() -> bool:
        asked.append(len(log))
        return len(asked) == 4

    def drive(number: int, run: Run) -> Iterator[Event]:
        if number == 0:
            yield Waiting(done)
            log.append("the result")
        for i in range(2):
            log.append(f"run {number}")
            yield Stepped(Position(step=i), "train", 1, i, 2)
        run.record.status = "finished"

    records = run_lanes([tiny(), tiny(seed=1)], 2, drive=drive)
    assert log == ["run 1", "run 1", "the result", "run 0", "run 0"] and len(asked) == 4
    assert [record.status for record in records] == ["finished", "finished"]


def test_more_lanes_than_runs_is_no_mistake() -> None:
    assert [r.status for r in run_lanes([tiny(data__stop_after=1)], 8)] == ["finished"]
    assert run_lanes([], 2) == []


def test_a_lane_that_cannot_begin_is_marked_failed(tmp_path: Path) -> None:
    configs = [tiny(), tiny(data__name="folder:/nowhere"), tiny(seed=1)]
    places = [tmp_path / str(i) for i in range(3)]
    records = run_lanes_saved(configs, places, 3)
    assert [r.status for r in records] == ["finished", "failed", "finished"]
    assert records[1].message.startswith("UserError: ") and "/nowhere" in records[1].message
    assert load_record(places[1]).status == "failed"
    assert results(records[0]) == results(finish(configs[0]).record)
    assert results(records[2]) == results(finish(configs[2]).record)


def test_a_lane_that_breaks_on_the_way_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = METHODS.get("er")
    real = kind.loss

    def breaking(self: Any, batch: Any, output: Any, previous: Any) -> Any:
        if batch.n_old_classes:
            raise RuntimeError("injected")
        return real(self, batch, output, previous)

    monkeypatch.setattr(kind, "loss", breaking)
    configs = [tiny(method__name="er"), tiny(), tiny(seed=1, norm__name="tbbn")]
    ended: dict[int, str] = {}
    records = run_lanes_saved(
        configs,
        [tmp_path / str(i) for i in range(3)],
        2,
        on_end=lambda number, record: ended.update({number: record.status}),
    )
    assert [r.status for r in records] == ["failed", "finished", "finished"]
    assert ended == {0: "failed", 1: "finished", 2: "finished"}
    assert records[0].message == "RuntimeError: injected"
    assert len(records[0].accuracy) == 1  # the first task was learnt
    saved = load_record(tmp_path / "0")
    assert (saved.status, saved.message, saved.accuracy) == ("failed", "RuntimeError: injected", records[0].accuracy)
    assert results(records[1]) == results(finish(configs[1]).record)


def test_a_diverging_lane_is_diverged_not_failed() -> None:
    records = run_lanes([tiny(train__lr=1e20), tiny(data__stop_after=1)], 2)
    assert [r.status for r in records] == ["diverged", "finished"]


def test_once_told_to_stop_no_lane_begins_and_those_at_work_are_interrupted(tmp_path: Path) -> None:
    steps = 0

    def event(_: int, event: Event) -> None:
        nonlocal steps
        steps += isinstance(event, Stepped)

    configs = [tiny(seed=seed) for seed in range(3)]
    places = [tmp_path / str(i) for i in range(3)]
    stopped = run_lanes_saved(configs, places, 2, on_event=event, stop=lambda: steps >= 7)
    assert [r.status for r in stopped] == ["interrupted"] * 3
    assert steps <= 9 and not places[2].exists()
    resumed = run_lanes_saved(configs, places, 2)
    for config, record in zip(configs, resumed, strict=True):
        assert results(record) == results(finish(config).record)


def test_lanes_share_their_threads_until_the_last_has_ended_and_put_them_back(threads: list[int]) -> None:
    before = threads[-1]
    seen: set[int] = set()

    def event(_: int, event: Event) -> None:
        if isinstance(event, (Stepped, TaskEnded)):
            seen.add(threads[-1])

    run_lanes([tiny(threads=before + 1, data__stop_after=1), tiny(threads=before + 1)], 2, on_event=event)
    assert seen == {before + 1} and threads[-1] == before


def test_lanes_that_want_other_threads_or_precision_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"lanes: parallel runs must have the same precision, threads and autotune, got .*; run them separately\.",
    ):
        run_lanes([tiny(threads=1), tiny(threads=2)], 2)
    with pytest.raises(UserError, match=r"lanes: parallel runs must have the same precision, threads and autotune"):
        run_lanes([tiny(), tiny(precision="tf32")], 2)


def growth(speeds: list[float], limit: int = 8, room: int = 8, pause: int = -1) -> LaneTuner:
    """Lanes of which ``n`` together do ``speeds[n - 1]`` epochs of ten steps a second, until they no longer grow.

    In round number ``pause`` something else takes a minute.
    """
    now = 0.0
    found = LaneTuner(limit, lambda n: n < room, lambda: now)
    for i in range(1000):
        lanes = found.n
        now += 60.0 * (i == pause)
        for lane in range(lanes):
            for _ in range(10):
                found.observe(lane, Stepped(Position(), "train", 1, 1, 10))
        for lane in range(lanes):
            now += 1 / speeds[lanes - 1]
            found.observe(lane, EpochEnded(Position(), "train", 1, {}, None))
            if found.n != lanes:
                break
        if not found.is_growing:
            return found
    raise AssertionError("it never settled")


@pytest.mark.parametrize(
    ("speeds", "lanes"),
    [
        ([1.0, 1.9, 2.5, 2.55, 2.6], 4),  # the fourth did not pay, but it is at work
        ([1.0, 1.0, 5.0], 2),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 8),
    ],
)
def test_lanes_grow_as_long_as_that_pays(speeds: list[float], lanes: int) -> None:
    found = growth(speeds)
    assert found.n == lanes
    assert found.best_speed == pytest.approx(10 * max(speeds[:lanes]))


@pytest.mark.parametrize("pause", range(8))
def test_a_pause_while_it_is_measured_does_not_end_the_growth(pause: int) -> None:
    assert growth([1.0, 2.0, 3.0, 4.0], limit=4, pause=pause).n == 4


def test_lanes_do_not_outgrow_the_runs_or_the_memory() -> None:
    assert growth([1.0, 2.0, 3.0, 4.0], limit=3).n == 3
    assert growth([1.0, 2.0, 3.0, 4.0], room=2).n == 2
    assert not LaneTuner(1).is_growing


def test_a_lane_that_ends_while_it_is_measured_spoils_no_measurement() -> None:
    now = 0.0
    found = LaneTuner(8, clock=lambda: now)
    ended = EpochEnded(Position(), "train", 1, {}, None)
    found.observe(0, ended)
    found.observe(0, None)
    now = 50.0
    found.observe(0, ended)
    assert found.n == 1 and found.best_speed == 0.0


def test_a_lane_must_raise_the_speed_by_more_than_five_percent() -> None:
    assert growth([1.0, 1.0499, 9.0]).n == 2
    assert growth([1.0, 1.051, 1.06]).n == 3


def test_a_lane_that_brought_no_gain_is_measured_once_more_and_no_more() -> None:
    now, growing = 0.0, []
    found = LaneTuner(8, clock=lambda: now)
    for measured in range(5):  # the same speed, whatever the number of lanes
        lanes = found.n
        for _ in range(2):  # the first epoch is not measured
            now += 2.0 * lanes
            for lane in range(lanes):
                found.observe(lane, Stepped(Position(), "train", 1, 1, 10))
            for lane in range(lanes):
                found.observe(lane, EpochEnded(Position(), "train", 1, {}, None))
        growing.append((measured, found.n, found.is_growing))
    assert growing[:3] == [(0, 2, True), (1, 2, True), (2, 2, False)] and found.n_measured == 2


def test_a_measurement_lasts_a_second_and_an_epoch_of_every_lane() -> None:
    now = 0.0
    found = LaneTuner(8, clock=lambda: now)
    ended, stepped = EpochEnded(Position(), "train", 1, {}, None), Stepped(Position(), "train", 1, 1, 10)
    for seconds in (0.0, 0.25, 0.25, 0.4375):  # the first epoch is not measured, the others are too short together
        now += seconds
        for _ in range(3):
            found.observe(0, stepped)
        found.observe(0, ended)
        assert (found.n, found.best_speed) == (1, 0.0)
    now += 0.0625
    found.observe(0, stepped)
    found.observe(0, ended)
    assert (found.n, found.best_speed) == (2, 10.0)  # 3 + 3 + 3 + 1 steps in a second
    found.observe(0, ended)
    now += 5.0
    found.observe(0, ended)
    assert found.n == 2, "the other lane has done no epoch yet"
    found.observe(1, ended)
    assert found.started == now


def test_a_gpu_has_room_for_a_lane_of_the_mean_size_and_half_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 400)
    for free, lanes, room in ((600, 1, False), (601, 1, True), (300, 2, False), (301, 2, True), (150, 4, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1000))
        assert lanes_module._has_memory(lanes) is room


@pytest.mark.parametrize(
    ("gpu", "device", "runs", "given", "limit"),
    [
        (True, "cuda", 3, None, 3),
        (True, "auto", 20, None, 16),
        (True, "cpu", 3, None, 1),
        (False, "auto", 3, None, 1),
        (True, "cuda", 3, 2, 1),
    ],
)
def test_lanes_are_added_on_a_gpu_only_and_where_their_number_is_open(
    gpu: bool, device: str, runs: int, given: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def tuner(limit: int, has_memory: Any) -> None:
        raise Asked(limit, has_memory)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(lanes_module, "LaneTuner", tuner)
    config = replace(tiny(), device=device)
    with pytest.raises(Asked) as asked:
        run_lanes([config] * runs, given)
    assert asked.value.args == (limit, lanes_module._has_memory)


def test_while_all_lanes_wait_the_processor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("tbbn.bench.engine.lanes.time.sleep", pauses.append)

    def drive(number: int, run: Run) -> Iterator[Event]:
        yield Waiting(lambda: len(pauses) >= 3)
        yield Stepped(Position(), "train", 1, 1, 1)

    run_lanes([tiny(), tiny(seed=1)], 2, drive=drive)
    assert pauses == [5e-5] * 3


def test_the_number_of_lanes_may_be_left_open() -> None:
    records = run_lanes([tiny(data__stop_after=1), tiny(data__stop_after=1, seed=1)], None)
    assert [r.status for r in records] == ["finished", "finished"]
