"""Prints a pip constraints file: the oldest version of every package that pyproject.toml allows. See ``make test-oldest``."""

from __future__ import annotations

import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib
    except ImportError:  # in an environment with nothing but pip
        from pip._vendor import tomli as tomllib

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[^]]*\])?\s*(>=\s*(?P<oldest>[\w.]+))?")


def constraints(project: dict[str, Any]) -> list[str]:
    """A line ``name==version`` for each package.

    >>> constraints({"dependencies": ["torch>=2.9,<3"], "optional-dependencies": {"all": ["me[x]", "rich[y]>=13; os == 'z'"]},
    ...              "name": "me"})
    ['rich==13', 'torch==2.9']
    """
    found: dict[str, str] = {}
    for requirement in chain(project["dependencies"], *project["optional-dependencies"].values()):
        match = _REQUIREMENT.match(requirement)
        name, oldest = match["name"], match["oldest"]
        if name == project["name"]:
            continue
        if oldest is None or found.setdefault(name, oldest) != oldest:
            raise ValueError(f"{requirement!r} must have one lower bound: name>=version")
        found[name] = oldest
    return sorted(f"{name}=={oldest}" for name, oldest in found.items())


if __name__ == "__main__":
    print("\n".join(constraints(tomllib.loads(PROJECT.read_text())["project"])))
