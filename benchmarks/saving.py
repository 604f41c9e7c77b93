"""What saving a run costs: training with a folder at the default interval, against training that leaves nothing behind.

python benchmarks/saving.py [--epochs N] [--rounds N] [--folder PATH] [--json] [--threads N]

ResNet-32 with TBBN on random images of CIFAR-100's shape, 100 of them in a task, LUCIR: inside a task a checkpoint holds a
teacher and the momentum besides the network. Two kinds of run: "epochs" trains two tasks in short epochs and is saved once a
minute; "tasks" has tasks of one such epoch, each of which ends with a save and a file of its own: far more saves than a run
of that length has in earnest. A run saves in the thread it trains in, so what it spends there is what saving costs: "share"
is that time over the rest. "ratio" and "cpu_ratio" compare whole runs with and without a folder, by the clock and by the
processor's time; who goes first changes from round to round, and on a busy machine the first of the two says little.
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
    """Notes what each call of :func:`tbbn.bench.runs.state.save` takes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.real = state.save

    def __call__(self, run: Run, directory: Path) -> None:
        began = time.perf_counter()
        self.real(run, directory)
        self.seconds.append(time.perf_counter() - began)


def train(chosen: RunConfig, directory: Path | None) -> tuple[float, float]:
    """Seconds of a run by the clock and by the processor, its preparation aside."""
    job = Run(chosen)
    began, worked = time.perf_counter(), time.process_time()
    for _ in job.events() if directory is None else saved(job, directory):
        pass
    return time.perf_counter() - began, time.process_time() - worked


def kept_in(chosen: RunConfig, folder: Path) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return train(chosen, Path(place))


def measure(chosen: RunConfig, rounds: int, folder: Path) -> dict[str, Any]:
    shares, ratios, processor, saves = [], [], [], []
    for i in range(rounds):
        timed = state.save = Timed()  # type: ignore[assignment]
        if i % 2:
            left, left_cpu = train(chosen, None)
            kept, kept_cpu = kept_in(chosen, folder)
        else:
            kept, kept_cpu = kept_in(chosen, folder)
            left, left_cpu = train(chosen, None)
        state.save = timed.real
        spent = sum(timed.seconds)
        shares.append(spent / (kept - spent))
        ratios.append(kept / left)
        processor.append(kept_cpu / left_cpu)
        saves += timed.seconds
        said = f"round {i + 1}/{rounds}: {kept:.1f} s with {len(timed.seconds)} saves of {spent:.3f} s in all"
        print(f"{said}, {left:.1f} s without; processor {kept_cpu:.1f} and {left_cpu:.1f} s", file=sys.stderr)
    return {
        "seconds": kept,
        "saves": len(timed.seconds),
        "save_ms": 1e3 * statistics.median(saves),
        "share": statistics.median(shares),
        "ratio": statistics.median(ratios),
        "cpu_ratio": statistics.median(processor),
        "target": TARGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="of each of the two tasks (default: 60)")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of runs of each kind (default: 1)")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where runs are kept meanwhile: the disk to measure"
    )
    parser.add_argument("--json", action="store_true", help="results as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    chosen = parser.parse_args()
    source = fake_cifar(1000, 200)
    loading.load = lambda *_, **__: source
    result = {}
    for kind in KINDS:
        result[kind] = measure(config(kind, chosen.threads, chosen.epochs), chosen.rounds, chosen.folder)
    if chosen.json:
        print(json.dumps({"torch": torch.__version__, "threads": chosen.threads, **result}, indent=1))
        return
    print(f"ResNet-32, TBBN, LUCIR, torch {torch.__version__}, {chosen.threads} threads")
    for kind, found in result.items():
        print(f"{kind}: {found['saves']} saves of {found['save_ms']:.0f} ms in {found['seconds']:.0f} s", end="")
        print(f", {100 * found['share']:.2f} % of training (target {100 * TARGET:.0f} %)", end="")
        print(f"; with a folder {found['ratio']:.3f} of the time without, {found['cpu_ratio']:.3f} of the processor's")


if __name__ == "__main__":
    main()
