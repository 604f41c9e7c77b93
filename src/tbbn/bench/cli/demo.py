"""``tbbn demo``: shows the mechanism, the bench at work, and the result, in about a minute."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tbbn.bench.cli.common import Command
from tbbn.bench.cli.engines import LOCAL
from tbbn.bench.cli.train import train


def add(command: Command) -> None:
    line = "Show the mechanism, a small benchmark run and the CIFAR-100 results, in about a minute."
    made = command("demo", _demo, line, "tbbn demo --out /tmp/demo")
    made.add_argument("--out", default="runs", help="folder of all runs (default: runs)")
    made.add_argument("--quiet", action="store_true", help="hide progress")
    made.set_defaults(lanes="1", time_limit=None, log="", **LOCAL)


def _demo(args: argparse.Namespace) -> int:
    folder = Path(args.out)
    (folder / "demo").mkdir(parents=True, exist_ok=True)
    _mechanism(folder)
    code = _digits(folder, args)
    _result()
    return code


def _mechanism(folder: Path) -> None:
    from tbbn.bench.report.figures import save_figure
    from tbbn.paper import toy

    outcomes = toy.toy()
    print(
        "1. The mechanism. Four tasks, each a Gaussian; batches hold 48 rows of task 4 and 16 of tasks 1 to 3. How far are a"
    )
    print("   norm's statistics from those of all tasks weighted equally?\n")
    print(toy.table(outcomes).render("text"))
    print(f"\nfigure: {save_figure(toy.figure(outcomes), folder / 'demo' / 'toy.png')}\n")


def _digits(folder: Path, args: argparse.Namespace) -> int:
    from tbbn.bench.report.tables import summary_table
    from tbbn.bench.runs.pending import expand
    from tbbn.bench.runs.recipe import read_recipe, recipe_text
    from tbbn.paper import find_recipe

    print("2. The bench. Ten digits in five tasks, 100 stored images, two norms, three seeds:\n")
    sys.stdout.flush()
    path = find_recipe("demo")
    values, axes = read_recipe(path)
    layers = [(str(path), values)]
    runs = expand(layers, axes, folder / "demo")
    code, records = train(runs, args, recipe=recipe_text(layers, axes))
    table = summary_table(records)
    print(replace(table, notes=()).render("text"))
    print("\nIt works here. Expect no difference: the digits are easy, and both norms learn them.\n")
    return code


def _result() -> None:
    from tbbn.paper.measured import gains, gains_by_task, measured

    found = measured()
    print(
        "3. The result. The real CIFAR-100 in ten tasks, fine-tuning as in the paper, best epoch on the new task kept:\n"
    )
    print(gains_by_task(found["best"]).render("text"))
    print("\nHow it depends on the protocol:\n")
    print(gains({name: found[name] for name in ("best", "last", "clean")}, ("A_f", "A_a")).render("text"))
    print("\nRecords, figures and the full results: docs/results.md. Next: tbbn run --help, tbbn reproduce --help.")
