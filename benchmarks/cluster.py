"""What a cluster costs and gains: 64 short runs in this process, and on a local Ray with one and with two workers.

python benchmarks/cluster.py [--runs 64] [--rounds 2]

Needs tbbn[ray]. Runs are of one thread on the CPU. Each round times the three ways after one another; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from tbbn.bench.runs.pending import PendingRun, expand
from tbbn.bench.runs.recipe import Axes
from tbbn.bench.runs.sweep import run_all
from tbbn.integrations.cluster import run_on
from tbbn.integrations.ray import ray_cluster

SHORT = {"data.name": "synthetic:6x40x5x8", "data.tasks": 3, "train.epochs": 4, "memory.budget": 12}
SHORT |= {"device": "cpu", "threads": 1}


def short_runs(n: int) -> list[PendingRun]:
    """In a folder that is new each time, so that nothing is finished before."""
    return expand([("benchmark", SHORT)], Axes(norms=("tbbn",), seeds=tuple(range(n))), Path(tempfile.mkdtemp()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seconds: dict[str, list[float]] = {"here": [], "one worker": [], "two workers": []}
    began = time.perf_counter()
    with ray_cluster(None) as cluster:
        start = time.perf_counter() - began
        run_all(short_runs(2))  # what torch loads lazily
        run_on(cluster, short_runs(2), workers=2)
        for _ in range(args.rounds):
            for name in seconds:
                runs, began = short_runs(args.runs), time.perf_counter()
                if name == "here":
                    run_all(runs)
                else:
                    run_on(cluster, runs, workers=1 if name == "one worker" else 2)
                seconds[name].append(time.perf_counter() - began)
    here, one, two = (statistics.median(values) for values in seconds.values())
    found = {
        "runs": args.runs,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "seconds to start Ray": round(start, 1),
        "seconds a run, here": round(here / args.runs, 3),
        "seconds a run, one worker": round(one / args.runs, 3),
        "overhead a run": round((one - here) / args.runs, 3),
        "two workers over one": round(one / two, 2),
        "all rounds": {name: [round(value, 1) for value in values] for name, values in seconds.items()},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
