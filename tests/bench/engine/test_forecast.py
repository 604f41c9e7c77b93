"""The forecast of a run: the numbers of the paper's code on CIFAR-100, and what differs by method and scenario."""

from __future__ import annotations

from typing import Any

import pytest
from tinyrun import tiny

from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.engine.forecast import forecast
from tbbn.bench.engine.setup import outline_source, scenario_of
from tbbn.bench.methods import Phase
from tbbn.bench.methods.ft import FineTune
from tbbn.errors import UserError
from tbbn.plugins import temporary
from tbbn.registry import METHODS


def paper(**settings: Any) -> RunConfig:
    layer = {"data.name": "cifar100", "protocol": "paper", "norm.name": "tbbn"}
    return resolve(("test", layer | {key.replace("__", "."): value for key, value in settings.items()}))


def test_the_papers_run_on_cifar100_step_by_step() -> None:
    entries = forecast(paper()).tasks
    assert [e.steps for e in entries] == [70, 124, 124, 124, 124, 124, 126, 125, 124, 128]
    assert [e.splits for e in entries] == [1, 2, 4, 8, 8, 8, 16, 16, 16, 16]
    # ceil(2000 / classes seen) of each class: 200, 100, 67, 50, 40, 34, 29, 25, 23.
    kept = [0, 10 * 200, 20 * 100, 30 * 67, 40 * 50, 50 * 40, 60 * 34, 70 * 29, 80 * 25, 90 * 23]
    assert [e.exemplars for e in entries] == kept
    assert {e.images for e in entries} == {4500}  # 50 of each class are held out
    assert [(e.current, e.memory) for e in entries] == [(64, 0)] + [(48, 16)] * 9
    assert {e.epochs for e in entries} == {160}


def test_the_class_order_of_seed_0_is_the_papers() -> None:
    config = paper(seed=0)
    order = scenario_of(config, outline_source(config).source).class_order
    assert order[:10] == (26, 86, 2, 55, 75, 93, 16, 73, 54, 95)


def test_whole_last_batches_are_not_needed_in_the_clean_protocol() -> None:
    entries = forecast(resolve(("test", {"data.name": "cifar100"}))).tasks
    assert [e.images for e in entries] == [5000] * 10
    assert entries[0].steps == -(-5000 // 64)
    assert entries[1].steps == max(-(-5000 // 48), -(-2000 // 16))


def test_a_base_task_and_its_increments() -> None:
    entries = forecast(paper(data__base_classes=50, data__tasks=6)).tasks
    assert [e.classes for e in entries] == [50, 10, 10, 10, 10, 10]
    assert [e.splits for e in entries] == [1, 2, 4, 8, 8, 8]


def test_a_scaled_run_is_forecast() -> None:
    assert {e.epochs for e in forecast(paper(train__scale=0.1)).tasks} == {16}


def test_the_first_task_may_have_its_own_epochs() -> None:
    entries = forecast(paper(train__first={"epochs": 200})).tasks
    assert [e.epochs for e in entries] == [200] + [160] * 9


def test_methods_change_batches_and_rows() -> None:
    views = forecast(paper(method__name="balaug", norm__name="bn")).tasks
    assert [(e.current, e.memory) for e in views[:3]] == [(64, 0), (48, 48), (48, 96)]
    joint = forecast(paper(method__name="joint")).tasks
    assert [e.images for e in joint] == [4500 * (t + 1) for t in range(10)]
    assert {(e.current, e.memory, e.exemplars, e.splits) for e in joint} == {(64, 0, 0, 1)}
    union = forecast(paper(method__name="lucir", quirks=["current-from-union"])).tasks
    assert union[1].steps > 4500 // 48
    podnet = forecast(paper(method__name="podnet")).tasks
    assert (podnet[1].current, podnet[1].memory) == (96, 32)


def test_a_method_that_trains_on_other_rows_is_forecast_with_its_epochs_and_a_note() -> None:
    made: Any = (Phase(rows="exemplars", epochs=7), Phase(epochs=100))

    class OnMemory(FineTune):
        def phases(self, context: Any) -> Any:
            return made

    with temporary():
        METHODS.register("on-memory", OnMemory)
        found = forecast(tiny(method__name="on-memory"))
        assert {task.epochs for task in found.tasks} == {7}
        wanted = "method 'on-memory' trains on 'exemplars' rows; batches and steps shown are of 'replay' rows"
        assert found.note == wanted
        for wrong in ({}, (), Phase(epochs=9), [3]):
            made = wrong
            assert forecast(tiny(method__name="on-memory")) == forecast(tiny()), "the run itself refuses them"


def test_an_online_stream_is_cut_by_the_current_part_from_its_first_step() -> None:
    entries = forecast(paper(data__online=True, batch__last="short")).tasks
    assert {(e.current, e.memory, e.steps, e.epochs) for e in entries} == {(48, 16, -(-4500 // 48), 1)}
    assert [e.exemplars for e in entries[:3]] == [0, 2000, 2000]


def test_only_the_tasks_to_be_learnt_are_forecast() -> None:
    assert len(forecast(paper(data__stop_after=2)).tasks) == 2


def test_what_cannot_run_cannot_be_forecast() -> None:
    with pytest.raises(UserError, match=r"100 classes cannot fill 101 tasks"):
        forecast(paper(data__tasks=101))
    with pytest.raises(UserError, match=r"unknown augmentation 'crop'"):
        forecast(tiny(batch__augment="crop"))
