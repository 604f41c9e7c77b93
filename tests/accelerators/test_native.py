"""The native backend: equal to the literal form for any strides and plan, and skipped for inputs it cannot take."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import split_by_split, splits_by_trial
from torch import nn

import tbbn
from tbbn.accelerators import eager
from tbbn.accelerators.backend import find, only
from tbbn.accelerators.native import binding as native
from tbbn.nn.functional import task_balanced_batch_norm
from tbbn.nn.plan import Layout, PlanOptions, make_layout

CPU, SINGLE, DOUBLE = torch.device("cpu"), torch.float32, torch.float64
compiled = pytest.mark.skipif(native.library() is None, reason=f"C kernel: {native.status()}")


def is_compiled(y):
    return "_NativeNorm" in type(y.grad_fn).__name__


@st.composite
def problems(draw):
    n_current, n_memory, past = draw(st.integers(1, 12)), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    rule = draw(st.sampled_from(["paper", "current", "uneven"]))
    size = draw(st.sampled_from([(1,), (5,), (17,), (3, 2), (1, 1), (7, 7), (8, 8), (2, 1, 3)]))
    channels = draw(st.sampled_from([1, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 41]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(n_current + n_memory, channels, *size, generator=generator)
    spread, offset = draw(st.sampled_from([0.1, 1.0, 30.0])), draw(st.sampled_from([0.0, 1.0, 100.0]))
    x = x * spread + offset * torch.randn(channels, *[1] * len(size), generator=generator)
    if draw(st.booleans()):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    is_memory = torch.arange(len(x)) >= n_current
    if draw(st.booleans()):
        is_memory = is_memory[torch.randperm(len(x), generator=generator)]
    return x, is_memory, past, rule, draw(st.booleans()), draw(st.sampled_from(["averaged", "own"])), generator


def smallest_deviation(x, is_memory, r):
    """The smallest standard deviation over splits and channels: gradients are divided by it."""
    current, memory = torch.where(~is_memory)[0], torch.where(is_memory)[0]
    splits = (x[torch.cat([current[j::r], memory])].transpose(0, 1).flatten(1) for j in range(r))
    return min(s.var(1, correction=0).min().add(1e-5).sqrt().item() for s in splits)


@compiled
@given(problems())
@settings(max_examples=150)
def test_output_gradients_and_running_statistics_equal_the_literal_form(problem):
    x, is_memory, past, rule, affine, memory, generator = problem
    c = x.shape[1]
    r = splits_by_trial(int((~is_memory).sum()), int(is_memory.sum()), past, rule)
    if r == 1:
        return
    plan = make_layout(None, None, is_memory, past, None, rule).plan(PlanOptions(memory=memory), CPU, SINGLE)
    weight, bias = (torch.randn(c, generator=generator) if affine else None for _ in range(2))
    grad = torch.randn(x.shape, generator=generator)
    results = []
    for dtype in (DOUBLE, SINGLE):
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
        running = torch.full((c,), 0.5, dtype=dtype), torch.full((c,), 2.0, dtype=dtype)
        if dtype == DOUBLE:
            y = split_by_split(leaves[0], *running, *leaves[1:], is_memory, r, 0.3, 1e-5, memory)
        else:
            y = task_balanced_batch_norm(leaves[0], *running, *leaves[1:], plan, 0.3, 1e-5)
            assert is_compiled(y) and y.stride() == x.stride()
        y.backward(grad.to(dtype))
        results.append([y.detach(), *running, *(t.grad for t in leaves if t is not None)])
    gain = 1 if weight is None else weight.abs().max().item()
    # A gradient is compared on the scale of its own terms: where they cancel, rounding is all that is left.
    terms = grad.abs().max().item() * max(1.0, gain / smallest_deviation(x.double(), is_memory, r))
    names = ["output", "running mean", "running variance", "dx", "dweight", "dbias"]
    for name, wanted, got in zip(names, *results, strict=False):
        scale = max(wanted.abs().max().item(), terms if name.startswith("d") else 0)
        assert (got - wanted).abs().max().item() <= 2e-6 * scale, name


@compiled
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize(
    "options", [{}, {"rule": "uneven"}, {"memory": "own"}, {"total_variance": True}, {"kind": "weighted"}]
    + [{"case": case} for case in (1, 2, 4)], ids=str,
)  # fmt: skip
def test_every_plan_equals_the_eager_backend_in_double(options, last):
    torch.manual_seed(0)
    x, grad = torch.randn(64, 20, 5, 5) * 2 + 7, torch.randn(64, 20, 5, 5)
    if last:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    results = []
    for dtype in (DOUBLE, SINGLE):
        leaves = [t.to(dtype).requires_grad_() for t in (x.detach(), torch.linspace(-1, 2, 20), torch.zeros(20))]
        running = torch.zeros(20, dtype=dtype), torch.ones(20, dtype=dtype)
        plan = Layout(50, 14, 4).plan(PlanOptions(**options), CPU, dtype)
        y = task_balanced_batch_norm(leaves[0], *running, *leaves[1:], plan)
        assert is_compiled(y) == (dtype == SINGLE)
        y.backward(grad.to(dtype))
        results.append([y.detach(), *running, *(t.grad for t in leaves)])
    for wanted, got in zip(*results, strict=True):
        assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@compiled
def test_averaged_statistics_are_left_to_the_eager_backend():
    plan = Layout(48, 16, 3).plan(PlanOptions(case=3), CPU, SINGLE)
    assert not is_compiled(
        task_balanced_batch_norm(torch.randn(64, 3, 4), None, None, torch.ones(3).requires_grad_(), None, plan)
    )


@compiled
def test_native_and_eager_agree():
    torch.manual_seed(0)
    x, grad, results = torch.randn(64, 12, 6, 6) + 2, torch.randn(64, 12, 6, 6), []
    for chosen in (native, eager):
        layer, leaf = tbbn.TaskBalancedBatchNorm2d(12), x.clone().requires_grad_()
        with only(chosen), tbbn.balance(layer, current=48, memory=16, past_tasks=6):
            y = layer(leaf)
        assert is_compiled(y) == (chosen is native)
        y.backward(grad)
        results.append(
            [y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@compiled
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_error_is_at_most_twice_batch_norms(offset, last):
    torch.manual_seed(0)
    x, grad = torch.randn(64, 24, 8, 8) + offset, torch.randn(64, 24, 8, 8)
    if last:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))

    def errors(kind):
        found = []
        for dtype in (DOUBLE, SINGLE):
            layer, leaf = kind(24).to(dtype), x.to(dtype).detach().requires_grad_()
            with tbbn.balance(
                nn.Sequential(layer, tbbn.TaskBalancedBatchNorm2d(1)), current=48, memory=16, past_tasks=6
            ):
                y = layer(leaf)
            y.backward(grad.to(dtype))
            found.append([y.detach(), leaf.grad, layer.running_mean, layer.running_var, layer.weight.grad])
        return [(a - b).abs().max().item() for a, b in zip(*found, strict=True)]

    # Below a unit in the last place of the largest value both are exact.
    floors = [1e-6, 1e-6, 1e-7 * max(1.0, 0.1 * offset), 1e-7, 1e-4]
    for mine, native_error, floor in zip(
        errors(tbbn.TaskBalancedBatchNorm2d), errors(nn.BatchNorm2d), floors, strict=True
    ):
        assert mine <= max(2 * native_error, floor)


@compiled
@pytest.mark.parametrize("shape", [(64, 16, 32, 32), (64, 40, 8, 8), (64, 700, 7, 7), (64, 2000)])
def test_bits_do_not_depend_on_the_number_of_threads(shape):
    torch.manual_seed(0)
    before, plan = torch.get_num_threads(), Layout(48, 16, 6).plan(PlanOptions(), CPU, SINGLE)
    x, grad = torch.randn(shape), torch.randn(shape)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    results = []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            leaves = [t.clone().requires_grad_() for t in (x, torch.ones(shape[1]), torch.zeros(shape[1]))]
            running = torch.zeros(shape[1]), torch.ones(shape[1])
            y = task_balanced_batch_norm(leaves[0], *running, *leaves[1:], plan)
            y.backward(grad)
            results.append([y.detach(), *running, *(t.grad for t in leaves)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# -- Autograd and state -------------------------------------------------------------------------------------------------


@compiled
def test_second_derivatives_are_the_references():
    torch.manual_seed(0)
    leaves, second = [torch.randn(s) for s in ((8, 3, 4), (3,), (3,))], []
    for dtype in (SINGLE, DOUBLE):
        plan = Layout(6, 2, 2).plan(PlanOptions(), CPU, dtype)
        inputs = [t.to(dtype).requires_grad_() for t in leaves]
        y = task_balanced_batch_norm(inputs[0], None, None, *inputs[1:], plan)
        assert is_compiled(y) == (dtype == SINGLE)
        first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for got, wanted in zip(*second, strict=True):
        assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@compiled
@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_are_made_only_for_what_needs_one(needed):
    plan = Layout(6, 2, 2).plan(PlanOptions(), CPU, SINGLE)
    leaves = [torch.randn(s) for s in ((8, 2, 3), (2,), (2,))]
    grads = []
    for chosen in ((True, True, True), needed):
        inputs = [t.clone().requires_grad_(need) for t, need in zip(leaves, chosen, strict=True)]
        task_balanced_batch_norm(inputs[0], None, None, *inputs[1:], plan).pow(3).sum().backward()
        grads.append([t.grad for t in inputs])
    for wanted, got, need in zip(*grads, needed, strict=True):
        assert torch.equal(wanted, got) if need else got is None


@compiled
def test_autograd_sees_the_update_of_running_statistics_and_a_cumulative_average_works():
    torch.manual_seed(0)
    layer, x = tbbn.TaskBalancedBatchNorm2d(3, momentum=None), torch.randn(2, 64, 3, 4, 4)
    statistics = (layer.running_mean, layer.running_var)
    products = [(statistic * torch.ones(3, requires_grad=True)).sum() for statistic in statistics]
    means = []
    for batch in x:
        with tbbn.balance(layer, current=48, memory=16, past_tasks=6):
            assert is_compiled(layer(batch))
        # The mean over splits weighs a memory row sixteen times a current one.
        rows = batch.mean((2, 3))
        means.append((rows[:48].sum(0) + 16 * rows[48:].sum(0)) / (48 + 16 * 16))
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    torch.testing.assert_close(layer.running_mean, torch.stack(means).mean(0))


@compiled
def test_inference_mode_updates_running_statistics_too():
    layer = tbbn.TaskBalancedBatchNorm2d(3)
    with torch.inference_mode(), tbbn.balance(layer, current=48, memory=16, past_tasks=6):
        layer(torch.randn(64, 3, 4, 4) + 5)
    assert (layer.running_mean > 0.4).all()


@compiled
def test_hooks_may_change_the_strides_of_the_saved_input():
    torch.manual_seed(0)
    x = torch.randn(64, 5, 3, 3).to(memory_format=torch.channels_last)
    plan, grads = Layout(48, 16, 6).plan(PlanOptions(), CPU, SINGLE), []
    for pack in (lambda t: t, lambda t: t.contiguous(), lambda t: torch.stack([t, t], -1)[..., 0]):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = task_balanced_batch_norm(leaf, None, None, None, None, plan)
        y.pow(2).mul(x).sum().backward()
        grads.append(leaf.grad)
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0])


@compiled
def test_saved_for_backward_is_at_most_3_percent_more_than_the_input():
    sizes = {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(64, 64, 8, 8, requires_grad=True)
    plan = Layout(48, 16, 6).plan(PlanOptions(), CPU, SINGLE)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        task_balanced_batch_norm(x, None, None, torch.ones(64), torch.ones(64), plan)
    assert sum(sizes.values()) <= 1.03 * x.untyped_storage().nbytes()


# -- What it must not touch ---------------------------------------------------------------------------------------------


@compiled
def test_tensors_without_memory_of_their_own_do_not_reach_the_kernel():
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Wrapped(torch.Tensor):
        pass

    plan, x = Layout(6, 2, 2).plan(PlanOptions(), CPU, SINGLE), torch.randn(8, 3, 4)

    def asked(t):
        seen.append(find(t, None, None, None, None, plan) is native)
        return t

    seen: list[bool] = []
    asked(x)
    assert seen == [True]
    seen.clear()
    torch.func.vmap(asked)(torch.stack([x, x]))
    torch.func.grad(lambda t: asked(t).sum())(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and used all the same
        torch.jit.trace(asked, x, check_trace=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        asked(x)
        asked(mode.from_tensor(x))
    for other in (x.as_subclass(Wrapped), x.to("meta"), x.double(), torch.stack([x, x], -1)[..., 0], x[:, :0]):
        asked(other)
    assert seen == [False] * 10


@compiled
@pytest.mark.parametrize("which", ["weight", "bias", "running"])
def test_vectors_of_another_length_are_an_error_not_a_read_beyond_them(which):
    plan = Layout(48, 16, 3).plan(PlanOptions(), CPU, SINGLE)
    vectors = {name: torch.ones(2 if name == which else 3) for name in ("weight", "bias", "running")}
    with pytest.raises(RuntimeError):
        task_balanced_batch_norm(
            torch.randn(64, 3, 4),
            vectors["running"],
            vectors["running"].clone(),
            vectors["weight"],
            vectors["bias"],
            plan,
        )


@compiled
@pytest.mark.parametrize("size", [1e18, 1e30])
def test_values_whose_variance_float32_cannot_hold_are_not_numbers_in_either_form(size):
    """Up to 1e18 both forms agree. Beyond the range of float32, a run must be seen to diverge with either."""
    x = size * torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for backend in (native, eager):
        layer = tbbn.TaskBalancedBatchNorm2d(3)
        with only(backend), tbbn.balance(layer, current=6, memory=2, past_tasks=2):
            results.append((layer(x), layer.running_var))
    for ours, theirs in zip(*results, strict=True):
        assert ours.isnan().all() == theirs.isnan().all() == (size > 1e18)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
