"""Runs still to be done: their configs, their folders, and the state that an earlier session left there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tbbn.bench.config import PLACE, RunConfig, Values, flatten, read_toml, resolve, to_dict
from tbbn.bench.engine.plugins import (
    changed_plugins,
    check_unchanged,
    load_needed_plugins,
    load_plugins,
    require_plugins,
    used_plugins,
)
from tbbn.bench.engine.record import Record
from tbbn.bench.engine.validate import check
from tbbn.bench.runs.recipe import RECIPE, Axes, Layer, check_number, check_sealed, parse_choice, read_recipe
from tbbn.bench.runs.record import CONFIG, RECORD, can_be_restored, load_or_restore
from tbbn.errors import UserError
from tbbn.plugins import MissingPlugin


@dataclass(frozen=True)
class PendingRun:
    """A run to be done, and the folder for its files."""

    config: RunConfig
    directory: Path


def expand(layers: Sequence[Layer], axes: Axes, out: Path, *, resumes: bool = False) -> list[PendingRun]:
    """Every combination of the axes as a checked config with its own folder. A single run gets ``out`` itself.

    Every plugin must be available; for a sweep that is resumed, only those that it needs.
    """
    check_number(axes.n_runs)
    runs = []
    (load_needed_plugins if resumes else load_plugins)(resolve(*layers))  # configs include their options' defaults
    for method, norm, seed in product(axes.methods or ("",), axes.norms or ("",), axes.seeds or (None,)):
        layer: dict[str, Any] = {}
        if method:
            layer |= parse_choice("method", method)
        if norm:
            layer |= parse_choice("norm", norm)
        if seed is not None:
            layer["seed"] = seed
        config = check(resolve(*layers, ("command line", layer)))
        runs.append(PendingRun(config, out / run_name(config)))
    if len(runs) == 1:
        return [PendingRun(runs[0].config, out)]
    for name, n in Counter(run.directory.name for run in runs).items():
        if n > 1:
            raise UserError(f"{n} runs have the same folder {out / name}; name each method, norm and seed once.")
    return runs


def run_name(config: RunConfig) -> str:
    """The folder name of one of several runs: method and norm with the options that nothing else implies, and seed."""
    return re.sub(r"[^\w.=-]+", "_", "-".join((*config.names, str(config.seed)))).strip("_")


def runs_of_sweeps(folder: Path) -> list[PendingRun]:
    """All runs of the sweeps in a folder, whether they have started or not."""
    runs = []
    for file in sorted(folder.rglob(RECIPE)):
        check_sealed(file)
        values, axes = read_recipe(file)
        try:
            runs += expand([(str(file), values)], axes, file.parent, resumes=True)
        except MissingPlugin as error:
            raise UserError(f"{file.parent}: {error}") from error
    return runs


def joined(runs: Sequence[PendingRun]) -> list[PendingRun]:
    """The runs; a single run in the folder of a sweep gets its own folder there, like the sweep's runs."""
    if len(runs) == 1 and (runs[0].directory / RECIPE).exists():
        return [replace(runs[0], directory=runs[0].directory / run_name(runs[0].config))]
    return list(runs)


def forgotten(runs: Sequence[PendingRun]) -> list[str]:
    """Runs of an existing sweep in the same folder that have not started and that this sweep's recipe would drop."""
    folder = runs[0].directory.parent
    if len(runs) == 1 or not (folder / RECIPE).exists():
        return []
    try:
        known = [run.directory for run in runs_of_sweeps(folder) if run.directory.parent == folder]
    except UserError:  # damaged, so its runs are unknown
        return []
    asked = {run.directory for run in runs}
    return [place.name for place in known if place not in asked and not (place / RECORD).exists()]


def check_folders(runs: Sequence[PendingRun]) -> None:
    """Raise for runs inside another run's folder, and for a run in the folder of a sweep."""
    for folder in (run.directory for run in runs):
        for holder, pattern in ((folder.parent, RECORD), (folder, RECIPE), (folder, f"*/{RECORD}")):
            if any(holder.glob(pattern)):
                held = "a run and cannot hold others" if pattern == RECORD else "a sweep and cannot be a run itself"
                raise UserError(f"{holder}: is the folder of {held}; use another --name, or delete the folder.")


def finished_record(run: PendingRun) -> Record | None:
    """The record of a run that finished earlier with the same config; None if anything is left to do.

    Raises if the folder holds a run with another config.
    """
    if not (run.directory / RECORD).exists():
        return None
    record = load_or_restore(run.directory)
    there, now = flatten(to_dict(record.run_config)), flatten(to_dict(run.config))
    if changed := _difference(there, now, "there", "now"):
        raise UserError(
            f"{run.directory}: holds a run with another config ({changed}); use --name, --out or --overwrite."
        )
    if record.status == "finished" and not can_be_restored(record, run.directory):
        return record
    if record.status != "finished":
        require_plugins(run.config, record.plugins, str(run.directory))
    check_unchanged(run.config, record.plugins, str(run.directory))
    return None


def check_versions(runs: Sequence[PendingRun], done: Mapping[PendingRun, Record], *, resumes: bool) -> None:
    """Raise if a plugin's file has changed since one of these runs finished, and its old results would be taken for new ones.

    Whoever ``resumes`` runs wants the finished ones as they are. Otherwise somebody asked for them with the file as it is now.
    """
    for run, record in done.items():
        changed = changed_plugins(run.config, record.plugins)
        if changed and not resumes:
            raise UserError(
                f"{run.directory}: is finished, but the plugin {changed[0]['name']} has changed since; to keep it and do the "
                "others, use tbbn resume; to train anew, use --name, --out or --overwrite."
            )
        old = {text for plugin in changed for text in plugin["brings"]}
        for other in runs if old else ():
            used = {text for plugin in used_plugins(other.config) for text in plugin["brings"]}
            if other not in done and (shared := sorted(old & used)):
                raise UserError(
                    f"{other.directory}: {shared[0]} has changed since {run.directory} finished with it, and their results "
                    "would be of two versions; restore the plugin's file, or use tbbn run with --name, --out or --overwrite."
                )


def resumed_config(directory: Path, record: Record) -> RunConfig:
    """The config in the record, with the place of the data from ``config.toml``. Raises if the file has other edits.

    A file that is missing or not TOML is ignored; the run writes it again.
    """
    try:
        edited = read_toml(directory / CONFIG)
    except UserError:
        return record.run_config
    known = flatten(to_dict(record.run_config))  # a later version may have more options than the run wrote
    run = {key: known[key] for key in {**flatten(record.config), **edited} if key in known}
    if changed := _difference(run, edited, "in the run", "in the file"):
        raise UserError(
            f"{directory / CONFIG}: was edited ({changed}), and a run cannot change its config. To resume it, undo the edit "
            f"or delete the file; to train with the file, start a new run: tbbn run {directory / CONFIG} --name NAME."
        )
    config, root, download = record.run_config, edited.get("data.root"), edited.get("data.download")
    if isinstance(download, bool):
        config = replace(config, data=replace(config.data, download=download))
    return config.at(root if isinstance(root, str) else None)


def _difference(one: Values, other: Values, here: str, there: str) -> str:
    """The settings in which two configs differ, except the place of the data: the first three with both values, or empty."""
    changed = [key for key in {**one, **other} if key not in PLACE and one.get(key) != other.get(key)]
    shown = [f"{key} = {one.get(key)!r:.40} {here}, {other.get(key)!r:.40} {there}" for key in changed[:3]]
    return "; ".join(shown) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
