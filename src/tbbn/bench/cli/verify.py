"""``tbbn verify``: verify the record of a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tbbn.bench.cli.common import EXIT_FAILED, Command, add_data_root, in_turn, run_folders
from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    from tbbn.bench.engine import Event
    from tbbn.bench.runs.finding import Finding


def add(command: Command) -> None:
    line = "Check the files of a run and recompute its results from its predictions; optionally retrain a task."
    verify = command("verify", _verify, line, "tbbn verify runs/demo/ft-tbbn-0 --retrain-task 2")
    verify.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs or sweeps")
    verify.add_argument("--retrain-task", type=int, metavar="N", help="also retrain task N and compare bit for bit")
    verify.add_argument("--from-start", action="store_true", help="with --retrain-task: retrain tasks 1 to N")
    line = "do not re-evaluate the saved networks (may take minutes on a CPU)"
    verify.add_argument("--no-evaluation", action="store_true", help=line)
    add_data_root(verify)
    verify.add_argument("--json", action="store_true", help="print JSON")


def _verify(args: argparse.Namespace) -> int:
    from tbbn.bench.runs.verify import verify

    if args.from_start and args.retrain_task is None:
        raise UserError("--from-start needs --retrain-task N.")
    evaluate = not args.no_evaluation
    folders = in_turn(run_folders(args.runs), "verify")
    found = {folder: verify(folder, evaluate=evaluate, root=args.root) for folder in folders}
    if args.retrain_task is not None:
        for folder, findings in found.items():
            if not any(finding.problem for finding in findings):  # there is nothing to compare with a damaged record
                retrained = _retrain(folder, args.retrain_task - 1, args.from_start, args.root)
                found[folder] = [*_without_losses(findings, args), *retrained]
    if args.json:
        entries = [{"directory": str(f), "findings": [asdict(x) for x in findings]} for f, findings in found.items()]
        print(json.dumps(entries, indent=1))
    else:
        for folder, findings in found.items():
            _print_findings(folder, findings)
    return EXIT_FAILED if any(finding.problem for findings in found.values() for finding in findings) else 0


def _print_findings(folder: Path, findings: list[Finding]) -> None:
    from tbbn.bench.runs.verify import RESULTS

    problems = [finding for finding in findings if finding.problem]
    made = [finding for finding in findings if not finding.not_checked]
    result = f"FAILED ({len(problems)} of {len(made)} checks)" if problems else f"OK ({len(made)} checks passed)"
    if not problems and any(finding.subject == RESULTS and finding.not_checked for finding in findings):
        result = f"files OK, RESULTS NOT RECOMPUTED ({len(made)} checks passed)"
    print(printable(f"{folder}: {result}"))
    for finding in problems:
        print(printable(f"  {finding.subject}: {finding.problem}"))
    print(printable(f"  checked: {', '.join(_subjects(made))}"))
    for reason in dict.fromkeys(finding.not_checked for finding in findings if finding.not_checked):
        subjects = _subjects([finding for finding in findings if finding.not_checked == reason])
        print(printable(f"  not checked: {', '.join(subjects)} ({reason})"))


def _subjects(findings: list[Finding]) -> list[str]:
    """Each subject once, with all its tasks, such as "accuracy after task 1, 2, 3"."""
    tasks: dict[str, list[str]] = {}
    for finding in findings:
        subject, task, number = finding.subject.partition(" task ")
        tasks.setdefault(subject + task, []).append(number)
    return [subject + ", ".join(numbers) if numbers[0] else subject for subject, numbers in tasks.items()]


def _without_losses(findings: list[Finding], args: argparse.Namespace) -> list[Finding]:
    """The findings with the one on losses limited to tasks that are not retrained, or without it if all are."""
    from tbbn.bench.runs.verify import LOSSES

    n_tasks = sum(finding.subject.startswith("accuracy after task") for finding in findings)
    if n_tasks == (args.retrain_task if args.from_start else 1):
        return [finding for finding in findings if finding.subject != LOSSES]
    return [replace(f, subject=f"{LOSSES} of other tasks") if f.subject == LOSSES else f for f in findings]


def _retrain(folder: Path, task: int, from_start: bool, root: str | None) -> list[Finding]:
    from tbbn.bench.progress import run_progress
    from tbbn.bench.runs.pending import PendingRun
    from tbbn.bench.runs.record import load_record
    from tbbn.bench.runs.retrain import retrain

    run, started = PendingRun(load_record(folder).run_config, folder), False
    with run_progress([run], quiet=False) as progress:

        def on_event(event: Event) -> None:
            nonlocal started
            if not started:
                progress.start(run)
            started = True
            progress.event(run, event)

        return retrain(folder, task, from_start=from_start, on_event=on_event, root=root)
