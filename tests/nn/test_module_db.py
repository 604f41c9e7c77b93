"""PyTorch's own inputs for batch norm, and its error inputs, with the task-balanced layers in its place."""

from functools import partial

import pytest
import torch
from literal import split_by_split
from torch import nn
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db

import tbbn

INFOS = [info for info in module_db if info.module_cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)]
BALANCED = {f"BatchNorm{d}d": getattr(tbbn, f"TaskBalancedBatchNorm{d}d") for d in (1, 2, 3)}
WEIGHTED = {f"BatchNorm{d}d": getattr(tbbn, f"WeightedBatchNorm{d}d") for d in (1, 2, 3)}
SYNC = {name: partial(layer, sync=True) for name, layer in BALANCED.items()}  # one process: nothing to gather
KINDS = pytest.mark.parametrize("layers", [BALANCED, WEIGHTED, SYNC], ids=["tbbn", "weighted", "sync"])


def inputs(info, training, dtype):
    made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    return [
        pytest.param(info.module_cls, i, training, dtype, id=f"{info.name}-{i.desc}-{training}-{dtype}") for i in made
    ]


EVERY = [
    case
    for info in INFOS
    for training in (True, False)
    for dtype in (torch.float32, torch.float64)
    for case in inputs(info, training, dtype)
]


def run(layer, given, training, dtype):
    layer = layer.to(dtype).train(training)
    x = given.forward_input.args[0].detach().clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y).cumsum(0))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]


def test_pytorch_has_inputs_for_all_three():
    assert {info.module_cls.__name__ for info in INFOS} == set(BALANCED) and len(EVERY) > 60


@KINDS
@pytest.mark.parametrize(("plain", "given", "training", "dtype"), EVERY)
def test_outside_a_block_every_input_gives_what_batch_norm_gives(layers, plain, given, training, dtype):
    args, kwargs = given.constructor_input.args, given.constructor_input.kwargs
    wanted = run(plain(*args, **kwargs), given, training, dtype)
    got = run(layers[plain.__name__](*args, **kwargs), given, training, dtype)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("plain", "given", "training", "dtype"), [case for case in EVERY if case.values[2]])
def test_inside_a_block_every_input_gives_the_literal_form(plain, given, training, dtype):
    """Each input is repeated to eight rows, so that there is something to balance."""
    x = given.forward_input.args[0].detach()
    layer = BALANCED[plain.__name__](*given.constructor_input.args, **given.constructor_input.kwargs).to(dtype)
    if not len(x):
        with tbbn.balance(layer, current=0, memory=0, past_tasks=2):
            assert layer(x).shape == x.shape
        return
    x = torch.cat([x + i for i in range(8 // len(x))])
    with tbbn.balance(layer, current=6, memory=2, past_tasks=2):
        y = layer(x)
    is_memory = torch.arange(8) >= 6
    wanted = split_by_split(x, None, None, layer.weight, layer.bias, is_memory, 2, 0.1, layer.eps)
    torch.testing.assert_close(y, wanted, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)


@KINDS
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
def test_every_error_input_raises_batch_norms_error(layers, info):
    if info.module_error_inputs_func is None:
        pytest.skip("this torch has no error inputs for batch norm")
    errors = info.module_error_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=True)
    assert errors
    for error in errors:
        given = error.module_error_input
        make = partial(
            layers[info.module_cls.__name__], *given.constructor_input.args, **given.constructor_input.kwargs
        )
        if error.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(error.error_type, match=error.error_regex):
                make()
            continue
        layer = make().double()
        x = given.forward_input.args[0]
        with pytest.raises(error.error_type, match=error.error_regex):
            layer(x)
        x = torch.cat([x + i for i in range(4)])
        with (
            tbbn.balance(layer, current=6, memory=2, past_tasks=2),
            pytest.raises(error.error_type, match=error.error_regex),
        ):
            layer(x)


@KINDS
def test_wrong_dimensions_raise_batch_norms_error(layers):
    for name, layer in layers.items():
        made, plain = layer(4), getattr(nn, name)(4)
        for shape in ((4,), (8, 4), (8, 4, 2), (8, 4, 2, 2), (8, 4, 2, 2, 2)):
            try:
                plain(torch.randn(shape))
            except ValueError as error:
                with pytest.raises(ValueError, match=str(error).replace("(", r"\(").replace(")", r"\)")):
                    made(torch.randn(shape))
                with (
                    tbbn.balance(made, current=6, memory=2, past_tasks=2),
                    pytest.raises(ValueError, match="expected"),
                ):
                    made(torch.randn(shape))
