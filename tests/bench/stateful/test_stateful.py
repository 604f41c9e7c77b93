"""Commands in random order, disturbed by signals, full disks, other processes and damage: see `machine.py`."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def program(name: str, *words: str) -> dict[str, Any]:
    """The result of a program in this folder. It forks, so it needs a process without pytest's threads."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_no_order_of_commands_and_faults_breaks_a_promise() -> None:
    found = program("machine.py", "--seed", "0", "--steps", "80")
    assert found["broken"] is None, explained(found)
    assert found["steps"] >= 80


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_other_steps_do_not_either(part: int) -> None:
    seed = secrets.randbelow(10**9)
    found = program("machine.py", "--seed", str(seed), "--steps", "500", *(["--draw"] if part == 0 else []))
    assert found["broken"] is None, explained(found)


def explained(found: dict[str, Any]) -> str:
    steps = json.dumps(found["replay"])
    return f"{found['broken']}\nseed {found['seed']}; to replay: python {HERE / 'machine.py'} --replay '{steps}'"


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["report", "pack", "export"])
def test_a_signal_at_any_line_of_a_report_a_pack_or_an_export_leaves_nothing_half_done(command: str) -> None:
    found = program("signals.py", command, "60")
    assert sum(found.values()) == 60
    assert (
        found["died of SIGKILL"] == 20 and found["interrupted"] + found["died of SIGTERM"] + found.get("done", 0) == 40
    )


def test_a_signal_in_an_export_leaves_the_old_folder_or_the_new_one() -> None:
    assert sum(program("signals.py", "export", "6").values()) == 6
