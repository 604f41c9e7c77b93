"""What the parts of a run hand to each other: seen by spies between them, since a wrong number there still trains."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import run_in_pieces, same
from tinyrun import SHORT, Trained, finish, tiny

from tbbn.bench.data.batches import BatchMaker
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.engine import Event, Stepped, TaskEnded, forward, setup, task
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.phase import PhaseSettings
from tbbn.bench.engine.record import digest
from tbbn.bench.engine.step import Step
from tbbn.bench.engine.task import EngineTaskContext
from tbbn.bench.methods import Phase
from tbbn.bench.models import Network
from tbbn.bench.seeds import derive
from tbbn.nn import balance
from tbbn.registry import METHODS


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every ``balance`` of a training step was told."""
    seen: list[dict[str, Any]] = []

    class Spy(balance):
        def __init__(self, module: Any, **given: Any) -> None:
            seen.append(given)
            super().__init__(module, **given)

    monkeypatch.setattr(forward, "balance", Spy)
    return seen


@pytest.mark.parametrize("norm", ["tbbn", "weighted"])
def test_balance_is_told_the_tasks_before_and_the_rows_of_the_batch(
    norm: str, layouts: list[dict[str, Any]], trained: list[Trained]
) -> None:
    run = finish(tiny(norm__name=norm, train__epochs=1))
    told = [(given["past_tasks"], given["current"], given["memory"]) for given in layouts]
    assert told == [(step.spec.past_tasks, step.spec.n_current, step.spec.n_memory) for step in trained]
    task_of_row = torch.zeros(len(run.scenario.train_labels), dtype=torch.int64)
    for one in run.scenario.tasks:
        task_of_row[one.train] = one.number
    assert all((task_of_row[step.current] == past).all() for step, (past, _, _) in zip(trained, told, strict=True))
    assert {past for past, _, _ in told} == {0, 1, 2} and {given["task_ids"] for given in layouts} == {None}


# Random streams: a name of its own for every purpose, task, phase and epoch. -----------------------------------------


def test_every_draw_has_the_stream_of_its_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[str, list[int]] = {}

    def watch(owner: Any, name: str, find: Any) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seeds.setdefault(name, []).append(find(arguments, options).initial_seed())
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(setup, "backbone", lambda _, options: options["generator"])
    watch(Network, "grow", lambda arguments, _: arguments[2])
    watch(task, "epoch_blocks", lambda _, options: options["generator"])
    watch(task, "balanced_rows", lambda arguments, _: arguments[3])
    watch(task, "select", lambda arguments, _: arguments[4])
    watch(BatchMaker, "draw", lambda arguments, _: arguments[3])
    watch(ExemplarMemory, "update", lambda _, options: options["generator"])

    def of(*names: str | int) -> int:
        return derive(5, *names)

    finish(tiny(seed=5, data__stop_after=2, method__name="eeil", batch__size=16, **SHORT["eeil"]))
    main, second = [("train", e, t) for t in (0, 1) for e in (0, 1)], [("balanced", e, 1) for e in (0, 1)]
    assert seeds.pop("backbone") == [of("weights")]
    assert seeds.pop("grow") == [of("head", t) for t in (0, 1)]
    assert seeds.pop("epoch_blocks") == [of("batches", *names) for names in (*main, *second)]
    assert seeds.pop("balanced_rows") == [of("balanced", 1)]
    assert seeds.pop("update") == [of("exemplars", t) for t in (0, 1)]
    # Every block of an epoch has its own: 24 rows are a batch of 16 and one of 8, and so on.
    drawn = seeds.pop("draw")
    known = {of("augmentation", phase, e, i, t) for phase, e, t in (*main, *second) for i in range(4)}
    assert len(set(drawn)) == len(drawn) > 8 and set(drawn) <= known
    assert {of("augmentation", phase, e, 0, t) for phase, e, t in (*main, *second)} <= set(drawn)
    assert not seeds

    finish(tiny(seed=5, data__stop_after=2, method__name="bic", method__correction_epochs=1, train__epochs=1))
    assert set(seeds["select"]) == {of("holdout", 1)}
    assert seeds["epoch_blocks"] == [
        of("batches", *n) for n in (("train", 0, 0), ("train", 0, 1), ("correction", 0, 1))
    ]
    seeds.clear()
    finish(tiny(seed=5, data__stop_after=1, method__name="podnet", method__finetune_epochs=1, train__epochs=1))
    finish(tiny(seed=5, data__stop_after=2, method__name="podnet", method__finetune_epochs=1, train__epochs=1))
    assert of("provisional exemplars", 1) in seeds["update"]


def test_the_held_out_validation_rows_and_the_class_order_of_a_seed_stay_what_they_are() -> None:
    """Golden values: a renamed stream would change everybody's splits."""
    run = Run(tiny(data__validation=0.25))
    assert run.record.class_order == [5, 2, 1, 3, 0, 4]
    held_out = sorted(torch.cat([t.validation for t in run.scenario.tasks]).tolist())
    assert held_out == [0, 6, 8, 15, 19, 20, 28, 30, 35, 37, 40, 42, 50, 57, 58, 60, 63, 67]


def test_no_two_epochs_have_the_same_batches_or_augmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: dict[tuple[int, str, int], list[torch.Tensor]] = {}
    real = EngineTaskContext.draw

    def watched(self: EngineTaskContext, rows: Any, *purpose: Any) -> Any:
        blocks = real(self, rows, *purpose)
        epochs[(self.number, *purpose)] = [torch.cat([b.parameters[0].flatten() for b in blocks])]  # type: ignore[index]
        epochs[(self.number, *purpose)].append(torch.cat([b.index.flatten() for b in blocks]))  # type: ignore[index]
        return blocks

    monkeypatch.setattr(EngineTaskContext, "draw", watched)
    finish(tiny(batch__augment="shift", train__epochs=3))
    assert len(epochs) == 9
    for kind in (0, 1):
        assert len({tuple(drawn[kind].tolist()) for drawn in epochs.values()}) == 9


# The optimiser and the losses. ---------------------------------------------------------------------------------------


def test_the_optimiser_of_each_phase_has_the_settings_of_the_config_or_of_the_method() -> None:
    found: dict[tuple[str, int], tuple[Any, ...]] = {}

    def watch(run: Run, event: Event) -> None:
        if isinstance(event, Stepped) and event.position.task == 1 and run.optimizer is not None:
            (group,) = run.optimizer.param_groups
            settings = tuple(group[name] for name in ("lr", "momentum", "weight_decay", "nesterov", "dampening"))
            found[event.phase, event.position.epoch] = (settings, {id(p) for p in group["params"]})
            parameters.append({id(p) for p in run.network.parameters() if p.requires_grad})
            assert found[event.phase, event.position.epoch][1] == parameters[-1]

    parameters: list[set[int]] = []
    given = {"train__lr": 0.2, "train__momentum": 0.8, "train__weight_decay": 3e-3, "train__nesterov": True}
    run = finish(tiny(method__name="bic", method__correction_epochs=1, train__milestones=[0.5], **given), watch)
    assert found["train", 0][0] == (0.2, 0.8, 3e-3, True, 0)
    assert found["train", 1][0] == (pytest.approx(0.02), 0.8, 3e-3, True, 0)
    assert found["correction", 0][0] == (0.2, 0.9, 0.0, True, 0)
    assert len(found["correction", 0][1]) == 2 < len(found["train", 0][1]) < len(list(run.network.parameters()))
    without_momentum = PhaseSettings.of(tiny(**given), Phase(momentum=0.0), 0)
    assert not without_momentum.nesterov and PhaseSettings.of(tiny(**given), Phase(), 0).nesterov


def test_the_penalty_of_the_norm_is_a_term_of_the_loss() -> None:
    run = finish(tiny(norm__name="adab2n"))
    for entry in run.record.history[2:]:  # there is nothing to balance in the first task
        assert entry["norm"] > 0
        assert entry["total"] == pytest.approx(entry["ce"] + entry["norm"], rel=1e-5)
    assert "norm" not in finish(tiny(norm__name="tbbn", data__stop_after=2)).record.history[-1]


def test_the_loss_of_an_epoch_is_the_mean_over_its_steps_of_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, float]] = []
    real = Step.losses

    def watched(self: Step, batch: Any) -> Any:
        terms = real(self, batch)
        seen.append((self.spec, sum(term.item() for term in terms.values())))
        return terms

    monkeypatch.setattr(Step, "losses", watched)
    record = finish(tiny(batch__size=10, data__stop_after=2)).record
    assert len({spec for spec, _ in seen}) > 3
    for entry, steps in zip(record.history, _by_epoch(seen), strict=True):
        assert entry["total"] == pytest.approx(sum(steps) / len(steps), rel=1e-5)


def _by_epoch(seen: list[tuple[Any, float]]) -> list[list[float]]:
    """The losses of the two epochs of each task."""
    found = []
    for number in (0, 1):
        mine = [loss for spec, loss in seen if spec.past_tasks == number]
        found += [mine[: len(mine) // 2], mine[len(mine) // 2 :]]
    return found


# Phases, memory, record. ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eeil", "bic", "podnet"])
def test_dropping_the_last_batch_is_for_the_main_phase_only(method: str, trained: list[Trained]) -> None:
    size, more = (6, {"method__held_out": 0.3}) if method == "bic" else (10, {})
    once = {"data__stop_after": 2, "train__epochs": 1, "batch__size": size, "batch__last": "drop"}
    finish(tiny(method__name=method, **SHORT[method], **once, **more))
    second = [step for step in trained if step.loss != "loss"]
    assert {step.spec.base_rows for step in trained if step.loss == "loss"} == {size}
    assert len({step.spec.base_rows for step in second}) == 2, "there is a short batch"
    rows = Counter(row for step in second for row in step.index.tolist())
    # Balanced: 6 of each of 4 classes. Held out: 2 of each. Exemplars: 3 of each.
    assert len(rows) == {"eeil": 24, "bic": 8, "podnet": 12}[method]
    assert min(rows.values()) == 2


def test_the_rows_held_out_of_a_class_are_a_share_of_its_exemplars(trained: list[Trained]) -> None:
    run = finish(tiny(method__name="bic", method__correction_epochs=1, method__held_out=0.3))
    for number, wanted in ((1, 2), (2, 1)):  # 0.3 of 12 / 2 = 6, and of 12 / 4 = 3
        mine = [s for s in trained if s.loss == "correction_loss" and s.spec.past_tasks == number]
        rows = torch.cat([s.index for s in mine]).unique()
        assert set(Counter(run.scenario.train_labels[rows].tolist()).values()) == {wanted}


def test_after_training_comes_before_the_memory_is_updated_and_after_task_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int, int]] = []
    kind = METHODS.get("ft")
    for name in ("before_task", "after_training", "after_task"):
        real = getattr(kind, name)

        def watched(self: Any, context: Any, name: str = name, real: Any = real) -> None:
            seen.append((name, context.number, len(context.memory)))
            real(self, context)

        monkeypatch.setattr(kind, name, watched)
    finish(tiny(train__epochs=1, memory__budget=4, memory__per_class=True))
    for number in range(3):
        kept = 8 * number
        assert seen[3 * number :][:3] == [
            ("before_task", number, kept),
            ("after_training", number, kept),
            ("after_task", number, kept + 8),
        ]


def test_provisional_exemplars_do_not_change_the_memory() -> None:
    kept: dict[int, Any] = {-1: ([], 0)}

    def watch(run: Run, event: Event) -> None:
        if isinstance(event, TaskEnded):
            kept[event.task] = (run.memory.index.tolist(), run.memory.seen)
        elif isinstance(event, Stepped) and event.phase == "finetune":
            finetuned.append(event.position.task)
            assert kept[event.position.task - 1] == (run.memory.index.tolist(), run.memory.seen)

    finetuned: list[int] = []
    finish(tiny(method__name="podnet", method__finetune_epochs=1, train__epochs=1), watch)
    assert set(finetuned) == {1, 2} and len(kept) == 4


@pytest.mark.parametrize(("rule", "splits"), [("paper", [1, 2, 2]), ("current", [1, 2, 5]), ("uneven", [1, 3, 5])])
def test_the_record_has_the_splits_of_the_rule_that_is_trained_with(rule: str, splits: list[int]) -> None:
    # 10 current and 4 memory rows: exact balance is at 2.5 and 5 splits.
    config = tiny(norm__name="tbbn", norm__rule=rule, batch__size=14, batch__ratio="5:2", train__epochs=1)
    assert finish(config).record.splits == splits


def test_the_best_epoch_before_a_stop_is_kept_when_the_run_resumes(tmp_path: Path) -> None:
    # From the third epoch on the steps are far too large: the best epoch is one of the first two.
    settings = {"train__epochs": 5, "train__milestones": [0.4], "train__gamma": 60.0, "data__stop_after": 1}
    config = tiny(train__keep="best", data__validation=0.25, data__tasks=2, **settings)
    alone = finish(config)
    losses = [entry["validation"] for entry in alone.record.history]
    assert losses.index(min(losses)) < 2
    steps = len(alone.scenario.tasks[0].train) // 8 + 1
    resumed, places = run_in_pieces(config, tmp_path, [4 * (steps + 1)])
    assert places == 1 and same(resumed.network.state_dict(), alone.network.state_dict())


def test_seconds_are_counted_over_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr("tbbn.bench.engine.loop.time.perf_counter", lambda: next(clock))
    assert finish(tiny(train__epochs=1)).record.seconds == 15


def test_after_the_first_task_every_error_is_among_its_own_classes() -> None:
    record = finish(tiny(train__epochs=1, train__lr=1e-6, data__stop_after=1)).record
    wrong = record.errors[0].pop("C->C")
    assert wrong == round(10 * (1 - record.accuracy[0][0])) > 0
    assert set(record.errors[0].values()) == {0}


def test_a_digest_covers_names_types_shapes_and_values() -> None:
    tensor = torch.arange(6, dtype=torch.int32)
    variants = [
        {"a": tensor},
        {"b": tensor},
        {"a": tensor.view(torch.float32)},
        {"a": tensor.view(2, 3)},
        {"a": tensor + 1},
        {"a": tensor, "b": tensor[:0]},
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)
    assert digest({"a": tensor, "b": tensor[:1]}) == digest({"b": tensor[:1], "a": tensor.clone()})
