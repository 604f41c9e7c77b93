"""The examples run with the real packages, in a short form."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from package import package

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "needs", "options"),
    [
        ("avalanche_replay", "avalanche", ["--strategy", "ER_ACE"]),
        ("lightning_loop", "lightning", []),
        ("huggingface_trainer", "transformers", []),
    ],
)
def test_example_runs(name, needs, options):
    package(needs)
    script = EXAMPLES / f"{name}.py"
    marks = [int(mark) for mark in re.findall(r"# TBBN, (\d)", script.read_text())]
    assert marks == list(range(1, len(marks) + 1)) and len(marks) in (2, 3)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "--epochs", "1", *options],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.rstrip().endswith("%")]
    assert [line[:26].strip() for line in found] == ["batch norm", "task-balanced batch norm"]
