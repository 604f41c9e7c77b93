"""What is published: the files of ``make dist`` install into empty environments, and work there. Run by ``make test-dist``."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tbbn

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PYTHONS = [f"3.{minor}" for minor in range(10, 14)]
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not list(DIST.glob("*.whl")), reason="nothing to test; run make dist"),
]

LAYER = """
import importlib.util, torch, tbbn
assert not any(map(importlib.util.find_spec, ("numpy", "torchvision", "rich"))), "not an empty environment"
from tbbn.accelerators.native import binding
assert binding.status().startswith("built with "), binding.status()
layer = tbbn.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()))
x = torch.randn(16, 3, 6, 6)
def train(x):
    layer.zero_grad()
    with tbbn.balance(layer, current=12, memory=4, past_tasks=2):
        y = layer(x)
    y.square().sum().backward()
    return layer[0].weight.grad.clone()
native = train(x)
layer.double()  # the C kernel takes no float64: the reference
torch.testing.assert_close(native.double(), train(x.double()), rtol=1e-4, atol=1e-4)
assert type(tbbn.revert(layer)[1]) is torch.nn.BatchNorm2d
print("fine")
"""
KERNEL = """
import ctypes, pathlib, sys, tbbn
library = ctypes.CDLL(str(pathlib.Path(tbbn.__file__).parent / "accelerators/native/libtbbn.so"))
library.tbbn_built.restype = library.tbbn_choose.restype = ctypes.c_char_p
library.tbbn_choose.argtypes = [ctypes.c_char_p]
print(tbbn.__version__, library.tbbn_built().decode()[:16], library.tbbn_choose(None).decode())
"""


def run(*command: str | Path, code: int = 0, cwd: Path = Path("/")) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TBBN_NATIVE")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**clean, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def environment(folder: Path, python: str | Path = sys.executable) -> Path:
    """The folder of the programs of a new, empty virtual environment."""
    run(python, "-m", "venv", folder)
    return folder / "bin"


def made(pattern: str) -> Path:
    (found,) = DIST.glob(pattern)
    return found


def interpreter(version: str) -> str | None:
    own = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python3")
    )
    return str(own[-1]) if own else shutil.which(f"python{version}")


def test_one_wheel_serves_every_python_of_the_platform() -> None:
    assert re.fullmatch(rf"tbbn-{tbbn.__version__}-py3-none-manylinux_\d_\d+_x86_64\.whl", made("*.whl").name)


def test_the_wheel_has_the_package_and_nothing_else() -> None:
    with zipfile.ZipFile(made("*.whl")) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        fields = email.message_from_bytes(wheel.read(metadata))
    inside = {name.removeprefix("tbbn/") for name in names if name.startswith("tbbn/")}
    assert {name.split("/")[0] for name in names} == {"tbbn", f"tbbn-{tbbn.__version__}.dist-info"}
    package = ROOT / "src" / "tbbn"
    tracked = run("git", "-C", package, "ls-files").split()
    assert inside - {"accelerators/native/libtbbn.so"} == set(tracked) and len(inside) == len(tracked) + 1
    assert fields["Requires-Python"] == ">=3.10" and fields["License-Expression"] == "MIT"
    assert set(fields.get_all("Provides-Extra", [])) >= {"bench", "dev"}


def test_the_sdist_has_what_a_build_and_the_tests_need() -> None:
    with tarfile.open(made("*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "LICENSE", "Makefile", "tests/conftest.py"} <= names
    assert not [
        name for name in names if name.endswith((".so", ".pyc", "not_built.txt")) or name.startswith((".venv", "site/"))
    ]


@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_the_layer_and_then_the_bench_run_from_an_empty_environment(pattern: str, tmp_path: Path) -> None:
    bin = environment(tmp_path / "venv")
    run(bin / "python", *PIP, made(pattern))
    assert run(bin / "python", "-c", LAYER) == "fine\n"
    assert run(bin / "tbbn", "--version") == f"tbbn {tbbn.__version__}\n"
    assert "pip install 'tbbn[bench]'" in run(bin / "tbbn", "demo", code=2)

    run(bin / "python", *PIP, f"{made(pattern)}[bench]")
    printed = run(bin / "tbbn", "demo", "--out", tmp_path / "runs", "--quiet", cwd=tmp_path)
    assert "ft + tbbn" in printed and (tmp_path / "runs" / "demo" / "toy.png").exists()
    assert re.search(r"cpu kernel +built with ", run(bin / "tbbn", "doctor"))
    run(bin / "tbbn", "verify", tmp_path / "runs" / "demo")


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_compiles_and_its_kernel_loads_on_every_python(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    bin = environment(tmp_path / "venv", python)
    run(bin / "python", *PIP, "--no-deps", made("*.whl"))
    (package,) = (tmp_path / "venv").glob("lib/*/site-packages/tbbn")
    run(bin / "python", "-W", "error", "-m", "compileall", "-q", "-f", package)
    assert run(bin / "python", "-c", KERNEL).startswith(f"{tbbn.__version__} tbbn kernel from")
