"""Evaluation: every test image of the tasks so far, compared with a loop over images."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tinyrun import finish, results, tiny

from tbbn.bench.engine.forward import evaluation_forward
from tbbn.bench.engine.loop import Run
from tbbn.bench.models import LinearHead, Network, backbone
from tbbn.errors import UserError


def test_logits_are_float32_whatever_the_backbone_computes_in() -> None:
    """In bf16 equal logits are common, and argmax gives each tie to the older class."""
    body = backbone("small", in_channels=3, generator=torch.Generator().manual_seed(0))
    network = Network(body, LinearHead(body.n_features))
    network.grow(200, torch.Generator().manual_seed(1))
    network.eval()
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    output = evaluation_forward(network, images, "bf16")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        pooled = network.backbone(images).pooled
        rounded = network(images).logits
    assert rounded.dtype == torch.bfloat16  # what it would be otherwise
    assert output.logits.dtype == torch.float32
    torch.testing.assert_close(output.logits, network.head(pooled.float()), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["ft", "icarl", "il2m"])
def test_evaluation_is_a_loop_over_every_test_image(method: str) -> None:
    run = finish(tiny(method__name=method))
    mean, std = (torch.tensor(v)[:, None, None] for v in (run.source.mean, run.source.std))
    arrival = {original: place for place, original in enumerate(run.record.class_order)}
    right: dict[int, list[bool]] = {task: [] for task in range(3)}
    known: dict[int, list[bool]] = {task: [] for task in range(3)}
    kinds: Counter[str] = Counter()
    unbiased: list[
        tuple[float, int, int, int]
    ] = []  # lead of the newest task, its best class, the best past class, label
    predictions = iter(run.record.predictions["task2"].tolist())
    labels = [arrival[int(label)] for label in run.source.test.labels]
    order = [i for task in range(3) for i, label in enumerate(labels) if label // 2 == task]
    assert len(order) == 30  # the whole test set
    for i in order:
        image = (run.source.test.images[i].float() / 255 - mean) / std
        with torch.no_grad():
            scores = run.method.predict(run.network.eval()(image[None]))[0].tolist()
        best, task = scores.index(max(scores)), labels[i] // 2
        assert best == next(predictions)
        right[task].append(best == labels[i])
        known[task].append(max((2 * task, 2 * task + 1), key=lambda c: scores[c]) == labels[i])
        newest, past = max((4, 5), key=lambda c: scores[c]), max(range(4), key=lambda c: scores[c])
        unbiased.append((scores[newest] - scores[past], newest, past, labels[i]))
        if best != labels[i]:
            kinds[f"{'C' if labels[i] >= 4 else 'P'}->{'C' if best >= 4 else 'P'}"] += 1
    assert run.record.accuracy[2] == pytest.approx([sum(r) / len(r) for r in right.values()])
    assert run.record.task_il[2] == pytest.approx([sum(r) / len(r) for r in known.values()])
    assert {kind: n for kind, n in run.record.errors[2].items() if n} == dict(kinds)
    leads = sorted((lead for lead, *_ in unbiased), reverse=True)
    hits: dict[int, list[bool]] = {task: [] for task in range(3)}
    for lead, newest, past, label in unbiased:
        hits[label // 2].append((newest if lead >= leads[9] else past) == label)  # ten of the images are new
    assert leads[9] > leads[10] and run.record.calibrated[2] == pytest.approx([sum(h) / len(h) for h in hits.values()])
    assert run.record.calibrated[0] == run.record.accuracy[0]


def test_the_size_of_evaluation_batches_changes_no_prediction() -> None:
    one, other = finish(tiny(batch__evaluation=7)), finish(tiny(batch__evaluation=500))
    assert results(one.record)["predictions"] == results(other.record)["predictions"]


def test_errors_sum_to_the_images_predicted_wrong_and_task_il_is_never_below() -> None:
    record = finish(tiny(train__epochs=1)).record
    for t in range(3):
        wrong = sum(round(5 * 2 * (1 - a)) for a in record.accuracy[t])
        assert sum(record.errors[t].values()) == wrong
        assert all(known >= free for free, known in zip(record.accuracy[t], record.task_il[t], strict=True))
    assert record.errors[0]["P->P"] == record.errors[0]["P->C"] == record.errors[0]["C->P"] == 0


def test_whole_test_batches_leave_out_the_rest_when_asked_for_by_name() -> None:
    run = finish(tiny(quirks=["whole-test-batches"], train__epochs=1))
    assert len(run.record.predictions["task2"]) == 3 * 8  # of 10 test images a task, in batches of 8


def test_accuracy_after_a_task_does_not_depend_on_tasks_to_come() -> None:
    whole, part = finish(tiny()), finish(tiny(data__stop_after=2))
    assert part.record.status == "finished" and len(part.record.accuracy) == 2
    assert part.record.accuracy == whole.record.accuracy[:2]
    assert part.record.history == [entry for entry in whole.record.history if entry["task"] < 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quirks": ("whole-test-batches",), "batch__size": 64}, "has 10 test images, fewer than a batch of 64"),
        ({"train__keep": "best", "data__validation": 0.01}, "no validation images are left in task 1"),
    ],
)
def test_an_evaluation_of_nothing_is_refused_before_training(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Run(tiny(**settings))
