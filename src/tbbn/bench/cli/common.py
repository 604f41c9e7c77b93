"""Common code of all commands: exit codes, the types of commands, finding the folders of runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tbbn.errors import UserError, printable

if TYPE_CHECKING:
    from tbbn.bench.report.table import Table

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_DIVERGED = 3
EXIT_TIME_LIMIT = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_INTERRUPTED = 130

CHECKPOINTS = "checkpoint*.safetensors"  # files of a run that may exist without a record


class TimeLimitReached(Exception):
    """The time of ``--time-limit`` is over. Every run has been saved; the message names anything that has not."""


Call = Callable[[argparse.Namespace], int]
Command = Callable[[str, Call, str, str], argparse.ArgumentParser]  # name, function, one-line help, example


def parse_duration(text: str) -> float:
    """Parse a duration to seconds.

    >>> parse_duration("9m"), parse_duration("1h30m"), parse_duration("45s"), parse_duration("2d")
    (540.0, 5400.0, 45.0, 172800.0)
    """
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    seconds = 0.0
    if match is not None:
        seconds = float(sum(int(n or 0) * size for n, size in zip(match.groups(), (86400, 3600, 60, 1), strict=True)))
    if not 0 < seconds < 1e9:
        raise UserError(f"--time-limit takes a duration such as 45s, 9m or 1h30m, got {text!r:.40}.")
    return seconds


def add_data_root(command: argparse.ArgumentParser) -> None:
    line = "folder of the data sets (default: as in the run)"
    command.add_argument("--data.root", dest="root", metavar="PATH", help=line)


def run_folders(given: Sequence[str], others: Sequence[Path] = ()) -> list[Path]:
    """The folders of all runs below the given ones, without duplicates: those with a record, and those in ``others``.

    Files among folders are left out with a note: ``runs/*`` also names the figures there.
    """
    files = [text for text in given if Path(text).is_file()]
    if 0 < len(files) < len(given):
        named = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
        print(printable(f"not folders of runs, left out: {named}"), file=sys.stderr)
        given = [text for text in given if text not in files]
    folders: list[Path] = []
    for text in given:
        if Path(text).is_dir():
            os.listdir(text)  # raises if it is not readable; rglob would just find nothing
        there = [file.parent for file in Path(text).rglob("record.json")]
        inside = sorted({*there, *(folder for folder in others if Path(text) in (folder, *folder.parents))})
        if not inside and any(Path(text).rglob(CHECKPOINTS)):
            raise UserError(f"{text}: no record here. To restore it from the checkpoint: tbbn resume {text}")
        if not inside:
            raise UserError(f"{text}: no run here; the folder of a run holds a record.json.")
        folders += inside
    each: dict[Path, Path] = {}  # resolved path to the path as first given
    for folder in folders:
        each.setdefault(folder.resolve(), folder)
    return list(each.values())


_EVERY = 10  # seconds between two lines on progress


def in_turn(folders: Sequence[Path], command: str) -> Iterator[Path]:
    """Each folder in turn. From ten seconds on, a line on standard error every ten seconds names the folder that is next."""
    said = time.monotonic()
    for number, folder in enumerate(folders, 1):
        if time.monotonic() >= said + _EVERY:
            print(printable(f"{command}: {number}/{len(folders)}, {folder}"), file=sys.stderr, flush=True)
            said = time.monotonic()
        yield folder


def may_refuse(command: argparse.ArgumentParser, *names: str) -> None:
    """Store the defaults of these options for :func:`refuse`; ``names`` are their names in the parsed arguments."""
    command.set_defaults(defaults={name: command.get_default(name) for name in names})


def refuse(args: argparse.Namespace, names: Iterable[str], reason: str, *, settings: bool = False) -> None:
    """Raise if one of these options (or any setting, with ``settings``) was given although it would have no effect."""
    spelt = {"records": "--from", "recipe": "the recipe"}
    given = [name for name in names if getattr(args, name) != args.defaults[name]]
    options = [spelt.get(name, f"--{name.replace('_', '-')}") for name in given]
    if settings:
        options += [f"--{name}" for name in args.settings]
    if options:
        raise UserError(f"{reason}; leave out {', '.join(options)}.")


def print_table(table: Table, form: str) -> None:
    """Print a table. LaTeX and CSV contain the caption (CSV as a column); for them the separate caption goes to stderr."""
    if form == "csv":
        rows = tuple((table.caption, *row) for row in table.rows)
        table = replace(table, header=("table", *table.header), rows=rows, align="l" + table.align)
    print(f"{printable(table.caption)}\n", file=sys.stderr if form in ("csv", "latex", "tex") else sys.stdout)
    print(table.render(form) + "\n" * (form != "csv"))
