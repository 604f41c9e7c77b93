"""Commands of tbbn as real processes that cost no import: this process has torch loaded and forks.

A child may be told to receive signals at given lines of tbbn's own code, so that a kill can be repeated exactly.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import tbbn
from tbbn.bench.cli.main import main
from tbbn.bench.runs import saved

PACKAGE = str(Path(tbbn.__file__).parent)
SCOPES = {  # where lines are counted
    "all": (PACKAGE,),
    "files": (f"{PACKAGE}/bench/runs", f"{PACKAGE}/bench/files.py"),
}
CRASHED = 99  # exit code of a child whose exception left main
SECONDS = 120  # no command takes longer


@dataclass(frozen=True)
class Fault:
    """What happens to a command: ``signals``, each after so many lines of ``scope``; or files limited to ``file_bytes``."""

    scope: str = "all"
    signals: tuple[tuple[int, int], ...] = ()  # (lines, signal number), in order
    file_bytes: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``code`` is negative for a process that a signal ended."""

    code: int
    out: str
    err: str
    lines: dict[str, int] = field(default_factory=dict)


class Child:
    """A command at work in a process group of its own."""

    def __init__(self, words: Sequence[str], fault: Fault | None = None, *, count: bool = False) -> None:
        self.out, self.err, self.counted = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            self._work(words, fault or Fault(), count)

    def _work(self, words: Sequence[str], fault: Fault, count: bool) -> None:
        code = CRASHED
        lines = dict.fromkeys(SCOPES, 0)
        try:
            os.setpgid(0, 0)
            signal.alarm(SECONDS)
            for file, number in ((self.out, 1), (self.err, 2)):
                os.dup2(file.fileno(), number)
            if fault.file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (fault.file_bytes, resource.RLIM_INFINITY))
            if fault.signals:
                _trace(SCOPES[fault.scope], _sender(fault.signals))
            if count:
                _trace(SCOPES["all"], lambda frame: _count(frame, lines))
            code = main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.settrace(None)
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(self.counted.fileno(), repr(lines).encode())
            os._exit(code)

    def stopped(self) -> bool:
        """Wait until the child has stopped itself (True) or ended (False)."""
        status = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return status is not None and status.si_code == os.CLD_STOPPED

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> Ended:
        """Wait for the end of the child."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = []
        for file in (self.out, self.err, self.counted):
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return Ended(code, texts[0], texts[1], eval(texts[2]) if texts[2] else {})


def command(words: Sequence[str], fault: Fault | None = None, *, count: bool = False) -> Ended:
    """Run a command of tbbn to its end. ``count`` counts its lines in each of `SCOPES`."""
    return Child(words, fault, count=count).ended()


def _sender(signals: Sequence[tuple[int, int]]) -> Callable[[FrameType], None]:
    seen, left = 0, list(signals)

    def send(_: FrameType) -> None:
        nonlocal seen
        seen += 1
        while left and seen > left[0][0]:
            os.kill(os.getpid(), left.pop(0)[1])

    return send


def _count(frame: FrameType, lines: dict[str, int]) -> None:
    for scope, places in SCOPES.items():
        lines[scope] += frame.f_code.co_filename.startswith(places)


def _trace(places: tuple[str, ...], at_line: Callable[[FrameType], None]) -> None:
    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at_line(frame)
        return on_line

    sys.settrace(lambda frame, *_: on_line if frame.f_code.co_filename.startswith(places) else None)


def prepare(words: Sequence[str]) -> None:
    """Load what commands load, by training once in this process before the first fork. Then save after every epoch."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        where = ["--out", folder, "--name", "x", "--quiet"]
        assert main(["run", *words, *where]) == 0 and main(["verify", f"{folder}/x"]) == 0
    for function in (saved.saved, saved.run_saved):
        assert function.__kwdefaults__ is not None
        function.__kwdefaults__["every"] = 0.0
    gc.collect()
    gc.freeze()  # a child's collector then leaves these pages to be shared


def draw_nothing() -> None:
    """Write a few bytes instead of drawing: a picture takes longer than the run it shows."""
    import matplotlib.figure

    def savefig(self: Any, file: Any, **_: Any) -> None:
        file.write(b"picture")

    matplotlib.figure.Figure.savefig = savefig  # type: ignore[method-assign]
