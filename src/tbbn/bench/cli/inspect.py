"""``tbbn list``, ``show`` and ``doctor``: commands that only read."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from tbbn.bench.cli.catalogue import LISTS, doctor, lines
from tbbn.bench.cli.common import Command
from tbbn.errors import printable, unknown_name


def add(command: Command) -> None:
    what = command("list", _list, "List the available methods, norms, data sets, ...", "tbbn list methods")
    what.add_argument("what", metavar="WHAT", help=f"one of {', '.join(LISTS)}")
    what.add_argument("--json", action="store_true", help="print JSON")
    line = "Show one run: its accuracy matrix and every metric."
    show = command("show", _show, line, "tbbn show runs/demo/ft-tbbn-0")
    show.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/demo/ft-tbbn-0")
    show.add_argument("--format", default="text", help="text, md, csv or latex (default: text)")
    show.add_argument("--json", action="store_true", help="print the whole record as JSON")
    show.add_argument("--follow", action="store_true", help="show accuracies live while the run trains")
    line = "Show versions, device, available data sets and free disk space."
    health = command("doctor", _doctor, line, "tbbn doctor --root data")
    health.add_argument("--root", default="data", help="folder of the data sets (default: data)")
    health.add_argument("--json", action="store_true", help="print JSON")


def _list(args: argparse.Namespace) -> int:
    if args.what not in LISTS:
        raise unknown_name("list", args.what, LISTS)
    entries = LISTS[args.what]()
    if args.json:
        print(json.dumps(entries, indent=1))
        return 0
    for line in lines(entries, shutil.get_terminal_size().columns):
        print(line)
    return 0


def _show(args: argparse.Namespace) -> int:
    from tbbn.bench.engine.plugins import describe_plugins
    from tbbn.bench.report.tables import accuracy_table, metrics_table, skipped_note
    from tbbn.bench.runs.record import load_record

    if args.follow:
        from tbbn.bench.cli.follow import follow

        return follow(Path(args.run))
    record = load_record(args.run)
    if args.json:
        print(record.to_json(), end="")
        return 0
    config = record.run_config
    n_tasks, n_learnt = config.data.tasks, len(record.accuracy)
    part = f" after {n_learnt} of {n_tasks} tasks" if n_learnt < n_tasks else ""
    scaled = f"SCALE {config.train.scale:g}: a fraction of the epochs. " if config.train.scale != 1 else ""
    line = f"{scaled}{config.label}, {config.data.name}, seed {config.seed}: {record.status}{part}"
    line += f": {record.message}" if record.message else ""
    print(printable(line))
    for plugin in describe_plugins(record.plugins):
        print(printable(plugin))
    if record.skipped:
        print(printable(skipped_note([record])))
    if record.accuracy:
        print()
        print(accuracy_table(record).render(args.format))
        print()
        print(metrics_table(record).render(args.format))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    found = doctor(args.root)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    titles = {"environment": "environment", "plugins": "plugins", "data": f"data under {args.root}/"}
    for title, table in ((title, found[key]) for key, title in titles.items()):
        print(title)
        for key, value in table.items():
            print(printable(f"  {key.ljust(15)} {value}".rstrip()))
    return 0
