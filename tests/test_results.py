"""``tools/results.py``: what it refuses to average, and the pictures that it draws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from records import record

TOOLS = Path(__file__).parents[1] / "tools"
HALF = [[0.5], [0.5, 0.5]]


def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *runs: Any) -> list[Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    import results_numbers

    for number in range(len(runs)):
        (tmp_path / f"runs/{number}").mkdir(parents=True)
        (tmp_path / f"runs/{number}/record.json").touch()
    monkeypatch.setattr(results_numbers, "ROOT", tmp_path)
    monkeypatch.setattr(results_numbers, "load_record", lambda folder: runs[int(folder.name)])
    records: list[Any] = results_numbers.records_in.__wrapped__("runs")
    return records


def test_runs_of_a_folder_may_differ_in_method_norm_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [record(HALF, norm__name="bn", seed=seed) for seed in (0, 1)]
    runs += [record(HALF, norm__name="tbbn"), record(HALF, method__name="lucir", train__keep="last")]
    assert len(read(tmp_path, monkeypatch, *runs)) == 4


def test_runs_with_other_settings_are_not_pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [record(HALF), record(HALF, seed=1, backbone="resnet20")]
    with pytest.raises(AssertionError, match=r"^runs: ft \+ bn \[backbone=resnet20\] and ft \+ bn .* are mixed"):
        read(tmp_path, monkeypatch, *runs)


def test_runs_of_a_part_of_the_epochs_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"^runs: SCALE 0\.5"):
        read(tmp_path, monkeypatch, record(HALF, train__scale=0.5))


def test_runs_whose_learning_rate_drops_at_other_epochs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import results_numbers

    best = {"train__keep": "best", "data__validation": 0.1, "train__schedule": "multistep"}
    runs = [record(HALF, train__epochs=160, **best), record(HALF, train__epochs=160, seed=1, **best)]
    monkeypatch.setattr(results_numbers, "best_kept", lambda: runs)
    assert results_numbers.first_drop.__wrapped__() == 160 * runs[0].run_config.train.milestones[0]
    runs.append(record(HALF, train__epochs=90, method__name="lucir", seed=2, **best))
    wanted = r"differ in its schedule: 160 epochs .* \(2, such as ft \+ bn, seed 0\); 90 .* \(1, such as lucir \+ bn, seed 2\)$"
    with pytest.raises(AssertionError, match=wanted):
        results_numbers.first_drop.__wrapped__()
    runs.clear()
    with pytest.raises(AssertionError, match="there are none"):
        results_numbers.first_drop.__wrapped__()


def test_every_picture_of_results_in_the_documents_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import results

    pages = [results.README, *(results.ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"results/[\w-]+\.png", page.read_text())}
    assert (
        shown == set(results.PICTURES) == {f"results/{path.name}" for path in (results.ROOT / "results").glob("*.png")}
    )


def test_runs_of_a_new_folder_appear_beside_batch_norm_of_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import results_others

    monkeypatch.setattr(results_others.numbers, "all_records", lambda: [record(HALF, seed=seed) for seed in (0, 1)])
    better = [[0.5], [0.7, 0.7]]
    new = [record(better, norm__name="tbbn", seed=seed) for seed in (0, 1, 2)]
    for run in new:
        run.calibrated = [[0.5], [0.6, 0.4]]
    rows = results_others.table({"a": new, "b": [record(better, norm__name="tbbn", train__lr=0.3)]}).rows
    means = ("ft + tbbn", "3", "70.0", "60.0", "-10.0", "60.0", "50.0")
    assert rows[0] == ("a", *means, "+20.0 [20.0, 20.0]", "+10.0 [10.0, 10.0]")
    assert rows[1][0] == "b" and rows[1][-3:] == ("-", "", "")  # no calibrated accuracy, no batch norm at this rate
