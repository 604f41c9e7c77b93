"""The choice of epoch: scores of every epoch, and what each rule keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import SHORT, finish, tiny
from torch.nn import functional as F

from tbbn.bench.analysis import figures
from tbbn.bench.analysis.epochs import EpochScore, kept_by, kept_table, rules_table, score_epochs
from tbbn.bench.config import to_dict
from tbbn.bench.engine.events import EpochEnded, Event
from tbbn.bench.engine.loop import Run
from tbbn.errors import UserError

SETTINGS: dict[str, Any] = {"norm": "tbbn", "data__validation": 0.25, "train__epochs": 3, "train__keep": "best"}


def test_every_epoch_is_scored_and_the_run_trains_as_without() -> None:
    config = tiny(**SETTINGS)
    seen: list[tuple[list[float], float]] = []

    @torch.no_grad()
    def watch(run: Run, event: Event) -> None:
        """One image at a time, and the loss of all validation rows in one batch."""
        if not isinstance(event, EpochEnded):
            return
        run.network.eval()
        tasks = run.scenario.tasks[: event.position.task + 1]
        right = []
        for task in tasks:
            images = [run.test_data.evaluation_images(row.view(1), []) for row in task.test]
            predicted = [int(run.network(image).logits.argmax()) for image in images]
            wanted = run.scenario.test_labels[task.test].tolist()
            right.append(sum(a == b for a, b in zip(predicted, wanted, strict=True)) / len(wanted))
        rows = torch.cat([task.validation for task in tasks])
        logits = run.network(run.train_data.evaluation_images(rows, [])).logits
        seen.append((right, float(F.cross_entropy(logits, run.train_data.labels[rows]))))

    scores, plain = score_epochs(config), finish(config, watch)
    assert len(scores) == len(seen) == 9
    for score, (right, loss) in zip(scores, seen, strict=True):
        assert score.accuracy == pytest.approx(tuple(right)) and score.all_loss == pytest.approx(loss, rel=1e-5)
    entries = plain.record.history
    assert [score.new_loss for score in scores] == pytest.approx([entry["validation"] for entry in entries], rel=1e-5)
    kept = [score.epoch for score in kept_by(scores, "best on the new task")]
    assert kept == [epoch for _, epoch in plain.record.kept_epochs().items()]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "wa", "data__name": "synthetic:6x12x20x8", "train__epochs": 6},
        {"method": "il2m"},
        {"method": "icarl"},
        {"method": "icarl", "data__online": True},
        {"method": "podnet", **SHORT["podnet"]},
        {"method": "podnet", "method__classifier": "nme", **SHORT["podnet"]},
        {"method": "afc", "method__importance_moves_statistics": True, **SHORT["afc"]},
        {"method": "eeil", **SHORT["eeil"]},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_an_epoch_scores_what_the_run_scores_if_it_keeps_it(settings: dict[str, Any]) -> None:
    """Methods that rescale, remember or select exemplars after training do so before an epoch is scored."""
    keep = "last" if settings.get("data__online") else "best"
    config = tiny(norm="tbbn", data__validation=0.25, train__keep=keep, **settings)
    losses: list[dict[str, float]] = []
    scores = score_epochs(config, lambda event: losses.append(event.losses) if isinstance(event, EpochEnded) else None)
    record = finish(config).record
    last = {task: (phase, epoch) for (task, phase), epoch in record.kept_epochs().items()}
    scored = {(score.task, score.phase, score.epoch): list(score.accuracy) for score in scores}
    assert [scored[(task, *last[task])] for task in range(3)] == record.accuracy
    assert all(entry.items() >= loss.items() for entry, loss in zip(record.history, losses, strict=True))


def score(task: int, epoch: int, new: float, both: float, phase: str = "train", right: float = 0.5) -> EpochScore:
    return EpochScore(task, phase, epoch, 0.1, (right,) * (task + 1), new, both)


def test_each_rule_keeps_its_epoch_of_each_phase() -> None:
    first = [score(0, 0, 2.0, 2.0), score(0, 1, 1.0, 1.0), score(0, 2, 1.5, 1.5)]
    second = [score(1, e, *loss) for e, loss in enumerate([(3, 1), (2, 2)])]
    balanced = [score(1, e, *loss, "balanced") for e, loss in enumerate([(1, 9), (2, 3), (3, 7)])]
    run = [*first, *second, *balanced]
    assert [kept.epoch for kept in kept_by(run, "last")] == [2, 1, 2]
    assert [kept.epoch for kept in kept_by(run, "best on the new task")] == [1, 1, 0]
    assert [kept.epoch for kept in kept_by(run, "best on all tasks")] == [1, 0, 1]
    table = rules_table({"eeil + bn": [run]})
    assert table.header[2:5] == ("task", "phase", "epoch")
    kept = [row[1:5] for row in table.rows]
    assert kept[:3] == [("last", "1", "train", "3"), ("last", "2", "train", "2"), ("last", "2", "balanced", "3")]
    assert kept[7:] == [("best on all tasks", "2", "train", "1"), ("best on all tasks", "2", "balanced", "2")]
    table = rules_table({"ft + bn": [[*first, *second]]})
    assert "phase" not in table.header, "every task has one"
    assert table.rows[0] == ("ft + bn", "last", "1", "3", "-", "50.0", "50.0") and len(table.rows) == 6


def test_a_panel_for_each_norm_shows_the_mean_over_its_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    save = figures.save_figure
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure) or save(figure, path))
    one = [score(0, 0, 1, 1, right=0.2), score(0, 1, 2, 2, right=0.4), score(1, 0, 1, 1, right=0.6)]
    two = [score(0, 0, 2, 2, right=0.4), score(0, 1, 1, 1, right=0.8), score(1, 0, 1, 1, right=1.0)]
    picture = figures.epochs_figure({"ft + bn": [one], "ft + tbbn": [one, two]}, tmp_path / "epochs.png")
    assert picture.exists()
    bn, tbbn = drawn[0].axes
    (legend,) = drawn[0].legends  # of the figure: in a panel it would lie over curves
    assert bn.get_legend() is tbbn.get_legend() is None and len(legend.get_texts()) == 5
    assert (bn.get_title(), tbbn.get_title()) == ("ft + bn", "ft + tbbn, mean over 2 seeds")
    lines = {line.get_label(): line for line in tbbn.lines}
    assert list(lines["new task"].get_ydata()) == pytest.approx([30, 60, 80])
    # The lowest loss of the first task is at epoch 1 of one seed (20 %), and at epoch 2 of the other (80 %).
    best = lines["best on the new task"]
    assert list(best.get_xdata()) == [1.5, 3] and list(best.get_ydata()) == pytest.approx([50, 80])
    alone = {line.get_label(): line for line in bn.lines}["new task"]
    assert list(alone.get_ydata()) == pytest.approx([20, 40, 60])


def test_lines_divide_tasks_and_dotted_ones_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    run = [score(0, 0, 1, 1), score(0, 1, 1, 1), score(1, 0, 1, 1), score(1, 0, 1, 1, "balanced")]
    figures.epochs_figure({"eeil + bn": [run]}, tmp_path / "epochs.png")
    upright = [line for line in drawn[0].axes[0].lines if list(line.get_ydata()) == [0, 1]]
    assert [(line.get_xdata()[0], line.get_linestyle()) for line in upright] == [(2.5, "-"), (3.5, ":")]


def test_the_new_task_is_none_of_the_past_ones() -> None:
    scored = EpochScore(2, "train", 0, 0.1, (0.2, 0.4, 0.9), 1.0, 1.0)
    assert (scored.past, scored.new, scored.mean) == pytest.approx((0.3, 0.9, 0.5))
    assert math.isnan(score(0, 0, 1, 1).past)


def test_kept_epochs_are_read_from_the_history() -> None:
    record = finish(tiny(**SETTINGS, data__stop_after=2)).record
    record.history = [
        {"task": 0, "phase": "train", "epoch": 0, "validation": 3.0},
        {"task": 0, "phase": "train", "epoch": 1, "validation": 1.0},
        {"task": 0, "phase": "train", "epoch": 2, "validation": 2.0},
        {"task": 1, "phase": "train", "epoch": 0, "validation": 2.0},
        {"task": 1, "phase": "train", "epoch": 1, "validation": 3.0},
        {"task": 1, "phase": "balanced", "epoch": 0, "validation": 0.5},
        {"task": 1, "phase": "balanced", "epoch": 1, "validation": 0.4},
    ]
    shorter = replace(record, history=record.history[:3])
    table = kept_table({"whole": record, "shorter": shorter})
    assert table.header == ("run", "task 1", "task 2", "of")
    assert table.rows == (("whole", "2", "1", "3"), ("shorter", "2", "-", "3"))
    scaled = replace(record, config=to_dict(tiny(**SETTINGS, train__scale=0.34)))
    assert kept_table({"scaled": scaled}).rows[0][-1] == "1", "of one epoch of three"


def test_without_validation_rows_no_rule_can_choose() -> None:
    with pytest.raises(UserError, match=r"data.validation is 0; set it to 0.1"):
        score_epochs(tiny(data__validation=0))
