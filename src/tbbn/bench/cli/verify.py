"""``tbbn verify``: whether a run's record is true."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tbbn.bench.cli.common import EXIT_FAILED, Command, run_folders
from tbbn.errors import UserError, printable


def add(command: Command) -> None:
    line = "Check every file of a run; recompute what its record says from its predictions; retrain a task and compare."
    proof = command("verify", _verify, line, "tbbn verify runs/demo/ft-tbbn-0 --retrain-task 2")
    proof.add_argument("runs", nargs="+", metavar="RUN", help="runs' folders, or folders of runs")
    proof.add_argument("--retrain-task", type=int, metavar="N", help="also train task N again, from its start")
    proof.add_argument("--from-start", action="store_true", help="with --retrain-task: train all tasks up to N again")
    proof.add_argument("--json", action="store_true", help="findings as JSON")


def _verify(chosen: argparse.Namespace) -> int:
    from tbbn.bench.runs.verify import verify

    if chosen.from_start and chosen.retrain_task is None:
        raise UserError("--from-start says how to retrain; give --retrain-task N too.")
    found = {folder: verify(folder) for folder in run_folders(chosen.runs)}
    if chosen.retrain_task is not None:
        for folder, findings in found.items():
            if not any(finding.problem for finding in findings):  # of a record that is not true nothing can be repeated
                findings += _retrain(folder, chosen.retrain_task - 1, chosen.from_start)
    wrong = {folder: [f for f in findings if f.problem] for folder, findings in found.items()}
    if chosen.json:
        entries = [{"directory": str(f), "findings": [asdict(x) for x in findings]} for f, findings in found.items()]
        print(json.dumps(entries, indent=1))
    else:
        for folder, findings in found.items():
            state = "wrong" if wrong[folder] else "true"
            print(printable(f"{folder}") + f": {state}; {len(findings)} things looked at")
            for finding in wrong[folder]:
                print(printable(f"  {finding.subject}: {finding.problem}"))
    return EXIT_FAILED if any(wrong.values()) else 0


def _retrain(folder: Path, task: int, from_start: bool) -> list[Any]:
    from tbbn.bench.cli.progress import progress
    from tbbn.bench.runs.record import load_record
    from tbbn.bench.runs.retrain import retrain
    from tbbn.bench.runs.sweep import Job

    job = Job(load_record(folder).run_config, folder)
    with progress([job], quiet=False) as shown:
        shown.start(job)
        return retrain(folder, task, from_start=from_start, on_event=partial(shown.event, job))
