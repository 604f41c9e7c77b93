"""The command line: ``tbbn run | resume | list | show | report | verify | doctor``.

Data goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from tbbn import config as cfg
from tbbn.catalogue import LISTS, doctor
from tbbn.errors import UserError, choose

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_DIVERGED = 3
EXIT_INTERRUPTED = 130
COMMANDS = ("run", "resume", "list", "show", "report", "verify", "doctor")


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words:
            raise UserError(
                f"a command is needed: {', '.join(COMMANDS)}; tbbn run shows what this is, tbbn --help more."
            )
        if not words[0].startswith("-") and words[0] not in COMMANDS:
            raise choose("command", words[0], COMMANDS)
        settings, words = _take_settings(words) if words[0] == "run" else ({}, words)
        chosen = _parser().parse_args(words)
        chosen.settings = settings
        code: int = chosen.call(chosen)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"tbbn: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("tbbn: interrupted; what was done is kept, and the same command goes on from there.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; what is still in the buffer would fail again at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"tbbn: {error.filename}: {error.strerror}.", file=sys.stderr)
        return EXIT_MISTAKE


def _parser() -> Parser:
    import tbbn

    parser = Parser(prog="tbbn", description="Class-incremental learning with any method, any norm, any scenario.")
    parser.add_argument("--version", action="version", version=f"tbbn {tbbn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, call: Any, line: str, example: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, help=line, description=line, epilog=f"example: {example}", formatter_class=raw)
        made.set_defaults(call=call)
        return made

    run = command("run", _run, "Train and evaluate; without arguments, a demonstration of a minute.", _RUN_EXAMPLE)
    run.add_argument("recipe", nargs="?", help="a recipe's name (tbbn list recipes) or a TOML file")
    run.add_argument("--norm", help="norms with commas, options in brackets: bn,cn(groups=8),tbbn")
    run.add_argument("--method", help="methods with commas, options likewise: ft,lucir")
    run.add_argument("--data", help="the data set: cifar100, folder:PATH, ...")
    run.add_argument("--seeds", help="a number of seeds, or seeds with commas")
    run.add_argument("--name", help="the folder under --out; made from the settings if not given")
    run.add_argument("--out", default="runs", help="where runs are kept (default: runs)")
    run.add_argument("--lanes", type=int, default=1, help="runs at a time on one device (default: 1)")
    run.add_argument("--dry-run", action="store_true", help="check, print config and plan, do nothing")
    run.add_argument("--overwrite", action="store_true", help="run again what is finished, or has another config")
    run.add_argument("--json", action="store_true", help="results as JSON")
    run.add_argument("--quiet", action="store_true", help="no progress")
    run.epilog = f"{_settings_help()}\n\n{run.epilog}"

    line = "Go on with runs that were interrupted; those finished are left as they are."
    resume = command("resume", _resume, line, "tbbn resume runs/demo")
    resume.add_argument("runs", nargs="+", metavar="RUN", help="runs' folders, or folders of runs")
    resume.add_argument("--lanes", type=int, default=1, help="runs at a time on one device (default: 1)")
    resume.add_argument("--json", action="store_true", help="results as JSON")
    resume.add_argument("--quiet", action="store_true", help="no progress")

    what = command("list", _list, "What there is to choose from.", "tbbn list methods")
    what.add_argument("what", metavar="WHAT", help=", ".join(LISTS))
    what.add_argument("--json", action="store_true", help="as JSON")
    line = "One run: its accuracies task by task and every metric."
    show = command("show", _show, line, "tbbn show runs/demo/ft-tbbn-0")
    show.add_argument("run", metavar="RUN", help="a run's folder")
    show.add_argument("--format", default="text", help="text, md, csv or latex")
    show.add_argument("--json", action="store_true", help="the whole record as JSON")
    line = "Runs as one table, mean ± std over seeds."
    report = command("report", _report, line, "tbbn report runs/demo --format md")
    report.add_argument("runs", nargs="+", metavar="RUN", help="runs' folders, or folders of runs")
    report.add_argument("--format", default="text", help="text, md, csv or latex")
    report.add_argument("--plot", metavar="FILE.png", help="write the accuracy curves too")
    report.add_argument("--json", action="store_true", help="every run's metrics as JSON")
    line = "Recompute what a run's record says from its predictions; check its files."
    proof = command("verify", _verify, line, "tbbn verify runs/demo/ft-tbbn-0")
    proof.add_argument("runs", nargs="+", metavar="RUN", help="runs' folders, or folders of runs")
    proof.add_argument("--json", action="store_true", help="findings as JSON")
    health = command("doctor", _doctor, "Versions, device, data found, free disk.", "tbbn doctor --root data")
    health.add_argument("--root", default="data", help="where data sets lie (default: data)")
    health.add_argument("--json", action="store_true", help="as JSON")
    return parser


_RUN_EXAMPLE = "tbbn run --data cifar100 --protocol paper --norm bn,tbbn --seeds 3 --train.epochs 2"


def _settings_help() -> str:
    """Every setting with its default and what the config says about it."""
    notes = cfg.notes()
    shown = {key: f"  --{key} {_shown(value)}".rstrip() for key, value in cfg.names().items() if key not in _AXES}
    width = max(map(len, shown.values()))
    lines = [f"{text.ljust(width)}  {notes.get(key, '')}".rstrip() for key, text in shown.items()]
    head = "every setting, with its default (data sets and the protocol have their own: see --dry-run), and the options of\n"
    return head + "norms and methods as --norm.groups 8, --method.kd 2:\n" + "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


_AXES = ("data.name", "norm.name", "method.name")  # which have options of their own
RUN_OPTIONS = (
    *("norm", "method", "data", "seeds", "name", "out", "lanes"),
    *("dry-run", "overwrite", "json", "quiet", "help"),
)


def _take_settings(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """``--train.epochs 2`` or ``--train.epochs=2`` for any setting or option of a norm or method; and the other words."""
    known = cfg.names()
    found: dict[str, Any] = {}
    others, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        key, separator, value = word[2:].partition("=")
        if not word.startswith("--") or key in RUN_OPTIONS:
            others.append(word)
            continue
        if key not in known and not key.startswith(("norm.", "method.")):
            near = difflib.get_close_matches(key, [*known, *RUN_OPTIONS], n=1, cutoff=0.5)
            raise UserError(
                f"no setting --{key}." + (f" Did you mean --{near[0]}?" if near else " See tbbn run --help.")
            )
        if not separator:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif isinstance(known.get(key), bool):
                value = "true"
            else:
                raise UserError(f"--{key} needs a value.")
        found[key] = cfg.parse_value(key, value)
    return found, others


def _jobs(chosen: argparse.Namespace) -> tuple[list[Any], Path]:
    """The runs asked for, and the folder that holds them all."""
    from tbbn.paper import read_recipe
    from tbbn.sweep import Axes, expand, parse_seeds, split_names

    given = dict(chosen.settings)
    if chosen.data:
        given["data.name"] = chosen.data
    method, norm = (getattr(chosen, kind) or given.pop(f"{kind}.name", None) for kind in ("method", "norm"))
    bare = not (given or norm or method or chosen.seeds)
    name, layers = chosen.name, []
    sweep: dict[str, Any] = {}
    if chosen.recipe or bare:
        path, values, sweep = read_recipe(chosen.recipe or "demo")
        layers.append((str(path), values))
        name = name or path.stem
    if "seed" in given and chosen.seeds:
        raise UserError("--seed and --seeds exclude each other; --seeds 5, is the seed 5, --seeds 5 the seeds 0 to 4.")
    if chosen.seeds:
        sweep["seeds"] = parse_seeds(chosen.seeds)
    elif "seed" in given:
        sweep.pop("seeds", None)
    axes = Axes(
        methods=split_names(method) if method else tuple(sweep.get("methods", ())),
        norms=split_names(norm) if norm else tuple(sweep.get("norms", ())),
        seeds=tuple(sweep.get("seeds", ())),
    )
    layers.append(("command line", given))
    if name is None:
        parts = [given.get("data.name", "digits"), method or "ft", norm or "bn"]
        name = re.sub(r"[^\w.=+-]+", "_", "-".join(parts).replace(",", "+")).strip("_")
    folder = Path(chosen.out) / name
    return expand(layers, axes, folder), folder


def _run(chosen: argparse.Namespace) -> int:
    jobs, folder = _jobs(chosen)
    if chosen.dry_run:
        return _dry_run(jobs, chosen.json)
    return _work(jobs, folder, chosen, overwrite=chosen.overwrite)


def _resume(chosen: argparse.Namespace) -> int:
    from tbbn.record import load_record
    from tbbn.sweep import Job

    folders = _run_folders(chosen.runs)
    jobs = [Job(load_record(folder).run_config, folder) for folder in folders]
    return _work(jobs, Path(chosen.runs[0]), chosen, overwrite=False)


def _work(jobs: list[Any], folder: Path, chosen: argparse.Namespace, *, overwrite: bool) -> int:
    from tbbn.report.progress import progress
    from tbbn.report.tables import summary_table
    from tbbn.sweep import run_all, stoppable

    if chosen.lanes < 1:
        raise UserError(f"--lanes must be at least 1, got {chosen.lanes}.")
    with progress(jobs, chosen.quiet) as shown, stoppable() as stop:
        records = run_all(
            jobs,
            lanes=chosen.lanes,
            on_start=shown.start,
            on_event=shown.event,
            on_end=shown.end,
            overwrite=overwrite,
            stop=stop,
        )
    if chosen.json:
        print(json.dumps([_summary(job, record) for job, record in zip(jobs, records, strict=True)], indent=1))
    else:
        print(summary_table(records).render("text"))
        print(f"\none run: tbbn show {jobs[0].directory}")
    try:
        from tbbn.report.plots import accuracy_curves

        picture = accuracy_curves(records, folder / "accuracy.png")
        print(f"accuracy curves: {picture}", file=sys.stderr if chosen.json else sys.stdout)
    except UserError as error:
        print(f"tbbn: {error}", file=sys.stderr)
    states = {record.status for record in records}
    return EXIT_FAILED if "failed" in states else EXIT_DIVERGED if "diverged" in states else 0


def _summary(job: Any, record: Any) -> dict[str, Any]:
    config = job.config
    return {
        "directory": str(job.directory),
        "method": str(config.method),
        "norm": str(config.norm),
        "seed": config.seed,
        "status": record.status,
        "message": record.message,
        "metrics": record.metrics,
    }


def _dry_run(jobs: list[Any], as_json: bool) -> int:
    from tbbn.engine.forecast import forecast
    from tbbn.report.tables import forecast_table

    config = jobs[0].config
    entries = forecast(config)
    total = sum(entry.all_steps for entry in entries)
    if as_json:
        tasks = [asdict(entry) for entry in entries]
        print(json.dumps({"config": cfg.to_dict(config), "tasks": tasks, "steps": total, "runs": len(jobs)}, indent=1))
        return 0
    print(cfg.to_toml(config))
    print(forecast_table(entries).render("text"))
    others = f", and {len(jobs) - 1} more like it with another method, norm or seed" if len(jobs) > 1 else ""
    print(f"\n{total} steps in the main phases of {jobs[0].directory}{others}; nothing was done")
    return 0


def _list(chosen: argparse.Namespace) -> int:
    if chosen.what not in LISTS:
        raise choose("list", chosen.what, LISTS)
    entries = LISTS[chosen.what]()
    if chosen.json:
        print(json.dumps(entries, indent=1))
        return 0
    width = max(map(len, entries))
    for name, line in entries.items():
        print(f"{name.ljust(width)}  {line}".rstrip())
    return 0


def _show(chosen: argparse.Namespace) -> int:
    from tbbn.record import load_record
    from tbbn.report.tables import accuracy_table, metrics_table

    record = load_record(chosen.run)
    if chosen.json:
        print(record.to_json(), end="")
        return 0
    config = record.run_config
    print(f"{config.label}, {config.data.name}, seed {config.seed}: {record.status} {record.message}".rstrip())
    if record.accuracy:
        print()
        print(accuracy_table(record).render(chosen.format))
        print()
        print(metrics_table(record).render(chosen.format))
    return 0


def _run_folders(given: Sequence[str]) -> list[Path]:
    """The runs in these folders, each once: a folder and its parent may both be given."""
    folders: list[Path] = []
    for text in given:
        inside = sorted(file.parent for file in Path(text).rglob("record.json"))
        if not inside:
            raise UserError(f"{text}: no run here; a run's folder holds a record.json.")
        folders += inside
    return list(dict.fromkeys(folders))


def _verify(chosen: argparse.Namespace) -> int:
    from tbbn.engine.verify import verify

    found = {folder: verify(folder) for folder in _run_folders(chosen.runs)}
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


def _report(chosen: argparse.Namespace) -> int:
    from tbbn.record import load_record
    from tbbn.report.plots import accuracy_curves
    from tbbn.report.tables import summary_table

    folders = _run_folders(chosen.runs)
    records = [load_record(folder) for folder in folders]
    if chosen.json:
        entries = [
            {"directory": str(f), "label": r.run_config.label, "seed": r.run_config.seed, "status": r.status}
            | {"metrics": r.metrics}
            for f, r in zip(folders, records, strict=True)
        ]
        print(json.dumps(entries, indent=1))
    else:
        print(summary_table(records).render(chosen.format))
    if chosen.plot:
        print(f"accuracy curves: {accuracy_curves(records, chosen.plot)}", file=sys.stderr)
    return 0


def _doctor(chosen: argparse.Namespace) -> int:
    found = doctor(chosen.root)
    if chosen.json:
        print(json.dumps(found, indent=1))
        return 0
    for title, table in (("environment", found["environment"]), (f"data under {chosen.root}/", found["data"])):
        print(title)
        for key, value in table.items():
            print(f"  {key.ljust(16)}{value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
