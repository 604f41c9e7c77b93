"""What commands share: exit codes, and how a command is added."""

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
Command = Callable[[str, Call, str, str], argparse.ArgumentParser]  # name, what it does, a line about it, an example


def run_folders(given: Sequence[str], planned: Sequence[Path] = ()) -> list[Path]:
    """The runs in these folders, ``planned`` ones too, each once: a folder and its parent may both be given."""
    folders: list[Path] = []
    for text in given:
        there = [file.parent for file in Path(text).rglob("record.json")]
        inside = sorted({*there, *(folder for folder in planned if Path(text) in folder.parents)})
        if not inside:
            raise UserError(f"{text}: no run here; a run's folder holds a record.json.")
        folders += inside
    return list(dict.fromkeys(folders))
