"""The command line: ``tbbn run | list | show | report | doctor``. Data goes to standard output, progress to standard error."""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from tbbn import config as cfg
from tbbn.errors import UserError, choose
from tbbn.protocols import QUIRKS

EXIT_MISTAKE = 2
EXIT_DIVERGED = 3
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest option."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("argument command: ", ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        settings, words = _take_settings(words) if words[:1] == ["run"] else ({}, words)
        chosen = _parser().parse_args(words)
        chosen.settings = settings
        return chosen.call(chosen)
    except UserError as error:
        print(f"tbbn: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("tbbn: interrupted; what was finished is kept.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return 0


def _parser() -> Parser:
    parser = Parser(prog="tbbn", description="Class-incremental learning with any method, any norm, any scenario.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, call: Any, line: str, example: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, help=line, description=line, epilog=f"example: {example}", formatter_class=raw)
        made.set_defaults(call=call)
        return made

    run = command(
        "run",
        _run,
        "Train and evaluate: a recipe, a TOML file, or settings from the command line.",
        "tbbn run --data cifar100 --protocol paper --norm bn,tbbn --seeds 3 --train.epochs 2",
    )
    run.add_argument("recipe", nargs="?", help="a recipe's name (tbbn list recipes) or a TOML file; none: the demo")
    run.add_argument("--norm", help="norms with commas, options in brackets: bn,cn(groups=8),tbbn")
    run.add_argument("--method", help="methods with commas: ft,lucir")
    run.add_argument("--data", help="the data set, as data.name")
    run.add_argument("--seeds", help="a number of seeds, or seeds with commas")
    run.add_argument("--name", help="the folder under --out; made from the settings if not given")
    run.add_argument("--out", default="runs", help="where runs are kept (default: runs)")
    run.add_argument("--lanes", type=int, default=1, help="runs at a time on one device (default: 1)")
    run.add_argument(
        "--dry-run", action="store_true", help="check, print the config and what would be done, do nothing"
    )
    run.add_argument("--overwrite", action="store_true", help="run again what is finished, or has another config")
    run.add_argument("--json", action="store_true", help="results as JSON")
    run.add_argument("--quiet", action="store_true", help="no progress")
    listing = "\n".join(f"  --{key} {_shown(value)}" for key, value in cfg.names().items() if not key.endswith(".name"))
    run.epilog = f"every setting can be given, with its default:\n{listing}\n\n{run.epilog}"

    what = command("list", _list, "What there is to choose from.", "tbbn list methods")
    what.add_argument("what", choices=sorted(LISTS), metavar="WHAT", help=", ".join(sorted(LISTS)))
    what.add_argument("--json", action="store_true")
    show = command(
        "show", _show, "One run: its accuracies task by task and every metric.", "tbbn show runs/demo/ft-tbbn-0"
    )
    show.add_argument("run", help="a run's folder")
    show.add_argument("--format", default="text", help="text, md, csv or latex")
    show.add_argument("--json", action="store_true")
    report = command(
        "report", _report, "Runs as one table, mean ± std over seeds.", "tbbn report runs/demo --format md"
    )
    report.add_argument("runs", nargs="+", help="runs' folders, or folders of runs")
    report.add_argument("--format", default="text", help="text, md, csv or latex")
    report.add_argument("--plot", metavar="FILE.png", help="write the accuracy curves too")
    report.add_argument("--json", action="store_true")
    doctor = command("doctor", _doctor, "Versions, device, data found, free disk.", "tbbn doctor --root data")
    doctor.add_argument("--root", default="data", help="where data sets lie")
    doctor.add_argument("--json", action="store_true")
    return parser


def _shown(value: Any) -> str:
    return (
        ",".join(map(str, value))
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


RUN_OPTIONS = (
    "norm",
    "method",
    "data",
    "seeds",
    "name",
    "out",
    "lanes",
    "dry-run",
    "overwrite",
    "json",
    "quiet",
    "help",
)


def _take_settings(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """``--train.epochs 2`` or ``--train.epochs=2`` for any setting or option of a norm or method; and the other words."""
    known = {key: value for key, value in cfg.names().items() if not key.endswith(".name")}
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


def _jobs(chosen: argparse.Namespace) -> list[Any]:
    from tbbn.paper import recipes
    from tbbn.sweep import Axes, expand, parse_seeds, split_names

    given = dict(chosen.settings)
    if chosen.data:
        given["data.name"] = chosen.data
    name, layers, sweep = chosen.name, [], {}
    bare = not (given or chosen.norm or chosen.method or chosen.seeds)
    recipe = chosen.recipe or ("demo" if bare else None)
    if recipe:
        path = recipes().get(recipe)
        if path is None:
            if not recipe.endswith(".toml") and not Path(recipe).exists():
                raise choose("recipe", recipe, recipes())
            path = Path(recipe)
        values = cfg.read_toml(path)
        sweep = {key.removeprefix("sweep."): values.pop(key) for key in list(values) if key.startswith("sweep.")}
        layers.append((str(path), values))
        name = name or path.stem
    unknown = set(sweep) - {"norms", "methods", "seeds"}
    if unknown:
        raise UserError(f"{recipe}: [sweep] has no option {unknown.pop()!r}; it takes: methods, norms, seeds.")
    if not given.get("seed") and chosen.seeds:
        sweep["seeds"] = parse_seeds(chosen.seeds)
    axes = Axes(
        methods=split_names(chosen.method) if chosen.method else tuple(sweep.get("methods", ())),
        norms=split_names(chosen.norm) if chosen.norm else tuple(sweep.get("norms", ())),
        seeds=tuple(sweep.get("seeds", ())),
    )
    layers.append(("command line", given))
    if name is None:
        parts = [given.get("data.name", "digits"), chosen.method or "ft", chosen.norm or "bn"]
        name = "-".join(parts).replace("/", "_").replace(",", "+").replace(":", "_")
    return expand(layers, axes, Path(chosen.out) / name)


def _run(chosen: argparse.Namespace) -> int:
    from tbbn.report.progress import progress
    from tbbn.report.tables import summary_table
    from tbbn.sweep import run_all

    jobs = _jobs(chosen)
    if chosen.dry_run:
        return _dry_run(jobs, chosen.json)
    with progress(jobs, chosen.quiet) as shown:
        records = run_all(
            jobs,
            lanes=chosen.lanes,
            on_start=shown.start,
            on_event=shown.event,
            on_end=shown.end,
            overwrite=chosen.overwrite,
        )
    folder = Path(chosen.out) / jobs[0].directory.relative_to(chosen.out).parts[0]
    if chosen.json:
        print(json.dumps([_summary(job, record) for job, record in zip(jobs, records, strict=True)], indent=1))
    else:
        print(summary_table(records).render("text"))
    try:
        from tbbn.report.plots import accuracy_curves

        picture = accuracy_curves(records, folder / "accuracy.png")
        print(f"accuracy curves: {picture}", file=sys.stderr if chosen.json else sys.stdout)
    except UserError as error:
        print(f"tbbn: {error}", file=sys.stderr)
    return EXIT_DIVERGED if any(record.status == "diverged" for record in records) else 0


def _summary(job: Any, record: Any) -> dict[str, Any]:
    config = job.config
    return {
        "directory": str(job.directory),
        "method": str(config.method),
        "norm": str(config.norm),
        "seed": config.seed,
        "status": record.status,
        "metrics": record.metrics,
    }


def _dry_run(jobs: list[Any], as_json: bool) -> int:
    from tbbn.engine.forecast import forecast
    from tbbn.report.tables import Table

    config = jobs[0].config
    entries = forecast(config)
    total = sum(entry.steps * entry.epochs for entry in entries)
    if as_json:
        tasks = [asdict(entry) for entry in entries]
        print(json.dumps({"config": cfg.to_dict(config), "tasks": tasks, "steps": total, "runs": len(jobs)}, indent=1))
        return 0
    header = ("task", "classes", "images", "exemplars", "batch", "r*", "steps an epoch", "steps")
    rows = [
        (
            str(entry.task + 1),
            str(entry.classes),
            str(entry.images),
            str(entry.exemplars),
            f"{entry.current}+{entry.memory}",
            str(entry.splits),
            str(entry.steps),
            str(entry.steps * entry.epochs),
        )
        for entry in entries
    ]
    print(cfg.to_toml(config))
    print(Table(header, tuple(rows)).render("text"))
    others = f", and {len(jobs) - 1} more like it with another method, norm or seed" if len(jobs) > 1 else ""
    print(f"\n{total} steps in the main phases of {jobs[0].directory}{others}; nothing was done")
    return 0


def _list_methods() -> dict[str, str]:
    from tbbn.methods import METHODS

    return {name: kind.description for name, kind in METHODS.items()}


def _list_norms() -> dict[str, str]:
    from tbbn.norm import DESCRIPTIONS

    return DESCRIPTIONS


def _list_datasets() -> dict[str, str]:
    from tbbn.data.sources import available

    return available()


def _list_backbones() -> dict[str, str]:
    from tbbn.models import backbones

    return backbones()


def _list_recipes() -> dict[str, str]:
    from tbbn.paper import describe, recipes

    return {name: describe(path) for name, path in recipes().items()}


def _list_augmentations() -> dict[str, str]:
    from tbbn.data.augment import augmentations

    return augmentations()


LISTS = {
    "methods": _list_methods,
    "norms": _list_norms,
    "datasets": _list_datasets,
    "backbones": _list_backbones,
    "recipes": _list_recipes,
    "augmentations": _list_augmentations,
    "quirks": lambda: {name: quirk.line for name, quirk in QUIRKS.items()},
}


def _list(chosen: argparse.Namespace) -> int:
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


def _report(chosen: argparse.Namespace) -> int:
    from tbbn.record import load_record
    from tbbn.report.plots import accuracy_curves
    from tbbn.report.tables import summary_table

    folders = []
    for text in chosen.runs:
        inside = sorted(file.parent for file in Path(text).rglob("record.json"))
        if not inside:
            raise UserError(f"{text}: no run here; a run's folder holds a record.json.")
        folders += inside
    records = [load_record(folder) for folder in folders]
    if chosen.json:
        entries = [
            {"directory": str(f), "label": r.run_config.label, "seed": r.run_config.seed, "metrics": r.metrics}
            for f, r in zip(folders, records, strict=True)
        ]
        print(json.dumps(entries, indent=1))
    else:
        print(summary_table(records).render(chosen.format))
    if chosen.plot:
        print(f"accuracy curves: {accuracy_curves(records, chosen.plot)}", file=sys.stderr)
    return 0


def _doctor(chosen: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from tbbn.data.sources import found
    from tbbn.record import environment

    facts = environment()
    for package in ("torchvision", "triton", "numpy", "rich", "matplotlib", "safetensors", "scikit-learn"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    try:
        from tbbn.vision import torchvision

        torchvision()
    except (UserError, ImportError, RuntimeError) as error:
        facts["torchvision"] = f"{facts['torchvision']}, cannot be used: {error}"
    facts["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    facts["free disk here"] = f"{shutil.disk_usage('.').free / 2**30:.0f} GiB"
    data = {name: "found" if there else "not found" for name, there in found(chosen.root).items()}
    if chosen.json:
        print(json.dumps({"environment": facts, "data": data}, indent=1))
        return 0
    for title, table in (("environment", facts), (f"data under {chosen.root}/", data)):
        print(title)
        for key, value in table.items():
            print(f"  {key.ljust(16)}{value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
