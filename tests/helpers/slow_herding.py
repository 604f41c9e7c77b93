"""Herding by its definition, one class and one pick at a time."""

from __future__ import annotations

import torch


def slow_herding(features, n):
    """The definition, pick by pick and row by row."""
    rows = [f / f.norm() if f.norm() > 0 else f for f in features.double()]
    mu = sum(rows) / len(rows)
    picked, total = [], torch.zeros_like(mu)
    for k in range(min(n, len(rows))):
        distance = {i: float((mu - (x + total) / (k + 1)).norm()) for i, x in enumerate(rows) if i not in picked}
        picked.append(min(distance, key=distance.__getitem__))
        total = total + rows[picked[-1]]
    return picked
