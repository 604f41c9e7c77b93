"""The layers as drop-in batch norms: equality where nothing is balanced, copies, pickles, PyTorch's own inputs."""

import copy
import io
import pickle

import pytest
import torch
from literal import reshape_repeat, split_by_split
from torch import nn
from torch.testing._internal.common_modules import module_db

import tbbn
from tbbn.errors import UserError
from tbbn.nn.modules import RowsPerSample

CLASSES = {
    1: (tbbn.TaskBalancedBatchNorm1d, nn.BatchNorm1d, (64, 3, 5)),
    2: (tbbn.TaskBalancedBatchNorm2d, nn.BatchNorm2d, (64, 3, 5, 4)),
    3: (tbbn.TaskBalancedBatchNorm3d, nn.BatchNorm3d, (64, 3, 2, 3, 2)),
}
every_dims = pytest.mark.parametrize("dims", CLASSES)


def pair(dims=2, **options):
    ours, plain, shape = CLASSES[dims]
    torch.manual_seed(0)
    layers = ours(3, **options), plain(3, **options)
    if options.get("affine", True):
        for layer in layers:
            layer.weight.data, layer.bias.data = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 0.0, -1.0])
    return *layers, torch.randn(shape) * 2 + 1


def same_state(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in a.state_dict().items():
        torch.testing.assert_close(value, b.state_dict()[name], rtol=1e-6, atol=1e-7)


@every_dims
def test_eval_mode_is_batch_norm_bit_for_bit(dims):
    ours, plain, x = pair(dims)
    for layer in (ours, plain):
        layer.running_mean += 0.3
        layer.running_var *= 1.7
        layer.eval()
    with tbbn.balance(ours, current=48, memory=16, past_tasks=3):
        assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours(x), plain(x))
    same_state(ours, plain)


@every_dims
@pytest.mark.parametrize(
    "layout",
    [
        None,
        {"current": 48, "memory": 16, "past_tasks": 0},
        {"current": 64, "memory": 0, "past_tasks": 3},
        {"current": 0, "memory": 64, "past_tasks": 3},
        {"current": 16, "memory": 48, "past_tasks": 3},  # r = 1
        {"is_memory": torch.zeros(64, dtype=torch.bool), "past_tasks": 3},
    ],
    ids=["no balance", "first task", "no memory", "memory alone", "r = 1", "mask without memory"],
)
def test_training_with_nothing_to_balance_is_batch_norm(dims, layout):
    ours, plain, x = pair(dims)
    leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
    if layout is None:
        y = ours(leaves[0])
    else:
        with tbbn.balance(ours, **layout):
            y = ours(leaves[0])
    wanted = plain(leaves[1])
    assert torch.equal(y, wanted)
    y.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    same_state(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_without_any_tensor_takes_its_type_from_the_input(dtype):
    layer = tbbn.TaskBalancedBatchNorm2d(3, affine=False, track_running_stats=False)
    x = torch.randn(64, 3, 4, 4, dtype=dtype)
    with tbbn.balance(layer, current=48, memory=16, past_tasks=3):
        y = layer(x)
    wanted = reshape_repeat(x.double(), None, None, None, None, 48, 8)
    assert y.dtype == dtype and (y - wanted).abs().max() < (1e-10 if dtype == torch.float64 else 1e-5)


@every_dims
@pytest.mark.parametrize("affine", [True, False])
def test_layer_equals_the_literal_form(dims, affine):
    ours, _, x = pair(dims, affine=affine)
    ours, x = ours.double(), x.double()
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    with tbbn.balance(ours, current=48, memory=16, past_tasks=3):
        for _ in range(2):
            y = ours(x)
            wanted = reshape_repeat(x, mean, var, ours.weight, ours.bias, 48, 8)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.running_mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.running_var, var, rtol=1e-10, atol=1e-12)
    assert ours.num_batches_tracked == 2


def test_vectors_are_balanced_too():
    layer, x = tbbn.TaskBalancedBatchNorm1d(4).double(), torch.randn(12, 4).double()
    with tbbn.balance(layer, current=8, memory=4, past_tasks=2):
        y = layer(x)
    wanted = split_by_split(x, None, None, layer.weight, layer.bias, torch.arange(12) >= 8, 4)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_momentum_none_is_a_cumulative_average(dtype):
    layer = tbbn.TaskBalancedBatchNorm2d(3, momentum=None).to(dtype)
    x = torch.randn(3, 64, 3, 4, 4, dtype=torch.float64)
    means = []
    for batch in x.to(dtype):
        with tbbn.balance(layer, current=48, memory=16, past_tasks=3):
            layer(batch)
        current, memory = batch[:48].double(), batch[48:].double()
        means.append((current.mean((0, 2, 3)) * 6 + memory.mean((0, 2, 3)) * 16) / 22)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(layer.running_mean.double(), torch.stack(means).mean(0), rtol=0, atol=tolerance)


def test_statistics_that_are_not_tracked_are_not_touched():
    layer = tbbn.TaskBalancedBatchNorm2d(3, track_running_stats=False)
    assert layer.running_mean is None
    frozen = tbbn.TaskBalancedBatchNorm2d(3)
    frozen.track_running_stats = False  # how batch norm's statistics are frozen in PyTorch
    for one in (layer, frozen):
        with tbbn.balance(one, current=48, memory=16, past_tasks=3):
            one(torch.randn(64, 3, 4, 4))
    assert torch.all(frozen.running_mean == 0) and frozen.num_batches_tracked == 0


def test_half_model_keeps_float32_statistics():
    torch.manual_seed(0)
    x = torch.randn(64, 3, 8, 8) * 2 + 5
    half, single = tbbn.TaskBalancedBatchNorm2d(3).bfloat16(), tbbn.TaskBalancedBatchNorm2d(3)
    for layer, batch in ((half, x.bfloat16()), (single, x.bfloat16().float())):
        with tbbn.balance(layer, current=48, memory=16, past_tasks=3):
            y = layer(batch)
        y.float().sum().backward()
    torch.testing.assert_close(half.running_mean, single.running_mean.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(half.running_var, single.running_var.bfloat16(), rtol=0, atol=0)
    assert half.weight.grad.dtype == torch.bfloat16


@every_dims
def test_state_dict_loads_both_ways(dims):
    ours, plain, x = pair(dims)
    plain(x)
    ours.load_state_dict(plain.state_dict(), strict=True)
    same_state(ours, plain)
    with tbbn.balance(ours, current=48, memory=16, past_tasks=3):
        ours(x)
    plain.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(ours.eval()(x), plain.eval()(x))


def test_weight_without_bias_as_in_newer_torch():
    layer = tbbn.TaskBalancedBatchNorm2d(3, bias=False)
    assert layer.bias is None and layer.weight is not None
    with tbbn.balance(layer, current=48, memory=16, past_tasks=3):
        assert layer(torch.randn(64, 3, 4, 4)).shape == (64, 3, 4, 4)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("norm", ["tbbn", "adab2n"])
def test_copies_and_pickles_have_no_layout(way, inside, norm):
    model = tbbn.convert(nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)), norm)
    x = torch.randn(8, 2, 3, 3)

    def copied():
        if way == "deepcopy":
            return copy.deepcopy(model)
        if way == "pickle":
            return pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    with tbbn.balance(model, current=6, memory=2, past_tasks=2):
        y = model(x)
        twin = copied() if inside else None
        again = model(x)  # the original still has its layout
    twin = twin or copied()
    torch.testing.assert_close(y, again)
    assert len(twin(torch.randn(5, 2, 3, 3))) == 5  # a layout of 8 rows would raise
    plain = nn.BatchNorm2d(4)
    torch.testing.assert_close(twin(x), plain(model[0](x)))
    with tbbn.balance(twin, current=6, memory=2, past_tasks=2):
        torch.testing.assert_close(twin(x), y)


@pytest.mark.parametrize(
    "case", [m for m in module_db if m.module_cls in {p for _, p, _ in CLASSES.values()}], ids=lambda m: m.name
)
def test_module_inputs_of_pytorch(case):
    ours = {plain: mine for mine, plain, _ in CLASSES.values()}[case.module_cls]
    ran = 0
    for training in (True, False):
        for sample in case.module_inputs_func(
            case, device="cpu", dtype=torch.float64, requires_grad=True, training=training
        ):
            build, call = sample.constructor_input, sample.forward_input
            torch.manual_seed(0)
            mine, plain = (c(*build.args, **build.kwargs).double().train(training) for c in (ours, case.module_cls))
            mine.load_state_dict(plain.state_dict(), strict=True)
            (x,) = call.args
            y, wanted = mine(x, **call.kwargs), plain(x, **call.kwargs)
            assert torch.equal(y, wanted)
            assert torch.equal(*(torch.autograd.grad(t.pow(2).sum(), x)[0] for t in (y, wanted)))
            same_state(mine, plain)
            if training and len(x) > 2:
                before = mine.running_mean if mine.running_mean is None else mine.running_mean.clone()
                after = None if before is None else before.clone(), None if before is None else mine.running_var.clone()
                factor = mine.momentum if mine.momentum is not None else 1 / (int(mine.num_batches_tracked) + 1)
                with tbbn.balance(mine, is_memory=torch.arange(len(x)) >= len(x) - 1, past_tasks=2):
                    y = mine(x)
                r = tbbn.splits(len(x) - 1, 1, 2)
                memory = torch.arange(len(x)) >= len(x) - 1
                if r > 1:
                    wanted = split_by_split(x, *after, mine.weight, mine.bias, memory, r, factor, mine.eps)
                    torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-9)
            ran += 1
    assert ran >= 4


def test_wrong_number_of_dimensions():
    with pytest.raises(ValueError, match=r"expected 4D input \(got 3D input\)"):
        tbbn.TaskBalancedBatchNorm2d(3)(torch.randn(8, 3, 4))
    with pytest.raises(ValueError, match=r"expected 2D or 3D input \(got 4D input\)"):
        tbbn.TaskBalancedBatchNorm1d(3)(torch.randn(8, 3, 4, 4))


def test_layout_that_does_not_fit_the_batch():
    layer, x = tbbn.TaskBalancedBatchNorm2d(3), torch.randn(60, 3, 4, 4)
    wanted = r"the layout covers 48 \+ 16 = 64 rows but the input has 60; call tbbn.balance with the counts"
    with tbbn.balance(layer, current=48, memory=16, past_tasks=3), pytest.raises(UserError, match=wanted):
        layer(x)
    mask, wanted = torch.ones(8, dtype=torch.bool), r"covers 0 \+ 8 = 8 rows but the input has 60"
    with tbbn.balance(layer, is_memory=mask, past_tasks=3), pytest.raises(UserError, match=wanted):
        layer(x)


def test_unknown_option_of_the_constructor():
    with pytest.raises(TypeError, match="rul"):
        tbbn.TaskBalancedBatchNorm2d(3, rul="paper")
    with pytest.raises(UserError, match="weighted: it has no splits"):
        tbbn.WeightedBatchNorm2d(3, case=2)


def test_repr_names_what_differs_from_the_default():
    layer = tbbn.TaskBalancedBatchNorm2d(3, rule="current", case=2, output_statistics=True)
    assert repr(layer).startswith("TaskBalancedBatchNorm2d(3, eps=1e-05")
    assert "rule='current', case=2, output_statistics=True" in repr(layer)
    assert "rule" not in repr(tbbn.TaskBalancedBatchNorm2d(3))
    text = repr(tbbn.TaskBalancedBatchNorm2d(3, memory="own", total_variance=True, sync=True))
    assert text.endswith("track_running_stats=True, memory='own', total_variance=True, sync=True)")
    assert repr(tbbn.WeightedBatchNorm2d(3)).endswith("track_running_stats=True)")


def test_rows_per_sample_read_as_their_message():
    assert str(RowsPerSample("takes one row a sample", 3)) == "takes one row a sample"
