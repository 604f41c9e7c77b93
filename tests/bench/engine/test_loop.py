"""A run: the same bits for the same seed, its events, and how it ends."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tinyrun import SHORT, TINY, finish, results, tiny
from torch import Tensor

from tbbn.bench import engine
from tbbn.bench.engine import EpochEnded, Event, Loading, Stepped, TaskEnded, loop
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.record import digest
from tbbn.bench.engine.step import Step
from tbbn.bench.methods import Phase, TaskContext
from tbbn.bench.methods.ft import FineTune
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError
from tbbn.plugins import temporary
from tbbn.registry import METHODS


def assert_same(one: Run, other: Run) -> None:
    assert results(one.record) == results(other.record)
    left, right = one.network.state_dict(), other.network.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


DIGEST = """
import hashlib, json, sys
from dataclasses import asdict
from tbbn.bench.config import resolve
from tbbn.bench.engine.loop import Run
run = Run(resolve(("test", json.loads(sys.argv[1]))))
for _ in run.events(): pass
record = run.record
digest = hashlib.sha256(json.dumps([record.accuracy, record.history, record.class_order, record.errors]).encode())
for name, tensor in sorted({**run.network.state_dict(), **record.predictions}.items()):
    digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
print(digest.hexdigest())
"""


def noise(*_: object) -> None:
    """Draw from every global generator there is."""
    torch.rand(3)
    random.random()
    np.random.rand()  # noqa: NPY002


def global_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002


@pytest.mark.parametrize("n_lanes", [0, 1])
def test_a_run_tells_how_far_images_are_decoded_if_that_takes_long(
    n_lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part, number in (("train", 4), ("test", 2)):
        for i in range(2 * number):
            folder = tmp_path / part / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (30 * i, 0, 0)).save(folder / f"{i}.png")
    config = tiny(data__name=f"folder:{tmp_path}", data__tasks=1, train__epochs=1)
    seen: list[Event] = []

    def do() -> list[Event]:
        seen.clear()
        if n_lanes:
            engine.run_lanes([config], n_lanes, on_event=lambda number, event: seen.append(event))
        else:
            engine.run(config, on_event=seen.append)
        return [event for event in seen if isinstance(event, Loading)]

    assert do() == []
    monkeypatch.setattr(loop, "LONG_LOADING", 0.0)
    assert do() == [Loading(8, 12), Loading(12, 12)] == seen[:2]


@pytest.mark.parametrize("method", ["ft", "afc"])
def test_the_same_seed_gives_the_same_record_and_weights_whatever_was_drawn_before(method: str) -> None:
    settings = {"method__name": method, "norm__name": "tbbn", "batch__augment": "strong"}
    torch.manual_seed(1)
    one = finish(tiny(**settings))
    torch.manual_seed(99)
    noise()
    finish(tiny(seed=3))  # another run in between

    assert_same(one, finish(tiny(**settings), noise))


def test_the_same_seed_gives_the_same_bits_in_another_process(tmp_path: Path) -> None:
    settings = {**TINY, "method.name": "icarl", "norm.name": "tbbn", "batch.augment": "shift"}
    command = [sys.executable, "-c", DIGEST, json.dumps(settings)]
    other = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    here: list[str] = []
    code = DIGEST.replace("sys.argv[1]", repr(json.dumps(settings))).replace("print(", "here.append(")
    torch.rand(17)
    exec(code, {"here": here})
    assert other.stdout.split() == here


def test_another_seed_gives_another_run() -> None:
    one, other = finish(tiny(data__class_order="natural")), finish(tiny(data__class_order="natural", seed=1))
    assert one.record.history != other.record.history
    assert not torch.equal(next(one.network.parameters()), next(other.network.parameters()))


def test_class_order_and_seed_are_separate() -> None:
    def start(**settings: Any) -> tuple[list[int], Tensor]:
        run = Run(tiny(**settings))
        return run.record.class_order, next(run.network.parameters())

    order, weights = start(seed=0)
    same_order, other_weights = start(seed=1, data__class_order_seed=0)
    other_order, same_weights = start(seed=0, data__class_order_seed=1)
    assert order == same_order != other_order
    assert torch.equal(weights, same_weights) and not torch.equal(weights, other_weights)
    assert start(seed=1)[0] == start(seed=0, data__class_order_seed=1)[0]  # -1 is the run's seed


def test_the_order_of_the_classes_can_be_given() -> None:
    assert Run(tiny(data__class_order="3,1,0,2,5,4")).record.class_order == [3, 1, 0, 2, 5, 4]
    with pytest.raises(UserError, match=r"data\.class_order must be a name or whole numbers with commas, got '3,x'"):
        Run(tiny(data__class_order="3,x"))


def test_a_run_neither_reads_nor_moves_any_global_random_state() -> None:
    before = global_states()
    for method in ("podnet", "bic", "balaug"):
        finish(tiny(method__name=method, batch__augment="strong", memory__selection="random", **SHORT.get(method, {})))
    assert global_states() == before


class Restless(FineTune):
    """Draws from every global generator where a context is at hand."""

    def _draw(self, context: TaskContext) -> None:
        for parameter in context.network.parameters():
            torch.nn.init.uniform_(parameter, -0.1, 0.1)
        with torch.no_grad():
            next(context.network.parameters()).mul_(1 + random.random() + np.random.rand())  # noqa: NPY002

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        return (Phase(lr=0.1 * torch.rand(()).item()),)

    before_task = after_training = after_task = _draw


def test_a_method_may_draw_from_global_generators_in_its_hooks(tmp_path: Path) -> None:
    with temporary():
        METHODS.register("restless", Restless)
        config = tiny(method__name="restless")
        before = global_states()
        one = finish(config)
        assert global_states() == before
        noise()
        assert_same(one, finish(config))
        asked = iter(range(10**6))
        assert run_saved(config, tmp_path / "a", stop=lambda: next(asked) > 9).status == "interrupted"
        noise()
        assert run_saved(config, tmp_path / "a").weights == one.record.weights
        assert finish(tiny(method__name="restless", seed=1)).record.weights != one.record.weights


def test_a_loss_that_is_not_a_number_ends_the_run_and_is_recorded(tmp_path: Path) -> None:
    record = run_saved(tiny(train__lr=1e20), tmp_path)
    assert record.status == "diverged"
    assert "not finite" in record.message and "task 1" in record.message
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "diverged"


def test_events_tell_every_step_epoch_and_task() -> None:
    events: list[Event] = []
    record = engine.run(tiny(), on_event=events.append)
    assert sum(isinstance(event, TaskEnded) for event in events) == 3
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    assert [(e.position.task, e.position.epoch) for e in epochs] == [(t, e) for t in range(3) for e in range(2)]
    assert [e.losses["total"] for e in epochs] == [entry["total"] for entry in record.history]
    steps = [e for e in events if isinstance(e, Stepped) and (e.position.task, e.position.epoch) == (1, 1)]
    assert [e.step for e in steps] == list(range(1, steps[0].steps + 1))
    ended = [event for event in events if isinstance(event, TaskEnded)]
    assert [event.accuracy for event in ended] == record.accuracy
    assert [event.exemplars for event in ended] == record.exemplars == [12, 12, 12]


def test_the_loss_of_an_epoch_is_the_mean_over_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = Step.losses

    def watched(self: Step, batch: Any) -> Any:
        terms = real(self, batch)
        seen.append(sum(term.item() for term in terms.values()))
        return terms

    monkeypatch.setattr(Step, "losses", watched)
    record = finish(tiny(data__stop_after=1)).record
    half = len(seen) // 2
    assert record.history[0]["total"] == pytest.approx(sum(seen[:half]) / half, rel=1e-5)
    assert record.history[1]["total"] == pytest.approx(sum(seen[half:]) / half, rel=1e-5)


def test_the_record_is_saved_after_every_task(tmp_path: Path) -> None:
    rows: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 1 and event.position.epoch == 0:
            file = tmp_path / "record.json"
            rows.append(len(json.loads(file.read_text())["accuracy"]) if file.exists() else 0)

    run_saved(tiny(), tmp_path, on_event=watch)
    assert rows == [0, 1, 2]
    tree = json.loads((tmp_path / "record.json").read_text())
    assert tree["status"] == "finished" and len(tree["accuracy"]) == 3


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"data__tasks": 7}, r"6 classes cannot fill 7 tasks; use at most 6 tasks"),
        ({"memory__budget": 5}, r"a budget of 5 gives none of the 6 classes an exemplar"),
        ({"data__name": "sythetic"}, r"unknown dataset 'sythetic'; .*Did you mean 'synthetic'"),
        ({"data__class_order": "icarl"}, r"class_order 'icarl' orders 100 classes, the source has 6"),
        ({"data__name": "synthetic:2"}, r"synthetic: needs CLASSESxTRAINxTESTxSIZE"),
    ],
)
def test_what_cannot_be_run_is_said_before_training(settings: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        run_saved(tiny(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bfloat16_runs_and_keeps_weights_and_statistics_in_float32() -> None:
    run = finish(tiny(precision="bf16", train__epochs=1, data__stop_after=2))
    assert run.record.status == "finished"
    assert {t.dtype for t in run.network.state_dict().values() if t.is_floating_point()} == {torch.float32}


def test_the_record_tells_which_epoch_was_kept() -> None:
    """The weights after a task are those that the network had at the end of the epoch the record names."""
    for keep, more in (("best", {"data__validation": 0.25}), ("last", {})):
        after: dict[tuple[int, int], str] = {}

        def watch(run: Run, event: Event, after: dict[tuple[int, int], str] = after) -> None:
            if isinstance(event, EpochEnded):
                after[event.position.task, event.position.epoch] = digest(run.network.state_dict())

        run = finish(tiny(train__keep=keep, train__epochs=4, train__lr=0.5, train__momentum=0.9, **more), watch)
        kept = run.record.kept_epochs()
        assert set(kept) == {(task, "train") for task in range(3)}
        assert run.record.weights == [after[task, kept[task, "train"]] for task in range(3)]
        assert keep == "best" or set(kept.values()) == {3}
        assert keep == "last" or set(kept.values()) != {3}
