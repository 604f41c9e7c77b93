"""``tbbn reproduce``: the tables and figures of the paper, with its numbers beside ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tbbn.bench.cli import paper_figures
from tbbn.bench.cli.common import Command, may_refuse, print_table, refuse, run_folders
from tbbn.bench.cli.naming import folder_name
from tbbn.bench.cli.paper_figures import FIGURES
from tbbn.bench.cli.train import about_the_sweep_there, add_progress_options, train
from tbbn.errors import UserError, printable, unknown_name

if TYPE_CHECKING:
    from tbbn.bench.engine.record import Record
    from tbbn.bench.runs.pending import PendingRun
    from tbbn.bench.runs.recipe import Axes
    from tbbn.paper.published import PaperTable


_CHOOSING = ("data", "scale", "keep", "method", "norm", "seeds", "records")  # options that select the runs
# Options of how to train, without --quiet, which is harmless if there is no progress to hide.
_TRAINING = ("dry_run", "lanes", "time_limit", "log", "engine", "address", "workers", "job")


def add(command: Command) -> None:
    line = (
        "Reproduce a table or figure of the paper: train the missing runs, then print our numbers next to the paper's."
    )
    made = command("reproduce", _reproduce, line, "tbbn reproduce table1 --norm bn,tbbn --seeds 3 --precision bf16")
    made.set_defaults(takes_settings=True)
    made.add_argument("name", metavar="NAME", help=f"one of: {', '.join(names())}")
    made.add_argument("--data", help="data set, if the paper uses several: cifar100 or imagenet100")
    made.add_argument("--scale", type=float, default=1.0, help="fraction of the epochs to train; shown in the output")
    made.add_argument("--keep", choices=("best", "last"), help="epoch to keep (default: as the authors did)")
    made.add_argument("--method", help="only these methods of the table, comma-separated")
    made.add_argument("--norm", help="only these norms of the table, comma-separated")
    made.add_argument("--seeds", help="number of seeds, or a list: 3, or 0,1,2 (default: as in the recipe)")
    made.add_argument("--from", dest="records", nargs="+", metavar="FOLDER", help="show these runs; train nothing")
    made.add_argument("--out", default="runs", help="folder of all runs (default: runs)")
    made.add_argument("--format", default="text", help="text, md, csv or latex (default: text)")
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="show the runs to train, with estimated time and disk space; train nothing",
    )
    add_progress_options(made, lanes="auto")
    may_refuse(made, *_CHOOSING, *_TRAINING, "out")


def names() -> list[str]:
    """The tables and figures of the paper."""
    from tbbn.paper import table_names

    return [*table_names(), *FIGURES]


def _reproduce(args: argparse.Namespace) -> int:
    from tbbn.bench.report.table import FORMATS
    from tbbn.bench.runs.record import load_record
    from tbbn.paper.published import find_tables, has_settings, row_keys

    if not 0 < args.scale <= 1:
        raise UserError(f"--scale must be above 0 and at most 1, got {args.scale:g}.")
    if args.name not in names():
        raise unknown_name("table or figure", args.name, names())
    if args.format not in (*FORMATS, "tex"):
        raise unknown_name("format", args.format, FORMATS)  # now, not after hours of training
    if args.name != "fig-toy":
        _take_as_options(args)
    _check_read(args)
    if args.name == "fig-toy":
        paper_figures.show(args.name, paper_figures.toy(), Path(args.out), args.format)
        return 0
    code = 0
    if args.name == "fig-oracle":
        from tbbn.paper.oracle import oracle_table, title_of

        tables = [oracle_table(args.data)]
    else:
        tables = find_tables(FIGURES.get(args.name) or args.name, args.data)
    for table in tables:
        given, axes = _settings(table, args), _axes(table, args)
        if args.records:
            folder = Path(args.out) / _folder_name(table, args)
            found = {path: load_record(path) for path in run_folders(args.records)}
            found = {p: r for p, r in found.items() if not args.seeds or r.run_config.seed in axes.seeds}
            if args.name == "fig-oracle":
                wanted = {"data.name": args.data} | given if args.data else given
                found = {path: record for path, record in found.items() if has_settings(table, record, wanted)}
            folders, records = list(found), list(found.values())
        else:
            runs, folder, recipe = _runs(table, args, given, axes)
            if args.name == "fig-oracle":  # its title in the paper names the paper's data
                table = replace(table, title=title_of(runs[0].config))
            notes = _same_without_keep(table, axes, runs, given)
            _announce(table, axes, runs, folder, notes, measure=not args.quiet)
            if args.dry_run:
                continue
            ended, records = train(runs, args, recipe=recipe)
            folders = [run.directory for run in runs]
            code = code or ended  # the exit code of the first table that failed
        if args.name == "fig-oracle":
            paper_figures.show(args.name, paper_figures.oracle(args, folders, folder), folder, args.format)
        else:
            keys = [
                (method, norm)
                for method, norm in row_keys(table)
                if (not args.method or method in axes.methods) and (not args.norm or norm in axes.norms)
            ]
            _show(args, table, records, folder, given, keys)
    return code


def _take_as_options(args: argparse.Namespace) -> None:
    """Turn settings that select runs into the options of the same meaning; as settings, the recipe's axes would hide them."""
    for kind in ("method", "norm", "data"):
        named = args.settings.get(f"{kind}.name")
        if named is None or (kind == "data" and named not in _data_sets(args.name)):
            continue  # the recipe with another data set
        if getattr(args, kind):
            raise UserError(f"use either --{kind} or --{kind}.name: they mean the same here.")
        setattr(args, kind, args.settings.pop(f"{kind}.name"))
    if "seed" in args.settings:
        if args.seeds:
            raise UserError("use either --seed or --seeds: --seed 5 is the seed 5, --seeds 5 the seeds 0 to 4.")
        args.seeds = f"{args.settings.pop('seed')},"


def _data_sets(name: str) -> Iterable[str]:
    """The data sets for which ``--data`` chooses a table of this name."""
    from tbbn.paper.oracle import DATA
    from tbbn.paper.published import paper_tables

    return DATA if name == "fig-oracle" else [t.data for t in paper_tables() if t.name == (FIGURES.get(name) or name)]


def _check_read(args: argparse.Namespace) -> None:
    """Raise for options that would have no effect."""
    if args.name == "fig-toy":
        refuse(args, (*_CHOOSING, *_TRAINING), "fig-toy uses its own data and trains nothing", settings=True)
    if args.name == "fig-oracle":
        refuse(args, ("method",), "fig-oracle compares ft and joint")
    if args.records:
        unread = [name for name in _TRAINING if (args.name, name) != ("fig-oracle", "time_limit")]
        refuse(args, unread, "--from trains nothing")
        if args.name not in FIGURES:
            refuse(args, ("out",), "with --from a table is printed, and nothing is written")


def _settings(table: PaperTable, args: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line, to apply to the recipe."""
    given: dict[str, Any] = dict(args.settings)
    if args.keep:
        given["train.keep"] = args.keep
    if args.scale != 1:
        given["train.scale"] = args.scale
    return given


def _axes(table: PaperTable, args: argparse.Namespace) -> Axes:
    """The table's methods, norms and seeds that the command line selects."""
    from tbbn.bench.runs.recipe import parse_seeds, split_names

    _, axes = table.layers()
    if args.seeds:
        axes = replace(axes, seeds=parse_seeds(args.seeds))
    for axis, known in (("method", axes.methods or ("ft",)), ("norm", axes.norms)):
        chosen = split_names(getattr(args, axis) or "")
        for entry in chosen:
            if entry not in known:
                raise unknown_name(f"{axis} of {table.name}", entry, known)
        if chosen:
            axes = replace(axes, methods=chosen) if axis == "method" else replace(axes, norms=chosen)
    return axes


def _folder_name(table: PaperTable, args: argparse.Namespace) -> str:
    """Recipe, network, kept epoch, scale and every other given setting, so that other settings get another folder."""
    name = f"{table.recipe}-{table.backbone}" if table.backbone else table.recipe
    name += (f"-keep-{args.keep}" if args.keep else "") + (f"-scale-{args.scale:g}" if args.scale != 1 else "")
    return folder_name(name, None, None, args.settings)


def _runs(
    table: PaperTable, args: argparse.Namespace, given: dict[str, Any], axes: Axes
) -> tuple[list[PendingRun], Path, str]:
    """The runs of a table, their folder and their recipe."""
    from tbbn.bench.engine.validate import check_used
    from tbbn.bench.runs.pending import check_folders, expand, run_name
    from tbbn.bench.runs.recipe import recipe_text

    layers = [*table.layers()[0], ("command line", given)]
    folder = Path(args.out) / _folder_name(table, args)
    runs = expand(layers, axes, folder)
    check_used(given, [run.config for run in runs])
    if len(runs) == 1:  # give it its own folder, like any later runs
        runs = [replace(runs[0], directory=folder / run_name(runs[0].config))]
    check_folders(runs)
    return runs, folder, recipe_text(layers, axes)


def _same_without_keep(table: PaperTable, axes: Axes, runs: list[PendingRun], given: dict[str, Any]) -> list[str]:
    """A note on the methods whose runs ``--keep`` does not change, because it may cost hours to train them again."""
    from tbbn.bench.runs.pending import expand

    keep = given.get("train.keep")
    rest = {key: value for key, value in given.items() if key != "train.keep"}
    try:
        plain = expand([*table.layers()[0], ("command line", rest)], axes, runs[0].directory.parent)
    except UserError:
        return []  # these settings need --keep, so it changes something
    methods: dict[str, bool] = {}  # which of them --keep changes
    for own, run in zip(plain, runs, strict=True):
        name = run.config.names[0]
        methods[name] = methods.get(name, False) or own.config != run.config
    same, others = ([name for name, changes in methods.items() if changes is kind] for kind in (False, True))
    if not (keep and same and others):
        return []
    return [
        f"{', '.join(same)}: trained as without --keep {keep}, which is their default here; --method {','.join(others)} "
        "leaves them out."
    ]


def _announce(
    table: PaperTable, axes: Axes, runs: list[PendingRun], folder: Path, notes: list[str], *, measure: bool
) -> None:
    """Print the number of runs still to do, how they differ from the recipe, and the time and disk space that they need."""
    from tbbn.bench.runs.pending import expand, finished_record
    from tbbn.paper.effort import effort
    from tbbn.paper.published import departures_note

    missing = [run for run in runs if finished_record(run) is None]
    print(f"{table.title}: {len(runs)} runs, {len(runs) - len(missing)} finished.", file=sys.stderr)
    as_in_recipe = expand(table.layers()[0], axes, folder)
    departures = departures_note((own.config, run.config) for own, run in zip(as_in_recipe, runs, strict=True))
    for note in (*departures, *notes, *about_the_sweep_there(runs)):
        print(printable(note), file=sys.stderr)
    if missing:
        print(f"{effort(missing, measure=measure)} Results go to {printable(str(folder))}.", file=sys.stderr)


def _show(
    args: argparse.Namespace,
    table: PaperTable,
    records: list[Record],
    folder: Path,
    given: dict[str, Any],
    rows: list[tuple[str, str]],
) -> None:
    from tbbn.paper.published import compare, header

    if args.name in FIGURES:
        drawn = paper_figures.of_runs(args.name, table, records, given, rows)
        paper_figures.show(args.name, drawn, folder, args.format)
        return
    shown = compare(table, records, given, rows=rows)
    if args.format == "csv":  # columns need unique names
        shown = replace(shown, header=header(table.columns, unique=True))
    print_table(shown, args.format)
