"""From a config to the objects of a run: each gets the settings that are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tinyrun import finish, tiny
from torch import nn

import tbbn
from tbbn.bench.data import loading
from tbbn.bench.data.augment import Shift
from tbbn.bench.engine import EpochEnded, Event, setup, validate
from tbbn.bench.engine.evaluate import evaluated_rows
from tbbn.bench.engine.forward import evaluation_pass
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.step import Step
from tbbn.errors import UserError
from tbbn.plugins import temporary


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: you tried")])
def test_data_that_does_not_fit_in_memory_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(loading, "load", fail)
    with pytest.raises(UserError, match=r"^digits: its images do not fit in memory; set a smaller data\.size\.$"):
        setup.load_source(tiny(data__name="digits"))
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        setup.load_source(tiny(data__name="digits"))


def test_the_data_set_is_loaded_with_the_settings_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = loading.load

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return real("synthetic:6x12x5x8", "data")

    monkeypatch.setattr(loading, "load", watched)
    config = tiny(data__root="here", data__size=16, data__unreadable="skip", data__download=False, data__split=0.3)
    told = lambda done, images: None  # noqa: E731
    setup.load_source(config, on_progress=told)
    wanted = {"download": False, "size": 16, "unreadable": "skip", "split": 0.3, "on_progress": told}
    assert asked == [(("synthetic:6x12x5x8", "here"), wanted)]
    setup.load_source(config, download=True)
    setup.load_source(tiny(data__download=True), download=False)
    assert [options["download"] for _, options in asked] == [False, True, False]
    assert asked[-1][1]["size"] is None
    with pytest.raises(UserError, match=r"data\.crop must be at most 8 for images of 8x8, got 9\."):
        setup.load_source(tiny(data__crop=9))


def test_the_scenario_is_that_of_the_config() -> None:
    assert Run(tiny(data__base_classes=4)).record.task_sizes == [4, 1, 1]
    run = Run(tiny(data__tasks=2, data__class_order="natural", data__validation=0.25, data__stop_after=1))
    assert run.record.task_sizes == [3] and run.record.class_order == list(range(6))
    assert (len(run.scenario.tasks[0].train), len(run.scenario.tasks[0].validation)) == (27, 9)


def test_the_memory_is_that_of_the_config() -> None:
    given = {"budget": 7, "per_class": True, "rounding": "ceil", "selection": "entropy", "shrink": "reselect"}
    memory = setup.memory_of(tiny(**{f"memory__{name}": value for name, value in given.items()}))
    assert {name: getattr(memory, name) for name in given} == given


def test_only_plain_float32_on_a_gpu_has_channels_first() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    layouts = {(d.type, p): setup.memory_format_of(tiny(precision=p), d) for d in (cpu, gpu) for p in ("fp32", "bf16")}
    first = {key for key, layout in layouts.items() if layout == torch.contiguous_format}
    assert first == {("cuda", "fp32")} and set(layouts.values()) == {torch.contiguous_format, torch.channels_last}


def test_a_crop_is_what_training_evaluation_and_the_record_see(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    real = Step.losses

    def watched(self: Step, batch: Any) -> Any:
        seen.add(tuple(batch.images.shape[1:]))
        return real(self, batch)

    monkeypatch.setattr(Step, "losses", watched)
    run = finish(tiny(data__crop=6, batch__augment="shift", data__stop_after=1, train__epochs=1))
    assert seen == {(3, 6, 6)} and run.record.data["shape"] == [3, 6, 6]
    assert isinstance(run.maker.augment, Shift) and run.maker.augment.crop == 6
    assert run.maker.strong.apply(torch.zeros(1, 3, 8, 8), torch.zeros(1, 14)).shape == (1, 3, 6, 6)
    assert run.test_data.evaluation_images(torch.arange(2), []).shape == (2, 3, 6, 6)
    assert Run(tiny()).record.data["shape"] == [3, 8, 8]


def test_what_a_record_says_before_training() -> None:
    run = Run(tiny(norm__name="tbbn", data__stop_after=2))
    record = run.record
    assert record.data["classes"] == list(run.source.classes) and len(record.data["classes"]) == 6
    assert (record.data["mean"], record.data["std"]) == (list(run.source.mean), list(run.source.std))
    assert record.task_sizes == [2, 2] and record.class_order == list(run.scenario.class_order)
    assert record.environment["device"] == "cpu" and Run(tiny(threads=3)).record.environment["threads"] == 3
    assert "cpu_kernel" in record.environment and "cpu_kernel" not in Run(tiny()).record.environment
    assert (record.status, record.skipped, record.accuracy, record.seconds) == ("running", [], [], 0.0)


@pytest.mark.parametrize(
    ("settings", "task", "wanted"),
    [
        ({}, 0, (64, 0, 1)),
        ({}, 1, (48, 16, 2)),
        ({}, 3, (48, 16, 8)),
        ({"memory__budget": 0}, 3, (64, 0, 1)),
        ({"method__name": "joint"}, 3, (64, 0, 1)),
        ({"batch__ratio": "1:1"}, 1, (32, 32, 1)),
        ({"method__name": "balaug"}, 2, (48, 96, 1)),
        ({"data__online": True}, 0, (48, 16, 1)),
        ({"data__online": True}, 3, (48, 16, 8)),
        ({"data__online": True, "batch__memory_from": "past"}, 0, (48, 0, 1)),
        ({"data__online": True, "batch__memory_from": "past"}, 1, (48, 16, 2)),
        ({"data__online": True, "memory__budget": 0}, 3, (48, 0, 1)),
        ({"data__online": True, "method__name": "joint"}, 3, (64, 0, 1)),
    ],
)
def test_a_full_batch_by_hand(settings: dict[str, Any], task: int, wanted: tuple[int, int, int]) -> None:
    config = tiny(norm__name="tbbn", batch__size=64, **settings)
    assert setup.full_batch(config, setup.method_of(config), task) == wanted


def test_a_network_is_evaluated_in_eval_mode_in_batches_and_then_trains_on() -> None:
    run = finish(tiny(data__stop_after=1, train__epochs=1))
    for mode in (True, False):
        run.network.train(mode)
        rows = torch.arange(10)
        outputs = list(
            evaluation_pass(
                run.network, run.test_data, rows, 4, "fp32", lambda out: (len(out.logits), run.network.training)
            )
        )
        assert outputs == [(4, False), (4, False), (2, False)] and run.network.training == mode


def test_evaluation_uses_its_own_batch_size_and_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbbn.bench.engine import evaluate, task

    asked: list[tuple[int, str]] = []

    def watched(network: Any, data: Any, rows: Any, size: int, precision: str, *more: Any) -> Any:
        asked.append((size, precision))
        return evaluation_pass(network, data, rows, size, precision, *more)

    monkeypatch.setattr(evaluate, "evaluation_pass", watched)
    monkeypatch.setattr(task, "evaluation_pass", watched)
    finish(tiny(batch__evaluation=3, precision="bf16", data__stop_after=1, train__epochs=1))
    assert set(asked) == {(3, "bf16")} and len(asked) == 2  # herding, and the test images


def test_test_rows_in_whole_batches_are_the_first_ones() -> None:
    run = Run(tiny(batch__size=4, data__test="whole-batches"))
    task = run.scenario.tasks[1]
    assert len(task.test) == 10
    assert torch.equal(evaluated_rows(run.config, task), task.test[:8])
    assert torch.equal(evaluated_rows(tiny(), task), task.test)


def test_a_norm_is_tried_in_train_mode_though_the_backbone_comes_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    real = validate.backbone
    monkeypatch.setattr(validate, "backbone", lambda *arguments, **options: real(*arguments, **options).eval())
    with temporary(fresh=True):

        @tbbn.register_norm("untrainable", "a norm that works in eval mode only")
        class Untrainable(nn.BatchNorm2d):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.training:
                    raise ValueError("no training here")
                return super().forward(x)

        with pytest.raises(UserError, match="no training here"):
            validate.check(tiny(norm__name="untrainable"))


def test_a_phase_trains_what_it_says_in_the_mode_it_says() -> None:
    seen: dict[str, tuple[bool, bool, int]] = {}

    def watch(run: Run, event: Event) -> None:
        if isinstance(event, EpochEnded) and event.position.task == 1:
            trained = sum(p.requires_grad for p in run.network.parameters())
            has_teacher = {step.previous is not None for step in run.steps.values()}
            assert len(has_teacher) == 1
            seen[event.phase] = (run.network.training, has_teacher.pop(), trained)

    run = finish(tiny(method__name="bic", method__correction_epochs=1, data__stop_after=2), watch)
    n = len(list(run.network.parameters()))
    assert seen == {"train": (True, True, n - 4), "correction": (False, False, 2)}
    assert not run.network.training and run.rows is run.optimizer is run.best is None and run.steps == {}
