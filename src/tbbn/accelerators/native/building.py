"""Compiles ``native.c`` with the system's C compiler into a cache of the user's; finds it there the next time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.c", "native_passes.h"))
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_SECONDS = 120  # a compiler that takes longer hangs


class CannotBuild(Exception):
    """Why there is no compiled kernel, in words for a user."""


def built() -> Path:
    """The shared library, compiled now if it never was; raises :class:`CannotBuild` or OSError."""
    if os.environ.get("TBBN_NATIVE", "1") == "0":
        raise CannotBuild("TBBN_NATIVE=0 is set")
    if not sys.platform.startswith("linux"):
        raise CannotBuild(f"only on Linux, and this is {sys.platform}")
    cc, runtime = _compiler(), _openmp_runtime()
    target = _cache() / f"native-{_fingerprint(cc, runtime)}.so"
    if not target.exists():
        _compile(cc, runtime, target)
    return target


def _compiler() -> list[str]:
    import shlex
    import shutil

    asked = shlex.split(os.environ.get("CC", ""))
    for command in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise CannotBuild(f"no C compiler found ({asked[0] if asked else 'cc, gcc or clang'})")


def _openmp_runtime() -> Path:
    """The OpenMP library that torch has loaded: with one of its own, the kernels' threads would compete with torch's."""
    maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    loaded = {Path(line.split(maxsplit=5)[5]) for line in maps if line.count("/") and ".so" in line}
    torchs_own = Path(torch.__file__).parent
    for name in ("libgomp", "libiomp5", "libomp"):
        found = [p for p in loaded if p.name.startswith(name)]
        if found:  # other packages bring copies too
            return min(found, key=lambda p: (torchs_own not in p.parents, p))
    raise CannotBuild("this torch has no OpenMP library loaded")


def _cache() -> Path:
    """``$XDG_CACHE_HOME/tbbn``, of this user alone: what lies in it is loaded into the process."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "tbbn"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found, link = folder.stat(), folder.lstat()
    if {found.st_uid, link.st_uid} != {os.getuid()} or found.st_mode & 0o022:
        raise CannotBuild(f"{folder} must belong to this user and be writable by nobody else")
    return folder


def _fingerprint(cc: list[str], runtime: Path) -> str:
    """Changes with everything the compiled file depends on."""
    import hashlib

    version = _run([*cc, "--version"])
    parts = [
        *(path.read_text() for path in SOURCES),
        *FLAGS,
        *cc,
        version,
        _processor(),
        torch.__version__,
        str(runtime),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(cc: list[str], runtime: Path, target: Path) -> None:
    """Written beside and renamed: several processes may do this at once, and each finds a whole file or none."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, library = f"{folder}/native.o", f"{folder}/native.so"
        _run([*cc, *FLAGS, "-c", str(SOURCES[0]), "-o", made])
        # Linked in a second step, without -fopenmp: that would bring in the compiler's own OpenMP library.
        _run([*cc, "-shared", made, str(runtime), "-lm", "-o", library])
        os.replace(library, target)


def _run(command: list[str]) -> str:
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise CannotBuild(f"{command[0]} failed: {said[0]}")
    return done.stdout
