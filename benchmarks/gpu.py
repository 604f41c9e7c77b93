"""Task-balanced batch norm on a GPU: is it right, and what does it cost beside ``nn.BatchNorm2d``?

    PYTHONPATH=src python3 benchmarks/gpu.py

Needs torch with Triton and a CUDA device, nothing else. Four parts, each of which may fail alone: the kernels against
float64, layers (captured as graphs and eagerly), kernel times by the profiler, whole ResNet-32 steps. Times are compared in
interleaved rounds and given as medians. A table comes last; ``$OUT/gpu.json``, where OUT is set, has every number.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tbbn
from tbbn.models import backbone
from tbbn.norm import functional, kernels, layers
from tbbn.norm.plan import Layout, Plan, PlanOptions

SHAPES = ((64, 16, 32, 32), (64, 32, 16, 16), (64, 64, 8, 8), (64, 64, 56, 56), (64, 512, 7, 7))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
CONFIGS = [(shape, dtype, fmt) for dtype in DTYPES for fmt in FORMATS for shape in SHAPES]
CURRENT, MEMORY, PAST = 48, 16, 9  # r = 16
DEVICE = "cuda"
NAMES = ("y", "dx", "dw", "db", "mean", "var", "running_mean", "running_var")
WORKERS = 8
RESULTS: dict[str, Any] = {}
TABLE: list[str] = []
_PLAN_FORM = functional.task_balanced_batch_norm


def by_kernels(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    plan: Plan,
    momentum: float,
    eps: float,
) -> Tensor:
    assert kernels.available(x, plan)
    return kernels.planned_norm(x, weight, bias, plan, eps, mean, var, momentum)[0]


@contextmanager
def form(name: str) -> Iterator[None]:
    """Which code the task-balanced layers run: "triton", "split" (moments always in a launch of their own), "torch"."""
    available, limit = kernels.available, kernels.WHOLE_LIMIT
    try:
        if name == "torch":
            kernels.available = lambda *_: False
        else:
            layers.task_balanced_batch_norm = by_kernels
            kernels.WHOLE_LIMIT = 0 if name == "split" else limit
        yield
    finally:
        layers.task_balanced_batch_norm = _PLAN_FORM
        kernels.available, kernels.WHOLE_LIMIT = available, limit


@contextmanager
def balanced(kind: str, model: nn.Module) -> Iterator[None]:
    """What a forward of ``model`` needs around it; nothing where it is batch norm."""
    if kind == "bn":
        yield
    else:
        with form(kind), tbbn.balance(model, current=CURRENT, memory=MEMORY, past_tasks=PAST):
            yield


def section(title: str, work: Callable[[], Any]) -> None:
    print(f"== {title}", flush=True)
    start = time.perf_counter()
    try:
        RESULTS[title] = work()
    except Exception:
        traceback.print_exc()
        RESULTS[title] = {"failed": traceback.format_exc()}
        TABLE.append(f"{title}: FAILED")
    torch.cuda.synchronize()
    print(f"   {time.perf_counter() - start:.1f} s", flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "gpu.json").write_text(json.dumps(RESULTS, indent=1))


def make(shape: tuple[int, ...], dtype: str, fmt: str, offset: float = 0.5) -> tuple[Tensor, Tensor]:
    """Fresh activations, with a mean of their own in every channel, and a gradient."""
    x = torch.randn(shape, device=DEVICE) * 2 + offset * torch.randn(1, shape[1], 1, 1, device=DEVICE)
    g = torch.randn(shape, device=DEVICE)
    x, g = (t.to(DTYPES[dtype]).to(memory_format=FORMATS[fmt]) for t in (x, g))
    return x.requires_grad_(), g


def label(shape: tuple[int, ...], dtype: str, fmt: str) -> str:
    return f"{'x'.join(map(str, shape)):<14} {dtype} {fmt}"


# -- Right? -----------------------------------------------------------------------------------------------------------


def plan_of(dtype: torch.dtype) -> Plan:
    plan = Layout(CURRENT, MEMORY, PAST).plan(PlanOptions(), torch.device(DEVICE, 0), dtype)
    assert plan is not None
    return plan


def through_kernels(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    channels, plan = x.shape[1], plan_of(torch.float32)
    running = torch.zeros(channels, device=DEVICE), torch.ones(channels, device=DEVICE)
    poison = [torch.full_like(x, float("nan")) for _ in range(3)]  # a result not written will show
    del poison
    y, mean, var = kernels.planned_norm(x, weight, bias, plan, 1e-5, *running, 0.1)
    dx, dw, db = torch.autograd.grad(y, (x, weight, bias), g)
    return dict(zip(NAMES, (y.detach(), dx, dw, db, mean, var, *running), strict=True))


def in_float64(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    x, weight, bias = (t.detach().double().requires_grad_() for t in (x, weight, bias))
    plan, n = plan_of(torch.float64), x[0, 0].numel()
    y, mean, var = functional.reference(x, weight, bias, plan, 1e-5)
    dx, dw, db = torch.autograd.grad(y, (x, weight, bias), g.double())
    counts = plan.sizes * n
    running_var = 0.9 + 0.1 * (plan.running * counts / (counts - 1)) @ var
    running_mean = 0.1 * plan.running @ mean
    return dict(zip(NAMES, (y.detach(), dx, dw, db, mean, var, running_mean, running_var), strict=True))


def apart(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def check_one(shape: tuple[int, ...], dtype: str, fmt: str, offset: float = 0.5) -> dict[str, float]:
    x, g = make(shape, dtype, fmt, offset)
    weight = (torch.rand(shape[1], device=DEVICE) + 0.5).requires_grad_()
    bias = torch.randn(shape[1], device=DEVICE).requires_grad_()
    got, again, want = (
        through_kernels(x, g, weight, bias),
        through_kernels(x, g, weight, bias),
        in_float64(x, g, weight, bias),
    )
    errors = {k: apart(got[k], want[k]) for k in want}
    errors["not_deterministic"] = float(sum(not torch.equal(got[k], again[k]) for k in got))
    assert got["y"].stride() == x.stride() and got["dx"].stride() == x.stride()
    return errors


def check() -> dict[str, Any]:
    out: dict[str, Any] = {}
    bad = []
    for config in CONFIGS:
        for variant in ("triton", "split"):
            if variant == "split" and config[1:] not in (("fp32", "nchw"), ("bf16", "nhwc")):
                continue
            with form(variant):
                errors = check_one(*config)
            out[f"{label(*config)} {variant}"] = errors
            bound = {"y": 1e-2, "dx": 1e-2} if config[1] == "bf16" else {}
            wrong = {
                k: e for k, e in errors.items() if not e <= bound.get(k, 0.0 if k == "not_deterministic" else 2e-5)
            }
            if wrong:
                bad.append(label(*config))
                print(f"   WRONG {label(*config)} {variant}: {wrong}")
    far = check_one(SHAPES[0], "fp32", "nchw", offset=1e4)
    x, _ = make(SHAPES[0], "fp32", "nchw", offset=1e4)
    batch_norm = apart(F.batch_norm(x, None, None, training=True), F.batch_norm(x.double(), None, None, training=True))
    out["offset 1e4"] = {"kernels": far, "batch norm y": batch_norm}
    worst = max(e["y"] for k, e in out.items() if "fp32" in k)
    TABLE.append(
        f"check: {len(out) - 1 - len(bad)} of {len(out) - 1} agree with float64; worst fp32 y {worst:.1e}; "
        f"offset 1e4: y {far['y']:.1e} dx {far['dx']:.1e} dw {far['dw']:.1e} (BN y {batch_norm:.1e})"
    )
    return out


# -- Fast? ------------------------------------------------------------------------------------------------------------


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """``work`` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = work()
    graph.keep = keep  # type: ignore[attr-defined]  # its memory is the graph's
    return graph.replay


def race(runners: dict[str, Callable[[], Any]], seconds: float, rounds: int = 9) -> dict[str, float]:
    """Median milliseconds of each, in interleaved rounds of about ``seconds`` in all."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(run: Callable[[], Any], n: int) -> float:
        torch.cuda.synchronize()
        start.record()
        for _ in range(n):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / n

    for run in runners.values():
        once(run, 2)
    repeats = {
        k: max(1, int(seconds * 1e3 / rounds / len(runners) / max(once(run, 3), 1e-3))) for k, run in runners.items()
    }
    times: dict[str, list[float]] = {k: [] for k in runners}
    for _ in range(rounds):
        for k, run in runners.items():
            times[k].append(once(run, min(repeats[k], 200)))
    return {k: statistics.median(t) for k, t in times.items()}


class Layers:
    """Several layers of one kind with inputs of their own: one buffer used again and again would measure the cache."""

    def __init__(self, kind: str, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data = data
        self.norms = [nn.BatchNorm2d(x.shape[1]).to(DEVICE) for x, _ in data]
        self.kind = kind
        if kind != "bn":
            self.norms = [tbbn.convert(norm) for norm in self.norms]

    def __call__(self) -> list[Any]:
        out = []
        for norm, (x, g) in zip(self.norms, self.data, strict=True):
            y = norm(x)
            out.append((y, torch.autograd.grad(y, (x, norm.weight, norm.bias), g)))
        return out

    def ready(self) -> AbstractContextManager[None]:
        return balanced(self.kind, nn.ModuleList(self.norms))

    def peak(self) -> int:
        """Bytes above the input that one layer's forward and backward take."""
        norm, (x, g) = self.norms[0], self.data[0]
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = norm(x)
            grads = torch.autograd.grad(y, (x, norm.weight, norm.bias), g)
            peak = torch.cuda.max_memory_allocated() - before
            del y, grads
        return peak


def time_layers() -> dict[str, Any]:
    out: dict[str, Any] = {}
    TABLE.append("layer forward+backward, us a layer (ratio to BN)      BN   triton        split        torch    peak")
    chosen = [c for c in CONFIGS if c[1:] in (("fp32", "nchw"), ("bf16", "nhwc"), ("fp32", "nhwc"))]
    for config in chosen:
        data = [make(*config) for _ in range(8)]
        kinds = ("bn", "triton", "split", "torch")
        all_layers = {k: Layers(k, data) for k in kinds}
        runners, peaks = {}, {}
        for k, group in all_layers.items():
            with group.ready():
                runners[k] = captured(group)
                peaks[k] = group.peak()
        times = {k: t / len(data) * 1e3 for k, t in race(runners, 0.4).items()}
        eager: dict[str, float] = {}
        for k in ("bn", "triton", "torch"):
            with all_layers[k].ready():
                eager[k] = race({k: all_layers[k]}, 0.05, rounds=3)[k] / len(data) * 1e3
        ratios = {k: t / times["bn"] for k, t in times.items()}
        memory = peaks["triton"] / peaks["bn"]
        out[label(*config)] = {
            "us": times,
            "ratio": ratios,
            "eager_us": eager,
            "peak_bytes": peaks,
            "peak_ratio": memory,
        }
        cells = " ".join(f"{times[k]:6.1f} ({ratios[k]:4.2f})" for k in ("triton", "split", "torch"))
        TABLE.append(f"  {label(*config):<44} {times['bn']:8.1f} {cells}  {memory:5.3f}")
        TABLE[-1] += f"  eager {eager['bn']:.0f}/{eager['triton']:.0f}/{eager['torch']:.0f}"
        print(TABLE[-1], flush=True)
        del runners, all_layers, data
        torch.cuda.empty_cache()
    return out


def profile_kernels() -> dict[str, Any]:
    """Device time of every kernel of one layer: where the time of a layer goes."""
    from torch.profiler import ProfilerActivity, profile

    out: dict[str, Any] = {}
    for config in [c for c in CONFIGS if c[1:] in (("fp32", "nchw"), ("bf16", "nhwc"))]:
        data = [make(*config) for _ in range(4)]
        for kind in ("bn", "triton", "split"):
            group = Layers(kind, data)
            with group.ready():
                group()
                torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                    group()
                    torch.cuda.synchronize()
            rows = {
                e.key[:60]: [e.count, round(getattr(e, "device_time_total", 0.0) / max(e.count, 1), 2)]
                for e in recorded.key_averages()
                if getattr(e, "device_time_total", 0.0) > 0
            }
            out[f"{label(*config)} {kind}"] = rows
            print(f"   {label(*config)} {kind}: " + "; ".join(f"{k[:28]} x{n} {t}us" for k, (n, t) in rows.items()))
    return out


class Step:
    """A whole training step of ResNet-32: forward, cross entropy, backward, SGD."""

    def __init__(self, kind: str, amp: bool, fmt: str) -> None:
        self.kind, self.amp = kind, amp
        self.model = backbone("resnet32").to(DEVICE, memory_format=FORMATS[fmt])
        if kind != "bn":
            tbbn.convert(self.model)
        self.head = nn.Linear(64, 100).to(DEVICE)
        self.x = torch.randn(64, 3, 32, 32, device=DEVICE).to(memory_format=FORMATS[fmt])
        self.labels = torch.randint(100, (64,), device=DEVICE)
        self.sgd = torch.optim.SGD([*self.model.parameters(), *self.head.parameters()], lr=0.01, momentum=0.9)

    def __call__(self) -> Tensor:
        self.sgd.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.amp, cache_enabled=False):
            loss = F.cross_entropy(self.head(self.model(self.x).pooled).float(), self.labels)
        loss.backward()
        self.sgd.step()
        return loss

    def ready(self) -> AbstractContextManager[None]:
        return balanced(self.kind, self.model)


def time_steps() -> dict[str, Any]:
    out: dict[str, Any] = {}
    TABLE.append("captured ResNet-32 step, ms (ratio to BN)")
    for name, amp, fmt in (("fp32 nchw", False, "nchw"), ("bf16 nhwc", True, "nhwc"), ("fp32 nhwc", False, "nhwc")):
        runners, peaks, losses, kept = {}, {}, {}, []
        for kind in ("bn", "triton", "split", "torch"):
            step = Step(kind, amp, fmt)
            kept.append(step)  # a graph reads the tensors it was captured with
            with step.ready():
                for _ in range(2):
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    step()
                    peaks[kind] = torch.cuda.max_memory_allocated() - before
                runners[kind] = captured(step)
                runners[kind]()
                losses[kind] = step().item()
        times = race(runners, 1.5)
        ratios = {k: t / times["bn"] for k, t in times.items()}
        memory = {k: p / peaks["bn"] for k, p in peaks.items()}
        out[name] = {"ms": times, "ratio": ratios, "peak_bytes": peaks, "peak_ratio": memory, "loss": losses}
        cells = "  ".join(f"{k} {t:.3f} ({ratios[k]:.3f})" for k, t in times.items())
        TABLE.append(f"  {name}: {cells}; peak {memory['triton']:.3f}")
        print(TABLE[-1], flush=True)
        del runners, kept
        torch.cuda.empty_cache()
    return out


# -- One call ---------------------------------------------------------------------------------------------------------


def compile_ahead() -> None:
    """Fill Triton's cache with several processes: one alone would take most of the script's time."""
    command = [sys.executable, os.path.abspath(__file__), "--compile"]
    workers = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(WORKERS)]
    for worker in workers:
        try:
            _, errors = worker.communicate(timeout=60)
            if worker.returncode:
                print(f"   a compiling process failed: {errors[-300:]}")
        except subprocess.TimeoutExpired:
            worker.kill()
            print("   a compiling process took too long")


def compile_share(index: int) -> None:
    """Every WORKERS-th kernel: launch it once."""
    for config in CONFIGS[index::WORKERS]:
        for variant in ("triton", "split"):
            with form(variant):
                check_one(*config)


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--compile":
        compile_share(int(sys.argv[2]))
        return
    import triton

    torch.manual_seed(int(time.time()))
    RESULTS["versions"] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(),
    }
    print(RESULTS["versions"], flush=True)
    section("compile", compile_ahead)
    section("check", check)
    section("layers", time_layers)
    section("steps", time_steps)
    section("kernels", profile_kernels)
    print("\n".join(["", *TABLE]))


if __name__ == "__main__":
    main()
