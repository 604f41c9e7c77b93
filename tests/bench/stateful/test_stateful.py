"""Commands in random order, disturbed in every way a machine and its users know: see `machine.py`."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MACHINE = Path(__file__).with_name("machine.py")


def machine(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(MACHINE), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_no_order_of_commands_and_faults_breaks_a_promise() -> None:
    found = machine("--seed", "0", "--steps", "100")
    assert found["broken"] is None, explained(found)
    assert found["steps"] >= 100


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_other_steps_do_not_either(part: int) -> None:
    seed = secrets.randbelow(10**9)
    found = machine("--seed", str(seed), "--steps", "500", *(["--draw"] if part == 0 else []))
    assert found["broken"] is None, explained(found)


def explained(found: dict[str, Any]) -> str:
    return (
        f"{found['broken']}\nseed {found['seed']}; to replay: python {MACHINE} --replay '{json.dumps(found['replay'])}'"
    )
