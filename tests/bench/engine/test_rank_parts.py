"""Ranks as threads of one process: what each has of a batch, and that together they have all of it once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from tbbn.bench.data.types import Batch
from tbbn.bench.engine import ranks
from tbbn.bench.engine.ranks import ALONE, ProcessRanks, ProcessShare
from tbbn.bench.models import Output


class World:
    """Stands for ``torch.distributed``: every rank is a thread."""

    ReduceOp = dist.ReduceOp

    def __init__(self, size: int) -> None:
        self.size, self.local, self.barrier = size, threading.local(), threading.Barrier(size, timeout=20)
        self.given: list[Tensor] = [torch.empty(0)] * size

    def exchanged(self, tensor: Tensor) -> list[Tensor]:
        self.given[self.local.rank] = tensor.detach().clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def get_rank(self) -> int:
        return self.local.rank

    def get_world_size(self) -> int:
        return self.size

    def all_gather(self, parts: list[Tensor], tensor: Tensor) -> None:
        found = self.exchanged(tensor)
        assert len(parts) == self.size and {part.shape for part in found} == {tensor.shape}, "ranks send equal sizes"
        for part, other in zip(parts, found, strict=True):
            part.copy_(other)

    def all_reduce(self, tensor: Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        every = torch.stack(self.exchanged(tensor))
        tensor.copy_(every.sum(0) if how == dist.ReduceOp.SUM else every.amax(0))

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        tensor.copy_(self.exchanged(tensor)[rank])

    def do(self, work: Callable[[ProcessRanks], Any]) -> list[Any]:
        """What the work gives on each rank."""
        found: list[Any] = [None] * self.size

        def rank(number: int) -> None:
            self.local.rank = number
            try:
                found[number] = work(ProcessRanks())
            except BaseException as error:
                found[number] = error
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    def make(size: int) -> World:
        made = World(size)
        monkeypatch.setattr(ranks, "dist", made)
        return made

    return make


CPU = torch.device("cpu")
LAYOUTS = [(6, 2), (5, 3), (1, 0), (3, 1), (2, 5), (7, 0)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_has_a_share_of_both_parts_and_together_they_have_the_batch(
    size: int, layout: tuple[int, int], world: Callable[[int], World]
) -> None:
    n = sum(layout)
    index, labels = 100 + torch.arange(n), 50 + torch.arange(n)
    values = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))

    def work(mine: ProcessRanks) -> tuple[Batch, Any]:
        share = mine.share(layout, CPU)
        assert isinstance(share, ProcessShare) and share.rows is not None
        batch = share.of(Batch(share.take(values.T).T, labels, index, *layout, 4, 6))
        own = values[share.rows].requires_grad_()
        output = Output(own, own * 2, (own * 3, own * 4), own * 5, (2, 4), {})
        whole, without = share.whole(output, stages=True), share.whole(output, stages=False)
        assert torch.equal(whole.logits, values) and torch.equal(whole.features, values * 2)
        assert whole.similarity is not None and torch.equal(whole.similarity, values * 5)
        assert len(whole.stages) == 2 and torch.equal(whole.stages[1], values * 4) and without.stages == ()
        assert share.whole(Output(own, own, (), None, (2, 4), {}), stages=True).similarity is None
        (found,) = torch.autograd.grad(whole.logits, own, gradient)
        assert torch.equal(found, gradient[share.rows])
        assert torch.equal(share.take(torch.stack([index, labels])), torch.stack([batch.index, batch.labels]))
        return batch, share.counts

    found = world(size).do(work)
    for rank, (batch, counts) in enumerate(found):
        assert (batch.n_current, batch.n_memory) == counts[rank] and (batch.n_old_classes, batch.n_classes) == (4, 6)
        assert len(batch.images) == len(batch.index) == len(batch.labels) == sum(counts[rank])
        assert torch.equal(batch.labels + 50, batch.index)
        assert all(i < 100 + layout[0] for i in batch.index[batch.current])
        assert all(i >= 100 + layout[0] for i in batch.index[batch.memory])
    for which in (0, 1):
        parts = [counts[rank][which] for rank, (_, counts) in enumerate(found)]
        assert sum(parts) == layout[which] and max(parts) - min(parts) <= 1, "as even as can be"
    assert sorted(torch.cat([batch.index for batch, _ in found]).tolist()) == index.tolist()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_the_rows_of_a_pass_are_divided_and_gathered_in_order(n: int, size: int, world: Callable[[int], World]) -> None:
    rows = 10 * torch.arange(n)
    values = torch.arange(2 * n).view(n, 2)

    def work(mine: ProcessRanks) -> int:
        own = mine.part(rows)
        assert torch.equal(mine.gather(values[own // 10], n), values)
        return len(own)

    lengths = world(size).do(work)
    assert sum(lengths) == n and max(lengths) - min(lengths) <= 1


def test_gradients_are_added_up_and_weights_without_one_stay_without(world: Callable[[int], World]) -> None:
    def work(mine: ProcessRanks) -> list[Tensor | None]:
        weights = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(4))]
        weights[0].grad = torch.arange(6.0).view(2, 3) * (mine.rank + 1)
        weights[2].grad = torch.full((4,), 10.0**mine.rank)
        mine.sum_gradients(weights)
        return [weight.grad for weight in weights]

    for first, second, third in world(3).do(work):
        assert torch.equal(first, torch.arange(6.0).view(2, 3) * 6) and second is None
        assert third.tolist() == [111.0] * 4


@pytest.mark.parametrize("values", [(False, False), (True, False), (False, True), (True, True)])
def test_any_rank_may_say_yes_for_all(values: tuple[bool, bool], world: Callable[[int], World]) -> None:
    assert world(2).do(lambda mine: mine.any(values[mine.rank])) == [any(values)] * 2
    assert ALONE.any(values[0]) is values[0]


def test_all_ranks_get_the_values_of_the_first_in_place(world: Callable[[int], World]) -> None:
    def work(mine: ProcessRanks) -> tuple[Tensor, Tensor]:
        turned, weight = torch.full((2, 3), float(mine.rank)).T, nn.Parameter(torch.full((2,), mine.rank + 5.0))
        mine.copy_first([turned, weight])
        return turned, weight

    for turned, weight in world(2).do(work):
        assert turned.tolist() == [[0.0, 0.0]] * 3 and weight.tolist() == [5.0, 5.0]


def test_in_a_pass_of_its_own_a_rank_does_not_add_up_the_others(world: Callable[[int], World]) -> None:
    world(1).local.rank = 0
    layers = nn.ModuleList(nn.Identity() for _ in range(3))
    flags = True, False, None
    for layer, flag in zip(layers, flags, strict=True):
        if flag is not None:
            layer.sync = flag  # type: ignore[assignment]

    def found() -> list[Any]:
        return [getattr(layer, "sync", None) for layer in layers]

    mine = ProcessRanks()
    with suppress(KeyError), mine.alone(layers):
        assert found() == [False, False, None]
        raise KeyError
    assert found() == [True, False, None], "also after an error"
    with ALONE.alone(layers):
        assert found() == [True, False, None]


def test_what_the_first_rank_announces_the_others_receive_until_they_are_dismissed(
    world: Callable[[int], World],
) -> None:
    def work(mine: ProcessRanks) -> list[Any]:
        said: list[Any] = [mine.is_running]
        for content in (b"abc", b"\x00"):
            if mine.rank == 0:
                mine.announce(content)
            else:
                said.append(mine.receive())
            said.append(mine.is_running)
            mine.ended()
            said.append(mine.is_running)
        if mine.rank == 0:
            mine.dismiss()
        else:
            said.append(mine.receive())
        return [*said, mine.is_running]

    first, *others = world(3).do(work)
    assert first == [False, True, False, True, False, False]
    assert others == [[False, b"abc", True, False, b"\x00", True, False, b"", False]] * 2


def test_ranks_in_the_middle_of_a_run_are_not_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(
        ranks,
        "dist",
        SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2, broadcast=lambda t, rank: sent.append(t.numel())),
    )
    mine = ProcessRanks()
    mine.announce(b"state")
    assert sent == [1, 5]
    mine.dismiss()
    assert sent == [1, 5]
    mine.ended()
    mine.dismiss()
    assert sent == [1, 5, 1], "a length of 0, and nothing after it"


def test_a_process_alone_has_everything() -> None:
    rows = torch.arange(4)
    share = ALONE.share((3, 1), CPU)
    output = Output(rows, rows, (rows,), None, (2,), {})
    batch = Batch(rows, rows, rows, 3, 1, 0, 2)
    assert (ALONE.rank, ALONE.size) == (0, 1) and share.rows is None and share.counts is None
    assert share.take(rows) is rows and share.of(batch) is batch
    assert share.whole(output, stages=True) is share.whole(output, stages=False) is output
    assert ALONE.part(rows) is rows and ALONE.gather(rows, 4) is rows


def test_a_term_that_every_rank_has_in_full_counts_once(world: Callable[[int], World]) -> None:
    weight = torch.tensor(3.0, requires_grad=True)

    def work(rank: ProcessRanks) -> tuple[float, float]:
        term = rank.once(weight**2)
        (gradient,) = torch.autograd.grad(term, weight)
        return term.item(), gradient.item()

    assert world(4).do(work) == [(9.0, 1.5)] * 4  # 6 / 4 each
    assert ALONE.once(weight) is weight
