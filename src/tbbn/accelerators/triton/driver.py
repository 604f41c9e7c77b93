"""Launch a compiled kernel through the CUDA driver, with arguments stored in the layout that the driver reads.

Triton's launcher takes every argument as a Python object, and a norm's kernels have 25 to 50 of them. Here a constant argument is
stored once, and one ``struct.pack_into`` writes the pointers of a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_TYPES: dict[str, Any] = {"i1": ctypes.c_int8, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("name", ctypes.c_uint64), ("value", ctypes.c_uint32), ("rest", ctypes.c_uint8 * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


class PreparedLaunch:
    """A launch whose pointers are read from the addresses in ``arguments``; the other arguments are numbers.

    Call the driver's ``cuLaunchKernelEx`` with :attr:`call`.
    """

    def __init__(self, compiled: Any, grid: Sequence[int], arguments: Sequence[tuple[str, Any]]) -> None:
        facts = compiled.metadata
        self.config = _Config(tuple(grid), (32 * facts.num_warps, 1, 1), facts.shared)
        if facts.launch_pdl:
            self.attribute = _Attribute(_DEPENDENT, 1)
            self.config.attributes, self.config.count = ctypes.addressof(self.attribute), 1
        self.numbers = [None if type_.startswith("*") else _TYPES[type_](value) for type_, value in arguments]
        self.nothing = ctypes.c_uint64(0)  # Triton's own two pointers, which these kernels do not use
        places = [
            value if n is None else ctypes.addressof(n) for n, (_, value) in zip(self.numbers, arguments, strict=True)
        ]
        places += 2 * [ctypes.addressof(self.nothing)]
        self.places = (ctypes.c_void_p * len(places))(*places)
        self.move_to(0)
        self.call = ctypes.addressof(self.config), compiled.function, ctypes.addressof(self.places), None

    def move_to(self, stream: int) -> None:
        self.stream = self.config.stream = stream


def prepare(compiled: Any, grid: Sequence[int], values: Sequence[Any]) -> PreparedLaunch | None:
    """A launch of ``compiled`` with these arguments, pointers given as addresses of pointers; None: Triton must launch it."""
    cuda, facts = library(), getattr(compiled, "metadata", None)
    if cuda is None or facts is None:
        return None
    types = list(compiled.src.signature.values())
    arguments = [(type_, value) for type_, value in zip(types, values, strict=True) if type_ != "constexpr"]
    if (
        facts.num_ctas != 1
        or facts.launch_cooperative_grid
        or facts.global_scratch_size
        or getattr(facts, "profile_scratch_size", 0)
        or not all(type_.startswith("*") or type_ in _TYPES for type_, _ in arguments)
    ):
        return None
    sizes = [8 if type_.startswith("*") else ctypes.sizeof(_TYPES[type_]) for type_, _ in arguments]
    if _parameters(cuda, compiled.function) != [*sizes, 8, 8]:  # another Triton passes other things
        return None
    return PreparedLaunch(compiled, grid, arguments)


def _parameters(cuda: Any, function: int) -> list[int]:
    """The sizes of a kernel's parameters."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not cuda.cuFuncGetParamInfo(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


@cache
def library() -> Any:
    """The CUDA driver's library; None without one, or if it is too old."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuFuncGetParamInfo.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        cuda.cuLaunchKernelEx.argtypes = 4 * [ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return cuda
