"""Runs on a device that is neither a CPU nor CUDA and has no float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

SCRIPT = Path(__file__).parents[2] / "helpers" / "other_device.py"


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="needs a newer torch"
)
@pytest.mark.parametrize(
    "methods",
    [
        ("icarl",),
        pytest.param(
            ("afc", "balaug", "bic", "derpp", "eeil", "er", "il2m", "joint", "lucir", "podnet", "ssil", "wa"),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["icarl", "others"],
)
def test_a_run_needs_no_float64_on_its_device(methods):
    """In a process of its own: a device can be registered once."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *methods]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
