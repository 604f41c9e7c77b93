"""Run as a program: drive commands of tbbn through random steps and check what they leave after each.

    python tests/bench/stateful/machine.py --seed 3 --steps 300      draw steps from this seed
    python tests/bench/stateful/machine.py --replay '[{...}, ...]'   do these steps

The last line printed is a JSON object: how many steps of each kind were done, and for a broken invariant what was seen, and
the shortest sequence found that shows it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from forked import draw_nothing, prepare
from steps import Step, do, draw, recover
from world import TRAIN, Broken, World

EPISODE = 16  # steps between two clean folders
SHRINKING = 120.0  # seconds at most


def play(world: World, steps: list[Step], done: Counter[str]) -> tuple[int, str] | None:
    """Do steps from an empty folder. Gives the number of steps to the first broken invariant, and what it is."""
    world.clear()
    number = 0
    try:
        for step in steps:
            number += 1
            if do(world, step):
                done[label(step)] += 1
        recover(world)
        done["recover"] += 1
    except Broken as error:
        return number, str(error)
    return None


def label(step: Step) -> str:
    fault = step.get("fault")
    return f"{step['do']} {step['how']}" if "how" in step else f"{step['do']} {fault['kind'] if fault else ''}".strip()


def shrunk(world: World, steps: list[Step], problem: str) -> list[Step]:
    """Fewer steps that break the same invariant."""
    deadline, kind = time.monotonic() + SHRINKING, problem.split(":")[0]

    def breaks(some: list[Step]) -> bool:
        found = play(world, some, Counter())
        return found is not None and found[1].split(":")[0] == kind

    i = len(steps) - 1
    while i >= 0 and time.monotonic() < deadline:
        plain = {key: value for key, value in steps[i].items() if key != "fault"}
        for fewer in ([*steps[:i], *steps[i + 1 :]], [*steps[:i], plain, *steps[i + 1 :]]):
            if fewer != steps and breaks(fewer):
                steps = fewer
                break
        i = min(i - 1, len(steps) - 1)
    return steps


def explore(world: World, seed: int, n_steps: int, seconds: float) -> dict[str, Any]:
    """Play episodes until enough steps are done, time is up, or an invariant is broken."""
    dice, done, deadline = random.Random(seed), Counter[str](), time.monotonic() + seconds
    while done.total() < n_steps and time.monotonic() < deadline:
        steps = [draw(dice, world) for _ in range(EPISODE)]
        found = play(world, steps, done)
        if found is not None:
            short = shrunk(world, steps[: found[0]], found[1])
            again = play(world, short, Counter())
            problem = again[1] if again is not None else found[1]
            return {"steps": done.total(), "done": done, "seed": seed, "broken": problem, "replay": short}
    return {"steps": done.total(), "done": done, "seed": seed, "broken": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--replay", type=json.loads)
    parser.add_argument("--draw", action="store_true", help="draw the real pictures, which takes longer")
    given = parser.parse_args()
    if not given.draw:
        draw_nothing()
    prepare(TRAIN)
    world = World.make()
    try:
        if given.replay is not None:
            done = Counter[str]()
            found = play(world, given.replay, done)
            result = {"steps": done.total(), "done": done, "broken": found and found[1]}
        else:
            result = explore(world, given.seed, given.steps, given.seconds)
    finally:
        world.remove()
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
