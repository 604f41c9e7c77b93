"""Drift of running statistics, against a slow formula over all inputs of a layer at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import finish, tiny
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.analysis import figures
from tbbn.bench.analysis.drift import LayerDrift, drift, drift_table
from tbbn.bench.analysis.loading import run_after
from tbbn.bench.engine.loop import Run
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError


def inputs_of(run: Run, layer: str, rows: Tensor) -> Tensor:
    """The input of a layer (N, C, ...) over these training rows, in one batch."""
    seen: list[Tensor] = []
    module = dict(run.network.named_modules())[layer]
    handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().double()))
    with torch.no_grad():
        run.network.eval()(run.train_data.evaluation_images(rows, []))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("norm", ["tbbn", "cn"])
def test_drift_is_the_distance_from_the_mean_over_tasks(norm: str) -> None:
    run = finish(tiny(norm=norm, batch__evaluation=7))
    for found in drift(run, view="test"):
        layer = dict(run.network.named_modules())[found.layer]
        means, squares = [], []
        for task in run.scenario.tasks:
            x = inputs_of(run, found.layer, task.train)
            if norm == "cn":
                x = F.group_norm(x, layer.groups, eps=layer.eps)  # type: ignore[arg-type]
            means.append(x.mean((0, 2, 3)))
            squares.append(x.square().mean((0, 2, 3)))
        mean = (means[0] + means[1] + means[2]) / 3
        std = ((squares[0] + squares[1] + squares[2]) / 3 - mean * mean).sqrt()
        running, var = layer.get_buffer("running_mean").double(), layer.get_buffer("running_var").double()
        assert found.mean == pytest.approx(float(((running - mean).abs() / std).mean()), rel=1e-4)
        assert found.std == pytest.approx(float((var.sqrt() / std - 1).abs().mean()), rel=1e-4)


def test_the_weight_of_the_newest_task_is_found_again() -> None:
    run = finish(tiny(norm="bn"))
    first = drift(run, view="test")[0].layer
    means = [inputs_of(run, first, task.train).mean((0, 2, 3)) for task in run.scenario.tasks]
    mixed = 0.7 * means[2] + 0.15 * (means[0] + means[1])
    dict(run.network.named_modules())[first].get_buffer("running_mean").copy_(mixed)
    assert drift(run, view="test")[0].newest == pytest.approx(0.7, abs=1e-3)


def test_images_limit_what_is_read() -> None:
    run = finish(tiny(norm="bn", train__epochs=1))
    assert drift(run, 10**6, "test") == drift(run, 0, "test") != drift(run, 5, "test")
    few = [replace(task, train=task.train[::5]) for task in run.scenario.tasks]  # 5 of 24 rows
    wanted = drift(run, 5, "test")
    run.scenario = replace(run.scenario, tasks=tuple(few))
    assert drift(run, 0, "test") == wanted


@pytest.mark.parametrize("method", ["ft", "joint"])
def test_augmented_images_are_those_of_the_tasks_own_batches(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without augmentation, and with a whole number of batches, both views see the same images."""
    run = finish(tiny(norm="bn", method=method, batch__augment="none", train__epochs=1, batch__last="short"))
    for train, test in zip(drift(run), drift(run, view="test"), strict=True):
        assert (train.mean, train.std) == pytest.approx((test.mean, test.std), rel=1e-4)
    read: list[int] = []
    monkeypatch.setattr("tbbn.bench.analysis.drift.evaluation_forward", lambda _, images, __: read.append(len(images)))
    monkeypatch.setattr("tbbn.bench.analysis.drift._compare", lambda *_: None)
    drift(run, 7)
    assert sum(read) == 3 * 7


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(UserError, match="unknown view 'tset'"):
        drift(finish(tiny(norm="bn", train__epochs=1)), view="tset")


def test_a_saved_run_is_looked_at_after_any_of_its_tasks(tmp_path: Path) -> None:
    config = tiny(norm="bn", save__tasks="all")
    run_saved(config, tmp_path / "run")
    trained = finish(config)
    last, earlier = drift(run_after(tmp_path / "run")), drift(run_after(tmp_path / "run", 1))
    assert last == drift(trained) and earlier != last
    table = drift_table(["a", "b"], [last, last])
    assert len(table.rows) == len(last) + 1 and table.rows[-1][0] == "all layers"
    with pytest.raises(UserError, match="has learnt 3 tasks; there is no task 9"):
        run_after(tmp_path / "run", 8)


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no running statistics"):
        drift(finish(tiny(norm="gn", train__epochs=1)))
    run_saved(tiny(norm="bn", save__tasks="none", train__epochs=1), tmp_path / "run")
    with pytest.raises(UserError, match=r"network after task 1 is not saved; --save.tasks all"):
        run_after(tmp_path / "run", 0)


def test_of_many_runs_the_table_has_a_row_each_that_fits_a_terminal() -> None:
    runs = [[LayerDrift("a", 0.1 * n, 0.2, 0.5), LayerDrift("b", 0.3 * n, 0.4, 0.7)] for n in (1, 2, 3)]
    table = drift_table(["x", "y", "z"], runs)
    assert table.rows[1:] == (("y", "0.400", "30.0", "60.0"), ("z", "0.600", "30.0", "60.0"))
    assert max(map(len, table.render("text").splitlines())) <= 110
    both = drift_table(["x", "y"], runs[:2])
    assert both.rows[0] == ("a", "0.100", "20.0", "50.0", "0.200", "20.0", "50.0") and len(both.rows) == 3


def test_the_figure_of_drift_shows_both_distances_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    runs = [[LayerDrift("a", 0.1, 0.2, 0.5), LayerDrift("b", 0.3, 0.4, 0.7)], [LayerDrift("a", 1, 1, 0.2)]]
    figures.drift_figure(["bn", "tbbn"], runs, tmp_path / "drift.png")
    left, right = drawn[0].axes
    assert [list(line.get_ydata()) for line in left.lines] == [[0.1, 0.3], [1]]
    assert list(right.lines[0].get_ydata()) == pytest.approx([50, 70]) and list(right.lines[1].get_ydata()) == [20]
    assert (left.get_ylabel(), right.get_ylabel()) == ("running mean off (sd)", "weight of the newest task (%)")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["bn", "tbbn"]
