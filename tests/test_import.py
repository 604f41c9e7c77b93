"""What importing the package loads, and which way its imports go."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "tbbn"

NEW_MODULES = """
import sys
import torch
before = set(sys.modules)
import tbbn
tbbn.convert  # the first use loads the layer
new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names}
print(" ".join(sorted(new)))
"""


def test_the_layer_loads_torch_and_only_its_own_room():
    """No bench, no accelerators, no third party: this is what keeps the import a few milliseconds beside torch's."""
    done = subprocess.run([sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, check=True)
    new = done.stdout.split()
    assert "tbbn.nn.modules" in new
    own = ("tbbn", "tbbn.errors", "tbbn.options", "tbbn.registry")
    assert not [name for name in new if name not in own and room(name[5:]) != "nn"]


def test_torch_is_imported_at_the_first_use_and_every_name_is_there_before():
    code = """
import sys, tbbn
assert "torch" not in sys.modules and set(tbbn.__all__) <= set(dir(tbbn))
print(len([getattr(tbbn, name) for name in (*dir(tbbn), "errors", "nn")]))
tbbn.nothing
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'tbbn' has no attribute 'nothing'"
    assert int(done.stdout) > 20


# The rooms of the house from the ground up: a module may import its own room and those before it.
ROOMS = (
    "errors", "options", "registry", "plugins", "nn", "accelerators",
    "bench.extras", "bench.files", "bench.seeds", "bench.metrics", "bench.timing", "bench.vision", "bench.config",
    "bench.data", "bench.models", "bench.methods",
    "bench.engine", "bench.loggers", "bench.runs", "bench.progress", "bench.report", "bench.interchange",
    "bench.analysis", "bench.api",
    "bench.speed", "paper", "integrations", "bench.cli", "__main__",
)  # fmt: skip
# Imports that go up, each for a reason.
UPWARDS = {
    ("registry", "plugins"),  # looked for when a name is not built in
    ("nn", "accelerators"),  # one lazy call, in functional.py
}
WITHOUT_TORCH = {"errors", "options", "registry", "plugins", "bench.files", "bench.metrics", "bench.config"}


def room(module):
    """The room a module of the package is in: the longest name in the table that it begins with."""
    found = [r for r in ROOMS if module == r or module.startswith(r + ".")]
    return max(found, key=len, default=None)


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if module_of(p) not in ("", "bench"))


def imported(path):
    """Absolute names of all that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_layer_reaches_the_accelerators_by_one_lazy_import():
    asking = {path.name for path in (PACKAGE / "nn").glob("*.py") if "tbbn.accelerators" in " ".join(imported(path))}
    assert asking == {"functional.py"}
    found = [
        line for line in (PACKAGE / "nn/functional.py").read_text().splitlines() if "from tbbn.accelerators" in line
    ]
    assert [line.startswith("    ") for line in found] == [True, True]  # for type checkers, and inside a function


def test_every_room_has_a_test_folder_of_the_same_name():
    rooms = [path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")]
    rooms = [room for room in rooms if len(room.parts) == 1 or (len(room.parts) == 2 and room.parts[0] == "bench")]
    assert Path("nn") in rooms and Path("bench/engine") in rooms
    assert not [str(room) for room in rooms if not list((TESTS / room).glob("test_*.py"))]


def test_benchmarks_do_not_import_tests():
    helpers = {path.stem for path in TESTS.rglob("*.py")} | {"tests", "conftest"}
    for path in sorted((TESTS.parent / "benchmarks").glob("*.py")):
        assert not {name.partition(".")[0] for name in imported(path)} & helpers, path


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = room(module_of(path))
    assert own is not None, f"{path} is in no room of the house yet"
    for name in imported(path):
        top, _, rest = name.partition(".")
        if top != "tbbn":
            if own in WITHOUT_TORCH:
                assert top in sys.stdlib_module_names or top in ("tomllib", "tomli", "tomli_w", "filelock"), (
                    f"{own} may not import {top}"
                )
            elif own in ("nn", "accelerators"):
                assert top in sys.stdlib_module_names or top in ("torch", "triton"), f"{own} may not import {top}"
        elif (other := room(rest)) is not None and other != own and (own, other) not in UPWARDS:
            assert ROOMS.index(other) < ROOMS.index(own), f"{own} may not import {other}"
