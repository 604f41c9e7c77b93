"""Building the compiled CPU kernel: once, by one user, whoever else is at it, and never an obstacle where it fails."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tbbn
from tbbn.accelerators.native import binding as native
from tbbn.accelerators.native import building

compiled = pytest.mark.skipif(native.library() is None, reason=f"the kernel is {native.status()}")


def is_compiled(y):
    return "_Compiled" in type(y.grad_fn).__name__


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"TBBN_NATIVE": "0"}, "TBBN_NATIVE=0 is set"),
        ({"PATH": "/nowhere", "CC": ""}, "no C compiler found .cc, gcc or clang."),
        ({"CC": "no-such-compiler"}, "no C compiler found .no-such-compiler."),
        ({"CC": "false"}, "false failed"),
    ],
)
def test_without_a_compiler_there_is_a_reason(monkeypatch, tmp_path, environment, why):
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), "TBBN_NATIVE": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(building.CannotBuild, match=why):
        building.built()
    assert native._load()[0] is None
    assert native._load()[1].startswith("not compiled: ")


def test_source_that_does_not_compile_is_a_reason_too(monkeypatch, tmp_path):
    monkeypatch.setenv("TBBN_NATIVE", "1")
    (tmp_path / "native.c").write_text("int tbbn_forward(void) { return oops; }")
    monkeypatch.setattr(building, "SOURCES", (tmp_path / "native.c",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, why = native._load()
    assert found is None and why.startswith("not compiled: ")
    assert [p.name for p in (tmp_path / "tbbn").iterdir()] == []


def test_other_systems_are_told_so(monkeypatch):
    monkeypatch.setenv("TBBN_NATIVE", "1")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(building.CannotBuild, match="only on Linux, and this is win32"):
        building.built()


def test_a_cache_that_others_can_write_is_refused(monkeypatch, tmp_path):
    (tmp_path / "tbbn").mkdir()
    (tmp_path / "tbbn").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(building.CannotBuild, match="must belong to this user and be writable by nobody else"):
        building._cache()
    (tmp_path / "tbbn").rmdir()
    (tmp_path / "tbbn").write_text("a file in its place")
    with pytest.raises(OSError, match="tbbn"):
        building._cache()


def test_the_cache_is_this_users_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    assert building._cache().stat().st_mode & 0o777 == 0o700


def test_building_is_tried_once_and_then_the_pytorch_form_is_used(monkeypatch):
    tried = []

    def built():
        tried.append(1)
        raise building.CannotBuild("a test says so")

    monkeypatch.setattr(building, "built", built)
    monkeypatch.setattr(native, "_status", None)
    monkeypatch.setattr(native, "_kernels", None)
    layer, x = tbbn.TaskBalancedBatchNorm2d(3), torch.randn(64, 3, 4, 4)
    for _ in range(3):
        with tbbn.balance(layer, current=48, memory=16, past_tasks=6):
            assert not is_compiled(layer(x))
    assert tried == [1]
    assert native.status() == "not compiled: a test says so"


@compiled
def test_processes_may_build_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "FLAGS", ("-O0", *building.FLAGS[1:]))
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: building.built(), range(3)))
    assert len(set(made)) == 1
    assert list((tmp_path / "tbbn").iterdir()) == [made[0]]
    assert native._load()[1] == "compiled"


@compiled
def test_source_compiles_without_a_warning(tmp_path):
    strict = ["-Wall", "-Wextra", "-Werror", "-c", str(building.SOURCES[0]), "-o", str(tmp_path / "native.o")]
    building._run([*building._compiler(), *building.FLAGS, *strict])


ONE_RUNTIME = """
import torch, tbbn
from pathlib import Path
from tbbn.nn import native

def loaded():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "omp" in line.rpartition("/")[2]}

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

assert native._status is None, "import tbbn built something"
torch.set_num_threads(2)
x = torch.randn(64, 16, 32, 32)
x.mul(x)
before = loaded(), threads()
layer = tbbn.TaskBalancedBatchNorm2d(16)
with tbbn.balance(layer, current=48, memory=16, past_tasks=6):
    layer(x).sum().backward()
assert native.status() == "compiled"
assert (loaded(), threads()) == before, ((loaded(), threads()), before)
"""


@compiled
def test_kernel_shares_torchs_threads():
    done = subprocess.run([sys.executable, "-c", ONE_RUNTIME], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
