"""What records and checks of a run take from where: wrong numbers here look as plausible as right ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import finish, tiny

from tbbn.bench.config import RunConfig, to_dict
from tbbn.bench.engine import Event
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.record import new_record
from tbbn.bench.runs import retrain
from tbbn.bench.runs.crosscheck import same_place
from tbbn.bench.runs.record import load_predictions, load_record, save_record
from tbbn.bench.runs.saved import run_saved, saved
from tbbn.bench.runs.state import require_same_data
from tbbn.bench.runs.trained import trained
from tbbn.bench.runs.verify import verify
from tbbn.errors import UserError


def test_weighted_metrics_of_an_unfinished_run_count_the_classes_of_its_own_tasks() -> None:
    record = new_record(tiny())
    record.task_sizes, record.accuracy, record.task_il = [4, 1, 2], [[0.5], [0.25, 1.0]], [[0.75], [0.5, 1.0]]
    found = record.metrics
    assert found["weighted_final_accuracy"] == pytest.approx((4 * 0.25 + 1.0) / 5)
    assert found["weighted_average_accuracy"] == pytest.approx((0.5 + (4 * 0.25 + 1.0) / 5) / 2)
    assert found["task_il_final_accuracy"] == pytest.approx(0.75)


def test_predictions_of_a_task_that_a_finished_record_does_not_have_are_found(tmp_path: Path) -> None:
    run_saved(tiny(data__stop_after=2, train__epochs=1), tmp_path)
    record, predictions = load_record(tmp_path), load_predictions(tmp_path)
    record.predictions = {**predictions, "task2": predictions["task1"].clone()}
    save_record(record, tmp_path)
    (problem,) = [finding.problem for finding in verify(tmp_path) if finding.problem]
    assert problem == "the record has 2 tasks, but there are predictions for: task0, task1, task2."


def test_a_task_is_retrained_with_the_threads_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def ask(config: RunConfig) -> None:
        asked.append(config)
        raise Asked

    asked: list[RunConfig] = []
    run_saved(tiny(data__stop_after=1, train__epochs=1), tmp_path)
    record = load_record(tmp_path)
    monkeypatch.setattr(retrain, "Run", ask)
    for setting, recorded in ((0, 3), (2, 3)):
        record.config["threads"], record.environment["threads"] = setting, recorded
        save_record(record, tmp_path)
        with pytest.raises(Asked):
            retrain.retrain(tmp_path, 0)
    assert [config.threads for config in asked] == [3, 2]
    whole = replace(record.run_config.data, stop_after=1, download=False)
    assert {replace(config, threads=2) for config in asked} == {replace(record.run_config, data=whole)}


def test_a_record_is_checked_with_its_own_threads_and_device_where_they_are_known() -> None:
    record = new_record(tiny(threads=0, data__download=True))
    for setting, recorded, wanted in ((0, {}, 0), (0, {"threads": 3}, 3), (2, {"threads": 3}, 2)):
        record.config["threads"], record.environment = setting, recorded
        place = same_place(record)
        assert (place.threads, place.data.download, place.device) == (wanted, False, "cpu")
    record.config["device"] = "cuda:77"
    assert same_place(record).device == "auto"


def test_predictions_of_each_task_are_stored_under_its_number() -> None:
    record = finish(tiny(train__epochs=1)).record
    assert list(record.predictions) == ["task0", "task1", "task2"]
    assert [len(p) for p in record.predictions.values()] == [10, 20, 30]
    assert all(int(p.max()) < 2 * t + 2 for t, p in enumerate(record.predictions.values()))
    assert {p.dtype for p in record.predictions.values()} == {torch.int16}


def test_a_trained_network_saves_its_weights_alone_and_its_statistics_of_the_data_move_with_it() -> None:
    run = finish(tiny(data__stop_after=1, train__epochs=1))
    found = trained(run.record, run.network)
    assert {name.partition(".")[0] for name in found.state_dict()} == {"network"}
    assert found.mean.tolist() == pytest.approx(list(run.source.mean))
    assert found.std.tolist() == pytest.approx(list(run.source.std))
    moved = found.to("meta")
    assert {t.device.type for t in (moved.mean, moved.std, *moved.parameters())} == {"meta"}
    assert not any(p.requires_grad for p in found.parameters()) and not found.training


def test_a_resumed_run_changes_nothing_in_its_config_but_the_place_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version may have more settings. Its record must still be that of the checkpoints from before."""

    def without_split(config: RunConfig) -> dict[str, Any]:
        tree = to_dict(config)
        del tree["data"]["split"]
        return tree

    seen: list[Event] = []
    with monkeypatch.context() as earlier:
        earlier.setattr("tbbn.bench.engine.record.to_dict", without_split)
        for event in saved(Run(tiny(train__epochs=1)), tmp_path, every=0, stop=lambda: len(seen) >= 16):
            seen.append(event)
    before = load_record(tmp_path)
    assert before.accuracy and before.status == "interrupted" and "split" not in before.config["data"]
    run_saved(tiny(train__epochs=1, data__root="elsewhere"), tmp_path)
    after = load_record(tmp_path)
    assert after.status == "finished"
    assert after.config == {**before.config, "data": {**before.config["data"], "root": "elsewhere"}}
    assert not any(finding.problem for finding in verify(tmp_path))


@pytest.mark.parametrize(
    ("name", "then", "now"),
    [("class_order", [0, 1], [1, 0]), ("skipped", ["a.png"], []), ("data", {"std": [0.1]}, {"std": [0.2]})],
)
def test_all_that_a_record_knows_of_its_data_is_compared(name: str, then: Any, now: Any) -> None:
    saved_record, here = new_record(tiny()), new_record(tiny())
    require_same_data(saved_record, here, "x")
    setattr(saved_record, name, then)
    setattr(here, name, now)
    key = "std" if name == "data" else name
    with pytest.raises(UserError, match=rf"^x: was trained on different data than .* \({key}: .* then, .* now\)"):
        require_same_data(saved_record, here, "x")
