"""What the cases of ``rank_cases.py`` share: batches over two ranks, and a step compared with that of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import nn

import tbbn

RANKS = 2
COUNTS = {
    "equal counts": [(12, 4), (12, 4)],
    "unequal counts": [(13, 4), (8, 5)],
    "a rank without memory": [(12, 6), (10, 0)],
    "a rank without rows": [(12, 4), (0, 0)],
}
CASES: dict[str, Callable[[], None]] = {}


NIGHTLY: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def nightly(function: Callable[[], None]) -> Callable[[], None]:
    NIGHTLY[function.__name__] = function
    return function


def own_rows(counts: list[tuple[int, int]]) -> torch.Tensor:
    """Where this rank's rows are in the whole batch."""
    rank, currents, memories = dist.get_rank(), *([c[i] for c in counts] for i in (0, 1))
    current = sum(currents[:rank]) + torch.arange(currents[rank])
    return torch.cat([current, sum(currents) + sum(memories[:rank]) + torch.arange(memories[rank])])


def sums(counts: list[tuple[int, int]]) -> dict[str, int]:
    return {"current": sum(c for c, _ in counts), "memory": sum(m for _, m in counts)}


def own(counts: list[tuple[int, int]]) -> dict[str, int]:
    return dict(zip(("current", "memory"), counts[dist.get_rank()], strict=True))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 + 1


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Relative to the largest value: a sum's rounding error has the size of its terms."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, (got.dtype, wanted.dtype, got.shape, wanted.shape)
    error = (got - wanted).abs().max() / wanted.abs().max().clamp_min(1) if got.numel() else 0
    assert error <= tolerance, f"{error:.2e} > {tolerance:.0e}"


def layers(plain: nn.Module, norm: str = "tbbn", **options: object) -> tuple[nn.Module, nn.Module]:
    """A synchronised layer, and the same one for a single process."""
    if plain.affine:
        plain.weight.data, plain.bias.data = random(plain.num_features, seed=7), random(plain.num_features, seed=8)
    return tbbn.convert(copy.deepcopy(plain), norm, sync=True, **options), tbbn.convert(plain, norm, **options)


def compare(synced: nn.Module, single: nn.Module, counts: list[tuple[int, int]], *size: int, past: int = 3) -> None:
    """Outputs, gradients and running statistics of one step."""
    rows, dtype = own_rows(counts), single.running_mean.dtype if single.running_mean is not None else torch.float32
    shape = (sum(map(sum, counts)), single.num_features, *size)
    whole, mine = (random(*shape, dtype=dtype)[i].requires_grad_() for i in (slice(None), rows))
    grad = random(*shape, seed=1, dtype=dtype)
    with tbbn.balance(single, **sums(counts), past_tasks=past):
        y = single(whole)
    y.backward(grad)
    with tbbn.balance(synced, **own(counts), past_tasks=past):
        z = synced(mine)
    z.backward(grad[rows])
    close(z, y[rows])
    close(mine.grad, whole.grad[rows])
    for a, b in zip(synced.parameters(), single.parameters(), strict=True):
        dist.all_reduce(a.grad)  # each rank has the gradients of its rows
        close(a.grad, b.grad)
    for a, b in zip(synced.buffers(), single.buffers(), strict=True):
        close(a, b)
