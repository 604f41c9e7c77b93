"""The kernels compile for GPUs, on a machine without one, and do not spill: the interpreter accepts more than the compiler."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import here, tf32
from torch import Tensor

import tbbn
from tbbn.bench.data.augment import ResizedCrop
from tbbn.nn.plan import Layout, PlanOptions

triton = pytest.importorskip("triton")
pytestmark = here


WAIT = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]


class Card:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 1000 + self.capability  # compiled kernels are cached by device: no real one has this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def compiled(request, monkeypatch, tmp_path) -> list[tuple[str, bytes]]:
    """Launches compile only, by default for an H100. Names and machine code of the compiled kernels."""
    from tbbn.accelerators.triton import launch

    found: list[tuple[str, bytes]] = []
    card = Card(getattr(request, "param", 90))

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*args: Any, **options: Any) -> None:
            assert all(n > 0 for n in grid)
            asm = kernel.warmup(*args, grid=grid, **options).asm
            # Kernels with dependent launch, and only they, wait for the kernel before them first.
            early = options.get("launch_pdl", False)
            steps = re.findall(r"griddepcontrol\.\w+|(?:ld|st)\.global|cp\.async|red\.|atom\.", asm["ptx"])
            assert steps[:2] == WAIT if early else not set(steps) & set(WAIT)
            assert not early or card.capability >= 90
            found.append((kernel.__name__, asm["cubin"]))

        return compile_only

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(triton.runtime.driver, "_active", card)
    monkeypatch.setattr(launch, "supports_pdl", lambda device: card.capability >= 90)
    return found


def spilled(code: bytes, folder: Path) -> int:
    """Bytes of local memory: register spills."""
    file = folder / "code.cubin"
    file.write_bytes(code)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    used = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert used is not None, text
    return sum(map(int, used.groups()))


def check(compiled: list[tuple[str, bytes]], names: set[str], folder: Path) -> None:
    assert {name for name, _ in compiled} == names
    assert {name: n for name, code in compiled if (n := spilled(code, folder))} == {}


LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format


def nightly(*case: Any) -> Any:
    """Compiling takes seconds: by default one case with whole tiles and one with split ones per kernel, for an H100."""
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("shape", "dtype", "memory_format"),
    [
        ((64, 16, 32, 32), torch.bfloat16, LAST),
        nightly((64, 64, 8, 8), torch.float16, LAST),
        nightly((64, 64, 56, 56), torch.float32, LAST),
        ((64, 512, 7, 7), torch.float32, CONTIGUOUS),
        nightly((64, 768, 7, 7), torch.bfloat16, LAST),
        nightly((1000, 16, 8, 8), torch.float32, LAST),
        nightly((512, 2048, 7, 7), torch.bfloat16, LAST),
    ],
    ids=str,
)
def test_the_norms_kernels_compile(compiled, shape, dtype, memory_format, tmp_path):
    from tbbn.accelerators.triton import norm_launch

    plan = Layout(shape[0] * 3 // 4, shape[0] // 4, 9).plan(PlanOptions(), torch.device("cpu"), torch.float32)
    assert plan is not None
    x = torch.zeros(shape, dtype=dtype).to(memory_format=memory_format)
    weight, bias, mean, var = torch.zeros(4, shape[1]).unbind()
    counted = torch.zeros((), dtype=torch.int64)
    running = norm_launch.Running(mean, var, plan.running, plan.sizes, 0.1, counted, False)
    given = (weight, bias, plan.gather, plan.scatter)
    y, stats, _ = norm_launch.forward(x, *given, 1e-5, running, relu=True, residual=x)
    norm_launch.backward(x, x, *given, stats, 1e-5, y, residual=True)
    norm_launch.eval_forward(x, mean, var, weight, bias, 1e-5, True, x)
    whole = {"whole_forward", "whole_backward", "eval_affine"}
    split = {"moments", "plan_forward", "affine", "row_sums", "plan_backward", "affine_backward", "eval_affine"}
    check(compiled, whole if memory_format is CONTIGUOUS and shape[2] < 8 else split, tmp_path)


@pytest.mark.parametrize(
    ("shape", "dtype", "memory_format"),
    [((64, 32, 16, 16), torch.bfloat16, LAST), nightly((64, 512, 7, 7), torch.float32, CONTIGUOUS)],
    ids=str,
)
def test_the_kernels_of_norms_by_sample_compile(compiled, shape, dtype, memory_format, tmp_path):
    from tbbn.accelerators.triton import sample

    x = torch.zeros(shape, dtype=dtype).to(memory_format=memory_format).requires_grad_()
    same, mean, var = sample.sample_moments(x)
    y = sample.sample_affine(same, mean, var, torch.zeros(shape[1]), relu=True, residual=x)
    y.sum().backward()
    check(compiled, {"moments", "add_moments_gradient", "affine", "affine_back"}, tmp_path)


@pytest.mark.parametrize("name", ["gn", "cn", "sn", "brn", "adab2n"])
@pytest.mark.parametrize(("channels", "side"), [(16, 32), nightly(64, 8)])
def test_the_arithmetic_of_other_norms_compiles(compiled, name, channels, side, tmp_path):
    from tbbn.accelerators.triton import normaliser

    norm = tbbn.convert(torch.nn.BatchNorm2d(channels), norm=name)
    x = torch.zeros(64, channels, side, side, dtype=torch.bfloat16).to(memory_format=LAST).requires_grad_()
    with tbbn.balance(norm, current=48, memory=16, past_tasks=9) if name == "adab2n" else nullcontext():
        form = norm.form(x)
    y = normaliser.normalise(norm, form, x, True, None, torch.zeros(2, 64, 4, channels))
    y.sum().backward()
    check(compiled, {"forward", "affine", "row_sums", "backward", "affine_backward"}, tmp_path)


def test_a_thread_has_whole_runs_of_pixels(compiled, monkeypatch):
    """If threads shared the runs of a row, they would have to shuffle the sums of each row; see ``ROWS_FIRST``."""
    from tbbn.accelerators.triton import norm_launch

    exchanges, warmup = [], triton.runtime.JITFunction.warmup

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        done = warmup(kernel, *args, **options)
        exchanges.append(done.asm["ptx"].count("shfl.sync"))
        return done

    monkeypatch.setattr(triton.runtime.JITFunction, "warmup", counted)
    plan = Layout(48, 16, 9).plan(PlanOptions(), torch.device("cpu"), torch.float32)
    assert plan is not None
    norm_launch.forward(torch.zeros(64, 32, 16, 16), None, None, plan.gather, plan.scatter, 1e-5)
    assert exchanges[0] < 100


@pytest.mark.parametrize("past_tasks", [nightly(0), nightly(1), nightly(4), 9])
def test_plans_of_any_number_of_groups_compile(compiled, past_tasks, tmp_path):
    """With moments of parts of rows, as a convolution returns them."""
    from tbbn.accelerators.triton import norm_launch
    from tbbn.accelerators.triton.norm import whole_batch

    plan = Layout(48, 16, past_tasks).plan(PlanOptions(), torch.device("cpu"), torch.float32)
    plan = plan or whole_batch(64, torch.device("cpu"))
    x, (weight, bias) = torch.zeros(64, 16, 32, 32, dtype=torch.bfloat16).to(memory_format=LAST), torch.zeros(2, 16)
    given = (weight, bias, plan.gather, plan.scatter)
    y, stats, _ = norm_launch.forward(x, *given, 1e-5, relu=True, moments=torch.zeros(2, 64, 4, 16))
    norm_launch.backward(x, x, *given, stats, 1e-5, y)
    check(compiled, {"plan_forward", "affine", "row_sums", "plan_backward", "affine_backward"}, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, nightly(torch.float32)], ids=str)
@pytest.mark.parametrize(
    ("n_in", "n_out", "side", "size", "stride"),
    [
        nightly(3, 16, 32, 3, 1),
        (16, 16, 32, 3, 1),  # three taps at a time
        nightly(16, 32, 32, 1, 2),
        (32, 64, 16, 3, 2),  # one tap at a time
        nightly(64, 64, 8, 3, 1),
    ],
)
def test_the_convolutions_kernels_compile(compiled, n_in, n_out, side, size, stride, dtype, tmp_path):
    from tbbn.accelerators.triton import conv as conv_launch

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype).to(memory_format=LAST)

    x, weight, out = (
        zeros(64, n_in, side, side),
        zeros(n_out, n_in, size, size),
        (64, n_out, side // stride, side // stride),
    )
    with tf32(True):
        y, moments = conv_launch.launch(x, weight, out, stride, moments=True)
        assert moments is not None
        if n_in > 3:
            conv_launch.launch(y, weight, tuple(x.shape), stride, back=True, added=x)
        conv_launch.weight_gradient(y, x, weight, stride)
    check(compiled, {"convolve", "weight_sums", "fold"}, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [80], indirect=True, ids=["A100"])
def test_the_kernels_compile_for_an_older_gpu(compiled, tmp_path):
    test_the_convolutions_kernels_compile(compiled, 32, 32, 16, 3, 1, torch.bfloat16, tmp_path)
    compiled.clear()
    test_the_norms_kernels_compile(compiled, (64, 32, 16, 16), torch.bfloat16, LAST, tmp_path)


@pytest.mark.parametrize("rows", [torch.arange(4), None], ids=["held", "streamed"])
def test_the_crops_kernel_compiles(compiled, rows, tmp_path):
    from tbbn.bench.data import crop

    images = torch.zeros(5, 3, 32, 32, dtype=torch.uint8)
    crop.fused_crop(ResizedCrop(padded=True), images, rows, torch.rand(4, 5), torch.rand(3), torch.rand(3), LAST)
    check(compiled, {"crop"}, tmp_path)


@pytest.mark.parametrize(("compiled", "early"), [(90, True), (80, False)], indirect=["compiled"])
def test_small_kernels_use_dependent_launch_where_the_gpu_can(compiled, early):
    from tbbn.accelerators.triton.launch import launch_options

    small, large = torch.empty(2**21), torch.empty(2**21 + 1)
    assert launch_options(small).get("launch_pdl", False) is launch_options(small)["PDL"] is early
    assert launch_options(large) == {"PDL": False}


@pytest.mark.parametrize(
    ("place", "capability", "early", "can"),
    [("cuda", 9, "1", True), ("cuda", 8, "1", False), ("cuda", 9, "0", False), ("cpu", 9, "1", False)],
)
def test_dependent_launch_can_be_turned_off(monkeypatch, place, capability, early, can):
    from tbbn.accelerators.triton import launch

    monkeypatch.setenv("TBBN_PDL", early)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert launch.supports_pdl.__wrapped__(torch.device(place)) is can


def test_the_plans_kernels_take_numbers_as_the_compiler_passes_them(compiled):
    """Triton's launcher passes float32, torch.compile float64."""
    from triton.compiler import ASTSource

    from tbbn.accelerators.triton import norm_backward, norm_forward

    sizes = {"BATCH": 64, "CHANNELS": 1, "GROUPS": 16, "PARTS": 2}
    for kernel in (norm_forward.plan_forward, norm_backward.plan_backward):
        types = {name: "i32" if len(name) < 3 and name != "x" else "*fp32" for name in kernel.arg_names}
        types |= {name: "constexpr" for name in types if name.isupper() and len(name) > 1}
        types |= {name: "fp64" for name in ("eps", "momentum") if name in types}
        constants = {(i,): sizes.get(name, False) for i, name in enumerate(types) if types[name] == "constexpr"}
        target = triton.runtime.driver.active.get_current_target()
        assert triton.compile(ASTSource(kernel, types, constants), target, {"num_warps": 4}).asm["cubin"]
