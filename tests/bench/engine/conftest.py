"""Fixtures of the engine's tests. The tiny run they watch is in ``helpers/tinyrun.py``."""

from __future__ import annotations

import pytest
import torch
from tinyrun import Trained
from torch import Tensor

from tbbn.bench.engine.step import Step


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads set in torch, the initial one first. Nothing is really set: tests share the machine."""
    numbers = [torch.get_num_threads()]
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    return numbers


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    """Every step trained during the test."""
    steps: list[Trained] = []
    real = Step.train

    def watched(self: Step, index: Tensor, *inputs: Tensor) -> None:
        steps.append(Trained(self.loss.__name__, self.spec, index.clone()))
        real(self, index, *inputs)

    monkeypatch.setattr(Step, "train", watched)
    return steps
