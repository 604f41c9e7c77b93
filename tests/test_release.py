"""What a release says of itself agrees: versions, lower bounds, files that readers look for."""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tbbn
from tbbn.bench.config.toml import tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def oldest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oldest", ROOT / "tools" / "oldest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_the_same_everywhere() -> None:
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == tbbn.__version__  # type: ignore[index]
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == tbbn.__version__  # type: ignore[index]
    assert PROJECT["dynamic"] == ["version"]


def test_the_oldest_versions_are_the_lower_bounds(oldest: ModuleType) -> None:
    assert doctest.testmod(oldest).failed == 0
    lines = oldest.constraints(PROJECT)
    assert f"torch=={re.match(r'torch>=([0-9.]+),', PROJECT['dependencies'][0])[1]}" in lines  # type: ignore[index]
    named = {re.match(r"[\w.-]+", r)[0] for extra in PROJECT["optional-dependencies"].values() for r in extra}  # type: ignore[index]
    assert {line.partition("==")[0] for line in lines} == (named | {"torch"}) - {"tbbn"}


@pytest.mark.parametrize("requirement", ["rich", "rich<14", "rich>=13.1"])
def test_a_requirement_without_one_lower_bound_is_refused(oldest: ModuleType, requirement: str) -> None:
    with pytest.raises(ValueError, match="must have one lower bound"):
        oldest.constraints({"name": "a", "dependencies": ["rich>=13"], "optional-dependencies": {"x": [requirement]}})


def test_the_makefile_installs_the_torch_that_is_allowed() -> None:
    asked = set(re.findall(r'"(torch[<>=][^"]+)"', (ROOT / "Makefile").read_text()))
    assert asked == set(PROJECT["dependencies"])


def test_this_python_is_one_of_those_promised() -> None:
    promised = [c.split()[-1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in promised and promised[0] == PROJECT["requires-python"][2:]
