"""Moments, plan and affine pass against the layer written out word for word."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import reshape_repeat, split_by_split, splits_by_trial
from torch import nn

import tbbn
from tbbn.errors import UserError
from tbbn.nn.functional import averaged, reference, task_balanced_batch_norm, update_average
from tbbn.nn.plan import Layout, Plan, PlanOptions, make_layout

CPU, DOUBLE = torch.device("cpu"), torch.float64
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def relative(got, wanted):
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()


@st.composite
def problems(draw):
    """A batch with its layout: any sizes, any memory format, memory rows first to last or shuffled in."""
    n_current, n_memory, past = draw(st.integers(1, 12)), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    rule = draw(st.sampled_from(["paper", "current", "uneven"]))
    size = draw(st.sampled_from([(), (1,), (5,), (3, 2), (1, 1), (2, 1, 3)]))
    channels = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(n_current + n_memory, channels, *size, dtype=DOUBLE, generator=generator)
    spread, offset = draw(st.sampled_from([1e-2, 1.0, 30.0])), draw(st.sampled_from([0.0, 1.0, 50.0]))
    x = x * spread + offset * torch.randn(channels, *[1] * len(size), dtype=DOUBLE, generator=generator)
    layout = draw(st.sampled_from(["contiguous", "channels_last", "strided"]))
    if layout == "channels_last" and size:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    is_memory = torch.arange(len(x)) >= n_current
    if draw(st.booleans()):
        is_memory = is_memory[torch.randperm(len(x), generator=generator)]
    return x, is_memory, past, rule, draw(st.booleans()), draw(st.sampled_from(["averaged", "own"])), generator


@given(problems())
@settings(max_examples=120)
def test_output_gradients_and_running_statistics_equal_the_literal_form(problem):
    x, is_memory, past, rule, affine, memory, generator = problem
    c = x.shape[1]
    r = splits_by_trial(int((~is_memory).sum()), int(is_memory.sum()), past, rule)
    plan = make_layout(None, None, is_memory, past, None, rule).plan(PlanOptions(memory=memory), CPU, DOUBLE)
    if r == 1:
        assert plan is None
        return
    weight = torch.randn(c, dtype=DOUBLE, generator=generator) if affine else None
    bias = torch.randn(c, dtype=DOUBLE, generator=generator) if affine else None
    grad = torch.randn(x.shape, dtype=DOUBLE, generator=generator)
    results = []
    for literal in (True, False):
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        running = torch.full((c,), 0.5, dtype=DOUBLE), torch.full((c,), 2.0, dtype=DOUBLE)
        if literal:
            y = split_by_split(leaves[0], *running, *leaves[1:], is_memory, r, 0.3, 1e-5, memory)
        else:
            y = task_balanced_batch_norm(leaves[0], *running, *leaves[1:], plan, 0.3, 1e-5)
        y.backward(grad)
        results.append([y.detach(), *running, *(t.grad for t in leaves if t is not None)])
    names = ["output", "running mean", "running variance", "dx", "dweight", "dbias"]
    for name, wanted, got in zip(names, *results, strict=False):
        # A gradient is compared on the scale of its own terms: where they cancel, rounding is all that is left.
        scale = max(wanted.abs().max().item(), grad.abs().max().item() if name.startswith("d") else 0)
        assert (got - wanted).abs().max().item() <= 1e-10 * scale, name


@pytest.mark.parametrize("past", [1, 2, 3, 6])
@pytest.mark.parametrize("shape", [(64, 5), (64, 5, 7), (64, 3, 4, 4), (64, 3, 2, 3, 2)])
def test_even_splits_equal_the_papers_reshape_and_repeat(shape, past):
    torch.manual_seed(0)
    c = shape[1]
    weight, bias = torch.randn(c, dtype=DOUBLE, requires_grad=True), torch.randn(c, dtype=DOUBLE, requires_grad=True)
    x = (2 + 3 * torch.randn(shape, dtype=DOUBLE)).requires_grad_()
    grad = torch.randn(shape, dtype=DOUBLE)
    plan = Layout(48, 16, past).plan(PlanOptions(), CPU, DOUBLE)
    first, second = [(torch.zeros(c, dtype=DOUBLE), torch.ones(c, dtype=DOUBLE)) for _ in range(2)]
    wanted = reshape_repeat(x, *first, weight, bias, 48, tbbn.splits(48, 16, past))
    got = task_balanced_batch_norm(x, *second, weight, bias, plan)
    for a, b in zip((wanted, *first), (got, *second), strict=True):
        assert relative(b, a) < 1e-10
    for a, b in zip(
        torch.autograd.grad(wanted, (x, weight, bias), grad),
        torch.autograd.grad(got, (x, weight, bias), grad),
        strict=True,
    ):
        assert relative(b, a) < 1e-10


def test_acceptance_numbers_of_task_four():
    torch.manual_seed(0)
    x = torch.randn(64, 3, 4, 4, dtype=DOUBLE)
    current, memory = x[:48], x[48:]
    plan = Layout(48, 16, 3).plan(PlanOptions(), CPU, DOUBLE)
    running = torch.zeros(3, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE)
    y = task_balanced_batch_norm(x, *running, None, None, plan)
    parts = []
    for j in range(8):
        split = nn.BatchNorm2d(3, affine=False).double()(torch.cat([current[j::8], memory]))
        torch.testing.assert_close(y[:48][j::8], split[:6], rtol=1e-12, atol=1e-12)
        parts.append(split[6:])
    torch.testing.assert_close(y[48:], torch.stack(parts).mean(0), rtol=1e-12, atol=1e-12)
    weighted = (current.mean((0, 2, 3)) * 48 / 8 + memory.mean((0, 2, 3)) * 16) / (48 / 8 + 16)
    torch.testing.assert_close(running[0], 0.1 * weighted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 2), {}),
        ((8, 2, 3), {}),
        ((8, 1, 2, 2), {}),
        ((8, 2), {"memory": "own"}),
        *(((8, 2), {"case": case}) for case in (1, 2, 3, 4)),
    ],
)
def test_first_and_second_derivatives(shape, options):
    torch.manual_seed(1)
    plan = Layout(6, 2, 2).plan(PlanOptions(**options), CPU, DOUBLE)
    leaves = [torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in (shape, shape[1:2], shape[1:2])]

    def norm(*tensors):
        return task_balanced_batch_norm(tensors[0], None, None, *tensors[1:], plan)

    assert torch.autograd.gradcheck(norm, leaves)
    assert torch.autograd.gradgradcheck(norm, leaves)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_are_made_only_for_what_needs_one(needed):
    plan = Layout(6, 2, 2).plan(PlanOptions(), CPU, DOUBLE)
    leaves = [torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in ((8, 2, 3), (2,), (2,))]
    wanted = torch.autograd.grad(
        task_balanced_batch_norm(leaves[0], None, None, *leaves[1:], plan).pow(3).sum(), leaves
    )
    chosen = [t if need else t.detach() for t, need in zip(leaves, needed, strict=True)]
    y = task_balanced_batch_norm(chosen[0], None, None, *chosen[1:], plan)
    (got,) = torch.autograd.grad(y.pow(3).sum(), [t for t, need in zip(leaves, needed, strict=True) if need])
    torch.testing.assert_close(got, wanted[needed.index(True)])


def test_weight_without_bias_and_bias_without_weight():
    plan = Layout(6, 2, 2).plan(PlanOptions(), CPU, DOUBLE)
    x, p = torch.randn(8, 2, 3, dtype=DOUBLE), torch.randn(2, dtype=DOUBLE)
    plain = task_balanced_batch_norm(x, None, None, None, None, plan)
    torch.testing.assert_close(task_balanced_batch_norm(x, None, None, p, None, plan), plain * p.view(1, 2, 1))
    torch.testing.assert_close(task_balanced_batch_norm(x, None, None, None, p, plan), plain + p.view(1, 2, 1))


def test_bias_gradient_is_batch_norms():
    torch.manual_seed(0)
    x, grad = torch.randn(64, 3, 4, 4), torch.randn(64, 3, 4, 4)
    layer, plain = tbbn.TaskBalancedBatchNorm2d(3), nn.BatchNorm2d(3)
    with tbbn.balance(layer, current=48, memory=16, past_tasks=5):
        layer(x).backward(grad)
    plain(x).backward(grad)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 2, 3)), rtol=1e-6, atol=1e-5)
    assert not torch.allclose(layer.weight.grad, plain.weight.grad)


def test_affine_map_may_come_after_the_copies_are_averaged():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(64, 3, 4, 4, dtype=DOUBLE), torch.rand(3, dtype=DOUBLE), torch.rand(3, dtype=DOUBLE)
    plan = Layout(48, 16, 3).plan(PlanOptions(), CPU, DOUBLE)
    after = task_balanced_batch_norm(x, None, None, None, None, plan) * weight.view(3, 1, 1) + bias.view(3, 1, 1)
    torch.testing.assert_close(task_balanced_batch_norm(x, None, None, weight, bias, plan), after)


@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_float32_loses_no_more_digits_than_batch_norm(offset, memory_format):
    torch.manual_seed(0)
    x = (torch.randn(64, 8, 8, 8) + offset).to(memory_format=memory_format)
    grad = torch.randn(64, 8, 8, 8).to(memory_format=memory_format)

    def errors(make, exact):
        found = []
        for dtype in (torch.float64, torch.float32):
            layer, leaf = make().to(dtype), x.to(dtype).detach().requires_grad_()
            y = exact(layer, leaf)
            y.backward(grad.to(dtype))
            found.append([t.double() for t in (y.detach(), leaf.grad, layer.running_mean, layer.running_var)])
        return [(a - b).abs().max().item() for a, b in zip(*found, strict=True)]

    def balanced(layer, leaf):
        with tbbn.balance(layer, current=48, memory=16, past_tasks=6):
            return layer(leaf)

    ours = errors(lambda: tbbn.TaskBalancedBatchNorm2d(8), balanced)
    theirs = errors(lambda: nn.BatchNorm2d(8), lambda layer, leaf: layer(leaf))
    # Below a few units in the last place of the result both are exact.
    floors = [1.5e-6, 1e-6, 1e-7 * max(1.0, 0.1 * offset), 1e-7]
    names = ["output", "dx", "running mean", "running var"]
    for name, mine, native, floor in zip(names, ours, theirs, floors, strict=True):
        assert mine <= max(2 * native, floor), f"{name}: {mine:.1e} against {native:.1e}"


@pytest.mark.parametrize("offset", [0.5, 1.0, 2.0, 3.0, 3.5, 10.0])
def test_float32_error_is_small_at_any_offset(offset):
    # Native batch norm is up to 2e-5 off on this input in channels_last.
    torch.manual_seed(0)
    x = (torch.randn(64, 16, 32, 32) + offset).requires_grad_()
    grad = torch.randn(64, 16, 32, 32)
    plan = Layout(48, 16, 6).plan(PlanOptions(), CPU, torch.float32)
    y = task_balanced_batch_norm(x, None, None, None, None, plan)
    exact = task_balanced_batch_norm(x.double(), None, None, None, None, plan)
    assert (y - exact).abs().max() < 2e-5
    assert relative(*(torch.autograd.grad(t, x, grad.to(t.dtype))[0] for t in (y, exact))) < 1e-5


def test_a_tight_split_in_a_wide_batch_keeps_its_digits():
    torch.manual_seed(0)
    x = torch.randn(64, 2, 4, 4)
    x[:48:16] += 1e3  # the first of 16 splits is far away, the others and the memory rows are not
    plan = Layout(48, 16, 6).plan(PlanOptions(), CPU, torch.float32)
    exact = split_by_split(x.double(), None, None, None, None, torch.arange(64) >= 48, 16)
    y = task_balanced_batch_norm(x, None, None, None, None, plan)
    near = torch.arange(64) % 16 != 0
    assert (y - exact)[near].abs().max() < 1e-5
    assert (y - exact).abs().max() < 1e-4


def test_one_channel_far_off_centre_does_not_spoil_itself():
    torch.manual_seed(0)
    x = torch.randn(64, 8, 4, 4)
    x[:, 3] += 1e4
    plan = Layout(48, 16, 6).plan(PlanOptions(), CPU, torch.float32)
    y = task_balanced_batch_norm(x, None, None, None, None, plan)
    exact = task_balanced_batch_norm(x.double(), None, None, None, None, plan)
    assert (y - exact).abs().max() < 2e-3 and (y - exact)[:, [0, 1, 2, 4, 5, 6, 7]].abs().max() < 1e-5


@pytest.mark.parametrize("value", [0.0, 1e-3, 5.0, -1e4])
def test_constant_channels_give_the_bias_and_a_variance_of_zero(value):
    plan = Layout(48, 16, 6).plan(PlanOptions(), CPU, torch.float32)
    running = torch.zeros(2), torch.ones(2)
    x = torch.full((64, 2, 4, 4), value, requires_grad=True)
    y = task_balanced_batch_norm(x, *running, torch.ones(2), torch.full((2,), 3.0), plan)
    y.sum().backward()
    assert torch.all(torch.isfinite(x.grad))
    torch.testing.assert_close(y.detach(), torch.full_like(y, 3.0), atol=1e-3, rtol=0)
    torch.testing.assert_close(running[1], torch.full((2,), 0.9), atol=1e-9, rtol=1e-6)


def test_squares_that_overflow_are_centred_first():
    plan = Layout(48, 16, 6).plan(PlanOptions(), CPU, torch.float32)
    x = torch.randn(64, 3, 4, 4).sign() * 1e15 + 1e20  # 1e40 is no float32
    y = task_balanced_batch_norm(x, None, None, None, None, plan)
    assert torch.all(y.isfinite())


def test_not_a_number_stays_in_its_channel():
    plan = Layout(48, 16, 6).plan(PlanOptions(), CPU, torch.float32)
    x = torch.randn(64, 3, 4, 4)
    x[5, 1, 0, 0] = torch.nan
    y = task_balanced_batch_norm(x, None, None, None, None, plan)
    assert torch.all(y[:, [0, 2]].isfinite()) and torch.any(y[:, 1].isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_input_has_float32_statistics(dtype):
    torch.manual_seed(0)
    x = (torch.randn(64, 8, 6, 6) * 3 + 5).to(dtype)
    grad = torch.randn(64, 8, 6, 6).to(dtype)
    plan = Layout(48, 16, 6).plan(PlanOptions(), CPU, torch.float32)
    results = []
    for inner in (dtype, torch.float32):
        leaf, weight, bias = (t.detach().to(inner).clone().requires_grad_() for t in (x, torch.ones(8), torch.zeros(8)))
        running = torch.zeros(8), torch.ones(8)
        y = task_balanced_batch_norm(leaf, *running, weight, bias, plan)
        y.backward(grad.to(inner))
        assert y.dtype == leaf.grad.dtype == weight.grad.dtype == inner
        results.append([*running, y.float(), leaf.grad.float(), weight.grad.float(), bias.grad.float()])
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    for half, single in zip(results[0][2:], results[1][2:], strict=True):
        assert relative(half, single) < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
def test_autocast_does_not_round_statistics(norm, dtype):
    torch.manual_seed(0)
    layer = tbbn.convert(nn.BatchNorm2d(8), norm)
    x = torch.randn(64, 8, 6, 6) + 3
    states = []
    for enabled in (True, False):
        layer.reset_parameters()
        layer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=enabled), tbbn.balance(layer, current=48, memory=16, past_tasks=6):
            leaf = x.clone().requires_grad_()
            layer(leaf).pow(2).sum().backward()  # backward inside the block: it runs under autocast too
        states.append([layer.running_mean.clone(), layer.running_var.clone(), leaf.grad, layer.weight.grad])
        if norm == "adab2n":
            layer.rate.zero_()
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_autocast_does_not_round_the_products_of_the_reference():
    plan = Layout(48, 16, 3).plan(PlanOptions(), CPU, torch.float32)
    x = torch.randn(64, 3, 5, 4, generator=torch.Generator().manual_seed(0)) + 3
    found = []
    for enabled in (True, False):
        leaf, weight = x.clone().requires_grad_(), torch.linspace(0.5, 2, 3).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, mean, var = reference(leaf, weight, None, plan, 1e-5)
            y.pow(2).sum().backward()
        found.append([y.detach(), mean, var, leaf.grad, weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
def test_memory_format_is_kept(memory_format):
    plan = Layout(48, 16, 3).plan(PlanOptions(), CPU, torch.float32)
    x = torch.randn(64, 3, 5, 4).to(memory_format=memory_format).requires_grad_()
    y = task_balanced_batch_norm(x, None, None, None, None, plan)
    y.backward(torch.randn(64, 3, 5, 4).to(memory_format=memory_format))
    assert y.is_contiguous(memory_format=memory_format)
    assert x.grad.is_contiguous(memory_format=memory_format)


def test_gradients_of_any_layout_are_taken():
    plan = Layout(6, 2, 3).plan(PlanOptions(), CPU, DOUBLE)
    x = torch.randn(8, 3, 4, 4, dtype=DOUBLE).to(memory_format=torch.channels_last).requires_grad_()
    y = task_balanced_batch_norm(x, None, None, None, None, plan)
    grad = torch.randn(8, 3, 4, 4, dtype=DOUBLE)
    (plain,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (last,) = torch.autograd.grad(y, x, grad.to(memory_format=torch.channels_last), retain_graph=True)
    torch.testing.assert_close(plain, last)
    (expanded,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (full,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(expanded, full)


def test_input_is_not_changed():
    plan = Layout(48, 16, 3).plan(PlanOptions(), CPU, torch.float32)
    for offset in (0, 1e3):
        x = torch.randn(64, 3, 5, 4) + offset
        before = x.clone()
        x.requires_grad_()
        task_balanced_batch_norm(x, None, None, None, None, plan).sum().backward()
        assert torch.equal(x.detach(), before)


def test_reference_is_the_same_function():
    torch.manual_seed(0)
    plan = Layout(48, 16, 3).plan(PlanOptions(case=3), CPU, DOUBLE)
    x, weight = torch.randn(64, 3, 4, dtype=DOUBLE) + 4, torch.rand(3, dtype=DOUBLE)
    running = torch.zeros(3, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE)
    y = task_balanced_batch_norm(x, *running, weight, None, plan, 1.0)
    same, mean, var = reference(x, weight, None, plan, 1e-5)
    n = 22 * 4
    torch.testing.assert_close(same, y)
    torch.testing.assert_close(mean.mean(0), running[0])
    torch.testing.assert_close(var.mean(0) * n / (n - 1), running[1])


def test_groups_that_share_no_row_are_normalised_alone():
    torch.manual_seed(0)
    eye = torch.eye(2, dtype=DOUBLE).repeat_interleave(3, 1)  # rows 0..2 and rows 3..5
    halves = torch.full((2,), 0.5, dtype=DOUBLE)
    plan = Plan(6, eye / 3, eye.t().contiguous(), halves, 6 * halves, torch.zeros(1, dtype=torch.int64))
    x = torch.randn(6, 2, 5, dtype=DOUBLE)
    wanted = torch.cat([nn.functional.batch_norm(part, None, None, training=True) for part in x.split(3)])
    torch.testing.assert_close(reference(x, None, None, plan, 1e-5)[0], wanted)


@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_the_references_single_pass_keeps_its_digits(offset, memory_format):
    torch.manual_seed(0)
    x = torch.randn(16, 4, 24, 24) + offset
    x[:, :, 0, 0] += 30  # the pixel that is subtracted is far from the others
    x[5:7] *= 50
    x = x.to(memory_format=memory_format).requires_grad_()
    grad = torch.randn(16, 4, 24, 24).to(memory_format=memory_format)
    single, double = (Layout(12, 4, 3).plan(PlanOptions(), CPU, dtype) for dtype in (torch.float32, DOUBLE))
    y, exact = reference(x, None, None, single, 1e-5)[0], reference(x.double(), None, None, double, 1e-5)[0]
    assert y.is_contiguous(memory_format=memory_format)
    # The squared distance of a pixel from the mean of its row is at most the variance times the number of pixels, here 576.
    bound = 2 * 576 * torch.finfo(torch.float32).eps
    assert relative(y.double(), exact) < bound + 1e-7 * offset
    assert relative(*(torch.autograd.grad(t, x, grad.to(t.dtype))[0] for t in (y, exact))) < bound


def test_saved_for_backward_is_the_input_and_a_little():
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    layer = tbbn.TaskBalancedBatchNorm2d(16)
    x = torch.randn(64, 16, 32, 32, requires_grad=True)
    for offset in (0, 1e3):
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with hooks, tbbn.balance(layer, current=48, memory=16, past_tasks=6):
            layer(x + offset)
        assert sum(saved.values()) <= 1.05 * x.untyped_storage().nbytes()
        saved.clear()


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.7, 1.0, torch.tensor(0.3), torch.tensor(1.0).double()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
def test_a_running_average_moves_by_its_momentum_and_ends_where_it_should(dtype, momentum):
    running, value = torch.tensor([1e8, -2.0, 0.5], dtype=dtype), torch.tensor([1.0, 3.0, 0.25])
    wanted = running.double() + (value.double() - running.double()) * float(momentum)
    before, got = running.clone(), averaged(running, value, momentum)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
    assert got.dtype == torch.float32 and torch.equal(running, before)
    update_average(running, value, momentum)
    assert torch.equal(running, got.to(dtype))
    torch.testing.assert_close(running.double(), wanted, rtol=0.01 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_running_statistics_move_together_or_not_at_all():
    plan = Layout(6, 2, 3).plan(PlanOptions(), CPU, DOUBLE)
    x, mean, var = torch.randn(8, 3, 4, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE)
    wanted = task_balanced_batch_norm(x, None, None, None, None, plan)
    for running in ((mean, None), (None, var)):
        assert torch.equal(task_balanced_batch_norm(x, *running, None, None, plan), wanted)
    assert torch.equal(mean, torch.zeros_like(mean)) and torch.equal(var, torch.ones_like(var))


@pytest.mark.parametrize("eps", [0.0, -1e-5])
def test_an_eps_that_is_not_positive_is_refused(eps):
    for plan in (None, Layout(6, 2, 3).plan(PlanOptions(), CPU, DOUBLE)):
        with pytest.raises(ValueError, match=f"eps must be positive, got {eps}"):
            task_balanced_batch_norm(torch.randn(8, 3), None, None, None, None, plan, eps=eps)
        assert task_balanced_batch_norm(torch.randn(8, 3), None, None, None, None, plan, eps=1e-30).isfinite().all()


def test_plan_of_another_size_is_refused():
    plan = Layout(48, 16, 3).plan(PlanOptions(), CPU, torch.float32)
    with pytest.raises(UserError, match="the plan covers 64 rows but the input has 60"):
        task_balanced_batch_norm(torch.randn(60, 3), None, None, None, None, plan)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in jvp
def test_function_transforms_go_through_the_reference():
    torch.manual_seed(0)
    plan = Layout(6, 2, 2).plan(PlanOptions(), CPU, DOUBLE)
    x, direction = torch.randn(2, 8, 3, 4, dtype=DOUBLE)

    def norm(t):
        return task_balanced_batch_norm(t, None, None, None, None, plan)

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(norm(leaf).pow(3).sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda t: norm(t).pow(3).sum())(x), wanted)
    both = torch.func.vmap(norm)(torch.stack([x, direction]))
    torch.testing.assert_close(both, torch.stack([norm(x), norm(direction)]))
    value, slope = torch.func.jvp(lambda t: norm(t).pow(3).sum(), (x,), (direction,))
    torch.testing.assert_close(value, norm(x).pow(3).sum())
    torch.testing.assert_close(slope, (wanted * direction).sum())


def test_meta_tensors_have_shapes_only():
    layer = tbbn.TaskBalancedBatchNorm2d(3, device="meta")
    with tbbn.balance(layer, current=6, memory=2, past_tasks=2):
        assert layer(torch.empty(8, 3, 2, 2, device="meta")).shape == (8, 3, 2, 2)
