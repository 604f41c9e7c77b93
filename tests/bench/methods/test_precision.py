"""Methods compute in float32 whatever the precision of the network's outputs: bf16 numbers count as what they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tbbn.bench.methods import method
from tbbn.bench.models import Output
from tbbn.registry import METHODS


def rounded(output: Output, dtype: torch.dtype) -> Output:
    """The output in bf16, in this type."""

    def to(tensor: Tensor) -> Tensor:
        return tensor.bfloat16().to(dtype)

    similarity = None if output.similarity is None else to(output.similarity)
    stages = tuple(map(to, output.stages))
    return replace(output, logits=to(output.logits), features=to(output.features), stages=stages, similarity=similarity)


@pytest.mark.parametrize("name", list(METHODS))
def test_hooks_predictions_and_losses_are_those_of_the_same_numbers_in_float32(
    name: str, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = method(name, {"imprint": True} if name == "lucir" else {})
    kind = type(world.context(chosen))
    real = kind.outputs
    found: list[dict[str, Tensor]] = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(
            kind, "outputs", lambda self, rows, flip=False, dtype=dtype: rounded(real(self, rows, flip=flip), dtype)
        )
        context = world.context(chosen, number=2)
        world.finish(chosen, context)
        network = context.network.eval()
        with torch.no_grad():
            now = rounded(network(world.images), dtype)
            batch = context.batch(torch.cat([context.task.train[:8], context.memory.index[:4]]), n_memory=4)
            before = None if context.previous is None else rounded(context.previous(batch.images), dtype)
            losses = {
                f"{phase.name} {name}": term
                for phase in chosen.phases(context)
                for name, term in getattr(chosen, phase.loss)(
                    batch, rounded(network(batch.images), dtype), before
                ).items()
            }
            predicted = chosen.predict(now)
        assert losses and {loss.dtype for loss in losses.values()} == {torch.float32}
        # The logits themselves may be the scores, in the network's precision.
        found.append({**network.state_dict(), **losses, "predicted": predicted.float()})
    half, single = found
    assert half.keys() == single.keys()
    for key, tensor in single.items():
        assert torch.equal(half[key], tensor), key


@pytest.mark.parametrize("name", ["podnet", "afc"])
def test_means_of_exemplars_are_taken_in_float32(name: str, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = method(name, {"classifier": "nme"})
    kind = type(world.context(chosen))
    real = kind.outputs
    means = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(
            kind, "outputs", lambda self, rows, flip=False, dtype=dtype: rounded(real(self, rows, flip=flip), dtype)
        )
        context = world.context(chosen, number=1)
        world.finish(chosen, context)
        means.append(context.network.recall("exemplar_means"))
        assert means[-1].dtype == torch.float32
    assert torch.equal(*means)


def test_the_importance_of_channels_is_summed_in_float32(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast the maps, and so their gradients, are bf16 numbers."""
    afc = method("afc")
    context = world.context(afc, number=1)
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, maps: [torch.full_like(m, 0.1).bfloat16() for m in maps])
    stored: dict[str, Tensor] = {}
    monkeypatch.setattr(context.network, "remember", stored.__setitem__)
    afc.after_training(context)
    assert stored.keys() == {"importance_0", "importance_1", "importance_2"}
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
