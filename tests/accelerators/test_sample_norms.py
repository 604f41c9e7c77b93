"""Norms with a ``normaliser``, on the kernels: equal to their own forward (see ``tests/helpers/interpreter.py``)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, RUNNING, apart, equals_itself_captured, here, interpret, needs_gpu, on_device
from torch import Tensor, nn

import tbbn
from tbbn.accelerators import fused
from tbbn.accelerators.eager import activate
from tbbn.nn.adab2n import AdaptiveBalancedNorm
from tbbn.nn.comparison import BatchRenorm, ContinualNorm, GroupNorm, InstanceNorm, SwitchableNorm

if RUNNING:
    from tbbn.accelerators.triton import normaliser, sample

C = 16
NORMS: dict[str, Any] = {
    "in": lambda: InstanceNorm(C),
    "gn": lambda: GroupNorm(C, groups=4),
    "gn without affine": lambda: GroupNorm(C, groups=2, affine=False),
    "cn": lambda: ContinualNorm(C, groups=4),
    "cn, cumulative": lambda: ContinualNorm(C, groups=4, momentum=None),
    "cn without running statistics": lambda: ContinualNorm(C, groups=4, track_running_stats=False),
    "sn": lambda: SwitchableNorm(C),
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
    assert len(calls) == (in_kernels and name != "cn, cumulative")


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
        assert penalty is not None
        found.append((penalty, *torch.autograd.grad(penalty, [own, layer.task_logits])))
    for ours, want in zip(*found, strict=True):
        assert apart(ours, want) < 2e-5
    layer.strength = 0.0
    with tbbn.balance(layer, current=4, memory=2, past_tasks=2):
        by_kernels(layer, x, True, None)
    assert tbbn.penalty(layer) is None


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
@pytest.mark.parametrize("name", NORMS)
def test_a_normaliser_that_compiles_does_so_whole_and_for_any_number_of_shapes(name, monkeypatch):
    """On a GPU its arithmetic is compiled. torch.compile leaves a code object as it is after eight shapes."""
    norm, real, compiled = made(name, "cpu"), torch.compile, []
    if not getattr(norm, "compiles_normaliser", False):
        assert name == "cn, cumulative"
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
