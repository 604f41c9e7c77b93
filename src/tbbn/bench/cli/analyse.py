"""``tbbn shares``, ``drift``, ``slots`` and ``epochs``: analyses that explain results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tbbn.bench.cli.common import Command, add_data_root, in_turn, may_refuse, refuse, run_folders
from tbbn.errors import UserError, printable, unknown_name

if TYPE_CHECKING:
    from tbbn.bench.analysis.epochs import EpochScore
    from tbbn.bench.config import RunConfig
    from tbbn.bench.report.table import Table


_TRAINED = ("recipe", "norm", "method", "data", "seeds")  # options that say which runs to train


def add(command: Command) -> None:
    line = "Show the newest task's share in a norm's running statistics, with r and r*. Trains nothing."
    shares = command("shares", _shares, line, "tbbn shares --data cifar100 --norm bn,tbbn,tbbn(rule=current),weighted")
    _add_settings(shares, norm="bn,tbbn,weighted", method="method, options in brackets (default: ft)")
    line = "Measure how far running statistics are from those with all tasks weighted equally."
    drift = command("drift", _drift, line, "tbbn drift runs/demo/ft-bn-0 runs/demo/ft-tbbn-0 --plot drift.png")
    drift.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs or sweeps with the same backbone")
    drift.add_argument("--images", type=int, default=0, metavar="N", help="use N images of each task (default: all)")
    drift.add_argument(
        "--view", default="train", help="preprocessing: train, with augmentation, or test (default: train)"
    )
    line = "Test whether networks use the batch statistics to tell new images from past ones."
    slots = command("slots", _slots, line, "tbbn slots runs/demo/ft-tbbn-0 --batches 20")
    slots.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs or sweeps")
    slots.add_argument("--batches", type=int, default=20, metavar="N", help="training batches to try (default: 20)")
    for made in (drift, slots):
        add_data_root(made)
        made.add_argument("--task", type=int, metavar="N", help="use the network after task N (default: the last)")
    line = "Train, evaluate after every epoch, and show which epoch each selection rule would keep."
    epochs = command(
        "epochs", _epochs, line, "tbbn epochs --protocol paper --data digits --data.validation 0.1 --plot epochs.png"
    )
    _add_settings(epochs, norm="bn,tbbn", method="methods, comma-separated, options in brackets (default: ft)")
    epochs.add_argument("--seeds", help="number of seeds, or a list: 3, or 0,1,2 (default: 1)")
    epochs.add_argument(
        "--from",
        dest="records",
        nargs="+",
        metavar="FOLDER",
        help="show the epochs that these runs kept; train nothing",
    )
    epochs.add_argument("--quiet", action="store_true", help="hide progress")
    may_refuse(epochs, *_TRAINED)
    for made in (shares, drift, slots, epochs):
        made.add_argument("--format", default="text", help="text, md, csv or latex (default: text)")
    for made, what in ((drift, "drift of every layer"), (epochs, "score of every epoch")):
        made.add_argument("--plot", metavar="FILE.png", help=f"also draw the {what}")
    for made, what in ((drift, "drift of every layer"), (slots, "counts"), (epochs, "epochs")):
        made.add_argument("--json", action="store_true", help=f"print the {what} as JSON")


def _add_settings(made: argparse.ArgumentParser, norm: str, method: str) -> None:
    made.set_defaults(takes_settings=True)
    made.add_argument("recipe", nargs="?", help="a recipe's name (tbbn list recipes) or a TOML file")
    made.add_argument("--norm", default=norm, help=f"norms, comma-separated, options in brackets (default: {norm})")
    made.add_argument("--method", help=method)
    made.add_argument("--data", help="data set: cifar100, digits, ... (tbbn list datasets)")


def _check_output(args: argparse.Namespace) -> None:
    """Raise for a format or a picture that cannot be made, before the work for it."""
    from tbbn.bench.report.table import FORMATS

    if args.format not in (*FORMATS, "tex"):
        raise unknown_name("format", args.format, FORMATS)
    if getattr(args, "json", False) and args.format != "text":
        raise UserError(f"--json and --format {args.format} are two formats; leave one of them out.")
    if getattr(args, "plot", None):
        from tbbn.bench.report.figures import check_picture

        check_picture(args.plot)


def _configs(args: argparse.Namespace) -> list[RunConfig]:
    """The requested configs, as ``tbbn run`` would make them."""
    from tbbn.bench.cli.train import requested_runs

    args.name, args.out, args.dry_run, args.yes = None, "runs", True, True
    seeds = getattr(args, "seeds", None)  # the default is one seed
    args.seeds = seeds if seeds or "seed" in args.settings else "1"
    return [run.config for run in requested_runs(args)[0]]


def _shares(args: argparse.Namespace) -> int:
    from tbbn.bench.analysis.shares import shares_table

    _check_output(args)
    configs = {(str(config.method), str(config.norm)): config for config in _configs(args)}
    if len(methods := dict.fromkeys(method for method, _ in configs)) > 1:
        raise UserError(f"shares: shows one method at a time, got {', '.join(methods)}; choose with --method.")
    print(shares_table(list(configs.values())).render(args.format))
    return 0


def _drift(args: argparse.Namespace) -> int:
    from tbbn.bench.analysis.drift import drift, drift_table
    from tbbn.bench.analysis.figures import drift_figure
    from tbbn.bench.analysis.loading import run_after

    _check_output(args)
    folders = run_folders(args.runs)
    if args.images < 0:
        raise UserError(f"--images must not be negative, got {args.images}.")
    task = None if args.task is None else args.task - 1
    found = [drift(run_after(folder, task, args.root), args.images, args.view) for folder in in_turn(folders, "drift")]
    if len({tuple(layer.layer for layer in layers) for layers in found}) > 1:
        raise UserError("drift: these runs have different layers; compare runs of the same backbone.")
    labels = _labels(folders)
    configs = _configs_of(folders)
    picture = drift_figure(labels, found, args.plot, _stamp(configs)) if args.plot else None
    if args.json:
        entries = [
            {"directory": str(folder), "stamp": _stamp([config]), "layers": list(map(asdict, layers))}
            for folder, config, layers in zip(folders, configs, found, strict=True)
        ]
        print(json.dumps(entries, indent=1))
    else:
        _print(drift_table(labels, found), configs, args.format)
    return _say(picture)


def _stamp(configs: Iterable[RunConfig]) -> str:
    from tbbn.bench.report.groups import stamp

    return stamp(configs).strip()


def _print(table: Table, configs: Iterable[RunConfig], form: str) -> None:
    """Print a table; its first note, in CSV a column, says if runs trained only part of their epochs or tasks."""
    if mark := _stamp(configs):
        table = table.with_column(mark) if form == "csv" else replace(table, notes=(mark, *table.notes))
    print(table.render(form))


def _configs_of(folders: Sequence[Path]) -> list[RunConfig]:
    from tbbn.bench.runs.record import load_record

    return [load_record(folder).run_config for folder in folders]


def _labels(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, or all full paths if two folders have the same name."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else list(map(str, folders))


def _slots(args: argparse.Namespace) -> int:
    from tbbn.bench.analysis.loading import run_after
    from tbbn.bench.analysis.slots import slots, slots_table

    _check_output(args)
    if args.batches < 1:
        raise UserError(f"--batches must be at least 1, got {args.batches}.")
    folders = run_folders(args.runs)
    task = None if args.task is None else args.task - 1
    found = [slots(run_after(folder, task, args.root), args.batches) for folder in in_turn(folders, "slots")]
    configs = _configs_of(folders)
    if args.json:
        entries = [
            {"directory": str(folder), "stamp": _stamp([config]), **asdict(seen)}
            for folder, config, seen in zip(folders, configs, found, strict=True)
        ]
        print(json.dumps(entries, indent=1))
    else:
        _print(slots_table(_labels(folders), found), configs, args.format)
    return 0


def _epochs(args: argparse.Namespace) -> int:
    from tbbn.bench.analysis.epochs import kept_json, kept_table, rules_table, score_epochs
    from tbbn.bench.analysis.figures import epochs_figure
    from tbbn.bench.progress import run_progress
    from tbbn.bench.runs.pending import PendingRun
    from tbbn.bench.runs.record import load_record

    _check_output(args)
    if args.records:
        if args.plot:
            raise UserError("--plot draws the score of every epoch, which saved runs do not have; leave --from out.")
        refuse(args, _TRAINED, "--from shows runs as they are and trains nothing", settings=True)
        kept = {str(folder): load_record(folder) for folder in run_folders(args.records)}
        if args.json:
            print(json.dumps(kept_json(kept), indent=1))
        else:
            _print(kept_table(kept), [record.run_config for record in kept.values()], args.format)
        return 0
    runs = [PendingRun(config, Path(f"{config.label}-{config.seed}")) for config in _configs(args)]
    scores: dict[str, list[list[EpochScore]]] = {}
    entries: list[dict[str, Any]] = []
    with run_progress(runs, args.quiet) as progress:
        for run in runs:
            progress.start(run)
            found = score_epochs(run.config, on_event=lambda event, run=run: progress.event(run, event))  # type: ignore[misc]
            scores.setdefault(run.config.label, []).append(found)
            about = {"run": run.config.label, "seed": run.config.seed, "stamp": _stamp([run.config])}
            entries.append({**about, "epochs": list(map(asdict, found))})
    configs = [run.config for run in runs]
    picture = epochs_figure(scores, args.plot, _stamp(configs)) if args.plot else None
    if args.json:
        print(json.dumps(entries, indent=1))
    else:
        _print(rules_table(scores), configs, args.format)
    return _say(picture)


def _say(picture: Path | None) -> int:
    if picture is not None:
        print(printable(f"figure: {picture}"), file=sys.stderr)
    return 0
