"""Any method runs with any norm in any scenario. The lists come from the registries, so a new entry is covered at once.

By default every pair (method and norm, method and scenario, norm and scenario) occurs once; the rest of the product is nightly.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, product
from typing import Any

import pytest
import torch
from pairwise import pairwise

from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.engine import Stepped
from tbbn.bench.engine.forecast import forecast
from tbbn.bench.engine.loop import Run
from tbbn.registry import METHODS, NORMS

COMMON: dict[str, Any] = {
    "device": "cpu",
    "backbone": "small",
    "train.epochs": 1,
    "batch.size": 8,
    "batch.ratio": "1:1",
    "data.class_order": "natural",
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "ten tasks": {"data.name": "synthetic:10x6x1x4", "data.tasks": 10, "memory.budget": 10},
    "base task": {"data.name": "synthetic:8x6x1x4", "data.base_classes": 4, "data.tasks": 3, "memory.budget": 8},
    "online": {"data.name": "synthetic:8x6x1x4", "data.tasks": 4, "data.online": True, "memory.budget": 8},
}
# Second phases are as long as published by default; one epoch is enough here.
SHORT: dict[str, dict[str, Any]] = {
    "eeil": {"method.balanced_epochs": 1},
    "bic": {"method.correction_epochs": 2},
    "podnet": {"method.finetune_epochs": 1, "method.n_proxies": 2},
    "afc": {"method.finetune_epochs": 1, "method.n_proxies": 2},
    "balaug": {"method.views_per_task": 1},
}
FITTING: dict[str, dict[str, Any]] = {"gn": {"norm.groups": 8}, "cn": {"norm.groups": 8}}


def config(method: str, norm: str, scenario: str, **more: Any) -> RunConfig:
    own = {"method.name": method, "norm.name": norm, **SHORT.get(method, {}), **FITTING.get(norm, {})}
    return resolve(("test", {**COMMON, **SCENARIOS[scenario], **own, **more}))


COVER = set(pairwise(METHODS, NORMS, SCENARIOS))


@pytest.mark.parametrize(
    ("method", "norm", "scenario"),
    [
        pytest.param(*case, marks=() if case in COVER else pytest.mark.nightly)
        for case in product(METHODS, NORMS, SCENARIOS)
    ],
)
def test_any_method_with_any_norm_in_any_scenario(method: str, norm: str, scenario: str) -> None:
    run = Run(config(method, norm, scenario))
    main: Counter[int] = Counter()
    for event in run.events():
        if isinstance(event, Stepped) and event.position.phase == 0:
            main[event.position.task] += 1
    record = run.record
    n = run.config.data.tasks
    assert (record.status, record.message) == ("finished", "")
    assert [len(row) for row in record.accuracy] == [t + 1 for t in range(n)]
    for free, known in zip(record.accuracy, record.task_il, strict=True):
        assert all(0 <= a <= b <= 1 for a, b in zip(free, known, strict=True))
    assert all(math.isfinite(value) for entry in record.history for value in entry.values() if type(value) is float)
    assert all(
        torch.isfinite(tensor).all() for tensor in run.network.state_dict().values() if tensor.is_floating_point()
    )
    budget = run.config.memory.budget if run.method.uses_memory else 0
    assert all(kept <= budget for kept in record.exemplars) and (record.exemplars[-1] > 0) == (budget > 0)
    # What --dry-run promises is what happened.
    promised = forecast(run.config).tasks
    assert [entry.steps for entry in promised] == [main[t] for t in range(n)]
    assert [entry.splits for entry in promised] == record.splits
    assert [entry.exemplars for entry in promised[1:]] == record.exemplars[:-1]


@pytest.mark.parametrize("method", list(METHODS))
def test_a_method_runs_without_any_memory(method: str) -> None:
    run = Run(config(method, "tbbn", "base task", **{"memory.budget": 0}))
    for _ in run.events():
        pass
    assert run.record.status == "finished" and run.record.exemplars == [0, 0, 0]


@pytest.mark.parametrize("method", list(METHODS))
def test_a_method_runs_when_its_parts_are_forwarded_separately(method: str) -> None:
    run = Run(config(method, "bn", "base task", **{"batch.forward": "separate"}))
    for _ in run.events():
        pass
    assert run.record.status == "finished"


@pytest.mark.parametrize("axes", [("ab",), ("ab", "cd"), ("abc", "def", "gh"), ("ab", "cd", "ef", "gh")], ids=str)
def test_the_pairwise_cover_holds_every_pair_of_values(axes: tuple[str, ...]) -> None:
    cover = pairwise(*axes)
    for i, j in combinations(range(len(axes)), 2):
        assert {(case[i], case[j]) for case in cover} == set(product(axes[i], axes[j]))


def test_the_pairwise_cover_is_small_and_uses_the_scenarios_alike() -> None:
    cover = pairwise(METHODS, NORMS, SCENARIOS)
    assert cover == pairwise(list(METHODS), list(NORMS), list(SCENARIOS)) and set(cover) == COVER
    assert len(cover) <= 1.05 * len(list(METHODS)) * len(list(NORMS))  # the pairs of method and norm alone
    uses = Counter(scenario for _, _, scenario in cover).values()
    assert max(uses) - min(uses) <= 2
