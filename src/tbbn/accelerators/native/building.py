"""Compiles the C kernel into one library for the architecture. ``hatch_build.py`` calls this; the layer never does.

``python building.py`` builds in place, beside this file. It imports only the standard library: a build environment has no torch.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = "libtbbn.so"
NOTE = "not_built.txt"  # why there is no library
SOURCES = ("dispatch.c", "kernel.c", "passes.h", "team.h")
FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
# kernel.c is compiled once per level. tbbn_choose() in dispatch.c must ask the processor for each of these instruction sets.
_AVX2 = ("-mavx2", "-mfma")
LEVELS = {"baseline": (), "avx2": _AVX2, "avx512": (*_AVX2, "-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw")}
_TIMEOUT = 300  # seconds


class CannotBuild(Exception):
    """The library cannot be built. The message says why."""


def fingerprint(folder: Path) -> str:
    """Hash of the sources and flags. It is compiled into the library, so that a stale one is recognised."""
    parts = [*((folder / name).read_bytes() for name in SOURCES), repr((FLAGS, LEVELS)).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def is_current(library: bytes, folder: Path) -> bool:
    """Whether a library was built from the sources in ``folder``, found out without loading it."""
    return f"tbbn kernel from {fingerprint(folder)} ".encode() in library


def build(sources: Path, target: Path) -> Path:
    """Compile ``sources`` into ``target / LIBRARY``; raises :class:`CannotBuild` or OSError."""
    if not sys.platform.startswith("linux"):
        raise CannotBuild(f"the C kernel is for Linux, and this is {sys.platform}")
    cc = _compiler()
    x86 = _run([*cc, "-dumpmachine"]).startswith("x86_64")
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [([f"-DLEVEL={name}", *LEVELS[name]], "kernel") for name in (LEVELS if x86 else ["baseline"])]
        jobs.append(([f'-DTBBN_SOURCES="{fingerprint(sources)}"'], "dispatch"))
        objects = [f"{scratch}/{i}.o" for i in range(len(jobs))]
        commands = [
            [*cc, *FLAGS, *extra, "-c", str(sources / f"{name}.c"), "-o", made]
            for (extra, name), made in zip(jobs, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run, commands))
        _run([*cc, "-shared", *objects, "-lm", "-pthread", "-o", f"{scratch}/{LIBRARY}"])
        return _install(Path(scratch, LIBRARY), target / LIBRARY)


def build_in_place(folder: Path) -> bool:
    """Build beside the sources; False if the library is current. A failure is written to :data:`NOTE` and raised."""
    library, note = folder / LIBRARY, folder / NOTE
    if library.exists() and is_current(library.read_bytes(), folder):
        return False
    try:
        build(folder, folder)
    except CannotBuild as error:
        note.write_text(f"{error}\n")
        raise
    note.unlink(missing_ok=True)
    return True


def _install(made: Path, target: Path) -> Path:
    """Copy under another name, then rename, so that readers find a whole library even if several processes build."""
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".so", delete=False) as file:
        file.write(made.read_bytes())
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, target)
    return target


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CC", ""))
    for command in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise CannotBuild(f"no C compiler found ({asked[0] if asked else 'cc, gcc or clang'})")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        said = [line for line in lines if "error" in line] or lines or [f"exit status {done.returncode}"]
        raise CannotBuild(f"{command[0]} failed: {said[0]}")
    return done.stdout


def main() -> int:
    try:
        built = build_in_place(FOLDER)
    except (CannotBuild, OSError) as error:
        sys.stderr.write(f"C kernel not built: {error}\n")
        return 1
    sys.stdout.write(f"C kernel {'built' if built else 'is current'}: {FOLDER / LIBRARY}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
