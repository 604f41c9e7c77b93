"""The phases of every method and the parameters they train."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tbbn.bench.methods import Phase, method
from tbbn.bench.models import BiasCorrectedHead, CosineHead, ProxyHead
from tbbn.registry import METHODS


def ids(parameters: list[nn.Parameter]) -> set[int]:
    return {id(p) for p in parameters}


@pytest.mark.parametrize("name", list(METHODS))
def test_the_first_task_has_one_phase_and_every_phase_names_a_loss(name: str, world: Any) -> None:
    chosen = method(name)
    assert len(chosen.phases(world.context(chosen))) == 1
    context = world.context(chosen, number=1)
    for phase in chosen.phases(context):
        assert callable(getattr(chosen, phase.loss))
        assert chosen.parameters(context.network, phase.trainable)


@pytest.mark.parametrize("name", ["eeil", "bic", "podnet", "afc"])
def test_second_phases_need_a_memory_and_epochs(name: str, world: Any) -> None:
    chosen = method(name)
    assert len(chosen.phases(world.context(chosen, number=1))) == 2
    assert len(chosen.phases(world.context(chosen, number=1, budget=0))) == 1
    epochs = {"eeil": "balanced_epochs", "bic": "correction_epochs"}.get(name, "finetune_epochs")
    without = method(name, {epochs: 0})
    assert len(without.phases(world.context(without, number=1))) == 1


def test_eeil_s_second_phase(world: Any) -> None:
    eeil = method("eeil", {"balanced_epochs": 7})
    main, phase = eeil.phases(world.context(eeil, number=1))
    assert main == Phase()
    assert phase == Phase("balanced", "balanced", "balanced_loss", epochs=7, lr_factor=0.1, schedule="constant")
    quirky = method("eeil", {"unbalanced_phase": True})
    assert quirky.phases(world.context(quirky, number=1))[1].rows == "oversampled"


@pytest.mark.parametrize(("name", "head"), [("lucir", CosineHead), ("podnet", ProxyHead), ("afc", ProxyHead)])
def test_old_weights_are_frozen_in_the_main_phase(name: str, head: type, world: Any) -> None:
    chosen = method(name)
    assert not chosen.last_relu
    context = world.context(chosen, number=2)
    assert isinstance(context.network.head, head)
    main = chosen.phases(context)[0]
    left_out = ids(list(context.network.parameters())) - ids(chosen.parameters(context.network, main.trainable))
    assert left_out == ids(list(context.network.head.weights)[:2])


@pytest.mark.parametrize("name", ["podnet", "afc"])
def test_proxy_methods_finetune_all_proxies_and_nothing_else(name: str, world: Any) -> None:
    chosen = method(name, {"n_proxies": 3})
    context = world.context(chosen, number=2)
    phase = chosen.phases(context)[1]
    assert phase == Phase(
        "finetune",
        "exemplars",
        "finetune_loss",
        "head",
        20,
        lr=0.05,
        schedule="constant",
        keep="last",
        uses_previous=False,
    )
    assert ids(chosen.parameters(context.network, "head")) == ids(list(context.network.head.weights))
    assert [tuple(w.shape) for w in context.network.head.weights] == [(2, 3, 64), (3, 3, 64), (2, 3, 64)]


def test_bic_fits_the_newest_correction_and_never_in_the_main_phase(world: Any) -> None:
    bic = method("bic")
    assert bic.holdout() == 0.1
    context = world.context(bic, number=2)
    head = context.network.head
    assert isinstance(head, BiasCorrectedHead)
    main, phase = bic.phases(context)
    assert main == Phase()
    assert phase == Phase(
        "correction",
        "holdout",
        "correction_loss",
        "correction",
        200,
        schedule="constant",
        momentum=0.9,
        weight_decay=0.0,
        eval_mode=True,
        keep="last",
        uses_previous=False,
    )
    assert ids(bic.parameters(context.network, phase.trainable)) == {id(head.alphas[2]), id(head.betas[2])}
    left_out = ids(list(context.network.parameters())) - ids(bic.parameters(context.network, main.trainable))
    assert left_out == ids([*head.alphas, *head.betas])


def test_what_the_engine_reads_off_a_method() -> None:
    """Whether it needs the previous network, maps of stages, a memory or all data, and whether features may be negative."""
    found = {
        fact: {name for name in METHODS if getattr(method(name), fact)}
        for fact in ("needs_previous", "needs_stages", "last_relu", "uses_memory", "all_data")
    }
    everything = set(METHODS)
    assert found == {
        "needs_previous": {"afc", "bic", "eeil", "icarl", "lucir", "podnet", "ssil", "wa"},
        "needs_stages": {"afc", "podnet"},
        "last_relu": everything - {"afc", "lucir", "podnet"},
        "uses_memory": everything - {"joint"},
        "all_data": {"joint"},
    }


def test_a_phase_is_the_main_one_with_the_settings_of_the_run_unless_it_says_otherwise() -> None:
    assert vars(Phase()) == {
        "name": "train",
        "rows": "replay",
        "loss": "loss",
        "trainable": "all",
        "epochs": None,
        "lr": None,
        "lr_factor": 1.0,
        "schedule": None,
        "momentum": None,
        "weight_decay": None,
        "eval_mode": False,
        "keep": None,
        "uses_previous": True,
    }


@pytest.mark.parametrize("name", list(METHODS))
def test_only_bic_holds_rows_out_and_only_balaug_shows_more_views(name: str) -> None:
    assert method(name).holdout() == (0.1 if name == "bic" else 0.0)
    assert method(name).memory_views(5) == (15 if name == "balaug" else 1)


def test_the_parameters_of_every_kind_of_phase(world: Any) -> None:
    context = world.context(method("ft"), number=2)
    net, ft = context.network, method("ft")
    assert ids(ft.parameters(net, "all")) == ids(list(net.parameters()))
    assert ids(ft.parameters(net, "head")) == ids(list(net.head.parameters()))
    old = [p for task in (0, 1) for p in net.head.block(task)]
    assert len(old) == 4  # weights and biases of two tasks
    assert ids(ft.parameters(net, "newest")) == ids(list(net.parameters())) - ids(old)


def test_balaug_shows_three_views_for_each_past_task() -> None:
    assert [method("balaug").memory_views(t) for t in (0, 1, 2, 9)] == [1, 3, 6, 27]
    assert method("balaug", {"views_per_task": 2}).memory_views(4) == 8
    assert method("ft").memory_views(5) == 1
