"""torch.compile: one graph, no break, no recompilation from step to step, the same numbers."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointError, checkpoint

import tbbn


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network(norm="tbbn", **options):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    return tbbn.convert(nn.Sequential(*layers), norm, **options)


def images(step):
    return torch.randn(16, 2, 5, 5, generator=torch.Generator().manual_seed(step)) + 1


def layout(step, masked, past=2):
    if not masked:
        return {"current": 12, "memory": 4, "past_tasks": past}
    generator = torch.Generator().manual_seed(step)
    return {"is_memory": (torch.arange(16) >= 12)[torch.randperm(16, generator=generator)], "past_tasks": past}


def train(call, model, masked, steps=4, pasts=(2,)):
    seen = []
    for past in pasts:
        for step in range(steps):
            model.zero_grad()
            with tbbn.balance(model, **layout(step, masked, past)):
                y = call(images(step))
            y.pow(2).mean().backward()
            seen.append(y.detach())
    return [*seen, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
def test_one_graph_serves_every_step_of_a_task(norm, masked):
    counter = CompileCounterWithBackend("aot_eager")
    model = network(norm)
    got = train(torch.compile(model, backend=counter, fullgraph=True), model, masked)
    assert counter.frame_count == 1
    plain = network(norm)
    for a, b in zip(got, train(plain, plain, masked), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}, {"affine": False}])
def test_every_kind_of_layer_compiles(options):
    counter = CompileCounterWithBackend("aot_eager")
    layer, plain = (tbbn.TaskBalancedBatchNorm2d(2, **options) for _ in range(2))
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for step in range(3):
        with tbbn.balance(layer, **layout(step, False)), tbbn.balance(plain, **layout(step, False)):
            torch.testing.assert_close(compiled(images(step)), plain(images(step)), rtol=1e-5, atol=1e-5)
    for a, b in zip(layer.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_a_new_task_costs_no_more_than_a_graph_of_its_own():
    counter = CompileCounterWithBackend("eager")
    model = network()
    got = train(torch.compile(model, backend=counter, fullgraph=True), model, False, steps=3, pasts=(0, 1, 2, 3))
    assert counter.frame_count <= 4
    plain = network()
    for a, b in zip(got, train(plain, plain, False, steps=3, pasts=(0, 1, 2, 3)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fixed_size", [True, False])
def test_counts_that_vary_need_no_graph_each(fixed_size):
    counter = CompileCounterWithBackend("eager")
    model, plain = network(), network()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for memory in (4, 5, 6, 3, 7, 4, 8):
        rows = 30 if fixed_size else 20 + memory
        x = torch.randn(rows, 2, 5, 5, generator=torch.Generator().manual_seed(memory))
        is_memory = torch.arange(rows) % rows >= rows - memory
        chosen = {"is_memory": is_memory[torch.randperm(rows)], "past_tasks": 4}
        with tbbn.balance(model, **chosen), tbbn.balance(plain, **chosen):
            y, wanted = compiled(x), plain(x)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        y.pow(2).mean().backward()
    assert counter.frame_count <= 3
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_checkpointing_inside_compiled_code_and_around_it():
    found = []
    for compiled in (False, True):
        model, x = network(), images(0).requires_grad_()
        call = partial(checkpoint, model, use_reentrant=False)
        with tbbn.balance(model, **layout(0, False)):
            y = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(x)
        y.pow(2).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    around = torch.compile(model, backend="aot_eager")
    with tbbn.balance(model, **layout(0, False)):
        y = checkpoint(around, x, use_reentrant=False)
    with pytest.raises(CheckpointError):  # never a wrong gradient
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own
@pytest.mark.parametrize("norm", ["tbbn", "adab2n"])
def test_reentrant_checkpointing_around_compiled_code_repeats_each_layout(norm):
    """The first forward runs without gradients, the second in backward, here after both blocks or inside the second one."""
    found = []
    for way in ("plain", "after", "inside"):
        model = network(norm)
        call = model if way == "plain" else torch.compile(model, backend="aot_eager")
        xs = [images(step).requires_grad_() for step in range(2)]
        blocks = [layout(0, False, past) for past in (2, 3)]
        for _ in range(2):  # the second time nothing is compiled
            losses = []
            for x, block in zip(xs, blocks, strict=True):
                with tbbn.balance(model, **block):
                    y = call(x) if way == "plain" else checkpoint(call, x, use_reentrant=True)
                    losses.append(y.pow(2).sum())
                    if way == "inside" and len(losses) == 2:
                        sum(losses).backward()
            if way != "inside":
                sum(losses).backward()
        found.append([*(x.grad for x in xs), *(p.grad for p in model.parameters()), *model.buffers()])
    for got in found[1:]:
        for a, b in zip(got, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_eval_after_training_and_training_after_eval():
    counter = CompileCounterWithBackend("eager")
    model = network()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        model.train()
        with tbbn.balance(model, **layout(0, False)):
            compiled(images(0))
        model.eval()
        torch.testing.assert_close(compiled(images(1)), model(images(1)))
    assert counter.frame_count == 2


def test_the_block_may_stand_inside_the_compiled_function():
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = network(), network()

    def step(x):
        with tbbn.balance(model, current=12, memory=4, past_tasks=2):
            return model(x)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for i in range(3):
        y = compiled(images(i))
        with tbbn.balance(plain, **layout(i, False)):
            torch.testing.assert_close(y, plain(images(i)), rtol=1e-5, atol=1e-5)
    assert len(model(torch.randn(5, 2, 5, 5))) == 5  # no layer has a layout of 16 rows
    assert counter.frame_count == 1


@pytest.mark.slow  # a minute of C++ compilation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_inductor_gives_the_same_numbers():
    model, plain = network(), network()
    got = train(torch.compile(model, fullgraph=True), model, False, steps=2)
    for a, b in zip(got, train(plain, plain, False, steps=2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
