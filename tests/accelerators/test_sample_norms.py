"""Norms with a ``normaliser``, on the kernels: equal to their own forward (see ``tests/helpers/interpreter.py``)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, RUNNING, apart, equals_itself_captured, here, interpret, needs_gpu, on_device
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tbbn
from tbbn.accelerators import fused
from tbbn.accelerators.eager import activate
from tbbn.bench.models import resnet
from tbbn.nn.adab2n import AdaptiveBalancedNorm
from tbbn.nn.comparison import BatchRenorm, ContinualNorm, GroupNorm, InstanceNorm, SwitchableNorm

if RUNNING:
    from tbbn.accelerators.triton import norm_forward, norm_tiles, normaliser, normaliser_kernels, sample

C = 16
NORMS: dict[str, Any] = {
    "in": lambda: InstanceNorm(C),
    "gn": lambda: GroupNorm(C, groups=4),
    "gn without affine": lambda: GroupNorm(C, groups=2, affine=False),
    "cn": lambda: ContinualNorm(C, groups=4),
    "cn, cumulative": lambda: ContinualNorm(C, groups=4, momentum=None),
    "cn without running statistics": lambda: ContinualNorm(C, groups=4, track_running_stats=False),
    "sn": lambda: SwitchableNorm(C),
    "sn, cumulative": lambda: SwitchableNorm(C, momentum=None),
    "sn, unbiased": lambda: SwitchableNorm(C, unbiased=True),
    "brn": lambda: BatchRenorm(C),
    "brn, eps on std": lambda: BatchRenorm(C, eps=1e-3, eps_on_std=True),
    "adab2n": lambda: AdaptiveBalancedNorm(C),
}


@here
def test_the_kernels_pass_on_the_interpreter():
    interpret(__file__)


def noise(*shape: int, value: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(value))


def made(name: str, device: str) -> nn.Module:
    """A layer whose parameters and running statistics are not those of a new one."""
    layer = NORMS[name]()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for t in layer.parameters():
            t.add_(torch.randn(t.shape, generator=generator) * 0.3)
        for key, t in layer.named_buffers():
            if key in ("running_mean", "running_var"):
                t.add_(torch.rand(t.shape, generator=generator))
            elif key == "num_batches_tracked":
                t.fill_(12_000 if isinstance(layer, BatchRenorm) else 3)  # so that its limits are open
    return layer.to(device)


def by_kernels(norm: Any, x: Tensor, relu: bool, residual: Tensor | None, moments: Tensor | None = None) -> Tensor:
    return fused._normalise(norm, x, relu, residual, moments)


def by_forward(norm: Any, x: Tensor, relu: bool, residual: Tensor | None, moments: Tensor | None = None) -> Tensor:
    return activate(norm(x), relu, residual)


def worked(
    form: Any, norm: Any, x: Tensor, relu: bool, residual: Tensor | None, moments: Tensor | None = None
) -> dict[str, Any]:
    """The output, all gradients and all buffers after a training step."""
    norm, x = copy.deepcopy(norm), x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    residual = None if residual is None else residual.detach().clone().requires_grad_()
    with (
        tbbn.balance(norm, current=4, memory=2, past_tasks=2)
        if isinstance(norm, AdaptiveBalancedNorm)
        else nullcontext()
    ):
        y = form(norm, x, relu, residual, moments)
    loss = (y.float() * noise(*y.shape, value=3).to(y.device)).sum() + (tbbn.penalty(norm) or 0)
    loss.backward()
    grads = {f"grad of {name}": t.grad for name, t in norm.named_parameters()}
    return {
        "y": y, "dx": x.grad, "dresidual": None if residual is None else residual.grad, **grads, **dict(norm.named_buffers())
    }  # fmt: skip


def parts_of(x: Tensor, parts: int) -> Tensor:
    pieces = x.detach().float().flatten(2).unflatten(2, (parts, -1))  # (N, C, parts, pixels)
    var, mean = torch.var_mean(pieces, 3, unbiased=False)
    return torch.stack((mean, var)).transpose(2, 3).contiguous()


def close(ours: dict[str, Any], theirs: dict[str, Any], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        assert (ours[name] is None) == (want is None), name
        if want is not None:
            want = want.double()
            far = apart(ours[name], want) if want.norm() else float(ours[name].double().norm())
            assert far < bound, (name, far)


@on_device
@pytest.mark.parametrize("in_kernels", [True, False], ids=["arithmetic in kernels", "arithmetic by torch"])
@pytest.mark.parametrize("name", NORMS)
def test_a_training_step_equals_the_layers_own(name, in_kernels, device, monkeypatch):
    calls, real = [], normaliser.normalise
    monkeypatch.setattr(normaliser, "normalise", lambda *given: calls.append(1) or real(*given))
    if not in_kernels:
        monkeypatch.setattr(normaliser, "_MOST", 0)
    norm = made(name, device)
    x = (
        (noise(6, C, 5, 7) * 2 + noise(1, C, 1, 1, value=1) * 3)
        .to(device)
        .contiguous(memory_format=torch.channels_last)
    )
    residual = noise(6, C, 5, 7, value=2).to(device)
    given = (norm, x, True, residual)
    close(worked(by_kernels, *given), worked(by_forward, *given), 2e-5)
    assert len(calls) == (in_kernels and "cumulative" not in name)


@on_device
@pytest.mark.parametrize("name", ["in", "gn", "cn", "sn, unbiased", "brn", "brn, eps on std", "adab2n"])
def test_moments_of_parts_and_a_relu_whose_sign_is_computed_again(name, device):
    """What the bench's networks do between two convolutions."""
    norm, x = made(name, device), (noise(6, C, 4, 6) * 2 - 1).to(device).contiguous(memory_format=torch.channels_last)
    given = (norm, x, True, None)
    close(worked(by_kernels, *given, parts_of(x, 4)), worked(by_forward, *given), 2e-5)


@on_device
@pytest.mark.parametrize("step", [0, 5_000, 12_000, 50_000])
def test_limits_of_batch_renormalisation_open_with_its_steps(step, device):
    norm, x = made("brn", device), (noise(6, C, 4, 4) * 4 + 2).to(device)
    assert isinstance(norm, BatchRenorm) and norm.num_batches_tracked is not None
    norm.num_batches_tracked.fill_(step)
    close(worked(by_kernels, norm, x, False, None), worked(by_forward, norm, x, False, None), 2e-5)


@on_device
@pytest.mark.parametrize(
    ("spread", "level", "step", "ratio"),
    [(0.1, 0.0, 50_000, 1 / 2), (9.0, 7.0, 50_000, 2.0), (0.1, -9.0, 15_000, 35 / 45), (9.0, 9.0, 15_000, 45 / 35)],
)
def test_batch_renormalisation_corrects_up_to_its_limits(spread, level, step, ratio, device):
    """The limits are 2 and 4. At step 15 000 they are 1 + 10 / 35 and 2."""
    norm = BatchRenorm(C, eps=1e-8, r_max=2.0, d_max=4.0).to(device)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.fill_(step)
    x = noise(6, C, 4, 4)
    x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std(
        (0, 2, 3), correction=0, keepdim=True
    )  # the mean is 0, the deviation 1
    y = by_kernels(norm, (x * spread + level).to(device), False, None)
    shift = max(-1, min(1, level)) * (4 if step == 50_000 else 2)  # the running mean is 0, the deviation 1
    assert apart(y.cpu(), x * ratio + shift) < 2e-5


@on_device
@pytest.mark.parametrize("on_std", [True, False])
def test_eps_of_batch_renormalisation_counts_in_gradients_and_in_the_running_deviation(on_std, device):
    """By autograd in float64. The variance of the batch is as small as eps."""
    norm = BatchRenorm(C, eps=0.01, eps_on_std=on_std).to(device)
    x, g = noise(6, C, 4, 4).to(device) * 0.1, noise(6, C, 4, 4, value=1).to(device)
    own = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(by_kernels(norm, own, False, None), own, g)
    exact = x.double().requires_grad_()
    mean, var = exact.mean((0, 2, 3), keepdim=True), exact.var((0, 2, 3), correction=0, keepdim=True)
    sigma = var.sqrt() + 0.01 if on_std else (var + 0.01).sqrt()
    (want,) = torch.autograd.grad((exact - mean) / sigma, exact, g.double())  # at step 0 there is no correction
    assert apart(dx, want) < 2e-5
    moved = 0.99 * (1.01 if on_std else 1.01**0.5) + 0.01 * sigma.flatten()  # the running variance was 1
    assert norm.running_var is not None
    assert apart(norm.running_var, (moved - 0.01).square() if on_std else moved.square() - 0.01) < 1e-6


@on_device
@pytest.mark.parametrize("most", [0, 1, 2])
def test_large_logits_of_a_mixture_select_one_norm(most, device):
    """Switchable norm is then instance norm, layer norm or batch norm."""
    norm, x = SwitchableNorm(C).to(device), (noise(6, C, 4, 4) + noise(6, C, 1, 1, value=1)).to(device)
    with torch.no_grad():
        for logits in (norm.mean_weight, norm.var_weight):
            logits.fill_(0)[most] = 200
    over = ((2, 3), (1, 2, 3), (0, 2, 3))[most]
    exact = x.double()
    want = (exact - exact.mean(over, keepdim=True)) / (exact.var(over, correction=0, keepdim=True) + norm.eps).sqrt()
    assert apart(by_kernels(norm, x, False, None), want) < 1e-5


@on_device
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # of the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["in", "gn", "sn", "brn", "brn, eps on std", "adab2n"])
def test_rows_that_only_fill_a_program_do_not_count_without_eps(name, device):
    """There are 6 rows, and places for 8. The variance of the other two is 0."""
    norm, x = made(name, device), (noise(6, C, 4, 4) * 2 + 1).to(device)
    norm.eps = 0.0  # type: ignore[assignment]
    close(worked(by_kernels, norm, x, True, None), worked(by_forward, norm, x, True, None), 2e-5)


@on_device
@pytest.mark.parametrize("shape", [(6, C, 16, 16), (6, C, 13, 22)], ids=["4 parts", "2 parts"])
@pytest.mark.parametrize("name", ["gn", "cn", "sn", "brn", "adab2n"])
def test_long_rows_are_summed_in_parts(name, shape, device):
    norm, x = made(name, device), (noise(*shape) * 2 + 1).to(device).contiguous(memory_format=torch.channels_last)
    _, geometry = norm_tiles.geometry_of(x, 1, limit=0)
    assert geometry.tiles.parts == (4 if shape[2] == 16 else 2)
    close(worked(by_kernels, norm, x, False, None), worked(by_forward, norm, x, False, None), 1e-4)


@on_device
@pytest.mark.parametrize("parts", [16, 32])
def test_moments_are_used_unless_they_have_too_many_parts(parts, device, monkeypatch):
    norm, x = made("cn", device), noise(6, C, 8, 8).to(device)
    taken, real = [], norm_forward.moments
    monkeypatch.setattr(
        norm_forward, "moments", type("Spy", (), {"__getitem__": lambda _, grid: taken.append(1) or real[grid]})()
    )
    given = (norm, x, True, None)
    close(worked(by_kernels, *given, parts_of(x, parts)), worked(by_forward, *given), 2e-5)
    assert bool(taken) == (parts == 32)


@on_device
@pytest.mark.parametrize("name", NORMS)
def test_nothing_is_read_before_it_is_written(name, device):
    """torch fills memory without values with nan."""
    norm, x = made(name, device), noise(6, C, 4, 4).to(device)
    want = worked(by_forward, norm, x, True, None)
    torch.use_deterministic_algorithms(True)
    try:
        got = worked(by_kernels, norm, x, True, None)
    finally:
        torch.use_deterministic_algorithms(False)
    close(got, want, 2e-5)


@on_device
def test_no_gradient_is_written_behind_the_last_task(device, monkeypatch):
    """There are 3 tasks, and places for 4."""
    norm, x = AdaptiveBalancedNorm(C, max_tasks=3).to(device), noise(6, C, 4, 4).to(device)
    behind = []

    def guarded(t: Tensor) -> Tensor:
        if t.shape != (3,):
            return real(t)
        longer = torch.full((8,), 7.0, device=device)
        behind.append(longer[3:])
        return longer[:3]

    with tbbn.balance(norm, current=4, memory=2, past_tasks=2):
        loss = by_kernels(norm, x.requires_grad_(), False, None).pow(3).sum()
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", guarded)
    loss.backward()
    assert [t.tolist() for t in behind] == [[7.0] * 5]


@on_device
def test_a_loss_without_the_penalty_has_no_gradient_of_it(device):
    found = []
    for strength in (0.1, 0.0):
        norm, x = made("adab2n", device), (noise(6, C, 4, 4) + 3).to(device).requires_grad_()
        norm.strength = strength
        with tbbn.balance(norm, current=4, memory=2, past_tasks=2):
            y = by_kernels(norm, x, True, None)
        found.append(torch.autograd.grad(y.square().sum(), [x, norm.task_logits]))
    for ours, want in zip(*found, strict=True):
        assert torch.equal(ours, want)


@on_device
@pytest.mark.parametrize("name", ["cn", "sn", "brn", "adab2n"])
def test_autograd_sees_which_statistics_move(name, device):
    norm, x = made(name, device), noise(6, C, 4, 4).to(device)
    buffers = list(norm.buffers())
    assert len(buffers) == (4 if name == "adab2n" else 3)
    before = [t._version for t in buffers]
    with tbbn.balance(norm, current=4, memory=2, past_tasks=2) if name == "adab2n" else nullcontext():
        by_kernels(norm, x, True, None)
    moved = [t._version for t in buffers]
    assert all(b > a for a, b in zip(before, moved, strict=True))
    if name in ("cn", "sn"):
        with torch.no_grad():
            by_kernels(norm.eval(), x, True, None)
        assert [t._version for t in buffers] == moved


@on_device
@pytest.mark.parametrize("name", ["cn", "sn"])
def test_statistics_that_are_not_tracked_stay_where_they_are(name, device):
    norm, x = made(name, device), noise(6, C, 4, 4).to(device)
    norm.track_running_stats = False  # type: ignore[assignment]
    before = {key: t.clone() for key, t in norm.named_buffers()}
    by_kernels(norm, x, True, None)
    assert all(torch.equal(t, before[key]) for key, t in norm.named_buffers())


@on_device
def test_one_value_has_no_variance(device):
    norm, x = made("sn", device), noise(1, C, 1, 1).to(device)
    assert isinstance(norm, SwitchableNorm) and norm.running_var is not None
    before = norm.running_var.clone()
    assert by_kernels(norm, x, False, None).isfinite().all()
    assert apart(norm.running_var, before * 0.9) < 1e-6
    norm.unbiased = True  # divides by 0
    assert by_kernels(norm, x, False, None).isnan().all()


@on_device
@pytest.mark.parametrize(("rows_per_sample", "past"), [(2, 2), (1, 0)], ids=["two rows a sample", "the first task"])
def test_where_adab2n_needs_another_path_what_follows_it_stays(rows_per_sample, past, device):
    norm, n = made("adab2n", device), 6 * rows_per_sample
    x, residual = noise(n, C, 4, 4).to(device), noise(n, C, 4, 4, value=2).to(device)
    found = []
    for form in (by_kernels, by_forward):
        layer = copy.deepcopy(norm)
        with tbbn.balance(layer, current=4, memory=2, past_tasks=past, rows_per_sample=rows_per_sample):
            found.append((form(layer, x, True, residual), layer.running_mean, layer.running_var))
    for ours, want in zip(*found, strict=True):
        assert apart(ours, want) < 1e-5


@on_device
def test_adab2n_that_checkpointing_repeats_counts_a_batch_once(device):
    found = []
    for form in (by_kernels, by_forward):
        norm, x = made("adab2n", device), noise(6, C, 4, 4).to(device).requires_grad_()
        with tbbn.balance(norm, current=4, memory=2, past_tasks=2):
            y = checkpoint(lambda x, norm=norm, form=form: form(norm, x, True, None), x, use_reentrant=True)
        y.pow(3).sum().backward()
        assert norm.num_batches_tracked.item() == 4  # it was 3
        found.append((x.grad, norm.task_logits.grad, norm.running_mean, norm.running_var, norm.rate))
    for ours, want in zip(*found, strict=True):
        assert apart(ours, want) < 2e-5


@on_device
@pytest.mark.parametrize("ids", [[2, 2, 2, 0, 0, 1], [2, 2, 2, 2, 0, 0]], ids=["all tasks", "one is absent"])
@pytest.mark.parametrize("steps", [0, 3])
def test_rows_are_weighted_by_their_tasks(ids, steps, device):
    """AdaB2N with task ids. The weights of a task that is absent are lost, so they sum to less than 1."""
    norm, x = made("adab2n", device), (noise(6, C, 4, 4) + 3).to(device)
    task_ids = torch.tensor(ids, device=device)

    def in_block(form: Any) -> Any:
        def call(norm: Any, *given: Any) -> Tensor:
            with tbbn.balance(norm, current=3, memory=3, past_tasks=2, task_ids=task_ids):
                for _ in range(steps):  # the rate falls
                    form(norm, *given)
                return form(norm, *given)

        return call

    norm.kappa = 0.5
    close(worked(in_block(by_kernels), norm, x, True, None), worked(in_block(by_forward), norm, x, True, None), 2e-5)


@on_device
def test_a_penalty_alone_has_a_gradient(device):
    norm, x = made("adab2n", device), noise(6, C, 4, 4).to(device)
    found = []
    for form in (by_kernels, by_forward):
        layer, own = copy.deepcopy(norm), x.clone().requires_grad_()
        with tbbn.balance(layer, current=4, memory=2, past_tasks=2):
            form(layer, own, True, None)
        penalty = tbbn.penalty(layer)
        assert penalty > 0
        found.append((penalty, *torch.autograd.grad(penalty, [own, layer.task_logits])))
    for ours, want in zip(*found, strict=True):
        assert apart(ours, want) < 2e-5
    layer.strength = 0.0
    with tbbn.balance(layer, current=4, memory=2, past_tasks=2):
        by_kernels(layer, x, True, None)
    assert tbbn.penalty(layer) == 0


@on_device
@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((64, 64, 1, 2), True),
        ((64, 128, 1, 2), True),
        ((65, 64, 1, 2), True),
        ((65, 128, 1, 2), False),
        ((6, 48, 1, 2), False),
    ],
)
def test_one_program_holds_the_moments_of_a_small_batch(shape, fits, device):
    norm, x = InstanceNorm(shape[1]), torch.empty(shape, device=device)
    assert normaliser.supports(x, norm, norm.form(x)) is fits


@on_device
@pytest.mark.parametrize("name", ["in", "gn", "cn", "sn", "sn, unbiased"])
def test_eval_mode_without_a_gradient_is_in_the_kernels_for_any_number_of_rows(name, device, monkeypatch):
    calls, real = [], normaliser.normalise
    monkeypatch.setattr(normaliser, "normalise", lambda *given: calls.append(1) or real(*given))
    norm, x, residual = made(name, device).eval(), noise(67, C, 2, 4).to(device), noise(67, C, 2, 4, value=2).to(device)
    before = {key: t.clone() for key, t in norm.named_buffers()}
    with torch.no_grad():
        want = by_forward(norm, x, True, residual)
        assert apart(by_kernels(norm, x, True, residual), want) < 1e-5
        assert apart(by_kernels(norm, x, True, residual, parts_of(x, 2)), want) < 1e-5
    assert len(calls) == 2
    assert all(torch.equal(t, before[key]) for key, t in norm.named_buffers())
    own = x.clone().requires_grad_()
    given = torch.autograd.grad(by_kernels(norm, own, True, residual).square().sum(), own)[0]
    want = torch.autograd.grad(by_forward(norm, own, True, residual).square().sum(), own)[0]
    assert apart(given, want) < 1e-5 and len(calls) == 2


@on_device
def test_in_eval_mode_a_program_holds_no_more_moments_than_in_training(device, monkeypatch):
    norm, x = made("cn", device).eval(), noise(67, C, 2, 2).to(device)
    grids, real = [], normaliser_kernels.forward
    monkeypatch.setattr(
        normaliser_kernels,
        "forward",
        type("Spy", (), {"__getitem__": lambda _, grid: grids.append(grid) or real[grid]})(),
    )
    with torch.no_grad():
        for most in (8192, 16 * C):
            monkeypatch.setattr(normaliser, "_MOST", most)
            assert apart(by_kernels(norm, x, True, None), by_forward(norm, x, True, None)) < 1e-5
        assert grids == [(2,), (5,)]  # 64 rows each, 16 rows each
        wide = torch.empty(2, 32 * C, 1, 2, device=device)
        assert not normaliser.supports(wide, norm, norm.form(wide))


@on_device
@pytest.mark.parametrize("name", ["cn without running statistics", "brn, eps on std", "adab2n"])
def test_other_norms_are_not_in_the_kernels_in_eval_mode(name, device):
    norm, x = made(name, device).eval(), noise(4, C, 3, 3).to(device)
    form = norm.form(x)
    with torch.no_grad():
        assert form is None or not normaliser.supports(x, norm, form)


@on_device
@pytest.mark.parametrize(
    ("last", "relu", "adds", "parts", "shape"),
    [
        (True, False, False, None, (6, C, 1, 1)),
        (False, True, False, None, (6, C, 9, 30)),  # a tile and a bit
        (False, False, True, 4, (6, C, 4, 4)),
        (True, True, True, 1, (6, C, 4, 4)),
        (True, True, False, 2, (6, C, 8, 2)),
    ],
)
def test_formats_moments_and_what_follows(last, relu, adds, parts, shape, device, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(sample, "_TILE", 1024)
    norm = made("cn", device)
    x = noise(*shape).to(device)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    given = (norm, x, relu, noise(*shape, value=2).to(device) if adds else None)
    moments = None if parts is None else parts_of(x, parts)
    if shape[2:] == (1, 1):
        norm.training = False  # one value a channel has no variance: batch norm refuses it in torch
    close(worked(by_kernels, *given, moments), worked(by_forward, *given), 2e-5)


@on_device
@pytest.mark.parametrize("name", NORMS)
def test_eval_mode_equals_the_layers_own(name, device):
    norm, x = made(name, device).eval(), noise(3, C, 4, 4).to(device)
    with torch.no_grad():
        ours, want = by_kernels(norm, x, True, None), by_forward(norm, x, True, None)
    assert apart(ours, want) < 1e-5


@on_device
def test_channels_that_fill_no_block(device):
    norm, x = GroupNorm(80, groups=5).to(device), noise(2, 80, 3, 3).to(device)
    close(worked(by_kernels, norm, x, True, None), worked(by_forward, norm, x, True, None), 2e-5)


@on_device
def test_half_precision_keeps_its_type(device):
    norm, x = made("sn", device), noise(6, C, 4, 4).to(device, torch.float16)
    ours, want = worked(by_kernels, norm, x, True, None), worked(by_forward, norm, x.float(), True, None)
    assert ours["y"].dtype == ours["dx"].dtype == torch.float16
    close(ours, want, 2e-3)


@here
def test_on_the_cpu_the_layer_itself_is_called(monkeypatch):
    monkeypatch.setattr(fused, "_normalise", lambda *_: pytest.fail("no kernels on a CPU"))
    norm, x = made("cn", "cpu"), noise(4, C, 3, 3)
    assert torch.equal(fused.norm_act(copy.deepcopy(norm), x), by_forward(norm, x, True, None))


@here
@pytest.mark.parametrize("name", ["brn", "adab2n"])
def test_a_norm_that_is_batch_norm_in_eval_mode_is_evaluated_as_one(name, monkeypatch):
    monkeypatch.setattr(fused, "_by_sample", lambda norm, x: True)
    monkeypatch.setattr(fused, "_normalise", lambda *_: pytest.fail("no moments are needed"))
    norm, x, residual = made(name, "cpu").eval(), noise(4, C, 3, 3), noise(4, C, 3, 3, value=2)
    with torch.no_grad():
        assert torch.equal(fused.norm_act(norm, x, residual=residual), by_forward(norm, x, True, residual))


@here
def test_where_the_kernels_run_norm_act_calls_them_with_the_convolutions_moments(monkeypatch):
    asked: list[bool] = []
    given: list[Any] = []
    moments = torch.zeros(2, 4, 1, C)

    def convolved(self: Any, x: Tensor, *, moments: bool) -> fused.Convolved:
        asked.append(moments)
        return fused.Convolved(x, x, None)

    monkeypatch.setattr(fused.Conv2d, "with_moments", convolved)
    monkeypatch.setattr(fused, "_by_sample", lambda norm, x: True)
    monkeypatch.setattr(fused, "_normalise", lambda *got: given.append(got) or got[1])
    conv, x, residual = fused.Conv2d(C, C, 3, padding=1, bias=False), noise(4, C, 3, 3), noise(4, C, 3, 3)
    for name in NORMS:
        norm = made(name, "cpu")
        fused.conv_moments(conv, x, norm)
        fused.norm_act(norm, x, relu=False, residual=residual, moments=moments)
        assert all(a is b for a, b in zip(given[-1], (norm, x, False, residual, moments), strict=True))
    assert asked == [True] * len(NORMS)


@here
def test_the_norm_of_a_shortcut_takes_the_moments_of_its_convolution(monkeypatch):
    given: list[Any] = []
    moments = torch.zeros(2, 4, 1, C)
    conv, norm, x, out = fused.Conv2d(C, C, 1, bias=False), nn.BatchNorm2d(C), noise(4, C, 3, 3), noise(4, C, 3, 3)
    monkeypatch.setattr(fused, "conv_moments", lambda *got: given.append(got) or fused.Convolved(out, x, moments))
    monkeypatch.setattr(fused, "norm_act", lambda *got, **options: given.append((*got, options)) or got[1])
    assert fused.conv_norm(nn.Sequential(conv, norm), x) is out
    first, (got_norm, got_out, options) = given
    assert all(a is b for a, b in zip(first, (conv, x, norm), strict=True))
    assert got_norm is norm and got_out is out and options == {"relu": False, "moments": moments}


@here
def test_a_hook_on_a_shortcut_is_called():
    pair = nn.Sequential(fused.Conv2d(C, C, 1, bias=False), nn.BatchNorm2d(C))
    pair.register_forward_hook(lambda module, given, out: out + 1)
    x = noise(4, C, 3, 3)
    want = copy.deepcopy(pair)[1](pair[0](x)) + 1
    assert torch.equal(fused.conv_norm(pair, x), want)


@here
def test_a_residual_block_computes_its_shortcut_with_moments(monkeypatch):
    pairs: list[Any] = []
    monkeypatch.setattr(resnet, "conv_norm", lambda pair, x: pairs.append(pair) or pair(x))
    block = resnet.BasicBlock(C, 2 * C, stride=2)
    block(noise(4, C, 4, 4))
    assert pairs == [block.downsample]


@here
@pytest.mark.parametrize("name", NORMS)
def test_a_normaliser_that_compiles_does_so_whole_and_for_any_number_of_shapes(name, monkeypatch):
    """On a GPU its arithmetic is compiled. torch.compile leaves a code object as it is after eight shapes."""
    norm, real, compiled = made(name, "cpu"), torch.compile, []
    if not getattr(norm, "compiles_normaliser", False):
        assert "cumulative" in name
        return

    def spy(function: Any, **options: Any) -> Any:
        compiled.append(real(function, backend="aot_eager", fullgraph=True, **options))
        return compiled[-1]

    monkeypatch.setattr(torch, "compile", spy)
    fused._compiled_normaliser.cache_clear()
    for rows in range(3, 13) if name == "cn" else (3,):
        ours, want = made(name, "cpu"), made(name, "cpu")
        found = []
        for layer in (ours, want):
            x = noise(rows, C, 4, 4)
            var, mean = (t.requires_grad_() for t in torch.var_mean(x, (2, 3), unbiased=False))
            call = (
                fused._compiled_normaliser(type(layer), str(layer), x.shape)
                if layer is ours
                else type(layer).normaliser
            )
            with tbbn.balance(layer, current=2, memory=1, past_tasks=2) if name == "adab2n" else nullcontext():
                state = layer.snapshot(x) if hasattr(layer, "snapshot") else ()
            maps = [t.expand(rows, C) for t in call(layer, x, mean, var, *state)]
            total = sum((m * noise(rows, C, value=i)).sum() for i, m in enumerate(maps))
            total = total + (tbbn.penalty(layer) if name == "adab2n" else 0)
            assert isinstance(total, Tensor)
            grads = torch.autograd.grad(total, [mean, var, *layer.parameters()], allow_unused=True)
            found.append([*maps, *(g for g in grads if g is not None), *layer.buffers()])
        assert len(found[0]) == len(found[1])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b) or apart(a, b) < 1e-5
    fused._compiled_normaliser.cache_clear()
    assert len(compiled) == (10 if name == "cn" else 1)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", NORMS)
def test_a_network_uses_the_kernels_and_can_be_captured(name):
    norm = made(name, "cuda")
    x = noise(6, C, 8, 8).to("cuda", torch.bfloat16).contiguous(memory_format=torch.channels_last)
    calls = []
    real = fused._normalise
    fused._normalise = lambda *given: (calls.append(1), real(*given))[1]  # type: ignore[assignment]
    try:
        assert fused.norm_act(norm, x).dtype == torch.bfloat16 and calls
    finally:
        fused._normalise = real

    def work() -> list[Tensor]:
        own = x.detach().requires_grad_()
        with tbbn.balance(norm, current=4, memory=2, past_tasks=2) if name == "adab2n" else nullcontext():
            y = fused.norm_act(norm, own)
        return [y, *torch.autograd.grad(y.float().square().sum(), own)]

    if "cumulative" not in name and name not in (
        "brn",
        "brn, eps on std",
    ):  # the others read a counter or move by each step
        assert equals_itself_captured(work)


@on_device
def test_adab2n_can_be_checkpointed_without_reentry(device):
    """Its kernels save other tensors than its own forward, so both forwards of a checkpoint must go the same way."""
    found = []
    for form in (by_kernels, by_forward):
        norm, x = made("adab2n", device), noise(6, C, 4, 4).to(device).requires_grad_()
        with tbbn.balance(norm, current=4, memory=2, past_tasks=2):
            y = checkpoint(lambda x, norm=norm, form=form: form(norm, x, True, None), x, use_reentrant=False)
            y.square().sum().backward()
        found.append((y, x.grad, norm.running_mean, norm.num_batches_tracked))
    for ours, want in zip(*found, strict=True):
        assert apart(ours, want) < 2e-5


@on_device
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_adab2n_can_be_checkpointed_with_two_layouts_of_the_same_input(use_reentrant, device):
    norm, x = made("adab2n", device), noise(6, C, 4, 4).to(device).requires_grad_()
    for current in (4, 3):
        with tbbn.balance(norm, current=current, memory=6 - current, past_tasks=2):
            y = checkpoint(lambda x: by_kernels(norm, x, True, None), x, use_reentrant=use_reentrant)
        y.square().sum().backward()
    assert x.grad is not None and norm.num_batches_tracked == 5  # 3 before


@on_device
@pytest.mark.parametrize("name", ["cn", "sn"])
def test_eval_mode_takes_running_statistics_that_are_no_longer_tracked(name, device):
    norm, x = made(name, device).eval(), noise(6, C, 4, 4).to(device)
    norm.track_running_stats = False
    with torch.no_grad():
        assert apart(by_kernels(norm, x, True, None), by_forward(norm, x, True, None)) < 1e-5


@here
@pytest.mark.parametrize(("shape", "takes"), [((1, C, 1, 1), False), ((2, C, 1, 1), True), ((1, C, 1, 2), True)])
def test_a_single_value_per_channel_is_left_to_the_layer(shape, takes, monkeypatch):
    class OnGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(fused, "TRITON", True)
    assert fused._by_sample(made("cn", "cpu"), torch.zeros(shape).as_subclass(OnGpu)) is takes
