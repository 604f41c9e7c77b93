"""A method with state over tasks, and with parameters in its loss: examples/own_state.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import finish, results, tiny
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.engine import Event, TaskEnded, forward, step
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.ranks import Ranks
from tbbn.bench.methods import Method
from tbbn.bench.models import Network
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.retrain import retrain
from tbbn.bench.runs.saved import run_saved, saved
from tbbn.errors import UserError
from tbbn.plugins import load_plugin, temporary
from tbbn.registry import NORMS

FILE = str(Path(__file__).parents[3] / "examples/own_state.py")


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    with temporary():
        load_plugin(FILE)
        yield


def config(**settings: Any) -> Any:
    return tiny(method__name="ewc", norm__name="tbbn", **settings)


def test_the_penalty_pulls_important_parameters_to_where_they_were() -> None:
    run = Run(config(method__strength=3.0))
    kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for event in run.events():
        if isinstance(event, TaskEnded) and event.task < 2:
            kept.append(({n: p.clone() for n, p in run.network.named_parameters()}, run.network.state))
            assert not (run.method.penalty(run.network)["ewc"] > 0), "nothing has moved yet"
            with torch.no_grad():
                old, wanted = kept[-1][0], 0.0
                for name, parameter in run.network.named_parameters():
                    parameter += 0.25
                    wanted += 1.5 * (kept[-1][1][f"importance {name}"] * 0.25**2).sum().item()
                    assert torch.equal(run.network.recall(f"old {name}"), old[name])
                assert run.method.penalty(run.network)["ewc"].item() == pytest.approx(wanted, rel=1e-3)
                for name, parameter in run.network.named_parameters():
                    parameter.copy_(old[name])
    first, second = (state for _, state in kept)
    shared = [name for name in first if name.startswith("importance ")]
    assert all((second[name] >= first[name]).all() for name in shared), "they are summed over the tasks"
    assert len(second) > len(first), "the second task's classes have become important"
    assert [{"ce", "ewc"} <= set(entry) for entry in run.record.history] == [False] * 2 + [True] * 4


def test_the_importance_is_the_squared_gradient_of_the_batches() -> None:
    run = Run(config(data__stop_after=1))
    events = run.events()
    while not isinstance(next(events), TaskEnded):
        pass
    context, network = run.context(run.scenario.tasks[0]), run.network
    sums, n = {name: torch.zeros_like(p) for name, p in network.named_parameters()}, 0
    for batch in context.batches("importance"):
        network.zero_grad()
        logits = network(batch.images).logits  # the first task has no memory: a plain forward in eval mode
        F.cross_entropy(logits, batch.labels, reduction="sum").backward()
        for name, parameter in network.named_parameters():
            sums[name] += parameter.grad**2 / len(batch.labels)
        n += 1
    for name, total in sums.items():
        torch.testing.assert_close(network.recall(f"importance {name}"), total / n)


@pytest.mark.parametrize("norm", list(NORMS))
def test_every_norm_trains_with_a_penalty(norm: str) -> None:
    """adab2n has parameters that its forward in eval mode does not use."""
    run = finish(tiny(method__name="ewc", norm__name=norm, data__stop_after=2))
    assert "ewc" in run.record.history[-1]


@pytest.mark.parametrize("events", [4, 9, 14, 20])
def test_the_state_survives_a_resume_bit_for_bit(events: int, tmp_path: Path) -> None:
    straight = finish(config())
    stopping = saved(Run(config()), tmp_path, every=0, stop=lambda: len(seen) >= events)
    seen: list[Event] = []
    for event in stopping:
        seen.append(event)
    assert load_record(tmp_path).status == "interrupted"
    again = run_saved(config(), tmp_path)
    left = results(again), results(straight.record)
    assert [r.pop("resumed") for r in left] == [[], []] and left[0] == left[1]
    assert not any(finding.problem for finding in retrain(tmp_path, 2))


def test_ranks_are_asked_to_count_the_penalty_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "once", lambda self, term: term * 0)
    history = finish(config(data__stop_after=2)).record.history
    assert history[-1]["ewc"] == 0.0 and history[-1]["total"] == history[-1]["ce"] > 0


def test_in_bf16_the_penalty_joins_the_gradients_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(precision="bf16", data__stop_after=2, train__epochs=1)
    by_autocast = finish(settings).network.state_dict()
    prepared = step.Step.__post_init__

    def with_copies(self: step.Step) -> None:
        prepared(self)
        self.working = forward.WorkingCopies(self.network)

    monkeypatch.setattr(step.Step, "__post_init__", with_copies)
    by_copies = finish(settings).network.state_dict()
    assert all(torch.equal(by_copies[name], by_autocast[name]) for name in by_autocast)


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (lambda weight: weight.sum(), "method 'ft': penalty must return a dict of scalar tensors"),
        (lambda weight: {"l2": weight}, "method 'ft': penalty must return a dict of scalar tensors"),
        (lambda weight: {"ce": weight.sum()}, "method 'ft': loss and penalty both have a term 'ce'; rename one"),
        (lambda weight: {"norm": weight.sum()}, "'ft': penalty must name its terms with other texts .*; got 'norm'"),
        (lambda weight: {"lr": weight.sum()}, "'ft': penalty must name its terms with other texts .*; got 'lr'"),
        (lambda weight: {3: weight.sum()}, "'ft': penalty must name its terms with other texts .*; got 3"),
    ],
)
def test_mistakes_in_a_penalty_are_one_line(made: Any, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def penalty(self: Method, network: Network) -> Any:
        return made(next(network.parameters()))

    monkeypatch.setattr(Method, "penalty", penalty)
    with pytest.raises(UserError, match=wanted):
        finish(tiny())
