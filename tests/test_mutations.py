"""The changes that ``make mutants`` makes: real ones, and none of messages, types or docstrings."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = '''
"""A docstring with 1 < 2."""

LIMIT: "int | None" = 3


class Thing:
    def size(self, n: int, rows: "list[int]") -> int:
        """Another: 1 < 2."""
        if n < LIMIT and rows:
            raise ValueError(f"n is {n + 1}")
        self.seen = rows[1:].copy()
        return sum(rows, start=n + 1)
'''


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
    file = Path(__file__).parents[1] / "tools" / "mutations.py"
    spec = importlib.util.spec_from_file_location("mutations", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutations"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_change_compiles_and_is_one_of_those_expected(mutations: ModuleType) -> None:
    found = [m for m in mutations.mutants_of("x", "f.py", SOURCE) if mutations.is_valid(m, SOURCE)]
    names = {m.name.removeprefix("f.py: ") for m in found}
    assert len(names) == len(found)
    assert names == {
        'LIMIT: "int | None" = 3  ->  LIMIT: "int | None" = 4',
        "if n < LIMIT and rows:  ->  if True:",
        "if n < LIMIT and rows:  ->  if False:",
        "if n < LIMIT and rows:  ->  if (n < LIMIT or rows):",
        "if n < LIMIT and rows:  ->  if (n < LIMIT):",
        "if n < LIMIT and rows:  ->  if (rows):",
        "if n < LIMIT and rows:  ->  if (n <= LIMIT) and rows:",
        "self.seen = rows[1:].copy()  ->  pass",
        "self.seen = rows[1:].copy()  ->  self.seen = (rows[1:])",
        "self.seen = rows[1:].copy()  ->  self.seen = rows[:].copy()",
        "self.seen = rows[1:].copy()  ->  self.seen = rows[2:].copy()",
        "return sum(rows, start=n + 1)  ->  return (sum(rows))",
        "return sum(rows, start=n + 1)  ->  return sum(rows, start=(n - 1))",
        "return sum(rows, start=n + 1)  ->  return sum(rows, start=n + 2)",
    }


def test_a_line_belongs_to_its_function_or_to_the_module(mutations: ModuleType) -> None:
    lines = SOURCE.splitlines()
    assert mutations.function_at(SOURCE, 1 + lines.index("        self.seen = rows[1:].copy()")) == "Thing.size"
    assert mutations.function_at(SOURCE, 1 + lines.index('LIMIT: "int | None" = 3')) == ""
