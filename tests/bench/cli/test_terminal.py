"""The command as a process: on a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from commandline import TINY

from tbbn.bench.runs.record import load_record


def in_terminal(words: list[str], columns: int) -> tuple[int, str]:
    """The exit code and all output of a process on a real pseudo-terminal."""
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover
        os.environ |= {"TERM": "xterm-256color"}
        os.execv(sys.executable, [sys.executable, "-m", "tbbn.bench.cli.main", *words])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    output = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the child has ended
            break
        if not piece:
            break
        output += piece
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.decode()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("columns", "lanes"), [pytest.param(100, "2", marks=pytest.mark.nightly), (40, "1")])
def test_bars_on_a_terminal(columns: int, lanes: str, tmp_path: Path) -> None:
    words = ["run", *TINY, "--seeds", "2", "--method", "eeil(balanced_epochs=2)", "--lanes", lanes]
    code, output = in_terminal([*words, "--out", str(tmp_path)], columns)
    assert code == 0, output
    assert "Traceback" not in output and "\x1b[" in output
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "2 runs" in plain and "━" in plain
    # rich 13.0 leaves a space at the end of a line that it breaks
    unbroken = re.sub(r" ?\r\n", " ", plain) if columns < 60 else plain
    assert "eeil(balanced_epochs=2) + bn, seed 1: A_f" in unbroken
    assert "accuracy.png" in plain.replace("\r\n", "")


def test_a_closed_pipe_is_not_an_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tbbn.bench.cli.main", "list", "datasets"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait() == 0 and process.stderr.read() == b""
    process.stderr.close()


CLOSED = ("2>&1 | head -1", "2>&1 >/dev/null | true", ">&-", "2>&-", ">/dev/full")


@pytest.mark.parametrize(
    ("closed", "lanes"),
    [(CLOSED[0], "2"), (CLOSED[-1], "1")]
    + [pytest.param(closed, "1", marks=pytest.mark.nightly) for closed in CLOSED[:-1]]
    + [pytest.param(closed, "2", marks=pytest.mark.nightly) for closed in CLOSED[1:]],
)
def test_training_goes_on_when_nobody_reads(closed: str, lanes: str, tmp_path: Path) -> None:
    words = ["run", *TINY, "--seeds", "2", "--out", str(tmp_path), "--name", "x", "--lanes", lanes]
    command = f"{{ {shlex.join([sys.executable, '-m', 'tbbn.bench.cli.main', *words])}; echo $? > {tmp_path}/code; }}"
    outside, _, inside = closed.partition("|")
    command = f"{command} {outside}" + (f"| {inside}" if inside else "")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    code = int((tmp_path / "code").read_text())
    are_results_written = closed in ("2>&1 >/dev/null | true", "2>&-")
    assert (code == 0) == are_results_written
    statuses = [load_record(tmp_path / "x" / f"ft-bn-{seed}").status for seed in (0, 1)]
    assert statuses == ["finished", "finished"]
    assert (tmp_path / "x" / "accuracy.png").exists()


def test_a_signal_without_a_reader_of_standard_error_stops_and_saves(tmp_path: Path) -> None:
    words = ["run", *TINY, "--train.epochs", "2000", "--out", str(tmp_path), "--name", "x"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tbbn.bench.cli.main", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert process.stderr is not None
    process.stderr.readline()  # printed at the first step
    process.stderr.close()
    process.terminate()
    assert process.wait(timeout=120) == 130
    assert load_record(tmp_path / "x").status == "interrupted"
