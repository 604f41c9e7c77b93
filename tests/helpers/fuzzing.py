"""What fuzz tests share: how cases are drawn, how commands are called, and which results are allowed."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tbbn.bench.cli.main import main
from tbbn.bench.report import figures, plots

# A run takes a few hundredths of a second.
TINY = {
    "device": "cpu",
    "threads": "1",
    "data.name": "synthetic:4x6x2x8",
    "data.tasks": "2",
    "train.epochs": "1",
    "batch.size": "8",
    "memory.budget": "8",
}


def cases(default: int, nightly: int, strategy: SearchStrategy[Any]) -> Callable[[Callable[[Any], None]], Any]:
    """Make two tests of a property: ``default`` cases, always the same, and ``nightly`` cases, new each time."""

    def make(check: Callable[[Any], None]) -> Any:
        def case(drawn: Any) -> None:
            check(drawn)

        common = {
            "deadline": None,
            "database": None,
            "suppress_health_check": list(HealthCheck),
            "report_multiple_bugs": False,
        }
        without_shrinking = [Phase.explicit, Phase.generate]
        few = settings(max_examples=default, derandomize=True, phases=without_shrinking, **common)(
            given(strategy)(case)
        )
        many = settings(max_examples=nightly, **common)(given(strategy)(case))

        @pytest.mark.parametrize("size", ["default", pytest.param("nightly", marks=pytest.mark.nightly)])
        def test(size: str) -> None:
            (few if size == "default" else many)()

        test.__doc__ = check.__doc__
        return test

    return make


@contextmanager
def folder() -> Iterator[Path]:
    """A fresh folder for one case; a fixture would be shared by all cases."""
    made = Path(tempfile.mkdtemp(prefix="tbbn-fuzz-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def call(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command. An unexpected exception fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBBN_TRACEBACK", "1")  # unexpected exceptions must reach the test
        if words[0] != "report":  # the picture takes half the time of a tiny run
            patch.setattr(plots, "figure", lambda records: None)
            patch.setattr(figures, "save_figure", lambda figure, path: path)
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def judge(code: int, out: str, err: str, allowed: tuple[int, ...] = (0, 2, 3)) -> None:
    """Check that the exit code is documented, that an error is one line, and that no control characters are printed."""
    assert code in allowed, (code, out, err)
    assert not re.search(r"[^\n\x20-\x7e\xa0-\U0010ffff]", out + err), repr(out + err)
    assert "Traceback" not in err
    if code == 2:
        assert out == "" and err.startswith("tbbn: ") and err.count("\n") == 1, (out, err)
        assert len(err) > 20, err


def run(out: Path, *words: str) -> int:
    """Run quietly into ``out``; a refused run must leave nothing there."""
    code, said, complaint = call("run", *words, "--out", str(out), "--name", "x", "--quiet")
    judge(code, said, complaint)
    if code == 2:
        assert not out.exists(), (complaint, sorted(out.rglob("*")))
    else:
        assert list(out.glob("x/**/record.json"))
    return code
