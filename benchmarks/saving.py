"""What saving a run costs: training with a folder, at the default interval, against training without one.

python benchmarks/saving.py [--epochs N] [--rounds N] [--folder PATH] [--json] [--threads N]

ResNet-32 with TBBN and LUCIR, so that a checkpoint inside a task holds a teacher and momentum too. Random images of
CIFAR-100's shape, 100 per task. Two kinds of run:

- epochs: two tasks of many short epochs; saved once a minute.
- tasks: tasks of a single short epoch, each followed by a save: far more saves than a real run of that length has.

A run saves in the thread that trains. "share" is the time inside saves over the rest. "ratio" and "cpu_ratio" compare whole
runs with and without a folder, by wall clock and by processor time, in alternating order; on a busy machine the wall clock
says little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.data import loading
from tbbn.bench.engine import Run
from tbbn.bench.runs import state
from tbbn.bench.runs.saved import saved

sys.path.insert(0, str(Path(__file__).parent))

from throughput import fake_cifar

TARGET = 0.02
COMMON: dict[str, Any] = {
    "device": "cpu",
    "backbone": "resnet32",
    "norm.name": "tbbn",
    "method.name": "lucir",
    "data.name": "cifar100",
    "data.tasks": 10,
    "batch.augment": "shift",
    "memory.budget": 100,
}
KINDS: dict[str, dict[str, Any]] = {
    "epochs": {"data.stop_after": 2},
    "tasks": {"data.stop_after": 6, "train.epochs": 1},
}


def config(kind: str, threads: int, epochs: int) -> RunConfig:
    return resolve(("benchmark", {**COMMON, "train.epochs": epochs, **KINDS[kind], "threads": threads}))


class Timed:
    """Records how long each call of :func:`tbbn.bench.runs.state.save` takes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.real = state.save

    def __call__(self, run: Run, directory: Path) -> None:
        start = time.perf_counter()
        self.real(run, directory)
        self.seconds.append(time.perf_counter() - start)


def train(settings: RunConfig, directory: Path | None) -> tuple[float, float]:
    """Wall-clock and processor seconds of a run, without its setup."""
    run = Run(settings)
    start, start_cpu = time.perf_counter(), time.process_time()
    for _ in run.events() if directory is None else saved(run, directory):
        pass
    return time.perf_counter() - start, time.process_time() - start_cpu


def train_saved(settings: RunConfig, folder: Path) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return train(settings, Path(place))


def measure(settings: RunConfig, rounds: int, folder: Path) -> dict[str, Any]:
    shares, ratios, processor, saves = [], [], [], []
    for i in range(rounds):
        timed = state.save = Timed()  # type: ignore[assignment]
        if i % 2:
            plain_s, plain_cpu = train(settings, None)
            saved_s, saved_cpu = train_saved(settings, folder)
        else:
            saved_s, saved_cpu = train_saved(settings, folder)
            plain_s, plain_cpu = train(settings, None)
        state.save = timed.real
        spent = sum(timed.seconds)
        shares.append(spent / (saved_s - spent))
        ratios.append(saved_s / plain_s)
        processor.append(saved_cpu / plain_cpu)
        saves += timed.seconds
        line = f"round {i + 1}/{rounds}: {saved_s:.1f} s with a folder ({len(timed.seconds)} saves, {spent:.3f} s)"
        print(f"{line}, {plain_s:.1f} s without; processor {saved_cpu:.1f} and {plain_cpu:.1f} s", file=sys.stderr)
    return {
        "seconds": saved_s,
        "saves": len(timed.seconds),
        "save_ms": 1e3 * statistics.median(saves),
        "share": statistics.median(shares),
        "ratio": statistics.median(ratios),
        "cpu_ratio": statistics.median(processor),
        "target": TARGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="epochs of each of the two tasks (default: 60)")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of runs per kind (default: 1)")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the runs are saved: the disk to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    args = parser.parse_args()
    source = fake_cifar(1000, 200)
    loading.load = lambda *_, **__: source
    result = {}
    for kind in KINDS:
        result[kind] = measure(config(kind, args.threads, args.epochs), args.rounds, args.folder)
    if args.json:
        print(json.dumps({"torch": torch.__version__, "threads": args.threads, **result}, indent=1))
        return
    print(f"ResNet-32, TBBN, LUCIR, torch {torch.__version__}, {args.threads} threads")
    for kind, found in result.items():
        print(f"{kind}: {found['saves']} saves of {found['save_ms']:.0f} ms in {found['seconds']:.0f} s", end="")
        print(f", {100 * found['share']:.2f} % of training (target {100 * TARGET:.0f} %)", end="")
        print(f"; with a folder / without: {found['ratio']:.3f}, processor time {found['cpu_ratio']:.3f}")


if __name__ == "__main__":
    main()
