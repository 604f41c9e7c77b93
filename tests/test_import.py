"""What importing the package costs, and which way its imports go."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "tbbn"

MEASURE = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import tbbn
tbbn.convert  # all that there is to import is imported here
took = time.perf_counter() - start
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(took)
print(" ".join(sorted(n for n in new if n not in sys.stdlib_module_names and not n.startswith("_"))))
"""


def test_import_loads_torch_and_nothing_else_in_a_fifth_of_a_second():
    times = []
    for _ in range(3):  # the best of three: the machine may be busy
        done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
        took, new = done.stdout.splitlines()
        assert new == "tbbn"
        times.append(float(took))
        if times[-1] <= 0.2:
            break
    assert min(times) <= 0.2, times


def test_torch_is_imported_at_the_first_use_and_every_name_is_there_before():
    code = """
import sys, tbbn
assert "torch" not in sys.modules and set(tbbn.__all__) <= set(dir(tbbn))
print(len([getattr(tbbn, name) for name in (*dir(tbbn), "errors", "norm")]))
tbbn.nothing
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'tbbn' has no attribute 'nothing'"
    assert int(done.stdout) > 20


# Who may import whom, besides itself and the leaves. The command line may import all, and nobody may import it.
LEAVES = {"errors", "gpu", "launching", "seeds", "vision", "metrics"}
BELOW_METHODS = {"models", "data", "norm"}
BELOW_ENGINE = {"methods", *BELOW_METHODS, "config", "record"}
ABOVE_ENGINE = {"engine", *BELOW_ENGINE, "paper"}
LAYERS: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "norm": set(),
    "models": {"norm"},
    "data": set(),
    "methods": BELOW_METHODS,
    "protocols": set(),
    "config": {"protocols"},
    "schema": set(),
    "record": {"config", "schema"},
    "paper": {"config", "record"},
    "engine": BELOW_ENGINE,
    "analysis": ABOVE_ENGINE,
    "sweep": ABOVE_ENGINE,
    "bench": ABOVE_ENGINE,
    "report": {*ABOVE_ENGINE, "analysis", "sweep"},
}
STANDARD_LIBRARY_ONLY = {"errors", "gpu", "metrics", "protocols", "config"}
COMMAND_LINE = {"__main__", "cli", "catalogue", "commands"}


def part(path):
    """The name a module goes by in the table: its folder, or its own name at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if part(p) not in COMMAND_LINE | {"__init__"})


def imported(path):
    """Absolute names of all that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = part(path)
    assert own in LAYERS, f"{own} has no place in the order of imports yet"
    for name in imported(path):
        top, *rest = name.split(".")
        if top != "tbbn":
            third_party = {"norm": {"torch", "triton"}, "launching": {"torch", "triton"}, "config": {"tomli"}}.get(
                own, set()
            )
            if own in STANDARD_LIBRARY_ONLY or own in ("norm", "launching"):
                assert top in sys.stdlib_module_names or top in third_party, f"{own} may not import {top}"
        elif rest:
            allowed = {own, *LAYERS[own], *({"errors"} if own in STANDARD_LIBRARY_ONLY else LEAVES)}
            assert rest[0] in allowed, f"{own} may not import {rest[0]}; what it needs of it belongs further down"
        else:  # the package itself, for its version
            assert own not in STANDARD_LIBRARY_ONLY


def test_order_of_imports_has_no_circle():
    seen, left = set(LEAVES), dict(LAYERS)
    while left:
        ready = [name for name, needs in left.items() if needs <= seen]
        assert ready, f"a circle among {sorted(left)}"
        seen.update(ready)
        for name in ready:
            del left[name]
