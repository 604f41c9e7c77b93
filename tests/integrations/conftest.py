"""Data and a model small enough for every test here, and a way to see what the layers did."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import tbbn


def pytest_collection_modifyitems(items):
    """The packages' own warnings are none of ours."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


class Network(nn.Module):
    def __init__(self, n_classes=6):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8, n_classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Forwards:
    """Every training forward of a model: its rows, its output, and the model as it was before."""

    def __init__(self, model):
        self.seen = []
        model.register_forward_pre_hook(self.before)
        model.register_forward_hook(self.after)

    def before(self, model, args):
        if model.training:
            twin = copy.deepcopy(model)
            twin._forward_hooks.clear(), twin._forward_pre_hooks.clear()
            vars(twin).pop("forward", None)
            self.seen.append([twin, args[0].detach().clone(), None])

    def after(self, model, args, output):
        if model.training:
            self.seen[-1][2] = getattr(output, "pooler_output", output).detach().clone()


@pytest.fixture
def network():
    torch.manual_seed(0)
    return tbbn.convert(Network())


@pytest.fixture
def data():
    """240 images of six classes; a class differs by its mean, so that the statistics of tasks differ."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(240) % 6
    return torch.randn(240, 1, 8, 8, generator=generator) + y.view(-1, 1, 1, 1), y


@pytest.fixture
def watch():
    return Forwards


@pytest.fixture
def layouts(monkeypatch):
    """The number of current rows, of memory rows and of past tasks in every block that is entered."""
    seen, enter = [], tbbn.balance.__enter__

    def spy(block):
        seen.append((block.layout.current, block.layout.memory, block.layout.past_tasks))
        return enter(block)

    monkeypatch.setattr(tbbn.balance, "__enter__", spy)
    return seen
