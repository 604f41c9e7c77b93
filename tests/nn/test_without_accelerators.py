"""The layer without ``tbbn.accelerators``: its whole suite passes on the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blocked import is_blocked

TESTS = Path(__file__).parents[1]
# torch.compile and torch.export trace the reference in any case, and statistics over ranks have no accelerator.
SAME = ("test_compile.py", "test_export.py", "test_sync.py")


@pytest.mark.skipif(not is_blocked(), reason="for the process without the accelerators")
def test_the_folder_is_really_gone():
    with pytest.raises(ModuleNotFoundError) as raised:
        import tbbn.accelerators  # noqa: F401
    assert raised.value.name == "tbbn.accelerators"


@pytest.mark.skipif(is_blocked(), reason="starts the process without the accelerators")
def test_the_layers_suite_passes_on_the_reference():
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    path = os.pathsep.join([str(TESTS / "helpers"), *filter(None, [env.get("PYTHONPATH")])])
    ignored = [f"--ignore={TESTS / 'nn' / name}" for name in SAME]
    command = ["-m", "pytest", "-p", "blocked", "-p", "no:xdist", "-p", "no:cacheprovider", "-v", "-x", *ignored]
    done = subprocess.run(
        [sys.executable, *command, "-m", "not slow and not nightly", str(TESTS / "nn")],
        env={**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) > 250, summary  # and not a handful of collected files
