"""What all fuzz tests share: how many cases are drawn, the command line called as a person calls it, and what may come of it."""

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
from tbbn.bench.report import plots

# Small enough that a run takes a few hundredths of a second.
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
    """A property as two tests: ``default`` cases, the same ones each time, and ``nightly`` ones, new ones each time."""

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
    """A fresh folder for one case: a fixture would be shared by all of them."""
    made = Path(tempfile.mkdtemp(prefix="tbbn-fuzz-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def call(*words: str) -> tuple[int, str, str]:
    """The command's exit code and what it said; an exception that would reach the user fails the test as it stands."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBBN_TRACEBACK", "1")  # what no one has thought of is what is looked for
        if words[0] != "report":  # half of a tiny run's time is its picture
            patch.setattr(plots, "accuracy_curves", lambda records, path: path)
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def judge(code: int, out: str, err: str, allowed: tuple[int, ...] = (0, 2, 3)) -> None:
    """A mistake is one line; nothing that is printed moves a terminal's cursor; every exit code is a documented one."""
    assert code in allowed, (code, out, err)
    assert not re.search(r"[^\n\x20-\x7e\xa0-\U0010ffff]", out + err), repr(out + err)
    assert "Traceback" not in err
    if code == 2:
        assert out == "" and err.startswith("tbbn: ") and err.count("\n") == 1, (out, err)
        assert len(err) > 20, err


def run(out: Path, *words: str) -> int:
    """A quiet run into ``out``; one that is refused leaves nothing there."""
    code, said, complaint = call("run", *words, "--out", str(out), "--name", "x", "--quiet")
    judge(code, said, complaint)
    if code == 2:
        assert not out.exists(), (complaint, sorted(out.rglob("*")))
    else:
        assert list(out.glob("x/**/record.json"))
    return code
