"""What all commands share: exit codes, how a command is added, and how folders of runs are found."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from tbbn.errors import UserError

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_DIVERGED = 3
EXIT_INTERRUPTED = 130

Call = Callable[[argparse.Namespace], int]
Command = Callable[[str, Call, str, str], argparse.ArgumentParser]  # name, function, one-line help, example


def run_folders(given: Sequence[str], pending: Sequence[Path] = ()) -> list[Path]:
    """The folders of all runs below those given, and of ``pending`` ones not started yet; each once."""
    folders: list[Path] = []
    for text in given:
        there = [file.parent for file in Path(text).rglob("record.json")]
        inside = sorted({*there, *(folder for folder in pending if Path(text) in folder.parents)})
        if not inside:
            raise UserError(f"{text}: no run here; the folder of a run holds a record.json.")
        folders += inside
    return list(dict.fromkeys(folders))
