"""A process without ``tbbn.accelerators``, as if the folder had been deleted: ``python -m pytest -p blocked tests/nn``.

pytest loads this file as a plugin before it collects tests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

BLOCKED = "tbbn.accelerators"


class Finder:
    """The first import finder to be asked; it denies that the folder exists."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name == BLOCKED or name.startswith(BLOCKED + "."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def pytest_configure() -> None:
    assert not [name for name in sys.modules if name.startswith(BLOCKED)]
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]


def pytest_unconfigure() -> None:
    assert not [name for name in sys.modules if name.startswith(BLOCKED)]


def is_blocked() -> bool:
    return Finder in sys.meta_path
