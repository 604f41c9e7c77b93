"""What task-balanced batch norm costs in a training loop of one's own, beside batch norm.

    python benchmarks/own_loop.py                                  # every network and mode that fits this machine
    python benchmarks/own_loop.py --networks resnet18@32 --modes eager --rounds 5

The loop is the plain one a user writes: forward, loss, ``zero_grad``, ``backward``, SGD ``step``. Both norms take turns in one
process, and a figure is the median of its rounds. ``time`` is wall-clock time of a step, ``host`` the time Python needs to
enqueue one (where the two are equal, the loop waits for Python), ``launches`` the kernels of a step, ``peak`` its peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tbbn
from tbbn.bench.vision import torchvision

CURRENT, MEMORY, PAST_TASKS = 48, 16, 9  # r* = 16
NETWORKS = ("resnet18@32", "resnet18@224", "resnet50@224", "timm:efficientnet_b0@224")
MODES = ("eager", "autocast", "compile", "reduce-overhead")
NORMS = ("bn", "tbbn")
Step = Callable[[], Any]


def network(name: str) -> nn.Module:
    """A torchvision network, or one of timm's after ``timm:``."""
    vision = torchvision()
    if name.startswith("timm:"):
        import timm

        return timm.create_model(name.removeprefix("timm:"), num_classes=100)
    return vision.models.get_model(name, num_classes=100)


def step_of(model: nn.Module, images: Tensor, labels: Tensor, mode: str, balanced: bool) -> Step:
    """One step of the loop; the compiled modes compile the model, as a user would."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    half = mode != "eager"
    compiled: Callable[[Tensor], Tensor] = model
    if mode in ("compile", "reduce-overhead"):
        compiled = torch.compile(model, mode=None if mode == "compile" else mode)

    def step() -> None:
        layout = (
            tbbn.balance(model, current=CURRENT, memory=MEMORY, past_tasks=PAST_TASKS) if balanced else nullcontext()
        )
        precision = torch.autocast(images.device.type, torch.bfloat16) if half else nullcontext()
        with layout, precision:
            loss = cross_entropy(compiled(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def timed(step: Step, steps: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds a step takes, and milliseconds its Python code takes."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    enqueued = time.perf_counter()
    _wait(device)
    return 1e3 * (time.perf_counter() - begin) / steps, 1e3 * (enqueued - begin) / steps


def launches(step: Step, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        _wait(device)
    return sum(event.count for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def peak(step: Step, device: torch.device) -> float:
    """MiB above what the loop holds between steps, and that too."""
    if device.type != "cuda":
        return 0.0
    _wait(device)
    torch.cuda.reset_peak_memory_stats()
    step()
    _wait(device)
    return torch.cuda.max_memory_allocated() / 2**20


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(name: str, mode: str, *, rounds: int, steps: int, warm_up: int, device: torch.device) -> dict[str, Any]:
    kind, _, size = name.partition("@")
    found: dict[str, Any] = {"network": name, "mode": mode}
    work: dict[str, Step] = {}
    images = torch.randn(CURRENT + MEMORY, 3, int(size), int(size), device=device)
    labels = torch.randint(100, (CURRENT + MEMORY,), device=device)
    if mode != "eager":
        images = images.contiguous(memory_format=torch.channels_last)
    for norm in NORMS:
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        model = network(kind).to(device).train()
        if norm != "bn":
            tbbn.convert(model, norm)
        if mode != "eager":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        work[norm] = step_of(model, images, labels, mode, norm != "bn")
        for _ in range(warm_up):
            work[norm]()
        if mode != "reduce-overhead":  # the allocator does not count the memory of captured graphs
            found[f"{norm} peak"] = peak(work[norm], device) - before / 2**20
        found[f"{norm} launches"] = launches(work[norm], device)
    seen: dict[str, list[tuple[float, float]]] = {norm: [] for norm in NORMS}
    for i in range(rounds):
        for norm in NORMS if i % 2 else reversed(NORMS):
            seen[norm].append(timed(work[norm], steps, device))
    for norm in NORMS:
        found[f"{norm} ms"] = statistics.median(t for t, _ in seen[norm])
        found[f"{norm} host ms"] = statistics.median(h for _, h in seen[norm])
    found["ratio"] = found["tbbn ms"] / found["bn ms"]
    if found.get("bn peak"):
        found["peak ratio"] = found["tbbn peak"] / found["bn peak"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, batch {CURRENT} + {MEMORY}, r* = {tbbn.splits(CURRENT, MEMORY, PAST_TASKS)}"
    )
    rows = []
    for network_name in chosen.networks.split(","):
        for mode in chosen.modes.split(","):
            try:
                row = compare(
                    network_name, mode, rounds=chosen.rounds, steps=chosen.steps, warm_up=chosen.warm_up, device=device
                )
            except ImportError as error:
                print(f"{network_name:26} {mode:16} left out: {error}")
                continue
            rows.append(row)
            print(
                f"{network_name:26} {mode:16} bn {row['bn ms']:7.2f} ms (host {row['bn host ms']:6.2f})  "
                f"tbbn {row['tbbn ms']:7.2f} ms (host {row['tbbn host ms']:6.2f})  ratio {row['ratio']:.3f}  "
                f"launches {row['bn launches']}/{row['tbbn launches']}  "
                + (f"peak {row['peak ratio']:.3f}" if "peak ratio" in row else ""),
                flush=True,
            )
            if chosen.json:
                with open(chosen.json, "w") as file:
                    json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
