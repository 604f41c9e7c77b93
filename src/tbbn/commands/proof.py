"""``tbbn verify``: whether a run's record is true."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tbbn.commands.common import EXIT_FAILED, Command, run_folders


def add(command: Command) -> None:
    line = "Recompute what a run's record says from its predictions; check its files."
    proof = command("verify", _verify, line, "tbbn verify runs/demo/ft-tbbn-0")
    proof.add_argument("runs", nargs="+", metavar="RUN", help="runs' folders, or folders of runs")
    proof.add_argument("--json", action="store_true", help="findings as JSON")


def _verify(chosen: argparse.Namespace) -> int:
    from tbbn.engine.verify import verify

    found = {folder: verify(folder) for folder in run_folders(chosen.runs)}
    wrong = {folder: [f for f in findings if f.problem] for folder, findings in found.items()}
    if chosen.json:
        entries = [{"directory": str(f), "findings": [asdict(x) for x in findings]} for f, findings in found.items()]
        print(json.dumps(entries, indent=1))
    else:
        for folder, findings in found.items():
            state = "wrong" if wrong[folder] else "true"
            print(f"{folder}: {state}; {len(findings)} things looked at")
            for finding in wrong[folder]:
                print(f"  {finding.subject}: {finding.problem}")
    return EXIT_FAILED if any(wrong.values()) else 0
