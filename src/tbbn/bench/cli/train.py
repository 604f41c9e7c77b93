"""``tbbn run`` and ``tbbn resume``: what trains."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tbbn.accelerators.triton import nothing_compiled
from tbbn.bench import config as cfg
from tbbn.bench.cli.common import EXIT_DIVERGED, EXIT_FAILED, Command, run_folders
from tbbn.errors import UserError, printable
from tbbn.paper import is_recipe


def add(command: Command) -> None:
    line = "Train and evaluate; without arguments, a demonstration of a minute."
    _run_options(command("run", _run, line, _RUN_EXAMPLE), lanes="1")
    line = "The same for many runs on one GPU: as many at a time as pay."
    _run_options(command("sweep", _run, line, _SWEEP_EXAMPLE), lanes="auto")
    line = "Go on with runs that were interrupted, and begin those of a sweep that had not begun."
    resume = command("resume", _resume, line, "tbbn resume runs/demo")
    resume.add_argument("runs", nargs="+", metavar="RUN", help="runs' folders, or folders of runs")
    resume.add_argument("--lanes", default="1", help="runs at a time on one device, or auto (default: 1)")
    resume.add_argument("--json", action="store_true", help="results as JSON")
    resume.add_argument("--quiet", action="store_true", help="no progress")


def _run_options(run: argparse.ArgumentParser, lanes: str) -> None:
    run.add_argument("recipe", nargs="?", help="a recipe's name (tbbn list recipes) or a TOML file")
    run.add_argument("--norm", help="norms with commas, options in brackets: bn,cn(groups=8),tbbn")
    run.add_argument("--method", help="methods with commas, options likewise: ft,lucir")
    run.add_argument("--data", help="the data set: cifar100, folder:PATH, ...")
    run.add_argument("--seeds", help="a number of seeds, or seeds with commas")
    run.add_argument("--name", help="the folder under --out; made from the settings if not given")
    run.add_argument("--out", default="runs", help="where runs are kept (default: runs)")
    run.add_argument("--lanes", default=lanes, help=f"runs at a time on one device, or auto (default: {lanes})")
    run.add_argument("--dry-run", action="store_true", help="check, print config and plan, do nothing")
    run.add_argument("--overwrite", action="store_true", help="run again what is finished, or has another config")
    run.add_argument("--json", action="store_true", help="results as JSON")
    run.add_argument("--quiet", action="store_true", help="no progress")
    run.epilog = f"{_settings_help()}\n\n{run.epilog}"


_RUN_EXAMPLE = "tbbn run --data cifar100 --protocol paper --norm bn,tbbn --seeds 3 --train.epochs 2"
_SWEEP_EXAMPLE = "tbbn sweep --data cifar100 --protocol paper --method ft,lucir --norm bn,tbbn --seeds 5"


def _settings_help() -> str:
    """Every setting with its default and its help."""
    settings = [s for s in cfg.SETTINGS.values() if s.name not in _AXES]
    shown = [f"  --{s.name} {_shown(s.default)}".rstrip() for s in settings]
    width = max(map(len, shown))
    lines = []
    for text, s in zip(shown, settings, strict=True):
        first, *rest = textwrap.wrap(s.line, 120 - width, break_on_hyphens=False)
        lines += [f"{text.ljust(width)}  {first}", *(" " * (width + 2) + line for line in rest)]
    head = "every setting, with its default (data sets and the protocol have their own: see --dry-run), and the options of\n"
    return head + "norms and methods as --norm.groups 8, --method.kd 2:\n" + "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


_AXES = ("data.name", "norm.name", "method.name")  # which have options of their own
_LISTS = ("--norm", "--method", "--seeds", "--quirks", "--train.milestones")
RUN_OPTIONS = (
    *("norm", "method", "data", "seeds", "name", "out", "lanes"),
    *("dry-run", "overwrite", "json", "quiet", "help"),
)


def check_commas(words: list[str]) -> None:
    """Refuse ``--norm bn tbbn``, in which the second name would be taken for a recipe."""
    for option, value, other in zip(words, words[1:], words[2:], strict=False):
        if option in _LISTS and not value.startswith("--") and not other.startswith("--") and not is_recipe(other):
            together = f"{option} {value.rstrip(',')},{other}"
            raise UserError(f"{option} {value} {other}: several values have commas between them: {together}.")


def take_settings(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """``--train.epochs 2`` or ``--train.epochs=2`` for any setting or option of a norm or method; and the other words."""
    found: dict[str, Any] = {}
    others, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        key, separator, value = word[2:].partition("=")
        if not word.startswith("--") or key in RUN_OPTIONS:
            others.append(word)
            continue
        if key not in cfg.SETTINGS and not key.startswith(("norm.", "method.")):
            near = difflib.get_close_matches(key, [*cfg.SETTINGS, *RUN_OPTIONS], n=1, cutoff=0.5)
            raise UserError(
                f"no setting --{key}." + (f" Did you mean --{near[0]}?" if near else " See tbbn run --help.")
            )
        if not separator:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif key in cfg.SETTINGS and cfg.SETTINGS[key].kind is bool:
                value = "true"
            else:
                raise UserError(f"--{key} needs a value.")
        found[key] = cfg.parse_value(key, value)
    return found, others


def _jobs(chosen: argparse.Namespace) -> tuple[list[Any], Path, str]:
    """The runs asked for, the folder that holds them all, and a recipe of them."""
    from tbbn.bench.runs.sweep import Axes, expand, parse_seeds, plan, split_names
    from tbbn.paper import read_recipe

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
    return expand(layers, axes, folder), folder, plan(layers, axes)


def _run(chosen: argparse.Namespace) -> int:
    from tbbn.bench.runs.sweep import check_apart

    jobs, folder, plan = _jobs(chosen)
    if chosen.dry_run:
        return _dry_run(jobs, chosen.json)
    check_apart(jobs)
    return _work(jobs, folder, chosen, overwrite=chosen.overwrite, plan=plan)


def _resume(chosen: argparse.Namespace) -> int:
    from tbbn.bench.runs.record import RECORD, load_record
    from tbbn.bench.runs.sweep import Job, planned

    known = {job.directory: job for text in chosen.runs for job in planned(Path(text))}
    jobs = [
        Job(load_record(folder).run_config, folder) if (folder / RECORD).exists() else known[folder]
        for folder in run_folders(chosen.runs, list(known))
    ]
    return _work(jobs, Path(chosen.runs[0]), chosen)


def _work(jobs: list[Any], folder: Path, chosen: argparse.Namespace, *, overwrite: bool = False, plan: str = "") -> int:
    from tbbn.bench.cli.progress import progress
    from tbbn.bench.report.tables import summary_table
    from tbbn.bench.runs.sweep import run_all, stoppable

    lanes = _lanes(chosen.lanes)
    if not chosen.quiet and nothing_compiled() and _on_gpu(jobs):
        print(
            "the GPU kernels are compiled at their first use: half a minute or more before the first step",
            file=sys.stderr,
        )
    with progress(jobs, chosen.quiet) as shown, stoppable() as stop:
        records = run_all(
            jobs,
            lanes=lanes,
            on_start=shown.start,
            on_event=shown.event,
            on_end=shown.end,
            overwrite=overwrite,
            plan=plan,
            stop=stop,
        )
    if chosen.json:
        print(json.dumps([_summary(job, record) for job, record in zip(jobs, records, strict=True)], indent=1))
    else:
        print(summary_table(records).render("text") + "\n")
        print(printable(f"one run: tbbn show {jobs[0].directory}"))
    try:
        from tbbn.bench.report.plots import accuracy_curves

        picture = accuracy_curves(records, folder / "accuracy.png")
        print(printable(f"accuracy curves: {picture}"), file=sys.stderr if chosen.json else sys.stdout)
    except UserError as error:
        print(f"tbbn: {error}", file=sys.stderr)
    states = {record.status for record in records}
    return EXIT_FAILED if "failed" in states else EXIT_DIVERGED if "diverged" in states else 0


def _on_gpu(jobs: list[Any]) -> bool:
    import torch

    return torch.cuda.is_available() and any(job.config.device != "cpu" for job in jobs)


def _lanes(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--lanes must be a number from 1, or auto, got {text!r}.")
    return int(text)


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
    from tbbn.bench.engine.forecast import forecast
    from tbbn.bench.report.tables import forecast_table

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
