"""Loads the C kernel that was built with the package. Nothing is compiled here, and nothing outside this folder is loaded.

``TBBN_NATIVE`` switches it off (0) or forces a level (baseline, avx2, avx512); by default the processor's highest is used.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

from tbbn.accelerators.native import building
from tbbn.nn.private import binary

NAMES = {"baseline": "baseline instructions", "avx2": "AVX2", "avx512": "AVX-512"}
# benchmarks/norm.py, ResNet-32's layers: the `pytorch` column over the `tbbn` column.
COST = "without it the layer takes 2 to 2.5 times as long on a CPU"


class CannotLoad(Exception):
    """The C kernel cannot be used: the reason, and what the user can do about it."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def load(folder: Path = building.FOLDER) -> tuple[ctypes.CDLL, str]:
    """The library, and a description of how it was built and runs; raises :class:`CannotLoad`."""
    level = _wanted_level()
    path = folder / building.LIBRARY
    _check(path)
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        library.tbbn_forward.argtypes = library.tbbn_backward.argtypes = [ctypes.c_char_p]
        library.tbbn_choose.argtypes, library.tbbn_choose.restype = [ctypes.c_char_p], ctypes.c_char_p
        library.tbbn_built.restype = ctypes.c_char_p
        compiler = library.tbbn_built().decode(errors="replace").partition(" by ")[2].partition("(")[0].strip()
        chosen = library.tbbn_choose(level.encode() if level else None)
        threads = _share_threads(library)
    except (OSError, AttributeError) as error:
        raise CannotLoad(f"the library cannot be loaded: {error}", _rebuild()) from error
    if chosen is None:
        raise CannotLoad(f"TBBN_NATIVE={level}, and this processor has no {NAMES[str(level)]}")
    return library, f"built with {compiler}, {NAMES[chosen.decode()]} in use{threads}"


def _wanted_level() -> str | None:
    wanted = os.environ.get("TBBN_NATIVE") or "1"
    if wanted == "0":
        raise CannotLoad("switched off by TBBN_NATIVE=0")
    if wanted != "1" and wanted not in NAMES:
        raise CannotLoad(f"TBBN_NATIVE must be 0, 1, {', '.join(NAMES)}, got {wanted!r}")
    return None if wanted == "1" else wanted


def _check(path: Path) -> None:
    """Refuse a library that is missing, truncated (reading its missing pages would crash) or built from other sources."""
    if not sys.platform.startswith("linux"):
        raise CannotLoad(f"the C kernel is for Linux, and this is {sys.platform}")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CannotLoad(f"not built: {_why_not_built(path)}", _rebuild()) from None
    except OSError as error:
        raise CannotLoad(f"the library cannot be read: {error}", _rebuild()) from error
    if not is_whole(data):
        raise CannotLoad(f"{path} is damaged", _rebuild())
    has_sources = all((path.parent / name).is_file() for name in building.SOURCES)
    if has_sources and not building.is_current(data, path.parent):
        raise CannotLoad("out of date: the C sources have changed since it was built", _rebuild())


def _why_not_built(path: Path) -> str:
    try:
        return f"{path.with_name(building.NOTE).read_text().strip()} when tbbn was installed"
    except OSError:
        return f"there is no {path.name} in {path.parent}"


def is_whole(data: bytes) -> bool:
    """Whether a 64-bit ELF file holds all its segments and its section table, which comes last."""
    if len(data) < 64 or data[:5] != b"\x7fELF\2":
        return False
    order = "<" if data[5] == 1 else ">"
    segments, sections = struct.unpack_from(order + "QQ", data, 32)
    segment_size, n_segments, section_size, n_sections = struct.unpack_from(order + "4H", data, 54)
    if max(segments + segment_size * n_segments, sections + section_size * n_sections) > len(data):
        return False
    for i in range(n_segments):
        offset, _, _, size = struct.unpack_from(order + "4Q", data, segments + i * segment_size + 8)
        if offset + size > len(data):
            return False
    return True


def _share_threads(library: ctypes.CDLL) -> str:
    """Give the library the OpenMP functions that torch calls: threads of a second OpenMP library would compete with torch's.

    They are looked up as the linker did for torch: among all global symbols, then in torch's own dependencies.
    """
    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    for scope in (None, binary):
        try:
            runtime = ctypes.CDLL(scope)
            found = [ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in names]
        except (OSError, AttributeError):
            continue
        library.tbbn_use_threads((ctypes.c_void_p * len(found))(*found))
        return ""
    return ", one thread only: torch has no OpenMP library"


def _rebuild() -> str:
    return f"install gcc or clang and run: python {building.__file__}"
