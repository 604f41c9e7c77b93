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
    phase = eeil.phases(world.context(eeil, number=1))[1]
    assert (phase.rows, phase.epochs, phase.lr_factor, phase.schedule) == ("balanced", 7, 0.1, "constant")
    assert phase.trainable == "all" and not phase.eval_mode
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
    assert (phase.rows, phase.epochs, phase.momentum, phase.weight_decay) == ("holdout", 200, 0.9, 0.0)
    assert (phase.eval_mode, phase.schedule, phase.keep) == (True, "constant", "last")
    assert ids(bic.parameters(context.network, phase.trainable)) == {id(head.alphas[2]), id(head.betas[2])}
    left_out = ids(list(context.network.parameters())) - ids(bic.parameters(context.network, main.trainable))
    assert left_out == ids([*head.alphas, *head.betas])


def test_joint_trains_on_everything_without_a_memory() -> None:
    joint = method("joint")
    assert joint.all_data and not joint.uses_memory


def test_balaug_shows_three_views_for_each_past_task() -> None:
    assert [method("balaug").memory_views(t) for t in (0, 1, 2, 9)] == [1, 3, 6, 27]
    assert method("balaug", {"views_per_task": 2}).memory_views(4) == 8
    assert method("ft").memory_views(5) == 1
