"""What a hostile user of the layer found: each case was silently wrong, or raised where batch norm works."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import tbbn
from tbbn.nn.active import Forwards

COUNTS: dict[str, Any] = {"current": 6, "memory": 2, "past_tasks": 2}


def model() -> nn.Sequential:
    return tbbn.convert(nn.Sequential(nn.BatchNorm2d(3)))  # type: ignore[return-value]


def images(seed: int = 0, rows: int = 8) -> Tensor:
    return torch.randn(rows, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


# -- torch.compile: a graph break inside the block


def test_a_block_in_compiled_code_survives_graph_breaks():
    net, plain = model(), model()

    @torch.compile(backend="eager")
    def step(x: Tensor, mask: Tensor) -> Tensor:
        with tbbn.balance(net, is_memory=mask, past_tasks=2):  # reading the mask breaks the graph
            torch._dynamo.graph_break()
            return net(x)

    for seed in range(3):
        mask = torch.arange(8) % 4 == seed
        with tbbn.balance(plain, is_memory=mask, past_tasks=2):
            want = plain(images(seed))
        torch.testing.assert_close(step(images(seed), mask), want)
    with tbbn.balance(plain, current=8, memory=0, past_tasks=0):
        want = plain(images())
    torch.testing.assert_close(net(images()), want)  # the block has ended


def test_counts_that_vary_inside_compiled_code_stay_balanced():
    net, plain = model(), model()

    @torch.compile(backend="eager")
    def step(x: Tensor, memory: int) -> Tensor:
        with tbbn.balance(net, current=x.shape[0] - memory, memory=memory, past_tasks=2):
            return net(x)

    for rows in (8, 8, 12, 16, 8):
        x = images(rows, rows)
        with tbbn.balance(plain, current=rows - rows // 4, memory=rows // 4, past_tasks=2):
            torch.testing.assert_close(step(x, rows // 4), plain(x))


# -- activation checkpointing


def gradient(masks: list[Tensor], reused: bool) -> Tensor:
    net, buffer = model(), torch.zeros(8, dtype=torch.bool)
    xs = [images(seed).requires_grad_() for seed in range(len(masks))]
    total = torch.zeros(())
    for x, mask in zip(xs, masks, strict=True):
        given = buffer.copy_(mask) if reused else mask
        with tbbn.balance(net, is_memory=given, past_tasks=2):
            total = total + (checkpoint(net, x, use_reentrant=True) * images(9)).sum()  # type: ignore[operator]
    total.backward()
    return torch.stack([x.grad for x in xs])  # type: ignore[arg-type]


def test_a_mask_that_the_loader_fills_again_is_copied():
    masks = [torch.arange(8) >= 6, torch.arange(8) < 2]
    torch.testing.assert_close(gradient(masks, reused=True), gradient(masks, reused=False))


def test_task_ids_that_the_loader_fills_again_are_copied():
    ids = torch.tensor([2, 2, 2, 2, 2, 2, 0, 1])
    block = tbbn.balance(tbbn.convert(nn.BatchNorm2d(3), "adab2n"), current=6, memory=2, past_tasks=2, task_ids=ids)
    ids.zero_()
    assert block.layout.task_ids.tolist() == [2, 2, 2, 2, 2, 2, 0, 1]


def test_a_forward_out_of_memory_is_refused_or_right_never_wrong():
    net, x = model(), images().requires_grad_()
    with tbbn.balance(net, **COUNTS):
        losses = [checkpoint(net, x, use_reentrant=True).square().sum()]  # type: ignore[union-attr]
    for seed in range(Forwards.KEPT):
        with tbbn.balance(net, current=4, memory=4, past_tasks=2):
            losses.append(checkpoint(net, images(seed + 1).requires_grad_(), use_reentrant=True).square().sum())  # type: ignore[union-attr]
    with pytest.raises(tbbn.errors.UserError, match="several layouts were used since"):
        torch.stack(losses).sum().backward()


def test_as_many_forwards_with_one_layout_as_one_likes():
    net, x = model(), images().requires_grad_()
    total = torch.zeros(())
    for _ in range(Forwards.KEPT + 3):
        with tbbn.balance(net, **COUNTS):
            total = total + checkpoint(net, x, use_reentrant=True).square().sum()  # type: ignore[union-attr]
    total.backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_each_repeated_forward_folds_its_own_rows():
    net = model()
    x, y = images(1, 16).requires_grad_(), images(2).requires_grad_()
    with tbbn.balance(net, **COUNTS, rows_per_sample=2):
        first = checkpoint(net, x, use_reentrant=True)
    with tbbn.balance(net, current=4, memory=4, past_tasks=2):
        second = checkpoint(net, y, use_reentrant=True)
    (first.square().sum() + second.square().sum()).backward()  # type: ignore[union-attr]
    assert x.grad is not None and y.grad is not None


class CallsFunction(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1, self.eps)


def test_a_repeated_forward_of_an_own_class_counts_its_batch_once():
    found = []
    for repeats in (False, True):
        net = tbbn.convert(nn.Sequential(CallsFunction(3)))
        with tbbn.balance(net, **COUNTS):
            x = images().requires_grad_()
            y = checkpoint(net, x, use_reentrant=True) if repeats else net(x)
        y.square().sum().backward()  # type: ignore[union-attr]
        found.append(net[0].running_var)  # type: ignore[index]
    torch.testing.assert_close(*found)


# -- input, plans and copies


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("norm", ["tbbn", "weighted", "sn", "brn"])
def test_integers_are_refused_not_truncated(dtype, norm):
    net = tbbn.convert(nn.Sequential(nn.BatchNorm2d(3)), norm)
    block = tbbn.balance(net, **COUNTS) if norm in ("tbbn", "weighted") else nullcontext()
    with block, pytest.raises(TypeError, match=f"floating-point input, got {dtype}"):
        net(images().to(dtype))


def test_a_plan_made_in_inference_mode_serves_training():
    net, counts = model(), {"current": 5, "memory": 3, "past_tasks": 7}  # of no other test: plans are kept
    with torch.inference_mode(), tbbn.balance(net, **counts):
        net(images())
    x = images().double().requires_grad_()
    with tbbn.balance(net.double(), **counts):
        (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    grad.sum().backward()
    assert x.grad is not None


def test_a_copy_of_a_layer_has_hooks_of_its_own():
    layer = nn.BatchNorm2d(3)
    layer.register_load_state_dict_pre_hook(lambda *_: None)
    net = tbbn.convert(nn.Sequential(layer))
    net[0].me = [net[0]]  # type: ignore[index, assignment]
    other = copy.deepcopy(net)
    other.load_state_dict(net.state_dict())
    assert other[0].me[0] is other[0] is not net[0]  # type: ignore[index]


@pytest.mark.parametrize("norm", ["tbbn", "adab2n", "cn", "sn", "brn", "gn", "in"])
def test_the_input_may_be_given_by_its_name(norm):
    options = {"groups": 1} if norm in ("cn", "gn") else {}
    layer = tbbn.convert(nn.BatchNorm2d(3), norm, **options)
    other = copy.deepcopy(layer)
    torch.testing.assert_close(layer(input=images()), other(images()))


class HoldsTwice(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.steps: Any = {"a": self.norm} if kind is dict else kind([self.norm, torch.relu])

    def forward(self, x: Tensor) -> Tensor:
        held = self.steps["a"] if isinstance(self.steps, dict) else self.steps[0]
        return held(x)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_layer_that_is_also_in_a_plain_collection_is_replaced_there(kind):
    net = tbbn.convert(HoldsTwice(kind))
    held = net.steps["a"] if kind is dict else net.steps[0]  # type: ignore[index]
    assert held is net.norm and isinstance(held, tbbn.TaskBalancedBatchNorm2d)
    net = tbbn.revert(net)
    assert type(net.steps["a"] if kind is dict else net.steps[0]) is nn.BatchNorm2d  # type: ignore[index]


class Frozen(dict):  # type: ignore[type-arg]
    """As the configs of some libraries, which are attributes of their models."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("frozen")


class FrozenList(list):  # type: ignore[type-arg]
    def __setitem__(self, *_: Any) -> None:
        raise TypeError("frozen")


class Named(NamedTuple):
    norm: nn.Module
    count: int


def test_collections_with_other_things_in_them_keep_those():
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    norm, conv = net
    numbers: list[Any] = [1, [2], torch.zeros(2), conv]
    net.many = [norm, *numbers, norm]
    net.fixed = (*numbers, norm)
    net.by_name = {"norm": norm, "conv": conv, "numbers": numbers, "again": norm}
    net.untouched, net.config, net.shapes, net.empty = Named(norm, 3), Frozen(a=[1], b=conv), FrozenList([conv]), []
    many, by_name, config, named = net.many, net.by_name, net.config, net.untouched
    tbbn.convert(net)
    new = net[0]
    assert isinstance(new, tbbn.TaskBalancedBatchNorm2d)
    assert net.many is many and len(many) == 6 and many[0] is many[5] is new
    assert all(a is b for a, b in zip(many[1:5], numbers, strict=True))
    assert type(net.fixed) is tuple and net.fixed[4] is new and net.fixed[3] is conv and net.fixed[1] is numbers[1]
    assert net.by_name is by_name and list(by_name) == ["norm", "conv", "numbers", "again"]
    assert by_name["norm"] is by_name["again"] is new and by_name["conv"] is conv and by_name["numbers"] is numbers
    assert net.config is config and net.untouched is named and net.shapes == [conv] and net.empty == []


def test_a_second_convert_keeps_the_synchronisation():
    net = tbbn.convert(tbbn.convert(nn.Sequential(nn.BatchNorm2d(3)), sync=True), rule="uneven")
    assert net[0].sync and net[0].options.rule == "uneven"  # type: ignore[index, union-attr]


def test_a_module_may_be_skipped_itself():
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3)))
    tbbn.convert(net, skip=[net[1]])
    assert isinstance(net[0], tbbn.TaskBalancedBatchNorm2d) and type(net[1][0]) is nn.BatchNorm2d  # type: ignore[index]
    with pytest.raises(tbbn.errors.UserError, match="no module of Sequential is the BatchNorm2d given"):
        tbbn.convert(net, skip=nn.BatchNorm2d(3))


# -- what balance takes


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, ">i4"])
def test_task_ids_of_any_width_and_order(dtype):
    ids = np.array([2, 2, 2, 2, 2, 2, 0, 1], dtype)[::-1]
    assert tbbn.balance(model(), task_ids=ids, current_task=2).layout.is_memory.tolist() == [True, True, *[False] * 6]


def test_task_numbers_do_not_wrap():
    ids = torch.tensor([44] * 8, dtype=torch.uint8)  # 300 mod 256
    assert tbbn.balance(model(), task_ids=ids, current_task=300).layout.memory == 8


def test_numbers_of_numpy_and_a_model_are_what_balance_takes():
    assert tbbn.balance(model(), **COUNTS, rows_per_sample=np.int64(2)).rows_per_sample == 2
    with pytest.raises(TypeError, match="current_classes must be a range or a list of labels, got array"):
        tbbn.balance(model(), labels=[0] * 8, current_classes=np.array(3), past_tasks=1)
    with pytest.raises(TypeError, match=r"the first argument must be the model, an nn\.Module, got <function"):
        tbbn.balance(lambda x: x, **COUNTS)  # type: ignore[arg-type]
    with pytest.raises(tbbn.errors.UserError, match="rows_per_sample must be a whole number from 1, or 'any', got 0"):
        tbbn.balance(model(), **COUNTS, rows_per_sample=0)


# -- ReplayBatchSampler


def loader(workers: int) -> tuple[tbbn.ReplayBatchSampler, DataLoader[Any]]:
    a, b = TensorDataset(torch.arange(20)), TensorDataset(torch.arange(100, 108))
    sampler = tbbn.ReplayBatchSampler(a, b, current=3, memory=1)
    return sampler, DataLoader(ConcatDataset([a, b]), batch_sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_an_epoch_early_does_not_shorten_the_next(workers):
    sampler, batches = loader(workers)
    next(iter(batches))
    lengths = [sum(1 for _ in batches), sum(1 for i, _ in enumerate(batches) if i < 3)]
    assert lengths == [len(sampler), 3] and len(sampler) == 8
    assert len(list(zip(batches, batches, strict=True))) == 8


def test_near_the_end_of_an_epoch_workers_have_fetched_it_all():
    _, whole = loader(0)
    first = [batch[0].tolist() for batch in whole]
    sampler, batches = loader(2)
    for trained, _ in enumerate(batches, 1):
        if trained == 6:
            state = sampler.state_dict(batches=trained)
            break
    assert state["epoch"] == 0
    sampler, batches = loader(0)
    sampler.load_state_dict(state)
    assert [batch[0].tolist() for batch in batches] == first[6:]
