"""Fair timing of alternatives on a CPU or a GPU.

Candidates run in interleaved rounds, in alternating order, and are compared within a round, so that other load on the machine
affects all of them equally. On a GPU, capture the work as a CUDA graph first and rotate through several inputs, because a single
input would stay in the L2 cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

Work = Callable[[], Any]
Clock = Callable[[Work, int], float]  # seconds per call over n calls


def time_interleaved(
    candidates: dict[str, Work],
    device: torch.device,
    *,
    seconds: float = 0.6,
    rounds: int = 9,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each candidate, one value per round. Takes about ``seconds`` in total."""
    clock = clock or device_clock(device)
    once = {name: (clock(work, 2), clock(work, 3))[1] for name, work in candidates.items()}  # warm up, then estimate
    calls = {name: min(200, max(1, int(seconds / rounds / len(once) / t))) for name, t in once.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds):
        for name, work in list(candidates.items())[:: 1 if i % 2 else -1]:
            times[name].append(clock(work, calls[name]))
    return times


def device_clock(device: torch.device) -> Clock:
    """A wall clock on a CPU, CUDA events on a GPU."""

    def on_cpu(work: Work, n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            work()
        return (time.perf_counter() - start) / n

    def on_gpu(work: Work, n: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(n):
            work()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end), 1e-4) / n / 1e3

    return on_gpu if device.type == "cuda" else on_cpu


def median_ratio(times: dict[str, list[float]], name: str) -> float:
    """Median over rounds of a candidate's time divided by batch norm's in the same round."""
    return median(a / b for a, b in zip(times[name], times["bn"], strict=True))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large copy: the upper limit for a pass over memory."""
    megabytes = 2048 if device.type == "cuda" else 256
    source = torch.randn(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    seconds = time_interleaved({"copy": lambda: target.copy_(source)}, device, seconds=0.5)["copy"]
    return 2 * 4 * source.numel() / median(seconds)


def captured(work: Work, device: torch.device) -> Work:
    """Capture ``work`` as a CUDA graph and return its replay; on a CPU, return ``work`` itself."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay(_: Any = (kept, work)) -> None:  # the default keeps the graph's inputs and outputs alive
        graph.replay()

    return replay


def peak_memory(work: Work, device: torch.device) -> int:
    """Peak bytes allocated during a call, minus those allocated before it; 0 on a CPU, where torch does not count them."""
    if device.type != "cuda":
        return 0
    for _ in range(2):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = work()
        most = torch.cuda.max_memory_allocated(device) - before
        del kept
    return most
