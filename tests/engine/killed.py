"""Run as a program: kill a run again and again, let it continue, and compare it with one that was left alone.

Imports torch once and forks, so that a kill costs a fraction of a second. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tbbn.config import RunConfig, resolve
from tbbn.engine import Run, run, state
from tbbn.sweep import parse_choice

SMALL = {
    "data.name": "synthetic:6x20x4x8",
    "data.tasks": 3,
    "train.epochs": 6,
    "memory.budget": 18,
    "batch.size": 16,
    "norm.name": "tbbn",
    "device": "cpu",
}


def settings(method: str) -> RunConfig:
    return resolve(("test", {**SMALL, **parse_choice("method", method)}))


def left_alone(config: RunConfig) -> Run:
    job = Run(config)
    for _ in job.recorded(None):
        pass
    return job


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal to the bit; where one is not a number, so is the other."""
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(1e9), b[k].nan_to_num(1e9)) for k in a)


def child(config: RunConfig, directory: Path) -> int:
    pid = os.fork()
    if pid == 0:
        run(config, directory=directory, every=0.0)
        os._exit(0)
    return pid


def main(method: str, directory: Path, n_kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    config, dice = settings(method), random.Random(seed)
    expected = left_alone(config)
    began = time.monotonic()
    left_alone(config)
    whole = time.monotonic() - began
    kills, places = 0, []
    while True:
        pid = child(config, directory)
        deadline = time.monotonic() + (
            dice.uniform(0.3, 3.0) * whole / max(n_kills, 1) + 0.05 if kills < n_kills else 600
        )
        status = 0
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.002)
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills += 1
            written = directory / "record.json"
            places.append(len(json.loads(written.read_text())["history"]) if written.exists() else 0)
            continue
        assert status == 0, status
        break
    resumed = Run(config)
    state.load(resumed, directory)
    mine, theirs = json.loads(resumed.record.to_json()), json.loads(expected.record.to_json())
    final = json.loads((directory / "record.json").read_text())
    return {
        "kills": kills,
        "places": places,
        "status": final["status"],
        "weights": same(resumed.network.state_dict(), expected.network.state_dict()),
        "record": [k for k in theirs if k not in ("seconds", "status", "environment") and mine[k] != theirs[k]],
        "predictions": same(resumed.record.predictions, expected.record.predictions),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))  # noqa: T201
