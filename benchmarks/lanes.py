"""What each kind of kernel costs while several runs share a GPU.

    PYTHONPATH=src python3 benchmarks/lanes.py 8 bn,tbbn

Runs of the paper's protocol on synthetic images of CIFAR's size, until each of them has captured a step of its second task. Then
the captured steps are replayed on their streams, with all kernels and with those of one kind disabled: the difference is what
the kind costs, waiting included. A profiler shows instead how long kernels last, which in parallel runs is mostly waiting.

If OUT is set, the numbers go to ``$OUT/lanes.json``. Needs torch 2.9 with Triton and a CUDA device.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tbbn.accelerators import graphs
from tbbn.bench.config import resolve
from tbbn.bench.engine import Event, run_lanes
from tbbn.bench.engine.events import EpochEnded

SETTINGS = {
    "device": "cuda",
    "protocol": "paper",
    "precision": "bf16",
    "backbone": "resnet32",
    "batch.augment": "padded-resized",
    "data.name": "synthetic:100x500x1x32",
    "data.tasks": 10,
    "data.stop_after": 2,
    "train.epochs": 3,
}
ROUNDS = 40  # replays of each lane that are timed
SMALLEST = 200  # nodes of a step's graph; that of a validation pass has fewer
# Prefixes of kernel names, the longer ones first; all others are torch's.
OURS = (
    "convolve", "weight_sums", "fold", "plan_forward", "plan_backward", "affine_backward", "affine", "row_sums", "moments",
    "crop", "forward", "backward",
)  # fmt: skip
Pointer = ctypes.c_void_p


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", Pointer),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        *((name, Pointer) for name in ("arguments", "extra", "kernel", "context")),
    ]


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver(name: str, *given: Any) -> None:
    code = getattr(library(), name)(*given)
    if code:
        raise RuntimeError(f"{name}: CUDA error {code}")


@dataclass
class Lane:
    """A captured step that can be replayed with some of its kernels disabled."""

    step: graphs.CapturedFunction  # kept, because it owns the tensors that the graph reads
    stream: torch.cuda.Stream

    def __post_init__(self) -> None:
        raw, n = raw_graph(self.step), ctypes.c_size_t()
        driver("cuGraphGetNodes", raw, None, ctypes.byref(n))
        nodes = (Pointer * n.value)()
        driver("cuGraphGetNodes", raw, nodes, ctypes.byref(n))
        self.kernels = [(node, kind) for node in map(Pointer, nodes) if (kind := kind_of(node))]
        self.executable = Pointer()
        driver("cuGraphInstantiateWithFlags", ctypes.byref(self.executable), raw, ctypes.c_ulonglong())

    def enable(self, wanted: Callable[[str], bool]) -> None:
        for node, kind in self.kernels:
            driver("cuGraphNodeSetEnabled", self.executable, node, ctypes.c_uint(wanted(kind)))

    def replay(self) -> None:
        driver("cuGraphLaunch", self.executable, Pointer(self.stream.cuda_stream))


def raw_graph(step: graphs.CapturedFunction) -> Pointer:
    assert step.graph is not None
    return Pointer(step.graph.raw_cuda_graph())


def kind_of(node: Pointer) -> str:
    """The kind of a kernel node; empty for other nodes."""
    what, params, text = ctypes.c_int(), KernelParams(), ctypes.c_char_p()
    driver("cuGraphNodeGetType", node, ctypes.byref(what))
    if what.value:
        return ""
    driver("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
    if params.function:
        driver("cuFuncGetName", ctypes.byref(text), Pointer(params.function))
    else:
        driver("cuKernelGetName", ctypes.byref(text), Pointer(params.kernel))
    name = (text.value or b"").decode()
    return next((kind for kind in OURS if name.startswith(kind)), "torch")


class AllCaptured(Exception):
    pass


def capture_steps(norms: list[str], n: int) -> list[Lane]:
    """Train until the steps of ``n`` runs are captured, and keep their graphs."""
    kept: dict[int, tuple[graphs.CapturedFunction, torch.cuda.Stream]] = {}
    make = torch.cuda.CUDAGraph

    def capture(self: graphs.CapturedFunction) -> None:
        torch.cuda.CUDAGraph = lambda: make(keep_graph=True)  # type: ignore[assignment,misc]
        try:
            plain(self)
        finally:
            torch.cuda.CUDAGraph = make  # type: ignore[misc]
        count, stream = ctypes.c_size_t(), torch.cuda.current_stream()
        driver("cuGraphGetNodes", raw_graph(self), None, ctypes.byref(count))
        if count.value > SMALLEST:
            kept[stream.cuda_stream] = self, stream

    plain, graphs.CapturedFunction._capture = graphs.CapturedFunction._capture, capture  # type: ignore[method-assign]
    ready: set[int] = set()

    def event(lane: int, event: Event) -> None:
        if isinstance(event, EpochEnded) and event.position.task == 1:
            ready.add(lane)
        if len(ready) == n:
            raise AllCaptured

    runs = [{**SETTINGS, "norm.name": norms[i % len(norms)], "seed": i // len(norms)} for i in range(n)]
    try:
        run_lanes([resolve(("lanes", run)) for run in runs], n, on_event=event)
    except AllCaptured:
        torch.cuda.synchronize()
    return [Lane(*captured) for captured in kept.values()]


def microseconds(lanes: list[Lane]) -> float:
    """Of a step and run, with the kernels that are enabled."""
    for rounds in (3, ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for lane in lanes:
                lane.replay()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / ROUNDS / len(lanes) * 1e6


def report(lanes: list[Lane]) -> dict[str, Any]:
    counts = Counter(kind for _, kind in lanes[0].kernels)
    all_kernels = {n: microseconds(lanes[:n]) for n in sorted({1, 2, 4, len(lanes)}) if n <= len(lanes)}
    print("us per step and run, by lanes:", {n: round(value) for n, value in all_kernels.items()})
    print(f"{len(lanes)} lanes; what a step without one kind of kernel saves:")
    costs = {}
    for kind, count in counts.most_common():
        for lane in lanes:
            lane.enable(lambda other, kind=kind: other != kind)  # type: ignore[misc]
        costs[kind] = all_kernels[len(lanes)] - microseconds(lanes)
        print(f"{costs[kind]:7.1f} us  {count:4d} launches  {kind}", flush=True)
    return {"us_by_lanes": all_kernels, "launches": counts, "us_saved_without": costs}


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("lanes.py: no CUDA device here.")
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    found = report(capture_steps(sys.argv[2].split(",") if len(sys.argv) > 2 else ["bn", "tbbn"], n))
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "lanes.json").write_text(json.dumps(found, indent=1))
