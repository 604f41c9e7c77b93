"""Make the tables of ``docs/scale.md``: what the whole paper takes on 1, 8 and 64 GPUs, from measured times.

python tools/scale.py            # write them
python tools/scale.py --check    # exit code 1 if they are not current
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tbbn.bench.config import RunConfig, flatten, resolve
from tbbn.bench.engine.forecast import forecast
from tbbn.bench.engine.setup import method_of
from tbbn.bench.runs.recipe import parse_choice, read_recipe
from tbbn.paper import find_recipe
from tbbn.paper.published import paper_tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/scale.md"
BEGIN, END = "<!-- made by tools/scale.py -->", "<!-- end -->"
SEEDS, LANES, GPUS = 5, 8, (1, 8, 64)
ORACLES = ("oracle-cifar100", "oracle-imagenet100")  # the paper's upper bounds, which no table of its own has
START = 90  # seconds of a worker before its first step: imports, data to the GPU, kernels compiled (about 40 s)
DEEPER = {
    "resnet34": 2.0
}  # multiply-adds relative to ResNet-18; the mobile networks have fewer, but as much memory traffic


@dataclass(frozen=True)
class Times:
    """What was measured on an H200 in bf16."""

    small: float  # seconds of a step and run, ResNet-32 on 32x32, eight runs side by side
    large: float  # seconds of a step, ResNet-18 on 224x224, one run
    method: dict[str, float]  # a step of a method, its later phases spread over the main one, over one of fine-tuning


def measured() -> Times:
    lanes = json.loads((ROOT / "results/h200.json").read_text())["lanes"]
    chosen = [e["ms_per_step_and_run"] for e in lanes if e["lanes"] == LANES and e["convolutions"] == "tbbn"]
    found = re.search(r"training ResNet-18, bf16.*\| (\d+ \d+) \(", (ROOT / "docs/speed.md").read_text())
    assert found is not None, "docs/speed.md: the images per second of ResNet-18 are missing"
    return Times(statistics.mean(chosen) / 1000, 64 / int(found[1].replace(" ", "")), methods())


def methods() -> dict[str, float]:
    """From runs of Table 2 that shared a GPU. A group of n that took alike long had at least n lanes: an upper bound.

    Only the runs with batch norm and TBBN, seed 0: the others were interrupted and went on with other numbers of lanes.
    """
    sessions = json.loads((ROOT / "results/cifar100-ft.json").read_text())["sessions"]
    seconds: dict[str, list[float]] = {}
    configs = {"ft": resolve(("", {"protocol": "paper", "data.name": "cifar100", "device": "cpu"}))}
    for file in sorted((ROOT / "results/cifar100-table2").glob("*/record.json")):
        record = json.loads(file.read_text())
        name = record["config"]["method"]["name"]
        if record["config"]["norm"]["name"] not in ("bn", "tbbn") or record["config"]["seed"]:
            continue
        seconds.setdefault(name, []).append(record["seconds"])
        configs[name] = resolve(("", {**flatten(record["config"]), "device": "cpu"}))
    all_of_them = [s for several in seconds.values() for s in several]
    per_step = {"ft": sessions[-1]["seconds_for_all"] / LANES / amount(configs["ft"]).full_steps}
    for name, several in seconds.items():
        together = sum(_is_near(s, several[0]) for s in all_of_them)
        per_step[name] = statistics.mean(several) / together / amount(configs[name]).full_steps
    return {name: time / per_step["ft"] for name, time in per_step.items()}


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) < 0.25 * other


@dataclass(frozen=True)
class Work:
    """The runs of a table with one method: all take the same time."""

    table: str
    data: str
    is_large: bool
    runs: int
    steps: int  # of the main phases
    seconds: float  # of GPU time of a run


def works(times: Times) -> Iterator[Work]:
    tables = [(t.name, t.recipe, t.backbone) for t in paper_tables()]
    for name, recipe, backbone in [*tables, *((recipe.partition("-")[0], recipe, "") for recipe in ORACLES)]:
        values, axes = read_recipe(find_recipe(recipe))
        given = {**values, **({"backbone": backbone} if backbone else {})}
        for method in axes.methods or ("ft",):
            config = resolve((recipe, given), ("", {**parse_choice("method", method), "device": "cpu"}))
            yield _work(name, config, len(axes.norms or ("bn",)), times)


def _work(table: str, config: RunConfig, n_norms: int, times: Times) -> Work:
    found, is_large = amount(config), config.data.crop > 64
    step = times.large * DEEPER.get(config.backbone, 1.0) if is_large else times.small
    seconds = found.full_steps * step * times.method.get(config.method.name, 1.0)
    return Work(table, config.data.name, is_large, SEEDS * n_norms, found.steps, seconds)


class Amount(NamedTuple):
    steps: int  # of the main phases
    full_steps: float  # as many rows in batches of 64


def amount(config: RunConfig) -> Amount:
    """What a run trains. Neither network nor norm changes it, and few methods: what is the same is counted once."""
    method, plain = method_of(config), resolve()
    if not method.holdout() and not method.all_data and method.memory_views(1) == 1:
        config = replace(config, method=plain.method)
    return _amount(replace(config, backbone="small", norm=plain.norm, seed=0))


@functools.cache
def _amount(config: RunConfig) -> Amount:
    tasks = forecast(config).tasks
    return Amount(sum(t.all_steps for t in tasks), sum(t.all_steps * (t.current + t.memory) / 64 for t in tasks))


def jobs(found: list[Work]) -> list[float]:
    """The seconds of every job: eight small runs share a GPU, a large run has its own."""
    small = sorted((w.seconds for w in found if not w.is_large for _ in range(w.runs)), reverse=True)
    packs = [sum(small[i : i + LANES]) for i in range(0, len(small), LANES)]
    return [START + s for s in packs + [w.seconds for w in found if w.is_large for _ in range(w.runs)]]


def makespan(seconds: list[float], gpus: int) -> float:
    """The longest job goes first, to the GPU that is free first."""
    loads = [0.0] * gpus
    for job in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += job
    return max(loads)


def page() -> str:
    times = measured()
    found = list(works(times))
    lines = ["| part of the paper | data | runs, 5 seeds | steps of a run | GPU hours |", "|---|---|---:|---:|---:|"]
    rows: dict[tuple[str, str], list[Work]] = {}
    for work in found:
        rows.setdefault((work.table, work.data), []).append(work)
    for (table, data), group in rows.items():
        steps = sorted({w.steps for w in group})
        span = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
        hours = sum(w.runs * w.seconds for w in group) / 3600
        lines.append(f"| {table} | {data} | {sum(w.runs for w in group)} | {span} | {hours:.1f} |")
    total = sum(w.runs * w.seconds for w in found) / 3600
    lines.append(f"| **all** | | **{sum(w.runs for w in found)}** | | **{total:.0f}** |")
    every = jobs(found)
    lines += ["", "| H200s | hours for everything | idle GPU hours at the end |", "|---:|---:|---:|"]
    for gpus in GPUS:
        span = makespan(every, gpus) / 3600
        lines.append(f"| {gpus} | {span:.1f} | {abs(gpus * span - sum(every) / 3600):.1f} |")
    factors = ", ".join(f"{name} {factor:.1f}" for name, factor in times.method.items() if name != "ft")
    lines += [
        "",
        f"Taken from measurements: {1000 * times.small:.2f} ms for a step of ResNet-32 on 32x32, eight runs side by side; "
        f"{1000 * times.large:.2f} ms for a step of ResNet-18",
        f"on 224x224, batches of 64. A step takes that of fine-tuning times: {factors}, second phases included.",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not current")
    args = parser.parse_args()
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    made = f"{before}{BEGIN}\n\n{page()}\n\n{END}{rest.partition(END)[2]}"
    if args.check:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
