"""What is refused before training: every check by the one setting that it is there for, and its limits from both sides."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinyrun import tiny
from torch import Tensor

import tbbn
from tbbn.bench.config import RunConfig
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.engine import setup, validate
from tbbn.bench.engine.loop import Run
from tbbn.errors import UserError
from tbbn.plugins import temporary


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"method__name": "fy"}, r"^unknown method 'fy'"),
        ({"norm__name": "bbn"}, r"^unknown norm 'bbn'"),
        ({"backbone": "smal"}, r"^unknown backbone 'smal'"),
        ({"batch__augment": "crop"}, r"^unknown augmentation 'crop'"),
        ({"memory__selection": "reservoir", "memory__per_class": True}, r"^memory: a reservoir has a total budget"),
        ({"batch__ratio": "3"}, r"^batch\.ratio must be two whole numbers such as '3:1', got '3'\.$"),
        ({"batch__ratio": "a:1"}, r"^batch\.ratio must be two whole numbers such as '3:1', got 'a:1'\.$"),
        ({"batch__ratio": "0:1"}, r"ratio"),
        ({"train__nesterov": True, "train__momentum": 0.0}, r"^train\.nesterov needs a momentum; set train\.momentum"),
        ({"train__keep": "best"}, r"^train\.keep = 'best' needs validation images; set data\.validation, such as 0\.1\.$"),
        ({"data__online": True, "train__epochs": 2}, r"^data\.online passes .*; train\.epochs must be 1, got 2\.$"),
        ({"data__online": True, "memory__selection": "herding"}, r"^data\.online needs memory\.selection = 'reservoir', got"),
        ({"data__online": True, "batch__current_from": "union"}, r"^data\.online needs batch\.current_from = 'task', got 'u"),
        ({"method__name": "podnet", "backbone": "small", "norm__name": "bn", "device": "cuda:9"}, r"^device 'cuda:9' cannot"),
        ({"device": "warp"}, r"^unknown device 'warp'; use 'cuda' for a GPU, 'cpu' or 'auto'\.$"),
        ({"device": "meta"}, r"^device 'meta' cannot be used here: its tensors hold no data\. Use 'cpu' or 'auto'\.$"),
        ({"norm__name": "tbbn", "batch__forward": "separate"}, r"^norm tbbn needs the whole batch in one forward; set ba"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_run_is_refused_before_any_data_is_loaded(
    settings: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "load_source", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match=line):
        Run(tiny(**settings))


def test_a_config_that_was_not_made_by_resolve_is_held_to_its_limits() -> None:
    config = tiny()
    with pytest.raises(UserError, match=r"^threads must be at most 1024, got 1025\.$"):
        validate.check(replace(config, threads=1025))
    assert validate.check(replace(config, threads=1024)).threads == 1024


def of_data(config: RunConfig) -> None:
    source = setup.load_source(config)
    scenario = setup.scenario_of(config, source)
    validate.check_data(config, setup.method_of(config), setup.memory_of(config), scenario, source)


# Each line: settings that just pass, and settings that just do not.
# Three tasks of two classes; a class has 12 images for training and 5 for testing.
@pytest.mark.parametrize(
    ("passes", "fails", "line"),
    [
        (
            {"data__test": "whole-batches", "batch__size": 10},
            {"data__test": "whole-batches", "batch__size": 11},
            r"^data\.test = 'whole-batches': task 1 has 10 test images, fewer than a batch of 11; lower batch\.size",
        ),
        (
            {"train__keep": "best", "data__validation": 0.25, "data__validate": "whole-batches", "batch__size": 6},
            {"train__keep": "best", "data__validation": 0.25, "data__validate": "whole-batches", "batch__size": 7},
            r"^train\.keep = 'best': 6 validation images, fewer than a batch of 7, are left in task 1; raise data\.val",
        ),
        (
            {"train__keep": "last", "data__validation": 0.25, "data__validate": "whole-batches", "batch__size": 7},
            {"train__keep": "best", "data__validation": 0.01},
            r"^train\.keep = 'best': no validation images are left in task 1; raise data\.validation above 0\.01, or keep",
        ),
        (
            {"train__keep": "best", "data__validation": 0.1, "data__tasks": 6},  # one image of each task
            {"train__keep": "best", "data__validation": 0.01, "data__tasks": 6},
            r"^train\.keep = 'best': no validation images are left in task 1; raise data\.validation above 0\.01, or keep",
        ),
        (  # joint training validates on all tasks, whatever the size of a batch
            {"train__keep": "best", "data__validation": 0.25, "data__validate": "whole-batches", "method__name": "joint"},
            {"train__keep": "best", "data__validation": 0.25, "data__validate": "whole-batches", "method__name": "er"},
            r"^train\.keep = 'best': 6 validation images, fewer than a batch of 8, are left in task 1; raise data\.val",
        ),
        ({"memory__budget": 6}, {"memory__budget": 5}, r"memory"),
        (
            {"memory__budget": 12, "memory__per_class": True},
            {"memory__budget": 13, "memory__per_class": True},
            r"^memory\.budget must be at most 12 for each class, the training images of class '\w+', got 13; or make it",
        ),
        ({"method__name": "joint", "memory__budget": 5}, {"method__name": "er", "memory__budget": 5}, r"memory"),
        ({"memory__budget": 0}, {"memory__budget": 1}, r"memory"),
        (
            {"method__name": "bic", "data__validation": 0.8},
            {"method__name": "bic", "data__validation": 0.9},
            r"^method bic.*: holds out an image of each class, which leaves task 2 without training images \(it has 2 ima",
        ),
        (
            {"method__name": "bic", "data__validation": 0.9, "memory__budget": 0},
            {"method__name": "bic", "data__validation": 0.9, "memory__budget": 6},
            r"^method bic.*: holds out an image of each class",
        ),
    ],
)  # fmt: skip
def test_data_that_just_suffices_and_data_that_just_does_not(
    passes: dict[str, Any], fails: dict[str, Any], line: str
) -> None:
    of_data(tiny(**passes))
    with pytest.raises(UserError, match=line):
        of_data(tiny(**fails))


def test_an_augmentation_is_tried_on_images_of_every_brightness(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    class Watching:
        n_parameters = 1

        def draw(self, n: int, generator: torch.Generator, size: tuple[int, int]) -> Tensor:
            assert size == (8, 6)
            return torch.rand(n, 1, generator=generator)

        def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
            seen.append(images)
            return images[..., :height, :width].float() / 255 * scale + shift

    crops: list[int | None] = []

    def make(crop: int | None) -> Watching:
        crops.append(crop)
        return Watching()

    with temporary(fresh=True):
        tbbn.register_augmentation("watching", "keeps what it is given")(make)
        config = tiny(batch__augment="watching")
        source: Any = SimpleNamespace(train=SimpleNamespace(images=torch.zeros(5, 3, 8, 6)))
        height, width, scale, shift = 8, 6, 1.0, 0.0
        validate._try_augmentation(config, source)
        (images,) = seen
        assert images.shape == (3, 3, 8, 6) and images.dtype == torch.uint8
        values = images.flatten().tolist()
        assert (values[0], values[-1]) == (0, 255) and values == sorted(values) and len(set(values)) > 200
        for scale, shift in ((1.0009, 0.0), (1.0, -0.0009)):  # noqa: B007  (rounding)
            validate._try_augmentation(config, source)
        for scale, shift in ((1.0, 0.0011), (1.0, -0.0011)):  # noqa: B007
            with pytest.raises(UserError, match=r"apply must return images in \[0, 1\], got "):
                validate._try_augmentation(config, source)
        height, width, shift = 5, 5, 0.0
        validate._try_augmentation(tiny(batch__augment="watching", data__crop=5), source)
        assert crops == [None] * 5 + [5]


@pytest.mark.parametrize("scarce", range(6))
@pytest.mark.parametrize("learnt", [3, 2])
def test_the_class_with_the_fewest_images_limits_a_budget_for_each_class(scarce: int, learnt: int) -> None:
    """Three tasks of two classes, of which the first ones are learnt; every class but one has 5 images."""
    counts = [3 if label == scarce else 5 for label in range(6)]
    labels = torch.tensor([label for label, n in enumerate(counts) for _ in range(n)])
    tasks = [
        SimpleNamespace(train=torch.where((labels // 2) == t)[0], classes=range(2 * t, 2 * t + 2))
        for t in range(learnt)
    ]
    order = (3, 1, 5, 0, 2, 4)  # the class that came as number i
    scenario: Any = SimpleNamespace(tasks=tasks, train_labels=labels, n_classes=6, class_order=order)
    source: Any = SimpleNamespace(classes=tuple("abcdef"))
    method: Any = SimpleNamespace(uses_memory=True)
    least = 3 if scarce < 2 * learnt else 5
    validate.check_memory(method, ExemplarMemory(least, per_class=True), scenario, source)
    with pytest.raises(UserError) as caught:
        validate.check_memory(method, ExemplarMemory(least + 1, per_class=True), scenario, source)
    name = source.classes[order[scarce if least == 3 else 0]]
    assert str(caught.value).startswith(
        f"memory.budget must be at most {least} for each class, the training images of class {name!r}, got {least + 1}; "
    )
    none: Any = SimpleNamespace(uses_memory=False)
    validate.check_memory(none, ExemplarMemory(99, per_class=True), scenario, source)
    validate.check_memory(method, ExemplarMemory(0, per_class=True), scenario, source)
    validate.check_memory(method, ExemplarMemory(99), scenario, source)
