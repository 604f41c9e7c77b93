"""The examples run, in a short form, as a user would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_loop_runs_and_shows_three_lines():
    script = EXAMPLES / "own_loop.py"
    assert re.findall(r"# TBBN, (\d)", script.read_text()) == ["1", "2", "3"]
    done = subprocess.run(
        [sys.executable, str(script), "--epochs", "1"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line[:26].strip() for line in lines] == ["batch norm", "task-balanced batch norm"]
    for line in lines:
        assert 0 <= float(re.search(r"([\d.]+) %", line)[1]) <= 100
