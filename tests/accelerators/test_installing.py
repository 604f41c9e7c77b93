"""Real installs: wheel, sdist and editable bring the C kernel; without a compiler they are pure Python and say so."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = "tbbn/accelerators/native"
HERE = sysconfig.get_path("purelib")
NO_COMPILER = {"CC": "/nonexistent"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C kernel is for Linux"),
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"),
]


def run(*command, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "TBBN_NATIVE")}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=clean | environment, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path):
    """What a build reads of a fresh clone: no library, no earlier failure."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so", "not_built.txt", "__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def environment(tmp_path):
    """A virtual environment that finds this one's packages, but not its tbbn."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(own, "zz_others.pth").write_text(HERE + "\n")  # after what is installed there; its own .pth files are not read
    return python


def install(python, *what, **environment):
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *what, **environment)


def doctor(python):
    """Where tbbn was found, and what it says of its kernel."""
    code = "import sys, tbbn; print(tbbn.__file__); from tbbn.bench.cli.main import main; sys.exit(main(['doctor']))"
    where, *lines = run(python, "-c", code).splitlines()
    return Path(where), next(line for line in lines if "cpu kernel" in line).split("cpu kernel")[1].strip()


def wheel_of(python, source, folder, **environment):
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source, **environment)
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    return wheel, [Path(name).name for name in names if name.startswith(FOLDER)]


def test_a_wheel_brings_the_library(checkout, environment, tmp_path):
    wheel, names = wheel_of(environment, checkout, tmp_path / "wheels")
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    assert "libtbbn.so" in names and "kernel.c" in names and "not_built.txt" not in names
    assert not list(checkout.rglob("*.so"))
    install(environment, wheel)
    where, said = doctor(environment)
    assert tmp_path in where.parents and checkout not in where.parents
    assert said.startswith("built with ")


def test_without_a_compiler_the_wheel_is_pure_and_says_so(checkout, environment, tmp_path):
    (checkout / "src" / FOLDER / "libtbbn.so").write_text("of an earlier build, must not travel")
    wheel, names = wheel_of(environment, checkout, tmp_path / "wheels", **NO_COMPILER)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "libtbbn.so" not in names and "not_built.txt" in names
    install(environment, wheel)
    where, said = doctor(environment)
    assert said.startswith("not built: no C compiler found (/nonexistent) when tbbn was installed; without it ")
    run(environment, said.rpartition("run: python ")[2])  # the remedy
    assert (where.parent / "accelerators" / "native" / "libtbbn.so").exists()
    assert doctor(environment)[1].startswith("built with ")


def test_an_sdist_builds_and_installs(checkout, environment, tmp_path):
    build = "import os, sys; os.chdir(sys.argv[1]); from hatchling.build import build_sdist; build_sdist(sys.argv[2])"
    install(environment, "hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers")
    run(environment, "-c", build, checkout, tmp_path / "sdist")
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")
    install(environment, sdist)
    assert doctor(environment)[1].startswith("built with ")


def test_an_editable_install_builds_in_place(checkout, environment):
    install(environment, "-e", checkout)
    where, said = doctor(environment)
    assert checkout in where.parents
    assert said.startswith("built with ")
    with (checkout / "src" / FOLDER / "kernel.c").open("a") as file:
        file.write("/* changed */\n")
    assert doctor(environment)[1].startswith("out of date: the C sources have changed since it was built; ")
    run(environment, checkout / "src" / FOLDER / "building.py")
    assert doctor(environment)[1].startswith("built with ")


def test_an_editable_install_without_a_compiler_succeeds(checkout, environment):
    install(environment, "-e", checkout, **NO_COMPILER)
    assert doctor(environment)[1].startswith("not built: no C compiler found (/nonexistent) when tbbn was installed; ")
