"""``tbbn run``, ``tbbn sweep`` and ``tbbn resume``: the commands that train."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tbbn.accelerators.triton import nothing_compiled
from tbbn.bench import config as cfg
from tbbn.bench.cli.common import (
    CHECKPOINTS,
    EXIT_DIVERGED,
    EXIT_FAILED,
    Command,
    TimeLimitReached,
    add_data_root,
    parse_duration,
    run_folders,
)
from tbbn.bench.cli.engines import add_engine_options, engine
from tbbn.bench.cli.naming import folder_name
from tbbn.bench.cli.settings import settings_help
from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    from tbbn.bench.engine.record import Record
    from tbbn.bench.runs.pending import PendingRun
    from tbbn.bench.runs.recipe import Axes, Layer

COMMANDS = ("demo", "run", "sweep", "resume", "reproduce")
_RUN_EXAMPLE = "tbbn run --data cifar100 --protocol paper --norm bn,tbbn --seeds 3 --train.epochs 2"
_SWEEP_EXAMPLE = "tbbn sweep --data cifar100 --protocol paper --method ft,lucir --norm bn,tbbn --seeds 5"


def add(command: Command) -> None:
    line = "Train and evaluate. Without arguments: a one-minute demo."
    _add_run_options(command("run", _run, line, _RUN_EXAMPLE), lanes="1")
    line = "Like run, but with as many runs in parallel on one GPU as increase throughput."
    _add_run_options(command("sweep", _run, line, _SWEEP_EXAMPLE), lanes="auto")
    line = "Resume interrupted runs, and start the remaining runs of a sweep."
    resume = command("resume", _resume, line, "tbbn resume runs/demo")
    resume.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs or sweeps")
    add_data_root(resume)
    resume.add_argument("--json", action="store_true", help="print results as JSON")
    add_progress_options(resume, lanes="1")


def add_progress_options(command: argparse.ArgumentParser, lanes: str) -> None:
    command.add_argument("--lanes", default=lanes, help=f"runs in parallel on one device, or auto (default: {lanes})")
    command.add_argument("--time-limit", metavar="TIME", help="save and stop after this time: 45s, 9m, 1h30m")
    command.add_argument("--quiet", action="store_true", help="hide progress")
    command.add_argument(
        "--log", metavar="LOGGERS", default="", help="loggers, comma-separated (tbbn list loggers); none turns all off"
    )
    add_engine_options(command)


def _add_run_options(run: argparse.ArgumentParser, lanes: str) -> None:
    run.set_defaults(takes_settings=True)
    run.add_argument("recipe", nargs="?", help="a recipe's name (tbbn list recipes) or a TOML file")
    run.add_argument("--norm", help="norms, comma-separated, options in brackets: bn,cn(groups=8),tbbn")
    run.add_argument("--method", help="methods, comma-separated, options in brackets: ft,eeil(kd=2)")
    run.add_argument("--data", help="data set: cifar100, folder:PATH, ... (tbbn list datasets)")
    run.add_argument("--seeds", help="number of seeds, or a list: 3, or 0,1,2")
    run.add_argument("--name", help="folder under --out (default: derived from the settings)")
    run.add_argument("--out", default="runs", help="folder of all runs (default: runs)")
    run.add_argument(
        "--dry-run", action="store_true", help="print the config and the steps of each task; train nothing"
    )
    run.add_argument("--overwrite", action="store_true", help="replace runs that are finished or have another config")
    run.add_argument("--yes", action="store_true", help="train a thousand runs or more without asking")
    run.add_argument("--json", action="store_true", help="print results as JSON")
    add_progress_options(run, lanes)
    run.epilog = f"{settings_help()}\n\n{run.epilog}"


def _run(args: argparse.Namespace) -> int:
    from tbbn.bench.runs.pending import check_folders, joined

    asked, folder, recipe = requested_runs(args)
    runs = joined(asked)
    if args.dry_run:
        return _dry_run(runs, args, joins=runs != asked)
    check_folders(runs)
    for line in about_the_sweep_there(runs, joins=runs != asked):
        print(printable(line), file=sys.stderr)
    folder = runs[0].directory if runs != asked else folder
    return _train(runs, folder, args, overwrite=args.overwrite, recipe=recipe)


def _only_seed(axes: Axes, layers: Sequence[Layer]) -> int | None:
    """The seed if there is only a single run, else None."""
    if axes.n_runs > 1:
        return None
    return axes.seeds[0] if axes.seeds else next((v["seed"] for _, v in reversed(layers) if "seed" in v), 0)


def requested_runs(args: argparse.Namespace) -> tuple[list[PendingRun], Path, str]:
    """The requested runs, the folder for them, and their recipe."""
    from tbbn.bench.engine.validate import check_used
    from tbbn.bench.runs.pending import expand
    from tbbn.bench.runs.recipe import Axes, parse_seeds, read_recipe, recipe_text, split_names
    from tbbn.paper import find_recipe

    if args.name == "":
        raise UserError("--name needs a name; without it, one is made from the settings.")
    for kind in ("data", "method", "norm"):
        if getattr(args, kind) == "":
            raise UserError(
                f"--{kind} needs a name; tbbn list {'datasets' if kind == 'data' else kind + 's'} shows them."
            )
    given = dict(args.settings)
    if args.data:
        given["data.name"] = args.data
    method, norm = (getattr(args, kind) or given.pop(f"{kind}.name", None) for kind in ("method", "norm"))
    recipe, layers, axes = "", [], Axes()
    if args.recipe or not (given or norm or method or args.seeds):
        path = find_recipe(args.recipe or "demo")
        values, axes = read_recipe(path)
        layers.append((str(path), values))
        recipe = path.stem
    if "seed" in given and args.seeds:
        raise UserError("use either --seed or --seeds: --seed 5 is the seed 5, --seeds 5 the seeds 0 to 4.")
    if args.seeds:
        axes = replace(axes, seeds=parse_seeds(args.seeds))
    elif "seed" in given:
        axes = replace(axes, seeds=())
    if method:
        axes = replace(axes, methods=split_names(method))
    if norm:
        axes = replace(axes, norms=split_names(norm))
    if args.plugins:
        named = [*(layers[0][1].get("plugins", []) if layers else []), *given.get("plugins", ()), *args.plugins]
        given["plugins"] = tuple(dict.fromkeys(named))
    layers.append(("command line", given))
    name = args.name or folder_name(recipe, method, norm, given, seed=_only_seed(axes, layers))
    folder = Path(args.out) / name
    if not args.dry_run and not args.yes:
        _ask_if_many(axes.n_runs)
    try:
        runs = expand(layers, axes, folder)
        check_used(given, [run.config for run in runs])
        return runs, folder, recipe_text(layers, axes)
    except UserError:
        with suppress(OSError):  # the folder's name may be too long
            _require_plugins([folder])  # a record there may know which plugin is missing
        raise


def _ask_if_many(n_runs: int) -> None:
    """Ask for confirmation of a sweep so large that it may be a typing error. Raises if nobody can answer."""
    from tbbn.bench.runs.recipe import MANY_RUNS, check_number

    check_number(n_runs)
    if n_runs < MANY_RUNS:
        return
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(
            f"this would train {n_runs} runs; add --yes to train them all, or choose fewer methods, norms or seeds."
        )
    print(f"This would train {n_runs} runs. Train them all? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing was trained.")


def _require_plugins(folders: Iterable[Path], *, unfinished: bool = False) -> None:
    """Load the plugins that the runs in these folders need; the error for a missing one names it."""
    from tbbn.bench.engine.plugins import require_plugins
    from tbbn.bench.runs.record import RECORD, load_or_restore

    for file in sorted(file for folder in folders for file in folder.rglob(RECORD)):
        record = load_or_restore(file.parent)
        if not unfinished or record.status != "finished":
            require_plugins(record.run_config, record.plugins, str(file.parent))


def _resume(args: argparse.Namespace) -> int:
    from tbbn.bench.runs.pending import PendingRun, resumed_config, runs_of_sweeps
    from tbbn.bench.runs.record import RECORD, load_or_restore

    _require_plugins(map(Path, args.runs), unfinished=True)
    known = {run.directory: run for text in args.runs for run in runs_of_sweeps(Path(text))}
    saved = [file.parent for text in args.runs for file in Path(text).rglob(CHECKPOINTS)]
    runs = []
    for folder in run_folders(args.runs, [*known, *saved]):
        if folder in known and not (folder / RECORD).exists():
            runs.append(known[folder])
        else:
            record = load_or_restore(folder)
            runs.append(PendingRun(resumed_config(folder, record), folder))
    runs = [replace(run, config=run.config.at(args.root)) for run in runs]
    return _train(runs, Path(args.runs[0]), args)


def _train(
    runs: list[PendingRun], folder: Path, args: argparse.Namespace, *, overwrite: bool = False, recipe: str = ""
) -> int:
    code, records = train(runs, args, overwrite=overwrite, recipe=recipe)
    _print_results(runs, records, folder, args.json)
    return code


def train(
    runs: list[PendingRun], args: argparse.Namespace, *, overwrite: bool = False, recipe: str = ""
) -> tuple[int, list[Record]]:
    """Do the runs with progress on standard error. Returns the exit code and the records.

    Raises :class:`TimeLimitReached` when the time of ``--time-limit`` is over and there is more to do.
    """
    from tbbn.bench.loggers import parse_names
    from tbbn.bench.progress import run_progress
    from tbbn.bench.runs.interrupt import stop_on_signal

    lanes = _lanes(args.lanes)
    end = deadline(args)
    if not args.quiet and must_compile_kernels(runs):
        print("compiling GPU kernels: the first step may take half a minute", file=sys.stderr)
    with (
        engine(args, runs, overwrite) as run_all,
        run_progress(runs, args.quiet) as progress,
        stop_on_signal() as asked,
    ):
        try:
            records = run_all(
                runs,
                lanes=lanes,
                on_start=progress.start,
                on_event=progress.event,
                on_end=progress.end,
                recipe=recipe,
                stop=lambda: asked() or time.monotonic() >= end,
                log=parse_names(args.log),
            )
        except KeyboardInterrupt:
            if asked() or time.monotonic() < end:
                raise
            raise TimeLimitReached from None
    states = {record.status for record in records}
    return EXIT_FAILED if "failed" in states else EXIT_DIVERGED if "diverged" in states else 0, records


def deadline(args: argparse.Namespace) -> float:
    """The time at which ``--time-limit`` ends. Fixed at the first call."""
    if not hasattr(args, "end"):
        args.end = time.monotonic() + parse_duration(args.time_limit) if args.time_limit else math.inf
    return float(args.end)


def _print_results(runs: list[PendingRun], records: list[Record], folder: Path, as_json: bool) -> None:
    from tbbn.bench.report.figures import save_figure
    from tbbn.bench.report.plots import figure
    from tbbn.bench.report.tables import summary_table

    try:  # first, because the reader of the results may stop reading after a line
        drawn = printable(f"accuracy curves: {save_figure(figure(records), folder / 'accuracy.png')}")
    except (UserError, OSError, ImportError) as error:  # the runs are done, so a missing picture is not a failure
        reason = f"{error.filename}: {error.strerror}." if isinstance(error, OSError) else str(error)
        drawn = ""
        print(printable(f"no figure: {reason}"), file=sys.stderr)
    if as_json:
        print(json.dumps([_summary(run, record) for run, record in zip(runs, records, strict=True)], indent=1))
    else:
        print(summary_table(records).render("text") + "\n")
        print(printable(f"details of a run: tbbn show {runs[0].directory}"))
    if drawn:
        print(drawn, file=sys.stderr if as_json else sys.stdout)


def _summary(run: PendingRun, record: Record) -> dict[str, Any]:
    return {
        "directory": str(run.directory),
        "method": str(run.config.method),
        "norm": str(run.config.norm),
        "seed": run.config.seed,
        "status": record.status,
        "message": record.message,
        "metrics": record.metrics,
    }


def must_compile_kernels(runs: list[PendingRun]) -> bool:
    """Whether a run uses a GPU whose kernels Triton has not compiled yet."""
    import torch

    return nothing_compiled() and torch.cuda.is_available() and any(run.config.device != "cpu" for run in runs)


def _lanes(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--lanes must be a number from 1, or auto; got {text!r}.")
    return int(text)


def about_the_sweep_there(runs: list[PendingRun], *, joins: bool = False) -> list[str]:
    """A note on what happens to an existing sweep in the folder of these runs."""
    from tbbn.bench.runs.pending import forgotten

    folder = runs[0].directory.parent
    if joins:
        return [f"{folder} is the folder of a sweep; this run joins it, in {runs[0].directory}."]
    lost = forgotten(runs)
    if not lost:
        return []
    named = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
    return [
        f"{folder} is the folder of a sweep with {len(lost)} runs not started yet ({named}): tbbn resume will no longer "
        "start them. To keep them, first run the sweep's command again, or use another --name."
    ]


def _what_is_there(runs: list[PendingRun], overwrite: bool) -> str:
    """A sentence on the existing contents of these runs' folders."""
    from tbbn.bench.runs.pending import check_folders, check_versions, finished_record
    from tbbn.bench.runs.record import RECORD

    there = [run for run in runs if (run.directory / RECORD).exists()]
    try:
        check_folders(runs)
        if overwrite and there:
            return f"There are {len(there)} runs, which would be replaced."
        done = {run: record for run in there if (record := finished_record(run)) is not None}
        check_versions(runs, done, resumes=False)
    except UserError as error:
        return f"This command would fail: {error}"
    if not there:
        return "Nothing is there yet, and nothing was trained."
    return (
        f"There are {len(done)} finished and {len(there) - len(done)} unfinished runs, which would be kept and resumed."
    )


def _dry_run(runs: list[PendingRun], args: argparse.Namespace, *, joins: bool) -> int:
    from tbbn.bench.engine.forecast import forecast
    from tbbn.bench.engine.setup import has_splits
    from tbbn.bench.report.tables import forecast_table

    config = runs[0].config
    split = next((run.config for run in runs if has_splits(run.config)), None)
    found = forecast(config if split is None else replace(config, norm=split.norm))
    there = " ".join([_what_is_there(runs, args.overwrite), *about_the_sweep_there(runs, joins=joins)])
    if args.json:
        tasks = [asdict(task) | ({} if split else {"splits": None}) for task in found.tasks]
        tree = {"config": cfg.to_dict(config), "tasks": tasks}
        more = {"steps": found.all_steps, "runs": len(runs), "note": found.note, "there": there}
        more |= {"splits_of": str(split.norm)} if split else {}
        print(json.dumps(tree | more, indent=1))
        return 0
    print(cfg.to_toml(config))
    title = "" if split is None else "r*" if split.norm == config.norm else f"r* of {split.norm}"
    print(forecast_table(found.tasks, title).render("text"))
    if found.note:
        print(f"\n{printable(found.note)}.")
    others = f" This is the first of {len(runs)} runs; the others differ in method, norm or seed." if runs[1:] else ""
    print()
    print(printable(f"{found.all_steps} training steps (main phases) in {runs[0].directory}.{others} {there}"))
    return 0
