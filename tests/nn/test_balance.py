"""What ``balance`` gives to a model, for how long, and what it leaves alone."""

import copy

import pytest
import torch
from literal import split_by_split
from torch import nn
from torch.utils.checkpoint import checkpoint

import tbbn
from tbbn.errors import UserError

# Most tests here also run the model outside a block.
pytestmark = pytest.mark.filterwarnings("ignore:A training forward outside")


def network(norm="tbbn", seed=0, **options):
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Conv2d(n_in, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()) for n_in in (2, 6)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(6 * 16, 3))
    return tbbn.convert(model, norm, **options)


def images(n=12, seed=1):
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


def takes_any_batch(model):
    """A layer that still had a layout of 12 rows would raise."""
    return model(images(5)).shape == (5, 3)


EIGHT = {"current": 8, "memory": 4, "past_tasks": 2}


def test_layout_holds_inside_the_block_only():
    model, x = network(), images()
    before = model(x)
    with tbbn.balance(model, **EIGHT):
        inside = model(x)
    assert takes_any_batch(model)
    torch.testing.assert_close(model(x), before)
    assert not torch.allclose(inside, before, atol=1e-3)


def test_raising_inside_the_block_leaves_no_layout():
    model = network()
    with pytest.raises(ZeroDivisionError), tbbn.balance(model, **EIGHT):
        raise ZeroDivisionError
    assert takes_any_batch(model)
    with pytest.raises(RuntimeError), tbbn.balance(model, **EIGHT):
        model(torch.randn(12, 5, 4, 4))  # the convolution raises
    assert takes_any_batch(model)


def test_two_models_do_not_disturb_each_other():
    first, second, x = network(), network(seed=5), images()
    with tbbn.balance(first, **EIGHT):
        alone = first(x)
    with tbbn.balance(second, current=6, memory=6, past_tasks=3):
        other = second(x)
    with tbbn.balance(first, **EIGHT), tbbn.balance(second, current=6, memory=6, past_tasks=3):
        torch.testing.assert_close(first(x), alone)
        torch.testing.assert_close(second(x), other)
    with tbbn.balance(first, **EIGHT):
        plain = nn.BatchNorm2d(6)
        torch.testing.assert_close(second[0][1](second[0][0](x)), plain(second[0][0](x)))


def test_a_teacher_in_eval_mode_is_untouched():
    student, teacher, x = network(), network(seed=3).eval(), images()
    wanted, state = teacher(x), {k: v.clone() for k, v in teacher.state_dict().items()}
    with tbbn.balance(nn.ModuleList([student, teacher]), **EIGHT):
        student(x)
        assert torch.equal(teacher(x), wanted)
        assert torch.equal(teacher(images(5)), teacher(images(5)))  # any number of rows
    assert all(torch.equal(v, state[k]) for k, v in teacher.state_dict().items())


def test_blocks_may_be_nested():
    model, x = network(), images()
    block = tbbn.balance(model, **EIGHT)
    with block:
        outer = model(x)
        with tbbn.balance(model, current=6, memory=6, past_tasks=3):
            inner = model(x)
        torch.testing.assert_close(model(x), outer)
        with block:  # itself inside itself
            torch.testing.assert_close(model(x), outer)
        torch.testing.assert_close(model(x), outer)
    assert not torch.allclose(inner, outer, atol=1e-3)
    assert takes_any_batch(model)
    with block:  # and again
        torch.testing.assert_close(model(x), outer)
    assert takes_any_batch(model)


def test_shuffled_batch_gives_the_same_rows():
    model, x = network().double(), images().double()
    is_memory = torch.arange(12) >= 8
    order = torch.tensor([8, 0, 1, 9, 2, 3, 4, 10, 5, 6, 7, 11])  # current rows keep their order
    with tbbn.balance(model, **EIGHT):
        wanted = model(x)
    with tbbn.balance(model, is_memory=is_memory[order], past_tasks=2):
        torch.testing.assert_close(model(x[order]), wanted[order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("past", [0, 1, 2, 7])
def test_last_short_batch_is_balanced(past):
    layer = tbbn.TaskBalancedBatchNorm2d(2).double()
    for n_current, n_memory in ((47, 16), (5, 3), (1, 1), (7, 16), (13, 1)):
        x = torch.randn(n_current + n_memory, 2, 3, 3).double()
        r = tbbn.splits(n_current, n_memory, past)
        with tbbn.balance(layer, current=n_current, memory=n_memory, past_tasks=past):
            y = layer(x)
        is_memory = torch.arange(len(x)) >= n_current
        if r == 1:
            wanted = nn.BatchNorm2d(2).double()(x)
        else:
            wanted = split_by_split(x, None, None, layer.weight, layer.bias, is_memory, r)
        torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-9)


def test_a_model_that_was_reverted_is_an_error_that_says_so_and_a_reverted_copy_is_none():
    model = tbbn.convert(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    assert type(tbbn.revert(copy.deepcopy(model))[1]) is nn.BatchNorm2d
    tbbn.balance(model, **EIGHT)
    tbbn.revert(model)
    with pytest.raises(UserError, match=r"tbbn.revert\(model\) undoes it in place: to train on, revert a copy"):
        tbbn.balance(model, **EIGHT)


def test_a_model_without_a_balanced_layer_is_an_error_with_the_remedy():
    with pytest.raises(
        UserError, match=r"balance: Sequential has no task-balanced layer; call tbbn.convert\(model\) once"
    ):
        tbbn.balance(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), **EIGHT)
    with pytest.raises(UserError, match="balance: Linear has no batch norm, so there is nothing to balance"):
        tbbn.balance(nn.Linear(2, 2), **EIGHT)


@pytest.mark.parametrize("norm", ["bn", "in", "gn", "sn", "brn", "cn"])
def test_one_loop_serves_norms_that_need_no_layout(norm):
    options = {"groups": 2} if norm in ("gn", "cn") else {}
    model, x = network(norm, **options).double(), images().double()
    wanted = copy.deepcopy(model)(x)
    with tbbn.balance(nn.Sequential(model), **EIGHT):
        assert torch.equal(model(x), wanted)
    for part in (model[1], model[1][1], copy.deepcopy(model)[:2]):
        tbbn.balance(part, **EIGHT)
    with pytest.raises(UserError, match="Conv2d has no batch norm"):
        tbbn.balance(model[0][0], **EIGHT)
    with pytest.raises(UserError, match="past_tasks"):  # the layout is checked all the same
        tbbn.balance(model, current=8, memory=4)
    if norm == "bn":
        with pytest.raises(UserError, match="no task-balanced layer"):
            tbbn.balance(tbbn.revert(model), **EIGHT)
        with pytest.raises(UserError, match="no task-balanced layer"):
            tbbn.balance(model[1], **EIGHT)
        tbbn.balance(nn.SyncBatchNorm.convert_sync_batchnorm(tbbn.convert(model, "bn")), **EIGHT)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(tbbn.convert(model))
        with pytest.raises(UserError, match="convert_sync_batchnorm"):  # convert to tbbn took the mark of "bn" away
            tbbn.balance(model, **EIGHT)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"current": 8, "past_tasks": 1}, UserError, "give both current and memory"),
        (
            {"task_ids": [0, 1], "past_tasks": 1},
            UserError,
            "give current_task with task_ids: the number of the task being",
        ),
        ({"task_ids": [0, 1]}, UserError, "give current_task with task_ids"),
        ({"current": -8, "memory": 4, "past_tasks": 1}, UserError, "current must not be negative, got -8"),
        ({"current": 8, "memory": 4, "past_tasks": -1}, UserError, "past_tasks must not be negative, got -1"),
        (
            {"is_memory": torch.zeros(12), "past_tasks": 1},
            TypeError,
            "is_memory must be 1-d with one bool per row",
        ),
    ],
)
def test_wrong_arguments_are_one_clear_line(arguments, kind, message):
    with pytest.raises(kind, match=message):
        tbbn.balance(network(), **arguments)


def test_a_layer_that_cannot_take_the_layout_leaves_the_others_alone():
    model = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2))
    model[0] = tbbn.convert(model[0])
    model[1] = tbbn.convert(model[1], "adab2n", max_tasks=2)
    with pytest.raises(UserError, match="adab2n: max_tasks is 2 but this is task 3"):
        tbbn.balance(model, **EIGHT).__enter__()
    assert model(torch.randn(5, 2, 3, 3)).shape == (5, 2, 3, 3)  # no layer has a layout of 12 rows


# -- activation checkpointing


def checkpointed(model, x, use_reentrant):
    for block in model[:2]:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    return model[2:](x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
@pytest.mark.parametrize("past", [0, 2])
def test_checkpointing_changes_nothing_and_counts_a_batch_once(norm, use_reentrant, past):
    results = []
    for recompute in (False, True):
        model, x = network(norm).double(), images().double().requires_grad_()
        for _ in range(2):
            with tbbn.balance(model, current=8, memory=4, past_tasks=past):
                y = checkpointed(model, x, use_reentrant) if recompute else model(x)
            y.pow(2).sum().backward()  # outside the block
        results.append([y, x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_outside_a_block_does_not_remember_an_old_one():
    results = []
    for remembered in (False, True):
        model, x = network().double(), images().double().requires_grad_()
        if remembered:
            with tbbn.balance(model, **EIGHT), torch.no_grad():
                model(x + 1)
        checkpointed(model, x, use_reentrant=False).pow(2).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)


def test_penalty_of_adab2n_survives_checkpointing():
    values = []
    for recompute in (False, True):
        model, x = network("adab2n").double(), images().double()
        with tbbn.balance(model, **EIGHT):
            y = checkpointed(model, x, False) if recompute else model(x)
        (y.sum() + tbbn.penalty(model)).backward()
        values.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
def test_a_second_derivative_through_checkpointing_survives_the_next_forward(norm):
    """What the repeated forward keeps must not be the running statistics themselves, which the next batch moves."""
    found = []
    for recompute in (False, True):
        layer = tbbn.convert(nn.BatchNorm2d(2), norm).double()
        x = images().double().requires_grad_()
        with tbbn.balance(layer, **EIGHT):
            y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        loss = y.pow(3).sum() + (tbbn.penalty(layer) or 0)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with tbbn.balance(layer, **EIGHT):
            layer(x.detach() + 1)
        slope.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
