"""Cases of ``rank_cases.py``: training a network under DDP, FSDP2, checkpointing and ``torch.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from rank_tools import CASES, COUNTS, RANKS, case, close, compare, layers, nightly, own, own_rows, random, sums
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tbbn


def convnet() -> nn.Sequential:
    torch.manual_seed(0)

    def block(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]

    return nn.Sequential(
        *block(3, 6), *block(6, 6), *block(6, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def train(model: nn.Module, call: Callable, counts: list[tuple[int, int]], synced: bool, amp: bool = False) -> None:
    """Five steps. The loss is the mean over the whole batch: DDP averages gradients, so a rank counts its rows for ``RANKS``."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    total = sum(map(sum, counts))
    rows, given = (own_rows(counts), own(counts)) if synced else (slice(None), sums(counts))
    for step in range(5):
        x, y = random(total, 3, 8, 8, seed=step)[rows], (torch.arange(total) % 4)[rows]
        optimizer.zero_grad()
        with tbbn.balance(model, **given, past_tasks=3):
            out = call(x)
        (cross_entropy(out, y, reduction="sum") * (RANKS if synced else 1) / total).backward()
        optimizer.step()


def same_training(wrap: Callable[[nn.Module], nn.Module], counts: list[tuple[int, int]]) -> None:
    single, synced = tbbn.convert(convnet()), tbbn.convert(convnet(), sync=True)
    train(single, single, counts, False)
    call = wrap(synced)
    train(synced, call, counts, True)
    state = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in synced.state_dict().items()}
    for name, wanted in single.state_dict().items():
        close(state[name], wanted, 2e-6)


for title, given in COUNTS.items():
    CASES[f"DDP: {title}"] = lambda given=given: same_training(DistributedDataParallel, given)


@case
def ddp_with_a_static_graph() -> None:
    same_training(lambda model: DistributedDataParallel(model, static_graph=True), COUNTS["unequal counts"])


@case
def ddp_with_unused_parameters() -> None:
    class WithUnused(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.unused = model, nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    same_training(
        lambda model: DistributedDataParallel(WithUnused(model), find_unused_parameters=True), COUNTS["unequal counts"]
    )


@case
def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    def shard(model: nn.Module) -> nn.Module:
        for i in (0, 1, 3):  # a convolution, a norm, a convolution
            fully_shard(model[i])
        return fully_shard(model)

    same_training(shard, COUNTS["unequal counts"])


@case
def activation_checkpointing() -> None:
    def wrap(model: nn.Module) -> Callable:
        ddp = DistributedDataParallel(model)
        return lambda x: checkpoint(ddp, x, use_reentrant=False)

    same_training(wrap, COUNTS["unequal counts"])


def compiled(model: Callable, backend: object = "aot_eager", **options: object) -> Callable:
    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # the compiler causes some of torch's own
    return torch.compile(model, backend=backend, **options)


@case
def a_compiled_layer() -> None:
    synced, single = layers(nn.BatchNorm2d(5))
    compare(compiled(synced, fullgraph=True), single, COUNTS["unequal counts"], 4, 3)


@nightly
def a_block_inside_the_compiled_function() -> None:
    counts, (synced, single) = COUNTS["unequal counts"], layers(nn.BatchNorm2d(5))

    def step(x: torch.Tensor) -> torch.Tensor:
        with tbbn.balance(synced, **own(counts), past_tasks=3, rank_counts=counts):
            return synced(x)

    x = random(30, 5, 4, 3)
    with tbbn.balance(single, **sums(counts), past_tasks=3):
        close(compiled(step, fullgraph=True)(x[own_rows(counts)]), single(x)[own_rows(counts)])


@nightly
def a_compiled_layer_takes_counts_that_vary() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    counter, (synced, single) = CompileCounterWithBackend("aot_eager"), layers(nn.BatchNorm2d(5))
    call = compiled(synced, backend=counter, fullgraph=True)
    for step in range(12):
        counts = [(12 + step, 4 + step % 3), (9 + 2 * step, 5)]
        rows, x = own_rows(counts), random(sum(map(sum, counts)), 5, 4, 3)
        with tbbn.balance(single, **sums(counts), past_tasks=3), tbbn.balance(synced, **own(counts), past_tasks=3):
            close(call(x[rows]), single(x)[rows])
    assert counter.frame_count == 2  # one for the first count, one for all others


@nightly
def a_compiled_model() -> None:
    same_training(lambda model: DistributedDataParallel(compiled(model, fullgraph=True)), COUNTS["unequal counts"])


@nightly
def compiled_with_ddp() -> None:
    same_training(lambda model: compiled(DistributedDataParallel(model)), COUNTS["equal counts"])
