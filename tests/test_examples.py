"""The examples run, in a short form, as a user would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr == ""
    return done


def test_own_loop_runs_and_shows_three_lines():
    script = EXAMPLES / "own_loop.py"
    assert re.findall(r"# TBBN, (\d)", script.read_text()) == ["1", "2", "3"]
    done = run(script, "--epochs", "1")
    lines = done.stdout.splitlines()
    assert [line[:26].strip() for line in lines] == ["batch norm", "task-balanced batch norm"]
    for line in lines:
        assert 0 <= float(re.search(r"([\d.]+) %", line)[1]) <= 100


@pytest.mark.nightly  # ten seconds to start three processes; tests/nn/test_sync.py checks the numbers
def test_ranks_runs_under_torchrun():
    done = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "ranks.py", "--epochs", "1"
    )
    assert re.fullmatch(r"2 ranks: \d+\.\d %\n", done.stdout)
