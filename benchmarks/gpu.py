"""Task-balanced batch norm on a GPU: is it correct, and what does it cost relative to ``nn.BatchNorm2d``?

    PYTHONPATH=src python3 benchmarks/gpu.py [float64] [equality] [convolutions] [speed]

Needs only torch with Triton and a CUDA device. Without arguments it runs all parts:

- float64: the kernels against float64
- equality: captured runs against eager ones, and a lane against the run alone, bit for bit
- convolutions: against cuDNN's, errors and time
- speed: the tables of ``tbbn speed``

A part that fails does not stop the others. If OUT is set, all numbers go to ``$OUT/gpu.json``, or ``gpu-PART.json`` for parts.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tbbn.accelerators.fused import Conv2d
from tbbn.accelerators.graphs import CapturedFunction
from tbbn.accelerators.triton import norm as kernels
from tbbn.bench import speed
from tbbn.bench.cli.speed import speed_tables
from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.engine import run_lanes
from tbbn.bench.engine.loop import Run
from tbbn.bench.timing import captured, time_interleaved
from tbbn.nn import functional
from tbbn.nn.plan import Layout, Plan, PlanOptions

DEVICE = torch.device("cuda", 0)
EPS = 1e-5
RESULTS: dict[str, Any] = {}


def section(title: str, work: Callable[[], Any]) -> None:
    print(f"== {title}", flush=True)
    start = time.perf_counter()
    try:
        RESULTS[title] = work()
    except Exception:
        traceback.print_exc()
        RESULTS[title] = {"failed": traceback.format_exc()}
    torch.cuda.synchronize()
    print(f"   {time.perf_counter() - start:.1f} s", flush=True)
    if "OUT" in os.environ:
        name = "-".join(["gpu", *sys.argv[1:]]) + ".json"
        Path(os.environ["OUT"], name).write_text(json.dumps({**RESULTS, "spilled": spilled()}, indent=1))


def spilled() -> dict[str, int]:
    """Kernels that spill registers, and how many. The compiler for this card may differ from the one in the tests."""
    from tbbn.accelerators.triton import conv_kernels, crop, norm_backward, norm_forward

    found: dict[str, int] = {}
    for module in (norm_forward, norm_backward, conv_kernels, crop):
        for kernel in vars(module).values():
            for cache in getattr(kernel, "device_caches", {}).values():
                for compiled in cache[0].values():
                    if compiled.n_spills:
                        found[kernel.__name__] = max(found.get(kernel.__name__, 0), compiled.n_spills)
    return found


def plan_of(dtype: torch.dtype) -> Plan:
    plan = Layout(**speed.LAYOUT).plan(PlanOptions(), DEVICE, dtype)
    assert plan is not None
    return plan


def apart(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def check_one(shape: tuple[int, ...], dtype: str, fmt: str, residual: bool) -> dict[str, float]:
    """Errors against float64 of ``relu(norm(x) + residual)`` or of the norm alone; and whether two calls agree bit for bit."""

    def draw() -> Tensor:
        return torch.randn(shape, device=DEVICE).to(speed.DTYPES[dtype]).to(memory_format=speed.FORMATS[fmt])

    inputs = [draw(), torch.rand(shape[1], device=DEVICE) + 0.5, torch.randn(shape[1], device=DEVICE), draw()]
    inputs = [t.requires_grad_() for t in inputs[: 4 if residual else 3]]
    added = inputs[3] if residual else None
    exact = [t.detach().double().requires_grad_() for t in inputs]

    def norm() -> Tensor:
        x, weight, bias = inputs[:3]
        plan = plan_of(torch.float32)
        return kernels.norm_act(x, None, None, weight, bias, plan, 0.0, EPS, relu=residual, residual=added)

    y, want = norm(), functional.reference(*exact[:3], plan_of(torch.float64), EPS)[0]
    if residual:
        want = F.relu(want + exact[3])
    g = (
        draw() * ((y > 0) == (want > 0)) if residual else draw()
    )  # near zero, ReLU may cut a value in one and not in the other
    got, again = (torch.autograd.grad(norm(), inputs, g) for _ in range(2))
    errors = {"y": apart(y, want)}
    for name, a, b in zip(
        ("dx", "dweight", "dbias", "dresidual"), got, torch.autograd.grad(want, exact, g.double()), strict=False
    ):
        errors[name] = apart(a, b)
    errors["other_bits"] = float(sum(not torch.equal(a, b) for a, b in zip(got, again, strict=True)))
    assert y.stride() == inputs[0].stride() == got[0].stride()
    return errors


def check() -> dict[str, Any]:
    found, bad = {}, []
    for shape in speed.SHAPES:
        for dtype in speed.DTYPES:
            for fmt in speed.FORMATS:
                for residual in (False, True):
                    what = f"{'x'.join(map(str, shape))} {dtype} {fmt}{' residual' if residual else ''}"
                    found[what] = errors = check_one(shape, dtype, fmt, residual)
                    bound = {"y": 1e-2, "dx": 1e-2, "other_bits": 0.0} if dtype == "bf16" else {"other_bits": 0.0}
                    if any(not error <= bound.get(name, 2e-5) for name, error in errors.items()):
                        bad.append(what)
                        print(f"   WRONG {what}: {errors}")
    worst = max(e["y"] for what, e in found.items() if "fp32" in what)
    print(f"   {len(found) - len(bad)} of {len(found)} agree with float64; worst fp32 output {worst:.1e}")
    return found


# of a ResNet-32: channels in, channels out, image side, kernel size, stride
CONVOLUTIONS = (
    (3, 16, 32, 3, 1),
    (16, 16, 32, 3, 1),
    (16, 32, 32, 3, 2),
    (16, 32, 32, 1, 2),
    (32, 32, 16, 3, 1),
    (32, 64, 16, 3, 2),
    (32, 64, 16, 1, 2),
    (64, 64, 8, 3, 1),
)


def convolution(n_in: int, n_out: int, side: int, size: int, stride: int) -> dict[str, Any]:
    """Errors against float64, and microseconds of forward plus backward here and in cuDNN, in bf16."""
    layer = Conv2d(n_in, n_out, size, stride=stride, padding=size // 2, bias=False)
    layer = layer.to(DEVICE, torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).bfloat16().to(memory_format=torch.channels_last)

    inputs = [draw(64, n_in, side, side).requires_grad_(n_in > 3) for _ in range(4)]
    grads = [draw(64, n_out, side // stride, side // stride) for _ in inputs]

    def gradients(y: Tensor, x: Tensor, weight: Tensor, g: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(y, (weight, *([x] if x.requires_grad else [])), g)
        return [y.detach(), *found]  # detached: a live autograd graph would tie later captures to this stream

    def ours(x: Tensor, g: Tensor) -> list[Tensor]:
        return gradients(layer.with_moments(x).out, x, layer.weight, g)

    def cudnn(x: Tensor, g: Tensor, weight: Tensor = layer.weight) -> list[Tensor]:
        return gradients(F.conv2d(x, weight, stride=stride, padding=size // 2), x, weight, g)

    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in (inputs[0], layer.weight)]
    want = cudnn(exact[0], grads[0].double(), exact[1])
    got, again = ours(inputs[0], grads[0]), ours(inputs[0], grads[0])
    found: dict[str, Any] = dict(zip(("y", "dweight", "dx"), map(apart, got, want), strict=False))
    found["other_bits"] = sum(not torch.equal(a, b) for a, b in zip(got, again, strict=True))
    works = {
        name: captured(lambda f=f: [f(x, g) for x, g in zip(inputs, grads, strict=True)], DEVICE)  # type: ignore[misc]
        for name, f in (("cudnn", cudnn), ("ours", ours))
    }
    for name, times in time_interleaved(works, DEVICE).items():
        found[f"{name}_us"] = 1e6 * median(times) / len(inputs)
    return found


def convolutions() -> dict[str, Any]:
    found = {}
    for shape in CONVOLUTIONS:
        found[str(shape)] = row = convolution(*shape)
        good = max(v for k, v in row.items() if not k.endswith("_us")) < 5e-3
        print(
            f"   {shape}: {'right' if good else 'WRONG'}; cuDNN {row['cudnn_us']:.1f} us, here {row['ours_us']:.1f} us",
            flush=True,
        )
    return found


def config(method: str, norm: str, precision: str, backbone: str, seed: int = 0) -> RunConfig:
    data = {"data.name": "synthetic:10x320x10x32", "data.tasks": 5, "data.stop_after": 2, "memory.budget": 160}
    rest = {"device": "cuda", "train.epochs": 3, "seed": seed, "precision": precision, "backbone": backbone}
    return resolve(
        ("gpu", {**data, **rest, "batch.augment": "padded-resized", "method.name": method, "norm.name": norm})
    )


def finished(settings: RunConfig, eager_steps: int) -> tuple[Run, int]:
    """A finished run, and how many graphs it captured."""
    before, CapturedFunction.EAGER_CALLS = CapturedFunction.EAGER_CALLS, eager_steps
    graphs = set()
    try:
        run = Run(settings)
        for _ in run.events():
            graphs |= {step.graph.graph for step in run.steps.values() if step.graph and step.graph.graph}
    finally:
        CapturedFunction.EAGER_CALLS = before
    return run, len(graphs)


CASES = (
    ("ft", "bn", "bf16", "resnet32"),
    ("ft", "tbbn", "bf16", "resnet32"),
    ("ssil", "tbbn", "bf16", "resnet32"),
    ("ft", "tbbn", "tf32", "resnet20"),
    ("ft", "tbbn", "fp32", "small"),
    ("podnet", "tbbn", "bf16", "small"),
)


def equality() -> dict[str, bool]:
    """Captured runs equal eager runs, and lanes equal runs alone, bit for bit."""
    found = {}
    for case in CASES:
        method, _, precision, backbone = case
        (alone, graphs), (eager, none) = finished(config(*case), 3), finished(config(*case), 10**9)
        a, b = alone.network.state_dict(), eager.network.state_dict()
        lane = run_lanes([config(*case), config(*case, seed=1), config(method, "bn", precision, backbone)], 3)[0]
        same = lane.accuracy == alone.record.accuracy and lane.history == alone.record.history
        same &= graphs >= 2 and not none  # at least one per task
        found[" ".join(case)] = all(torch.equal(a[k], b[k]) for k in a) and same
        print(f"   {case}: {found[' '.join(case)]}, {graphs} graphs", flush=True)
    return found


def tables() -> dict[str, Any]:
    found = speed.measure_speed(
        DEVICE, precisions=("bf16", "tf32"), n_lanes=(1, 8), on_row=lambda row: print(f"   {row}")
    )
    print(speed_tables(found))
    return found


PARTS = {"float64": check, "equality": equality, "convolutions": convolutions, "speed": tables}

if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(PARTS):
        sys.exit(f"gpu.py: unknown part {min(unknown)!r}; choose from: {', '.join(PARTS)}.")
    if not torch.cuda.is_available():
        sys.exit("gpu.py: no CUDA device here; on a CPU, `make test` tests the kernels.")
    for part in sys.argv[1:] or PARTS:
        section(part, PARTS[part])
    print(f"kernels that spill registers: {spilled() or 'none'}")
