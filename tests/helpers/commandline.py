"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tbbn.bench.cli.main import main
from tbbn.bench.methods import Method, TaskContext

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


def interrupted(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until the second task begins."""

    def before_task(self: Method, context: TaskContext) -> None:
        if context.number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Method, "before_task", before_task)
        assert main(words) == 130
