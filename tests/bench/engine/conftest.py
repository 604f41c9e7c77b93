"""Tests here share ``tinyrun.py``: a tiny run, and a look at every batch it trains on."""

from __future__ import annotations

import pytest
import torch
from tinyrun import Trained
from torch import Tensor

from tbbn.bench.engine.step import Step


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every number of threads torch is told, the first being what it had; real ones would fight over the machine."""
    told = [torch.get_num_threads()]
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: told[-1])
    return told


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    """Every step trained from now on."""
    steps: list[Trained] = []
    real = Step.train

    def watched(self: Step, index: Tensor, *inputs: Tensor) -> None:
        steps.append(Trained(self.loss.__name__, self.spec, index.clone()))
        real(self, index, *inputs)

    monkeypatch.setattr(Step, "train", watched)
    return steps
