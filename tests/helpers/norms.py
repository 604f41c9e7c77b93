"""Small norms and batches for tests against formulas written out slowly."""

from __future__ import annotations

import torch
from torch import nn

import tbbn

EIGHT = {"current": 8, "memory": 4, "past_tasks": 2}


def data(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 + 1


def make(norm, channels=4, **options):
    layer = tbbn.convert(nn.BatchNorm2d(channels).double(), norm, **options)
    layer.weight.data = torch.linspace(0.5, 2, channels).double()
    layer.bias.data = torch.linspace(-1, 1, channels).double()
    return layer


def affine(layer, y):
    shape = (1, -1) + (1,) * (y.dim() - 2)
    return y * layer.weight.view(shape) + layer.bias.view(shape)


def close(got, wanted, tolerance=1e-10):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
