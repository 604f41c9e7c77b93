"""What the GPU does while several runs share it: the time of each kernel in a step, and how many kernels are at work.

    PYTHONPATH=src python3 benchmarks/lanes.py 8 bn,tbbn

Runs of the paper's protocol on synthetic images of CIFAR's size; torch's profiler watches 40 steps of each lane in their second
task. With programmatic dependent launch a kernel's time includes its wait for the kernel before it, so a lane alone has more than
one kernel at work. Needs torch with Triton and a CUDA device.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from tbbn.bench.config import resolve
from tbbn.bench.engine import Event, run_lanes
from tbbn.bench.engine.events import EpochEnded, Stepped

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
STEPS = 40  # of each lane


class Watch:
    """Profiles the lanes once each of them has ended an epoch of its second task: its step is captured then."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.ready: set[int] = set()
        self.steps = 0
        self.profile = profile(activities=[ProfilerActivity.CUDA])
        self.at_work = False

    def event(self, lane: int, event: Event) -> None:
        if isinstance(event, EpochEnded) and event.position.task == 1:
            self.ready.add(lane)
        if len(self.ready) < self.n or self.steps == STEPS * self.n:
            return
        if not self.at_work:
            torch.cuda.synchronize()
            self.profile.start()
            self.at_work = True
        elif isinstance(event, Stepped):
            self.steps += 1
            if self.steps == STEPS * self.n:
                torch.cuda.synchronize()
                self.profile.stop()

    def report(self) -> None:
        kernels = [e for e in self.profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        spans = [(e.name, e.time_range.start, e.time_range.end) for e in kernels]
        wall = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
        by_name: dict[str, list[float]] = defaultdict(list)
        for name, start, end in spans:
            by_name[name].append(end - start)
        total = sum(map(sum, by_name.values()))
        print(
            f"{self.n} lanes: {wall / self.steps:.0f} us a step and run, {len(spans) / self.steps:.0f} kernels, "
            f"{total / wall:.2f} of them at work at a time"
        )
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:30]:
            share, each = 100 * sum(times) / total, sum(times) / len(times)
            print(f"{share:5.1f} %  {len(times) / self.steps:6.1f} a step  {each:7.2f} us  {name[:90]}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("lanes.py: no CUDA device here.")
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    norms = sys.argv[2].split(",") if len(sys.argv) > 2 else ["bn", "tbbn"]
    runs = [{**SETTINGS, "norm.name": norms[i % len(norms)], "seed": i // len(norms)} for i in range(n)]
    watch = Watch(n)
    run_lanes([resolve(("lanes", run)) for run in runs], n, on_event=watch.event)
    watch.report()
