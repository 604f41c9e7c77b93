"""Loading the C kernel: from the package alone, never compiled on the way, and a reason where there is none."""

import ctypes
import shutil
import subprocess
import sys

import pytest
import torch

import tbbn
from tbbn.accelerators.native import binding as native
from tbbn.accelerators.native import building, loading
from tbbn.nn.functional import task_balanced_batch_norm
from tbbn.nn.plan import Layout, PlanOptions

compiled = pytest.mark.skipif(native.library() is None, reason=f"C kernel: {native.status()}")
LEVELS = ("avx512", "avx2", "baseline")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the folder, to be damaged."""
    monkeypatch.setenv("TBBN_NATIVE", "1")
    return shutil.copytree(building.FOLDER, tmp_path / "native", ignore=shutil.ignore_patterns("__pycache__", "*.txt"))


def unloaded(monkeypatch, folder):
    """As in a process that has not loaded anything yet, with the package in ``folder``."""
    load = loading.load
    monkeypatch.setattr(loading, "load", lambda: load(folder))
    for name, value in {"_status": None, "_kernels": None, "_remedy": ""}.items():
        monkeypatch.setattr(native, name, value)


def test_a_checkout_with_a_compiler_has_its_library():
    """Otherwise most tests of the kernel would be skipped in silence."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))) or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler")
    path = building.FOLDER / building.LIBRARY
    assert path.exists() and building.is_current(path.read_bytes(), building.FOLDER), "run `make native`"


@compiled
def test_status_names_the_compiler_and_the_instructions(monkeypatch, package):
    unloaded(monkeypatch, package)
    assert native.status().startswith("built with ")
    assert native.status().endswith(" in use")
    assert native.diagnosis() == native.status()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0", "switched off by TBBN_NATIVE=0"),
        ("avx3", "TBBN_NATIVE must be 0, 1, baseline, avx2, avx512, got 'avx3'"),
    ],
)
def test_the_environment_variable(monkeypatch, package, value, why):
    unloaded(monkeypatch, package)
    monkeypatch.setenv("TBBN_NATIVE", value)
    assert native.library() is None
    assert native.status() == why
    assert native.diagnosis() == f"{why}; {loading.COST}"


def test_other_systems_are_told_so(monkeypatch, package):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(loading.CannotLoad, match="the C kernel is for Linux, and this is win32"):
        loading.load(package)


def test_a_missing_library_says_why_what_it_costs_and_what_to_do(monkeypatch, package):
    (package / building.LIBRARY).unlink(missing_ok=True)
    with pytest.raises(loading.CannotLoad, match=r"not built: there is no libtbbn.so in "):
        loading.load(package)
    (package / building.NOTE).write_text("no C compiler found (cc, gcc or clang)\n")
    unloaded(monkeypatch, package)
    assert native.status() == "not built: no C compiler found (cc, gcc or clang) when tbbn was installed"
    cost, remedy = native.diagnosis().removeprefix(native.status() + "; ").split("; ")
    assert cost.endswith("times as long on a CPU")
    assert remedy == f"install gcc or clang and run: python {building.__file__}"


def test_a_forward_compiles_nothing_and_looks_once(monkeypatch, package):
    (package / building.LIBRARY).unlink(missing_ok=True)
    unloaded(monkeypatch, package)
    looked = []
    load = loading.load
    monkeypatch.setattr(loading, "load", lambda: looked.append(1) or load())
    monkeypatch.setattr(subprocess, "Popen", None)  # no process can be started
    layer, x = tbbn.TaskBalancedBatchNorm2d(3), torch.randn(64, 3, 4, 4)
    for _ in range(3):
        with tbbn.balance(layer, current=48, memory=16, past_tasks=6):
            assert "_NativeNorm" not in type(layer(x).grad_fn).__name__
    assert looked == [1]
    assert not (package / building.LIBRARY).exists()


@compiled
@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_library_is_refused(package, part):
    path = package / building.LIBRARY
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with pytest.raises(loading.CannotLoad, match=r"libtbbn.so is damaged") as error:
        loading.load(package)
    assert "building.py" in error.value.remedy


@compiled
def test_a_file_that_is_no_library_is_refused(package):
    (package / building.LIBRARY).write_text("not a library " * 100)
    with pytest.raises(loading.CannotLoad, match="damaged"):
        loading.load(package)


@compiled
def test_a_library_of_other_sources_is_refused(package):
    with (package / "team.h").open("a") as file:
        file.write("/* changed */\n")
    with pytest.raises(loading.CannotLoad, match="out of date: the C sources have changed since it was built"):
        loading.load(package)


@compiled
def test_an_installation_without_the_sources_loads(package):
    for name in building.SOURCES:
        (package / name).unlink()
    assert loading.load(package)[1].startswith("built with ")


@compiled
def test_a_library_without_its_functions_is_refused(package):
    path = package / building.LIBRARY
    path.write_bytes(path.read_bytes().replace(b"tbbn_choose", b"tbbn_chosen"))
    with pytest.raises(loading.CannotLoad, match=r"the library cannot be loaded: .*tbbn_choose"):
        loading.load(package)


# -- Levels -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def levels(tmp_path, monkeypatch):
    """A library of its own for every level that this processor has: one file is loaded once, and has one level."""
    found = {}
    for level in LEVELS:
        folder = shutil.copytree(building.FOLDER, tmp_path / level)
        monkeypatch.setenv("TBBN_NATIVE", level)
        try:
            found[level], status = loading.load(folder)
        except loading.CannotLoad:
            continue
        assert status.endswith(f", {loading.NAMES[level]} in use")
    return found


@compiled
def test_a_level_that_the_processor_lacks_is_refused(monkeypatch, package):
    class OldProcessor(ctypes.CDLL):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            if args[0] is not None and "tbbn" in args[0]:
                self.tbbn_choose = lambda level: None

    monkeypatch.setattr(ctypes, "CDLL", OldProcessor)
    monkeypatch.setenv("TBBN_NATIVE", "avx512")
    with pytest.raises(loading.CannotLoad, match="TBBN_NATIVE=avx512, and this processor has no AVX-512"):
        loading.load(package)


@compiled
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("channels", [1, 16, 37])
@pytest.mark.parametrize("size", [(1, 1), (3, 3), (8, 8)], ids=str)
def test_levels_agree(monkeypatch, levels, channels, size, last):
    torch.manual_seed(0)
    x, grad = torch.randn(64, channels, *size) + 1, torch.randn(64, channels, *size)
    weight, bias = torch.randn(channels), torch.randn(channels)
    if last:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    plan = Layout(48, 16, 6).plan(PlanOptions(), torch.device("cpu"), torch.float32)
    results = {}
    for level, library in levels.items():
        monkeypatch.setattr(native, "_kernels", library)  # private: a process loads one library, and here are several
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        running = torch.zeros(channels), torch.ones(channels)
        y = task_balanced_batch_norm(leaves[0], *running, *leaves[1:], plan)
        assert "_NativeNorm" in type(y.grad_fn).__name__
        y.backward(grad)
        results[level] = [y.detach(), *running, *(t.grad for t in leaves)]
    for wanted in results.values():
        for a, b in zip(results["baseline"], wanted, strict=True):
            assert (a - b).abs().max() <= 1e-6 * max(1.0, a.abs().max().item())
    if "avx512" in results:  # the same operations, fused alike: which of the two a machine has does not show
        assert all(torch.equal(a, b) for a, b in zip(results["avx512"], results["avx2"], strict=True))


ONE_RUNTIME = """
import torch, tbbn
from pathlib import Path
from tbbn.accelerators.native import binding as native

def loaded():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "omp" in line.rpartition("/")[2]}

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

assert "libtbbn" not in Path("/proc/self/maps").read_text(), "import tbbn loaded the kernel"
torch.set_num_threads(2)
x = torch.randn(64, 16, 32, 32)
x.mul(x)
before = loaded(), threads()
layer = tbbn.TaskBalancedBatchNorm2d(16)
with tbbn.balance(layer, current=48, memory=16, past_tasks=6):
    layer(x).sum().backward()
assert native.status().endswith(" in use"), native.status()
assert threads() > 1, "no second thread"
assert (loaded(), threads()) == before, ((loaded(), threads()), before)
"""


@compiled
def test_kernel_shares_torchs_threads():
    done = subprocess.run([sys.executable, "-c", ONE_RUNTIME], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
