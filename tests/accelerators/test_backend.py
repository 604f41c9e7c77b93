"""Which backend takes which inputs, and batch norm with the bench's kernels."""

import copy

import pytest
import torch
from torch import nn

import tbbn
from tbbn.accelerators import backend, eager
from tbbn.accelerators.fused import FusedBatchNorm2d, accelerate, norm_act
from tbbn.accelerators.native import binding as native
from tbbn.nn.functional import task_balanced_batch_norm
from tbbn.nn.plan import Layout, PlanOptions

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(native.library() is None, reason=f"the kernel is {native.status()}")


def plan_of(dtype=torch.float32, **options):
    return Layout(6, 2, 2).plan(PlanOptions(**options), CPU, dtype)


def find(x, plan):
    return backend.find(x, None, None, None, None, plan)


@compiled
def test_native_comes_before_eager():
    assert find(torch.randn(8, 3, 4), plan_of()) is native
    assert find(torch.randn(8, 3), plan_of()) is native
    assert find(torch.randn(8, 3, 4, dtype=torch.float64), plan_of(torch.float64)) is eager
    assert find(torch.randn(8, 3, 4), plan_of(case=3)) is eager


def test_without_the_c_library_eager_is_next(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    assert find(torch.randn(8, 3, 4), plan_of()) is eager


def test_on_a_cpu_batch_norm_is_torchs():
    assert find(torch.randn(8, 3, 4), None) is None


def test_under_transforms_only_the_reference_is_left():
    seen = []
    torch.func.vmap(lambda x: seen.append(find(x, plan_of())) or x)(torch.randn(2, 8, 3, 4))
    assert seen == [None]


def test_all_backends_and_the_reference_give_the_same():
    torch.manual_seed(0)
    x, weight, bias, grad = torch.randn(8, 3, 4), torch.rand(3), torch.randn(3), torch.randn(8, 3, 4)
    results = []
    for chosen in [[native]] * (native.library() is not None) + [[eager], []]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        running, batches = (torch.zeros(3), torch.ones(3)), torch.zeros((), dtype=torch.int64)
        with backend.only(*chosen):
            y = task_balanced_batch_norm(leaves[0], *running, *leaves[1:], plan_of(), 0.3, 1e-5, batches)
        y.backward(grad)
        assert batches == 1
        results.append([y.detach(), *running, *(t.grad for t in leaves)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("norm", ["bn", "fused", "tbbn", "weighted", "gn", "tbbn with output statistics"])
@pytest.mark.parametrize("training", [True, False])
def test_norm_act_is_the_norm_and_what_follows(norm, relu, with_residual, training):
    torch.manual_seed(0)
    options = {"groups": 2} if norm == "gn" else {"output_statistics": True} if norm.endswith("statistics") else {}
    layer = nn.BatchNorm2d(4)
    layer = (
        accelerate(layer, torch.device("cuda")) if norm == "fused" else tbbn.convert(layer, norm.split()[0], **options)
    )
    other = copy.deepcopy(layer)
    x, residual = torch.randn(8, 4, 3, 3), torch.randn(8, 4, 3, 3) if with_residual else None
    results = []
    for one, call in ((layer, norm_act), (other, None)):
        one.train(training)
        if tbbn.nn.is_balanced(one):
            with tbbn.balance(one, current=6, memory=2, past_tasks=2):
                y = one(x) if call is None else norm_act(one, x, relu=relu, residual=residual)
        else:
            y = one(x) if call is None else norm_act(one, x, relu=relu, residual=residual)
        if call is None:
            y = y if residual is None else y + residual
            y = y.relu() if relu else y
        results.append([y, *one.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_hooks_of_a_norm_fire():
    layer, calls = tbbn.TaskBalancedBatchNorm2d(4), []
    layer.register_forward_hook(lambda module, args, out: calls.append(out))
    with tbbn.balance(layer, current=6, memory=2, past_tasks=2):
        norm_act(layer, torch.randn(8, 4, 3, 3))
    assert len(calls) == 1


# -- batch norm by the bench's kernels


def test_accelerate_changes_plain_batch_norms_on_a_gpu_only(monkeypatch):
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm1d(4), tbbn.TaskBalancedBatchNorm2d(4), nn.GroupNorm(2, 4))
    kinds, state = [type(m) for m in model], dict(model.state_dict())
    assert accelerate(model, CPU) is model and [type(m) for m in model] == kinds
    monkeypatch.setattr("tbbn.accelerators.fused.TRITON", False)
    accelerate(model, torch.device("cuda"))
    assert [type(m) for m in model] == kinds
    monkeypatch.setattr("tbbn.accelerators.fused.TRITON", True)
    accelerate(model, torch.device("cuda"))
    assert [type(m) for m in model] == [FusedBatchNorm2d, *kinds[1:]]
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    model[3] = nn.Identity()
    assert (
        type(tbbn.revert(model)[0]) is nn.BatchNorm2d and type(tbbn.convert(model)[0]) is tbbn.TaskBalancedBatchNorm2d
    )


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_where_there_are_no_kernels_fused_batch_norm_is_torchs_bit_for_bit(options, monkeypatch):
    monkeypatch.setattr("tbbn.accelerators.fused.TRITON", True)
    plain = nn.BatchNorm2d(4, **options)
    fused = accelerate(copy.deepcopy(plain), torch.device("cuda"))
    for step in range(3):
        x = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y, wanted = fused(x), plain(x)
        assert torch.equal(y, wanted)
        assert torch.equal(*(torch.autograd.grad(t.pow(3).sum(), x)[0] for t in (y, wanted)))
    assert torch.equal(fused.eval()(x), plain.eval()(x))
    for (name, a), (other, b) in zip(fused.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused.train()(torch.randn(1, 4, 1, 1))
    with pytest.raises(ValueError, match="expected 4D input"):
        fused(torch.randn(8, 4, 3))


def test_the_fused_form_runs_the_forward_of_a_class_with_an_activation():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    layer, x = tbbn.convert(WithActivation(4)), torch.randn(12, 4, 3, 3)
    with tbbn.balance(layer, current=8, memory=4, past_tasks=2):
        assert norm_act(layer, x, relu=False, residual=torch.full_like(x, -1.0)).min() == -1


def test_autocast_does_not_round_the_statistics_of_eager():
    plan, x = plan_of(), torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0)) + 3
    found = []
    for enabled in (True, False):
        leaf, weight = x.clone().requires_grad_(), torch.linspace(0.5, 2, 3).requires_grad_()
        mean, var = torch.zeros(3), torch.ones(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = eager.norm(leaf, mean, var, weight, None, plan, 0.1, 1e-5)
            y.pow(2).sum().backward()  # under autocast too
        found.append([y.detach(), mean, var, leaf.grad, weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
