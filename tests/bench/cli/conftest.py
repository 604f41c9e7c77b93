"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import TINY

from tbbn.bench.cli.main import main


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two norms with two seeds each."""
    out = tmp_path_factory.mktemp("runs")
    words = ["run", *TINY, "--norm", "bn,gn(groups=8)", "--seeds", "2", "--out", str(out), "--name", "few", "--quiet"]
    assert main(words) == 0
    return out / "few"
