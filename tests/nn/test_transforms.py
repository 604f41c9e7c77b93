"""Function transforms, graph tracing, tensors without data: whatever works on batch norm works on the layer."""

import copy

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import tbbn
from tbbn.errors import UserError
from tbbn.nn.functional import task_balanced_batch_norm
from tbbn.nn.plan import Layout, PlanOptions

EIGHT = {"current": 8, "memory": 4, "past_tasks": 2}


def network(norm="tbbn", seed=0, **options):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    return tbbn.convert(nn.Sequential(*layers), norm, **options).double()


def images(seed=1):
    return torch.randn(12, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def balanced(model, x):
    with tbbn.balance(model, **EIGHT):
        return model(x)


# -- torch.func


@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
def test_grad_of_a_functional_call(norm):
    model, x = network(norm), images()
    balanced(model, x).pow(2).sum().backward()
    wanted, running = {k: p.grad for k, p in model.named_parameters()}, {k: b.clone() for k, b in model.named_buffers()}
    model = network(norm)
    parameters, buffers = (
        {k: t.detach() for k, t in named} for named in (model.named_parameters(), model.named_buffers())
    )

    def loss(parameters, buffers):
        with tbbn.balance(model, **EIGHT):
            return functional_call(model, (parameters, buffers), (x,)).pow(2).sum()

    for name, got in grad(loss)(parameters, buffers).items():
        torch.testing.assert_close(got, torch.zeros_like(got) if wanted[name] is None else wanted[name])
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, running[name])
    balanced(model, x)  # no plan made inside the transform is left behind


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("norm", ["tbbn", "adab2n"])
def test_vmap_over_stacked_models(norm, on_meta):
    models, x = [network(norm, seed) for seed in range(3)], images()
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta" if on_meta else "cpu")

    def call(parameters, buffers, x):
        return functional_call(base, (parameters, buffers), (x,))

    with tbbn.balance(base, **EIGHT):
        got = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    for i, model in enumerate(models):
        torch.testing.assert_close(got[i], balanced(model, x))
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name][i], buffer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in jvp
def test_jvp_and_jacrev():
    model, x, direction = network(track_running_stats=False), images(), images(2)
    with tbbn.balance(model, **EIGHT):
        rows = jacrev(lambda t: model(t).sum(0))(x)  # (3, 12, 2, 4, 4)
        _, slope = jvp(lambda t: model(t).sum(0), (x,), (direction,))
    torch.testing.assert_close((rows * direction).flatten(1).sum(1), slope)
    step = 1e-6 * direction
    torch.testing.assert_close(
        (balanced(model, x + step) - balanced(model, x - step)).sum(0) / 2e-6, slope, rtol=1e-5, atol=1e-6
    )


# -- graphs


@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
def test_fx_graphs_call_the_layer(norm):
    model, x = network(norm), images()
    traced = fx.symbolic_trace(model)
    assert "1" in [node.target for node in traced.graph.nodes if node.op == "call_module"]
    plain = network(norm)
    torch.testing.assert_close(balanced(traced, x), balanced(plain, x))
    torch.testing.assert_close(traced.eval()(x), plain.eval()(x))


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_fx_keeps_what_follows_a_norm_of_another_class():
    model = tbbn.convert(nn.Sequential(Activated(2))).double()
    traced, x = fx.symbolic_trace(model), images()
    torch.testing.assert_close(balanced(traced, x), balanced(tbbn.TaskBalancedBatchNorm2d(2).double(), x).relu())


def test_features_of_a_torchvision_network():
    from tbbn.bench.vision import torchvision

    vision = torchvision()
    from torchvision.models.feature_extraction import create_feature_extractor

    torch.manual_seed(0)
    model = tbbn.convert(vision.models.resnet18(num_classes=3))
    extractor = create_feature_extractor(model, {"layer1.0.bn1": "norm", "avgpool": "pooled"})
    with tbbn.balance(extractor, **EIGHT):
        found = extractor(torch.randn(12, 3, 16, 16))
    assert found["norm"].shape == (12, 64, 4, 4) and found["pooled"].shape == (12, 512, 1, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # of jit itself
def test_jit_refuses_a_layout_in_one_line_and_traces_batch_norm():
    model, x = network(), images()
    with pytest.raises(UserError, match=r"torch.jit.script: TaskBalancedBatchNorm2d cannot be scripted; script tbbn"):
        torch.jit.script(model)
    with tbbn.balance(model, **EIGHT), pytest.raises(UserError, match=r"torch.jit.trace would keep the layout of one"):
        torch.jit.trace(model, x, check_trace=False)
    model.eval()
    torch.testing.assert_close(torch.jit.trace(model, x)(images(3)), model(images(3)))
    torch.testing.assert_close(torch.jit.script(tbbn.revert(model))(images(3)), model(images(3)))


# -- tensors without data, devices without float64


def test_fake_tensors_leave_no_plan_behind():
    layout = {"current": 9, "memory": 3, "past_tasks": 5}
    with FakeTensorMode():
        model = tbbn.convert(nn.BatchNorm2d(3))
        with tbbn.balance(model, **layout):
            assert model(torch.randn(12, 3, 2, 2)).shape == (12, 3, 2, 2)
    model = tbbn.convert(nn.BatchNorm2d(3))
    with tbbn.balance(model, **layout):
        assert torch.isfinite(model(torch.randn(12, 3, 2, 2))).all()
    with FakeTensorMode(), tbbn.balance(fake := tbbn.convert(nn.BatchNorm2d(3)), **layout):
        assert fake(torch.randn(12, 3, 2, 2)).shape == (12, 3, 2, 2)


class NoDoubles(TorchDispatchMode):
    """Fails where a float64 tensor is made on, or moved to, the device called meta: it stands for MPS and XPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            assert not (isinstance(t, torch.Tensor) and t.is_meta and t.dtype == torch.float64), func
        return result


@pytest.mark.parametrize(
    "form", [EIGHT, {"is_memory": torch.arange(12) % 3 == 0, "past_tasks": 2}], ids=["counts", "mask"]
)
@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
def test_nothing_on_a_device_is_float64(norm, form):
    with NoDoubles():
        for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False, "affine": False}):
            if norm == "adab2n" and options:
                continue
            layer = tbbn.convert(nn.BatchNorm2d(4, device="meta", **options), norm)
            x = torch.empty(12, 4, 3, 3, device="meta", requires_grad=True)
            with tbbn.balance(layer, **form):
                layer(x).sum().backward()
            assert x.grad.shape == x.shape


def test_moving_a_plan_changes_its_type_first():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.extend(t.dtype for t in args if isinstance(t, torch.Tensor) and "device" in (kwargs or {}))
            return func(*args, **(kwargs or {}))

    plan = Layout(8, 4, 2).plan(PlanOptions())
    with Watch():
        plan.to(torch.device("meta"), torch.float32)
    assert seen and torch.float64 not in seen


def test_vmap_and_grad_of_the_function():
    plan = Layout(6, 2, 2).plan(PlanOptions(), torch.device("cpu"), torch.float64)
    x = torch.randn(3, 8, 2, 5, dtype=torch.float64)

    def loss(t):
        return task_balanced_batch_norm(t, None, None, None, None, plan).pow(3).sum()

    each = torch.stack([grad(loss)(t) for t in x])
    torch.testing.assert_close(vmap(grad(loss))(x), each)
