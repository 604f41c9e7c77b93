"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tbbn.bench.cli.main import main

TINY = ("--data", "synthetic:4x12x4x8", "--data.tasks", "2", "--train.epochs", "1", "--memory.budget", "8")
TINY += ("--device", "cpu")
Capture = pytest.CaptureFixture[str]


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def mistake(capsys: Capture, *words: str) -> str:
    """Run a command that must fail with exit code 2; return the one line it prints."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tbbn: ") and said.err.count("\n") == 1, said.err
    return said.err.strip()
