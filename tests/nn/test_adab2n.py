"""AdaB2N against its formula written out slowly, on any device without a host sync."""

import pytest
import torch
from norms import EIGHT, affine, close, data, make
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tbbn
from tbbn.errors import UserError
from tbbn.nn import wants_task_ids
from tbbn.nn.plan import Layout
from tbbn.registry import NORMS

SHAPES = [(12, 4), (12, 4, 5), (12, 4, 3, 2), (12, 4, 2, 2, 2)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)

pytestmark = pytest.mark.filterwarnings("ignore:A training forward outside")


def adaptive(layer, x, ids, n_tasks):
    counts = [sum(1 for i in ids if i == k) for k in range(n_tasks)]
    concentration = [layer.task_logits[k].exp() + counts[k] for k in range(n_tasks)]
    weights = [concentration[i] / sum(concentration) / counts[i] for i in ids]
    mean = sum(w * row.flatten(1).mean(1) for w, row in zip(weights, x.unsqueeze(2), strict=True))
    var = sum(
        w * (row.flatten(1) - mean.unsqueeze(1)).square().mean(1)
        for w, row in zip(weights, x.unsqueeze(2), strict=True)
    )
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return affine(layer, (x - mean.view(shape)) / (var.view(shape) + layer.eps).sqrt()), mean, var


@every_shape
def test_weighs_tasks_by_concentration(shape):
    layer, x = make("adab2n"), data(shape).requires_grad_()
    layer.task_logits.data[:3] = torch.tensor([0.5, -0.5, 1.0])
    ids = [2] * 8 + [0, 1, 1, 1]
    with tbbn.balance(layer, **EIGHT, task_ids=torch.tensor(ids)):
        y = layer(x)
    wanted, mean, var = adaptive(layer, x, ids, 3)
    close(y, wanted)
    close(layer.running_mean, 0.1 * mean.detach(), 1e-7)  # the rate is a float32
    close(layer.running_var, 0.9 + 0.1 * var.detach(), 1e-7)
    leaves = [x, layer.task_logits, layer.weight]
    for a, b in zip(
        torch.autograd.grad(y.pow(2).sum(), leaves), torch.autograd.grad(wanted.pow(2).sum(), leaves), strict=True
    ):
        close(a, b)


def test_an_absent_task_keeps_its_share():
    layer, x = make("adab2n"), data((12, 4, 3, 2))
    ids = [2] * 8 + [0] * 4  # task 1 is absent: exp(0) of 15 in all
    with tbbn.balance(layer, **EIGHT, task_ids=torch.tensor(ids)):
        y = layer(x)
    wanted, mean, _ = adaptive(layer, x, ids, 3)
    close(y, wanted)
    close(mean, 9 / 15 * x[:8].mean((0, 2, 3)) + 5 / 15 * x[8:].mean((0, 2, 3)))


def test_spreads_memory_of_unknown_task():
    layer, x = make("adab2n"), data((12, 4, 3, 2))
    with tbbn.balance(layer, **EIGHT):
        layer(x)
    # 8 current and 2 + 2 memory rows: shares (8+1)/15 and 2 * (2+1)/15
    mean = 9 / 15 * x[:8].mean((0, 2, 3)) + 6 / 15 * x[8:].mean((0, 2, 3))
    close(layer.running_mean, 0.1 * mean, 1e-7)


def test_is_batch_norm_in_the_first_task_and_outside():
    layer, plain, x = tbbn.convert(nn.BatchNorm2d(4), "adab2n"), nn.BatchNorm2d(4), data((12, 4, 3, 2)).float()
    with tbbn.balance(layer, current=12, memory=0, past_tasks=0):
        assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer(x), plain(x)) and torch.equal(layer.eval()(x), plain.eval()(x))
    assert torch.equal(layer.running_var, plain.running_var) and layer.rate == 0


@pytest.mark.parametrize("kappa", [0.0, 0.4, 1.0])
def test_rate_of_the_running_statistics(kappa):
    layer, x = make("adab2n", kappa=kappa), data((12, 4, 3, 2))
    rate, seen = 0.1**kappa, []
    for step in range(1, 200):
        with tbbn.balance(layer, **EIGHT):
            layer(x)
        seen.append(layer.rate.item())
        assert abs(seen[-1] - rate) < 1e-5
        if kappa == 0:
            assert abs(seen[-1] - 1 / step) < 1e-4
        rate = rate / (rate + 0.9**kappa)
    if kappa:
        assert abs(seen[-1] - (1 - 0.9**kappa)) < 1e-3


def test_penalty():
    model = nn.Sequential(make("adab2n", strength=0.5), make("adab2n", strength=2.0), make("adab2n", strength=0.0))
    x = data((12, 4, 3, 2)).requires_grad_()
    ids = torch.tensor([2] * 8 + [0, 1, 1, 1])
    assert tbbn.penalty(model) == 0
    with tbbn.balance(model, **EIGHT, task_ids=ids):
        y = model(x)
    wanted, z = 0.0, x
    for layer in model:
        out, mean, var = adaptive(layer, z, ids.tolist(), 3)
        squares = (mean - layer.running_mean).square().mean() + (var - layer.running_var).square().mean()
        wanted, z = wanted + layer.strength * squares, out
    got = tbbn.penalty(model)  # after the block: its layers remember their last training forward
    close(got, wanted)
    for a, b in zip(torch.autograd.grad(got, x, retain_graph=True), torch.autograd.grad(wanted, x), strict=True):
        close(a, b)
    model.eval()(x)
    assert tbbn.penalty(model) is got or torch.equal(tbbn.penalty(model), got)
    y = model.train()(x)  # outside a block there is nothing to add
    assert tbbn.penalty(model) == 0 and y.requires_grad


def test_the_steps_for_a_kernel_are_the_forward_in_training():
    """``snapshot`` and ``normaliser`` from the moments of each sample, as kernels call them."""
    layer, twin, x = make("adab2n"), make("adab2n"), data((12, 4, 3, 2))
    for one in (layer, twin):
        one.task_logits.data[:3] = torch.tensor([0.5, -0.5, 1.0])
    ids = torch.tensor([2] * 8 + [0, 1, 1, 1])
    var, mean = torch.var_mean(x.flatten(2), 2, unbiased=False)
    with tbbn.balance(layer, **EIGHT, task_ids=ids), tbbn.balance(twin, **EIGHT, task_ids=ids):
        y = twin(x)
        state = layer.snapshot(x)
        assert state is not None and layer.eval().snapshot(x) is None
        center, scale, shift = layer.train().normaliser(x, mean, var, *state)
    close((x - center.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1), y)
    close(layer.penalty, twin.penalty)
    with tbbn.balance(layer, current=12, memory=0, past_tasks=0):
        assert layer.snapshot(x) is None  # batch norm in the first task
    assert layer.snapshot(x) is None  # and outside


def test_penalty_of_other_models_is_zero():
    for model in (nn.Sequential(nn.BatchNorm2d(3)), nn.ReLU(), make("adab2n").to("meta")):
        found = tbbn.penalty(model)
        assert found.shape == () and found.device == next(model.parameters(), torch.zeros(())).device
    layer, x = make("adab2n"), data((12, 4, 3, 2)).requires_grad_()
    with tbbn.balance(layer, current=8, memory=4, past_tasks=0):  # in the first task one writes the same line
        (layer(x).pow(2).sum() + tbbn.penalty(layer)).backward()


def test_refuses_tasks_it_does_not_know():
    layer = make("adab2n", max_tasks=3)
    with pytest.raises(UserError, match="adab2n: max_tasks is 3 but this is task 4; raise it"):
        tbbn.balance(layer, current=8, memory=4, past_tasks=3).__enter__()
    for ids in ([3] + [0] * 11, [-1] + [0] * 11):
        with pytest.raises(UserError, match=r"task_ids must lie in 0\.\.2 for past_tasks=2, got "):
            tbbn.balance(layer, **EIGHT, task_ids=torch.tensor(ids)).__enter__()


def test_state_travels():
    layer, other = make("adab2n"), make("adab2n")
    with tbbn.balance(layer, **EIGHT):
        layer(data((12, 4, 3, 2)))
    other.load_state_dict(layer.state_dict(), strict=True)
    assert other.rate == layer.rate > 0


# -- the task of each row, on any device


@pytest.mark.parametrize("norm", list(NORMS))
def test_a_norm_says_whether_it_wants_task_ids(norm):
    options = {"groups": 2} if norm in ("gn", "cn") else {}
    model = tbbn.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), norm, **options)
    assert wants_task_ids(model) == (norm == "adab2n")


def test_task_ids_make_another_norm_than_counts_alone():
    """Why they must reach the layer: without them the output is off by tenths."""
    x, ids = data((12, 4, 3, 2)), torch.tensor([2] * 8 + [0, 1, 1, 1])
    outputs = []
    for given in ({"task_ids": ids}, {}):
        layer = make("adab2n")
        layer.task_logits.data[:3] = torch.tensor([1.0, -1.0, 0.0])
        with tbbn.balance(layer, **EIGHT, **given):
            outputs.append(layer(x))
    assert (outputs[0] - outputs[1]).abs().max() > 0.01


def test_membership_is_computed_where_the_task_ids_are():
    """With device operations only: a fake CUDA tensor has no values that the host could read."""
    with FakeTensorMode():
        ids = torch.zeros(12, dtype=torch.int64, device="cuda")
        member = Layout(8, 4, 2, task_ids=ids).membership(torch.device("cuda", 0), torch.float32)
    assert member.device.type == "cuda" and member.shape == (12, 3)


def test_a_training_step_on_a_device_never_waits_for_it():
    """Reading a value of a meta tensor raises; on a GPU it would wait, and break the capture of a CUDA graph."""
    layer = tbbn.convert(nn.BatchNorm2d(4, device="meta"), "adab2n")
    ids = torch.zeros(12, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError):
        ids[0].item()
    with tbbn.balance(layer, **EIGHT, task_ids=ids):
        y = layer(torch.zeros(12, 4, 2, 2, device="meta"))
    (y.sum() + tbbn.penalty(layer)).backward()
    assert y.device.type == "meta" and layer.task_logits.grad.shape == (100,)


def test_input_of_more_precision_than_the_layer_keeps_it():
    layer, x = tbbn.convert(nn.BatchNorm2d(4), "adab2n"), data((12, 4, 3, 2))
    layer.task_logits.data[:3] = torch.tensor([0.5, -0.5, 1.0])
    ids, exact = torch.tensor([2] * 8 + [0, 1, 1, 1]), make("adab2n")
    exact.weight, exact.bias = nn.Parameter(torch.ones(4).double()), nn.Parameter(torch.zeros(4).double())
    exact.task_logits.data[:3] = layer.task_logits.data[:3].double()
    with tbbn.balance(layer, **EIGHT, task_ids=ids), tbbn.balance(exact, **EIGHT, task_ids=ids):
        close(layer(x), exact(x))
        close(layer.snapshot(x)[0], exact.snapshot(x)[0])
        assert layer.snapshot(x)[0].dtype == torch.float64


def test_a_snapshot_is_of_before_the_step():
    layer, x = make("adab2n"), data((12, 4, 3, 2))
    with tbbn.balance(layer, **EIGHT):
        layer(x)
        before = [t.clone() for t in (layer.running_mean, layer.running_var, layer.rate)]
        _, *kept = layer.snapshot(x)
        layer(x + 1)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(kept[:2], (layer.running_mean, layer.running_var), strict=True))


def test_without_strength_there_is_no_penalty_of_an_earlier_step():
    layer, x = make("adab2n"), data((12, 4, 3, 2))
    var, mean = torch.var_mean(x.flatten(2), 2, unbiased=False)
    with tbbn.balance(layer, **EIGHT):
        for step in (lambda: layer(x), lambda: layer.normaliser(x, mean, var, *layer.snapshot(x))):
            layer.strength = 0.1
            step()
            assert layer.penalty is not None
            layer.strength = 0.0
            step()
            assert layer.penalty is None
