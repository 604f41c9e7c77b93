"""What the kernels fuse with the norm: ReLU, residual, known moments, rows in parts, batch norm in eval mode; against float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from interpreter import RUNNING, apart, here, interpret, on_device
from planned import buffers, compare, draw, literal, make_plan, triton_norm
from torch import Tensor

import tbbn
from tbbn.accelerators import backend, eager
from tbbn.accelerators.fused import FusedBatchNorm2d, accelerate, norm_act

if RUNNING:
    from tbbn.accelerators.triton import norm as kernels
    from tbbn.accelerators.triton import norm_forward, norm_launch, norm_tiles


@here
def test_this_file_passes_on_the_interpreter():
    interpret(__file__)


@pytest.fixture(params=[True, False], ids=["whole", "split"])
def whole(request, monkeypatch):
    """Moments from the tile that is normalised, or from a launch of their own."""
    if not request.param:
        monkeypatch.setattr(norm_tiles, "WHOLE_LIMIT", 0)


@on_device
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize(
    ("relu", "with_residual"), [(True, False), (False, True), (True, True)], ids=["relu", "residual", "both"]
)
def test_a_relu_and_a_residual_are_part_of_the_pass(device, whole, last, relu, with_residual):
    x, weight, bias, g = draw((16, 5, 3, 3), device, last=last)
    residual = draw((16, 5, 3, 3), device, offset=-1.0, last=last)[3].detach().requires_grad_()
    plan = make_plan(12, 4, 9, device)
    y = triton_norm(x, weight, bias, plan, relu=relu, residual=residual if with_residual else None)
    inputs = [x, weight, bias] + [residual] * with_residual
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = literal(*exact[:3], 12, plan.gather.shape[0])[0]
    want = want + exact[3] if with_residual else want
    want = F.relu(want) if relu else want
    assert apart(y, want) < 1e-6
    assert bool((y == 0).any()) == relu
    got = torch.autograd.grad(y, inputs, g)
    for a, b in zip(got, torch.autograd.grad(want, exact, g.double()), strict=True):
        assert apart(a, b) < 5e-6


@on_device
@pytest.mark.parametrize("relu", [True, False], ids=["relu", ""])
def test_nothing_is_saved_that_batch_norm_would_not_save(device, relu):
    x, weight, bias, residual = draw((8, 2, 3, 3), device)
    saved: set[int] = set()

    def pack(t: Tensor) -> Tensor:
        saved.add(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        plan = make_plan(6, 2, 3, device)
        y = triton_norm(x, weight, bias, plan, relu=relu, residual=residual.requires_grad_())
    assert x.data_ptr() in saved and residual.data_ptr() not in saved
    assert (y.data_ptr() in saved) == relu


@on_device
def test_a_relu_alone_needs_no_output_to_be_saved(device, monkeypatch):
    """Factors and offsets of the affine pass give its sign."""
    monkeypatch.setattr(norm_tiles, "WHOLE_LIMIT", 0)
    x, weight, bias, _ = draw((8, 2, 3, 3), device)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = triton_norm(x, weight, bias, make_plan(6, 2, 3, device), relu=True)
    assert y.data_ptr() not in [t.data_ptr() for t in saved]
    assert sorted(t.shape for t in saved if t.dim() == 3) == [(2, 2, 2), (2, 8, 2)]  # (2, groups or rows, channels)


@on_device
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
def test_a_relu_of_zero_has_no_gradient(device, whole, with_residual):
    """As in torch. Blocks that start as the identity have norms whose weight is zero."""
    x, weight, bias, g = draw((8, 2, 3, 3), device)
    weight, bias = (torch.zeros_like(t).requires_grad_() for t in (weight, bias))
    residual = torch.zeros_like(g) if with_residual else None
    y = triton_norm(x, weight, bias, make_plan(6, 2, 3, device), relu=True, residual=residual)
    assert not y.any()
    assert not any(t.any() for t in torch.autograd.grad(y, (x, weight, bias), g))


@on_device
def test_the_sign_by_a_table_and_the_sign_by_an_output_are_different_launches(device, monkeypatch):
    """A recorded launch must not be replayed for the other."""
    monkeypatch.setattr(norm_tiles, "WHOLE_LIMIT", 0)
    keys: list[object] = []
    monkeypatch.setattr(norm_launch, "replayed", lambda key, bases: keys.append(key))
    for residual in (None, torch.zeros(8, 2, 3, 3, device=device)):
        x, weight, bias, g = draw((8, 2, 3, 3), device)
        y = triton_norm(x, weight, bias, make_plan(6, 2, 3, device), relu=True, residual=residual)
        torch.autograd.grad(y, x, g)
    assert len(keys) == len(set(keys)) == 4


@on_device
@pytest.mark.parametrize("odd", [False, True], ids=["", "copied"])
def test_with_a_limit_of_zero_no_tile_is_whole(device, odd):
    x = torch.zeros(4, 8, 4, 3, device=device)
    x = x.permute(1, 3, 0, 2) if odd else x
    assert norm_tiles.geometry_of(x, 1)[1].tiles.whole
    assert not norm_tiles.geometry_of(x, 1, limit=0)[1].tiles.whole
    assert norm_tiles.geometry_of(x, 1)[1].tiles.whole


@on_device
@pytest.mark.parametrize(("pixels", "inside"), [(4, False), (8, True), (256, True), (257, False)])
def test_scratch_for_parts_reuses_a_small_output_that_is_large_enough(device, pixels, inside):
    out = torch.empty(8, 2, pixels, device=device)
    work = norm_launch.work_for(3, norm_launch.geometry_of(out, 2)[1], 4, out, out)
    one, two = norm_launch.part_sums(3, work, 4, out)
    assert not inside or len(work) == 3
    assert one.shape == two.shape == (32, 2) and one.data_ptr() != two.data_ptr()
    assert (one.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()) is inside
    assert inside or one.data_ptr() >= work[3].data_ptr()


@on_device
@pytest.mark.parametrize("relu", [True, False], ids=["relu", ""])
def test_second_derivatives_pass_a_relu_and_a_residual(device, relu):
    x, weight, bias, g = draw((8, 2, 3, 3), device)
    residual = g.detach().flip(0).requires_grad_()
    plan = make_plan(6, 2, 3, device)

    def penalty(out, inputs):
        return sum(t.square().sum() for t in torch.autograd.grad(out.square().sum(), inputs, create_graph=True))

    inputs = (x, weight, bias, residual)
    y = triton_norm(x, weight, bias, plan, relu=relu, residual=residual)
    got = torch.autograd.grad(penalty(y, inputs), inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want_y = literal(*exact[:3], 6, 2)[0] + exact[3]
    want_y = F.relu(want_y) if relu else want_y
    want = torch.autograd.grad(penalty(want_y, exact), exact)
    for a, b in zip(got, want, strict=True):
        assert apart(a, b) < 1e-4


@on_device
def test_second_derivatives_pass_a_relu_alone(device, whole):
    x, weight, bias, _ = draw((8, 2, 3, 3), device, offset=5.0)
    inputs = (x, weight, bias)

    def penalty(out, inputs):
        return sum(t.square().sum() for t in torch.autograd.grad(out.square().sum(), inputs, create_graph=True))

    y = triton_norm(*inputs, make_plan(6, 2, 3, device), relu=True)
    got = torch.autograd.grad(penalty(y, inputs), inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = torch.autograd.grad(penalty(F.relu(literal(*exact, 6, 2)[0]), exact), exact)
    for a, b in zip(got, want, strict=True):
        assert apart(a, b) < 1e-4


@on_device
def test_an_output_by_its_table_is_computed_in_float32(device):
    """Relative to the channel's first value: 60 000 - -60 000 is more than float16 holds."""
    x = torch.tensor([[[-60000.0, 60000.0], [1.0, 3.0]], [[0.0, -60000.0], [5.0, 1.0]]], device=device).half()
    table = torch.tensor([[[0.5, 2.0], [0.25, 3.0]], [[1.0, 7.0], [2.0, -4.0]]], device=device)  # factors, offsets
    want = [[[1.0, 59985.0], [7.0, 11.0]], [[14998.0, 2.0], [8.0, -4.0]]]
    assert torch.allclose(kernels._output(x, table).cpu(), torch.tensor(want), rtol=1e-3, atol=0)
    assert kernels._output(x, table).dtype == torch.float32


@on_device
def test_a_residual_of_another_type_is_added_after_the_norm(device):
    x, weight, bias, _ = draw((8, 2, 3, 3), device, dtype=torch.bfloat16)
    residual = torch.randn(8, 2, 3, 3, device=device)
    plan = make_plan(6, 2, 3, device)
    plain = triton_norm(x, weight, bias, plan)
    y = triton_norm(x, weight, bias, plan, relu=True, residual=residual)
    assert torch.equal(y, (plain + residual).to(torch.bfloat16).relu())


@pytest.fixture
def chosen():
    """The Triton backend is first on any device: on the CPU it is interpreted."""
    with backend.only(kernels, eager):
        yield


def fused(norm: torch.nn.BatchNorm2d) -> FusedBatchNorm2d:
    return accelerate(copy.deepcopy(norm), torch.device("cuda"))


@on_device
@pytest.mark.parametrize("make", [fused, lambda norm: tbbn.convert(copy.deepcopy(norm))], ids=["fused", "tbbn"])
def test_without_a_plan_the_kernels_are_batch_norm(device, make, chosen):
    x, weight, bias, g = draw((8, 3, 4, 4), device)
    residual = g.detach().flip(0)
    norm = torch.nn.BatchNorm2d(3, device=device)
    with torch.no_grad():
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)
    ours = make(norm)
    assert ours.state_dict().keys() == norm.state_dict().keys()
    for _ in range(2):
        y = norm_act(ours, x, residual=residual)
        want = F.relu(norm(x) + residual)
    assert apart(y, want) < 1e-6
    assert ours.num_batches_tracked.item() == 2
    assert max(apart(ours.running_mean, norm.running_mean), apart(ours.running_var, norm.running_var)) < 1e-6
    for a, b in zip(
        torch.autograd.grad(y, (x, ours.weight, ours.bias), g),
        torch.autograd.grad(want, (x, norm.weight, norm.bias), g),
        strict=True,
    ):
        assert apart(a, b) < 1e-5
    assert apart(ours(x), norm(x)) < 1e-6 and "Triton" in type(ours(x).grad_fn).__name__
    norm.load_state_dict(ours.state_dict())
    assert torch.equal(ours.eval()(x), norm.eval()(x))


@on_device
@pytest.mark.parametrize("tracked", [True, False], ids=["running statistics", "none"])
def test_a_batch_is_counted_once(device, tracked):
    x, weight, bias, _ = draw((8, 2, 3, 3), device)
    batches = torch.zeros((), dtype=torch.int64, device=device)
    running = buffers(2, device) if tracked else (None, None)
    kernels.norm(x, *running, weight, bias, make_plan(6, 2, 3, device), 0.1, 1e-5, batches)
    assert batches.item() == 1


@on_device
def test_fused_batch_norm_takes_the_plan_of_the_whole_batch_and_nothing_else(device, chosen, monkeypatch):
    """The bench's batch norm on a GPU: the launch it always had, argument by argument."""
    seen, forward = [], norm_launch.forward
    monkeypatch.setattr(norm_launch, "forward", lambda *args: seen.append(args) or forward(*args))
    norm = fused(torch.nn.BatchNorm2d(3, device=device))
    x = torch.randn(8, 3, 4, 4, device=device)
    norm(x)
    ((given, weight, bias, gather, scatter, eps, running, relu, residual, moments),) = seen
    plan = kernels.whole_batch(8, x.device)
    assert (
        given is x and weight is norm.weight and bias is norm.bias and gather is plan.gather and scatter is plan.scatter
    )
    assert running.mean is norm.running_mean and running.var is norm.running_var
    assert running.batches is norm.num_batches_tracked and running.momentum == 0.1
    assert running.share.tolist() == [1] and running.sizes.tolist() == [8]
    assert (eps, relu, residual, moments, running.total) == (norm.eps, False, None, None, False)


PARTS = {
    "nchw": {"shape": (4, 2, 66, 63), "parts": 2},
    "nchw, parts longer than a tile": {"shape": (4, 1, 2, 4099), "parts": 2, "relu": True},
    "channels_last": {"shape": (4, 3, 24, 24), "parts": 4, "relu": True},
    "channels_last, parts longer than a tile": {"shape": (4, 3, 2, 2051), "parts": 2},
    "channels_last, scratch in the output": {"shape": (4, 32, 16, 16), "parts": 8},
    "channels_last, scratch in the output, an odd channel": {"shape": (4, 33, 16, 16), "parts": 8, "relu": True},
}


@on_device
@pytest.mark.parametrize("name", [*list(PARTS)[:-1], pytest.param(list(PARTS)[-1], marks=pytest.mark.nightly)])
def test_rows_are_summed_in_parts_where_programs_would_be_few(device, name, monkeypatch):
    monkeypatch.setattr(norm_tiles, "WHOLE_LIMIT", 0)
    case, last = dict(PARTS[name]), name.startswith("channels_last")
    rows, channels, height, width = case["shape"]
    tiles = norm_tiles.tiles_for(rows, channels, height * width, 2, last, 4, norm_tiles.WHOLE_LIMIT)
    assert not tiles.whole and tiles.parts == case.pop("parts")
    assert max(compare(**case, past=3, device=device, current=2, last=last)) < 5e-6


@on_device
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("parts", [1, 4])
def test_known_moments_give_the_result_of_the_pass_they_save(device, whole, parts, last, monkeypatch):
    x, weight, bias, g = draw((16, 3, 4, 4), device, offset=100.0, last=last)
    plan = make_plan(12, 4, 9, device)
    cut = x.detach().double().flatten(2).unflatten(2, (parts, -1))  # (N, C, parts, pixels of a part)
    moments = torch.stack([cut.mean(3), cut.var(3, correction=0)]).transpose(2, 3).float().contiguous()

    def work(moments: Tensor | None) -> list[Tensor]:
        running = buffers(3, device)
        y = triton_norm(x, weight, bias, plan, running, moments=moments)
        return [y, *running, *torch.autograd.grad(y, (x, weight, bias), g)]

    want = work(None)
    monkeypatch.setattr(norm_forward, "moments", None)  # the pass that is saved
    for a, b in zip(work(moments), want, strict=True):
        assert apart(a, b) < 1e-5


@on_device
@pytest.mark.parametrize("shape", [(6, 16, 8, 8), (3, 5, 7, 7), (70, 3, 2, 2), (9, 12)], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", ""])
def test_in_eval_mode_the_fused_pass_is_batch_norm_and_what_follows(device, shape, affine, chosen):
    kind = torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d
    norm = kind(shape[1], affine=affine, device=device)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        for parameter in norm.parameters():
            parameter.normal_()
    ours, norm = tbbn.convert(copy.deepcopy(norm)).eval(), norm.double().eval()
    for last in (False, True) if len(shape) == 4 else (False,):
        x, _, _, other = (t.detach() for t in draw(shape, device, last=last))
        for relu, residual in ((True, None), (True, other), (False, other)):
            with torch.no_grad():
                got = norm_act(ours, x, relu=relu, residual=residual)
                want = norm(x.double()) if residual is None else norm(x.double()) + residual
            assert apart(got, want.relu() if relu else want) < 1e-6
            assert got.stride() == x.stride()


@on_device
def test_in_eval_mode_gradients_are_there_if_they_are_enabled(device, chosen, monkeypatch):
    monkeypatch.setattr(norm_launch, "eval_forward", None)  # has no gradient
    ours = tbbn.convert(torch.nn.BatchNorm2d(3, device=device)).eval()
    x = torch.randn(4, 3, 2, 2, device=device, requires_grad=True)
    norm_act(ours, x).sum().backward()
    assert x.grad is not None


@on_device
def test_in_eval_mode_the_kernel_is_used_only_where_it_can_be(device, chosen, monkeypatch):
    taken, fixed = [], norm_launch.eval_forward
    monkeypatch.setattr(norm_launch, "eval_forward", lambda *args: taken.append(1) or fixed(*args))
    x, weight, bias, g = (t.detach() for t in draw((3, 5, 4, 4), device))
    norm = tbbn.TaskBalancedBatchNorm2d(5).to(device).eval()
    norm.load_state_dict({**norm.state_dict(), "running_mean": bias, "running_var": weight})
    want = F.relu(F.batch_norm(x.double(), bias.double(), weight.double()) + g.double())
    with torch.no_grad():
        assert apart(norm_act(norm, x, residual=g), want) < 1e-6
        assert apart(norm_act(norm, x.half(), residual=g.half()), want) < 1e-3
        assert len(taken) == 2
        assert apart(norm_act(norm, x, residual=g.double()), want) < 1e-6
        assert len(taken) == 3  # the residual is added after it
        assert apart(norm_act(norm.double(), x.double(), residual=g), want) < 1e-6
        norm_act(tbbn.TaskBalancedBatchNorm2d(5, track_running_stats=False).to(device).eval(), x)
    assert len(taken) == 3


@on_device
def test_a_row_has_no_more_parts_than_the_plan_kernels_merge(device):
    assert norm_tiles.tiles_for(1, 1, 2**16, 1, False, 4, norm_tiles.WHOLE_LIMIT).parts == norm_tiles.MOST_PARTS


@on_device
def test_in_eval_mode_transforms_get_batch_norm(device, chosen, monkeypatch):
    monkeypatch.setattr(kernels, "norm_act", lambda *args, **options: pytest.fail("launched"))
    ours = tbbn.convert(torch.nn.BatchNorm2d(3, device=device)).eval()
    x = torch.randn(5, 4, 3, 2, 2, device=device)
    with torch.no_grad():
        got = torch.func.vmap(lambda row: norm_act(ours, row))(x)
    assert torch.equal(
        got, torch.stack([F.relu(F.batch_norm(row, ours.running_mean, ours.running_var, eps=ours.eps)) for row in x])
    )
