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


def test_own_data_runs_from_a_folder_and_from_arrays():
    done = run(EXAMPLES / "own_data.py", "--epochs", "1")
    assert re.search(r"^ft \+ bn .*^ft \+ tbbn .*^from arrays: [\d.]+ %$", done.stdout, re.M | re.S)


@pytest.mark.nightly  # docs/extending.md, run by tests/test_docs.py, has a method of its own too
def test_own_method_runs():
    done = run(EXAMPLES / "own_method.py", "--epochs", "1")
    assert re.findall(r"^(\S+) \+ tbbn", done.stdout, re.M) == ["ft", "balanced", "balanced(strength=0.5)"]


@pytest.mark.nightly  # tests/bench/methods/test_state.py runs its method
def test_own_state_runs():
    done = run(EXAMPLES / "own_state.py", "--epochs", "1")
    assert re.findall(r"^(\S+) \+ tbbn", done.stdout, re.M) == ["ft", "ewc"]


@pytest.mark.nightly  # the jobs call tbbn.run, which other tests cover
def test_own_cluster_divides_the_seeds_and_resumes(tmp_path):
    for job, seeds in (("0", "[0, 3]"), ("1", "[1]"), ("2", "[2]"), ("2", "[2]")):
        words = ("--out", tmp_path, "--job", job, "--jobs", "3", "--epochs", "1")
        assert run(EXAMPLES / "own_cluster.py", "train", *words).stdout == f"job {job} of 3: seeds {seeds} done\n"
    table = run(EXAMPLES / "own_cluster.py", "report", "--out", tmp_path).stdout
    assert re.findall(r"^(\w+ \+ \w+) +4 ", table, re.M) == ["eeil + bn", "eeil + tbbn", "ft + bn", "ft + tbbn"]
