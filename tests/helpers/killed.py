"""Run as a program: kill a run repeatedly, let it resume, and compare it with an uninterrupted run.

One run is killed at random moments; another once in every phase of every task and while its files are written. The program
imports torch once and forks, so that a kill costs a fraction of a second. It prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.engine import Event, Run, Stepped
from tbbn.bench.engine.task import EngineTaskContext
from tbbn.bench.runs import checkpoint, state
from tbbn.bench.runs.recipe import parse_choice
from tbbn.bench.runs.saved import run_saved
from tbbn.bench.runs.verify import verify

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


def uninterrupted(config: RunConfig) -> Run:
    job = Run(config)
    for _ in job.events():
        pass
    return job


def run_in_pieces(config: RunConfig, directory: Path, pauses: Iterable[int]) -> tuple[Run, int]:
    """Stop a run after so many steps each time and resume it; the finished run, and in how many places it was stopped."""
    places = set()
    for pause in (*pauses, 10**6):
        asked = iter(range(1, 10**7))
        record = run_saved(config, directory, stop=lambda asked=asked, pause=pause: next(asked) >= pause)  # type: ignore[misc]
        if record.status == "finished":
            break
        saved = checkpoint.load(directory)
        assert saved is not None
        places.add(tuple(saved[0]["position"].values()))
    assert record.status == "finished"
    resumed = Run(config)
    state.load(resumed, directory)
    assert resumed.position.task == len(record.accuracy)
    resumed.record = record
    return resumed, len(places)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit, NaN equal to NaN."""
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(1e9), b[k].nan_to_num(1e9)) for k in a)


def differences(config: RunConfig, directory: Path, expected: Run) -> list[str]:
    """What differs between the files of a finished run and an uninterrupted run."""
    resumed = Run(config)
    state.load(resumed, directory)
    mine, theirs = resumed.record.tree(), expected.record.tree()
    found = [k for k in theirs if k not in ("seconds", "status") and mine[k] != theirs[k]]
    if json.loads((directory / "record.json").read_text())["status"] != "finished":
        found.append("status")
    if not same(resumed.network.state_dict(), expected.network.state_dict()):
        found.append("network")
    if not same(resumed.record.predictions, expected.record.predictions):
        found.append("predictions")
    return found + [f"verify: {f.subject}: {f.problem}" for f in verify(directory) if f.problem]


# Where a child dies: a function, and whether before or after the call.
PLACES: dict[str, tuple[Any, str, str]] = {
    "herding": (EngineTaskContext, "updated_memory", "after"),  # exemplars are selected but not saved
    "evaluation": (sys.modules[Run.__module__], "evaluate", "after"),
    "renaming": (os, "replace", "after"),  # some files are new, others old
    "writing": (os, "fsync", "before"),  # a temporary file without its final name
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def trap(place: str, calls: int) -> Callable[[Event], None]:
    """Make this process die at a place, after so many calls. Pass the run's events to the function returned."""
    left = iter(range(calls))

    def look(event: Event) -> None:
        if isinstance(event, Stepped):
            here = "second" if event.position.phase else "main"
            if here == place and next(left, None) is None:
                die()

    if place in PLACES:
        owner, name, when = PLACES[place]
        real = getattr(owner, name)

        def trapped(*arguments: Any, **more: Any) -> Any:
            now = next(left, None) is None
            if now and when == "before":
                die()
            found = real(*arguments, **more)
            if now:
                die()
            return found

        setattr(owner, name, trapped)
    return look


def child(config: RunConfig, directory: Path, place: str = "", calls: int = 0) -> int:
    pid = os.fork()
    if pid == 0:
        run_saved(config, directory, every=0.0, on_event=trap(place, calls))
        os._exit(0)
    return pid


def killed_everywhere(config: RunConfig, directory: Path, dice: random.Random) -> dict[str, int]:
    """Kill a run in each phase of each task, in order; after each kill the folder must pass verification."""
    kills: Counter[str] = Counter()
    last = config.data.tasks - 1
    for task in range(config.data.tasks):
        second = [("second", dice.randrange(3))] if task and config.method.name != "ft" else []
        rest = [("herding", 0), ("evaluation", 0), ("renaming", dice.randrange(3)), ("writing", dice.randrange(3))]
        if task == last:  # there are no later files to wait for
            rest[2:] = [("renaming", 0), ("writing", 0)]
        for place, calls in [("main", dice.randrange(4)), *second, *rest]:
            _, status = os.waitpid(child(config, directory, place, calls), 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (task, place, calls, status)
            kills[place] += 1
            if (directory / "record.json").exists():
                wrong = [f for f in verify(directory) if f.problem]
                assert not wrong, (task, place, calls, wrong)
    _, status = os.waitpid(child(config, directory), 0)
    assert status == 0, status
    return kills


def killed_at_random(config: RunConfig, directory: Path, n_kills: int, whole: float, dice: random.Random) -> int:
    """Kill a run at random moments, spread over the ``whole`` seconds it takes."""
    kills = 0
    while True:
        pid = child(config, directory)
        pause = dice.uniform(0.3, 3.0) * whole / max(n_kills, 1) + 0.05 if kills < n_kills else 600
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert status == 0, status
                if kills == n_kills:
                    return kills
                shutil.rmtree(directory)  # it finished before the kill: try again
                break
            time.sleep(0.002)
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills += 1


def main(method: str, directory: Path, n_kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    config, dice = settings(method), random.Random(seed)
    expected = uninterrupted(config)
    began = time.monotonic()
    uninterrupted(config)
    whole = time.monotonic() - began
    at_random = killed_at_random(config, directory / "random", n_kills, whole, dice)
    everywhere = killed_everywhere(config, directory / "everywhere", dice)
    return {
        "kills": {**everywhere, "random": at_random},
        "different": {place: differences(config, directory / place, expected) for place in ("random", "everywhere")},
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))  # noqa: T201
