"""Run as a program, once per rank: every case on two gloo ranks, in one pair of processes. It writes what failed as JSON.

    python rank_cases.py RANK FOLDER CASE ...

A case compares two ranks with one process that has the whole batch: the current rows of rank 0 and 1, then their memory rows.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from rank_tools import CASES, COUNTS, NIGHTLY, RANKS, case, close, compare, layers, own, own_rows, random, sums
from rank_training import convnet
from torch import distributed as dist
from torch import nn

import tbbn
from tbbn.errors import UserError
from tbbn.nn import sync
from tbbn.nn.sync import share_counts

for title, given in COUNTS.items():
    CASES[f"the layer: {title}"] = lambda given=given: compare(*layers(nn.BatchNorm2d(5)), given, 4, 3)


@case
def every_dimension_and_constructor_argument() -> None:
    counts = COUNTS["unequal counts"]
    compare(*layers(nn.BatchNorm1d(5)), counts)
    compare(*layers(nn.BatchNorm1d(5)), counts, 6)
    compare(*layers(nn.BatchNorm3d(5)), counts, 2, 3, 2)
    for options in ({"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"dtype": torch.float64}):
        compare(*layers(nn.BatchNorm2d(5, **options)), counts, 4, 3)


@case
def every_plan() -> None:
    for counts in COUNTS.values():
        compare(*layers(nn.BatchNorm2d(5), "weighted"), counts, 4, 3)
        compare(*layers(nn.BatchNorm2d(5)), counts, 4, 3, past=0)  # batch norm
        for option in (
            {"rule": "uneven"},
            {"memory": "own"},
            {"total_variance": True},
            *({"case": i} for i in (1, 2, 3, 4)),
        ):
            compare(*layers(nn.BatchNorm2d(5), **option), counts, 4, 3)


@case
def a_shuffled_batch() -> None:
    counts, (synced, single) = COUNTS["unequal counts"], layers(nn.BatchNorm2d(5))
    rows, x = own_rows(counts), random(30, 5, 4, 3)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    current = own(counts)["current"]
    # The first current row in the shuffled batch is the first current row of the rank, and so on.
    order = torch.where(order < current, (order < current).cumsum(0) - 1, current + (order >= current).cumsum(0) - 1)
    with (
        tbbn.balance(single, **sums(counts), past_tasks=3),
        tbbn.balance(synced, is_memory=order >= current, past_tasks=3, rule="paper"),
    ):
        close(synced(x[rows][order]), single(x)[rows][order])


@case
def outside_a_block_it_is_batch_norm_over_all_ranks() -> None:
    for counts in COUNTS.values():
        synced, single = layers(nn.BatchNorm2d(5))
        rows, grad = own_rows(counts), random(sum(map(sum, counts)), 5, 4, 3, seed=1)
        whole, mine = (random(sum(map(sum, counts)), 5, 4, 3)[i].requires_grad_() for i in (slice(None), rows))
        y, z = single(whole), synced(mine)
        close(z, y[rows])
        y.backward(grad)
        z.backward(grad[rows])
        close(mine.grad, whole.grad[rows])
        for a, b in zip(synced.buffers(), single.buffers(), strict=True):
            close(a, b)


@case
def a_rule_or_tasks_given_to_the_block_hold_on_all_ranks() -> None:
    counts, x = COUNTS["unequal counts"], random(30, 5, 4, 3)
    rows = own_rows(counts)
    ids = torch.where(torch.arange(30) < 21, 3, torch.arange(30) % 3)
    outputs = []
    for given, mine in (
        ({"rule": "uneven"},) * 2,
        ({"rule": "paper"},) * 2,
        ({"task_ids": ids}, {"task_ids": ids[rows]}),
    ):
        synced, single = layers(nn.BatchNorm2d(5))
        with tbbn.balance(single, **sums(counts), past_tasks=3, **given):
            outputs.append(single(x))
        with tbbn.balance(synced, **own(counts), past_tasks=3, **mine):
            close(synced(x[rows]), outputs[-1][rows])
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)


@case
def gradients_are_made_only_for_what_needs_one() -> None:
    counts = COUNTS["unequal counts"]
    rows, grad = own_rows(counts), random(30, 5, 4, 3, seed=1)
    for needed in ((True, False, False), (False, True, False), (False, False, True), (False, True, True)):
        found = []
        for layer, own_counts, mine in zip(
            layers(nn.BatchNorm2d(5)), (own(counts), sums(counts)), (rows, slice(None)), strict=True
        ):
            leaves = random(30, 5, 4, 3)[mine], layer.weight, layer.bias
            for tensor, wanted in zip(leaves, needed, strict=True):
                tensor.requires_grad_(wanted)
            with tbbn.balance(layer, **own_counts, past_tasks=3):
                layer(leaves[0]).backward(grad[mine])
            assert [tensor.grad is not None for tensor in leaves] == list(needed)
            found.append([tensor.grad for tensor in leaves])
        for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
            if ours is not None and i:
                dist.all_reduce(ours)
            if ours is not None:
                close(ours, theirs if i else theirs[rows])


@case
def tasks_reach_norms_that_are_not_synchronised() -> None:
    counts, x = COUNTS["unequal counts"], random(30, 5, 4, 3)
    rows, ids = own_rows(counts), torch.where(torch.arange(30) < 21, 3, torch.arange(30) % 3)
    layer = tbbn.convert(nn.BatchNorm2d(5), "adab2n")
    layer.task_logits.data[:4] = torch.tensor([1.0, -1.0, 0.5, 0.0])
    alone = copy.deepcopy(layer)
    both = nn.ModuleList([layer, layers(nn.BatchNorm2d(5))[0]])
    given = {**own(counts), "past_tasks": 3, "task_ids": ids[rows]}
    with tbbn.balance(both, **given), tbbn.balance(alone, **given):
        y = layer(x[rows])
        close(y, alone(x[rows]))
    with tbbn.balance(alone, **own(counts), past_tasks=3):
        assert not torch.allclose(y, alone(x[rows]), atol=1e-3)


@case
def collectives_run_in_the_group_of_the_layer_and_only_where_they_are_needed() -> None:
    group, calls = dist.new_group([0, 1]), []

    def watched(name: str) -> Callable[..., None]:
        function = getattr(dist, name)
        return lambda *given, **named: (calls.append((name, named.get("group"))), function(*given, **named))[1]

    layer, outside = (tbbn.convert(nn.BatchNorm2d(5), sync=True, process_group=group) for _ in range(2))
    x = random(16, 5, 4, 3)
    with mock.patch.multiple(dist, **{name: watched(name) for name in ("all_gather", "all_reduce")}):
        for needed in (True, False):
            leaf = x.clone().requires_grad_(needed)
            with tbbn.balance(layer, current=12, memory=4, past_tasks=3):
                layer(leaf).square().sum().backward()
            outside(leaf).square().sum().backward()
            names = ["all_gather", "all_gather", "all_reduce", "all_gather", "all_reduce"]
            assert calls == [(name, group) for name in names if needed or name == "all_gather"], calls
            calls.clear()


@case
def a_group_without_this_rank_is_one_rank() -> None:
    others = [dist.new_group([rank]) for rank in range(RANKS)][1 - dist.get_rank()]
    assert sync.ranks_in(others) == 1 and sync.ranks_in(None) == RANKS


@case
def a_large_common_offset_loses_no_digits() -> None:
    counts, (synced, single) = COUNTS["unequal counts"], layers(nn.BatchNorm2d(5))
    rows, x = own_rows(counts), random(30, 5, 4, 3, dtype=torch.float64) / 100 + 1000
    x = x.float()
    exact = copy.deepcopy(single).double()
    with tbbn.balance(exact, **sums(counts), past_tasks=3), tbbn.balance(synced, **own(counts), past_tasks=3):
        y, z = exact(x.double())[rows], synced(x[rows])
    error = (z - y).abs().max()
    assert error < 0.02, error  # float32 has steps of 6e-5 at 1000, 0.3 % of the spread of 0.02
    close(synced.running_var.double(), exact.running_var, 1e-4)


@case
def one_collective_forward_and_one_backward() -> None:
    calls = []

    def counted(name: str) -> Callable[..., None]:
        function = getattr(dist, name)
        return lambda *given, **named: (calls.append(name), function(*given, **named))[1]

    model, x = tbbn.convert(convnet(), sync=True), random(16, 3, 8, 8)
    names = ("all_gather", "all_reduce")
    with mock.patch.multiple(dist, **{name: counted(name) for name in names}):
        with tbbn.balance(model, current=12, memory=4, past_tasks=3):
            assert calls == ["all_gather"]  # the counts, once a step
            model(x).sum().backward()
        assert calls == ["all_gather"] * 4 + ["all_reduce"] * 3
        calls.clear()
        with tbbn.balance(model, current=12, memory=4, past_tasks=3, rank_counts=[(12, 4)] * 2):
            assert not calls


@case
def eval_mode_needs_no_other_rank() -> None:
    synced, single = layers(nn.BatchNorm2d(5))
    if dist.get_rank() == 0:
        x = random(16, 5, 4, 3)
        assert torch.equal(synced.eval()(x), single.eval()(x))


@case
def a_process_group_of_its_own() -> None:
    alone, both = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()], dist.new_group([0, 1])
    counts, x = COUNTS["unequal counts"], random(30, 5, 4, 3)
    rows, (_, single) = own_rows(counts), layers(nn.BatchNorm2d(5))
    for group, wanted in ((both, (x, sums(counts))), (alone, (x[rows], own(counts)))):
        layer = copy.deepcopy(tbbn.convert(copy.deepcopy(single), sync=True, process_group=group))
        assert layer.process_group is group
        with tbbn.balance(single, **wanted[1], past_tasks=3), tbbn.balance(layer, **own(counts), past_tasks=3):
            y = single(wanted[0])
            close(layer(x[rows]), y[rows] if group is both else y)


@case
def without_a_cpu_backend_counts_travel_on_the_layers_device() -> None:
    devices, tensor = [], torch.tensor

    def spied(values: object, device: torch.device) -> torch.Tensor:
        devices.append(device.type)
        return tensor(values)

    layer = layers(nn.BatchNorm2d(5))[0].to("meta")
    for backend, wanted in (("cuda:nccl", "meta"), ("cpu:gloo,cuda:nccl", "cpu")):
        block = tbbn.balance(layer, current=12, memory=4, past_tasks=3)
        with (
            mock.patch.object(dist, "get_backend_config", lambda group, backend=backend: backend),
            mock.patch.object(torch, "tensor", spied),
        ):
            share_counts(block.layout, block.groups)
        assert devices.pop() == wanted


@case
def a_plan_is_built_once_for_all_batches_with_the_same_counts() -> None:
    synced, _ = layers(nn.BatchNorm2d(5))
    with mock.patch.object(sync, "_build", wraps=sync._build) as built:
        for rows in (7, 7, 6, 7):
            with tbbn.balance(synced, current=rows, memory=3, past_tasks=2):
                synced(random(rows + 3, 5, 4, 3))
    assert built.call_count == 2, built.call_count


@case
def batch_norm_is_batch_norm_of_the_whole_batch() -> None:
    for counts in COUNTS.values():
        synced, single = tbbn.convert(nn.BatchNorm2d(5), "bn", sync=True), tbbn.convert(nn.BatchNorm2d(5))
        compare(synced, single, counts, 4, 3, past=0)
        rows, x = own_rows(counts), random(sum(map(sum, counts)), 5, 4, 3)
        with tbbn.balance(synced, **own(counts), past_tasks=3):  # a layout changes nothing
            close(synced(x[rows]), nn.BatchNorm2d(5)(x)[rows])
    assert type(tbbn.revert(synced)) is nn.BatchNorm2d


@case
def a_converted_sync_batch_norm() -> None:
    synced, single = nn.SyncBatchNorm(5), tbbn.convert(nn.BatchNorm2d(5))
    compare(tbbn.convert(synced), single, COUNTS["unequal counts"], 4, 3)


@case
def autocast_rounds_no_statistics() -> None:
    counts, (synced, single) = COUNTS["unequal counts"], layers(nn.BatchNorm2d(5))
    rows, x = own_rows(counts), random(30, 5, 4, 3)
    mine = x[rows].bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), tbbn.balance(synced, **own(counts), past_tasks=3):
        z = synced(mine)
        z.float().square().sum().backward()
    with tbbn.balance(single, **sums(counts), past_tasks=3):
        y = single(x.bfloat16())
    assert z.dtype == torch.bfloat16 == mine.grad.dtype
    close(z, y[rows], 0.01)
    for a, b in zip(synced.buffers(), single.buffers(), strict=True):
        close(a, b)


@case
def errors_say_what_differs() -> None:
    layer, rank = layers(nn.BatchNorm2d(5))[0], dist.get_rank()
    for given, text in (
        ({"past_tasks": rank}, "past_tasks must be the same on all ranks, got [0, 1]"),
        ({"past_tasks": 1, "rank_counts": [(8, 4)]}, "rank_counts has 1 entries but the process group has 2 ranks"),
        (
            {"past_tasks": 1, "rank_counts": [(7, 4)] * 2},
            f"rank_counts says (7, 4) for rank {rank}, whose batch has (8, 4)",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(text)), tbbn.balance(layer, current=8, memory=4, **given):
            pass


@case
def a_second_derivative_is_refused() -> None:
    layer, x = layers(nn.BatchNorm2d(5))[0], random(16, 5, 4, 3).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def main() -> None:
    rank, folder, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    results: dict[str, str] = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                {**CASES, **NIGHTLY}[name]()
            dist.barrier()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
            break  # the ranks are no longer in step
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
