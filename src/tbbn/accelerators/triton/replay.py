"""Launch compiled kernels again without Triton's Python launch path.

``kernel[grid](...)`` binds and inspects every argument. For kernels with 30 of them that is 25 to 60 µs of host time, and a layer
launches six a step. The next launch with the same shapes differs only in its pointers. So the first launches of a configuration
go the ordinary way and are recorded; later ones put new pointers into the recorded arguments and call the compiled kernel.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

try:
    from triton import knobs
except ImportError:  # an older Triton
    knobs = None

_MISALIGNED = 15  # kernels are compiled for pointers that are multiples of 16
_MOST = 4096  # recordings kept; a program with more configurations starts over
Bases = Sequence[Tensor | None]


class Launches:
    """The launches of one call. Tensors among their arguments are ``bases`` of the call, or lie inside one of them."""

    def __init__(self, bases: Bases) -> None:
        self.places = [(i, t.data_ptr(), t.nbytes) for i, t in enumerate(bases) if t is not None]
        self.complete = not any(start & _MISALIGNED for _, start, _ in self.places)
        self.recorded: list[
            Callable[[list[int], int], None]
        ] = []  # each launches a kernel, given addresses and a stream

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch the ordinary way, and record it."""
        compiled = kernel[grid](*arguments, **options)
        if not self.complete or not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            self.complete = False
            return
        values = (*arguments, *(options[name] for name in kernel.arg_names[len(arguments) :]))
        words = ", ".join(self._address(v) if isinstance(v, Tensor) else repr(v) for v in values)
        x, y, z = (*grid, 1, 1)[:3]
        # An expression with its constants in it: putting pointers into a list of arguments takes several times as long.
        call = f"lambda a, stream: run({x}, {y}, {z}, stream, function, metadata, None, None, None, {words})"
        names = {"run": compiled.run, "function": compiled.function, "metadata": compiled.packed_metadata}
        self.recorded.append(eval(call, names))

    def _address(self, tensor: Tensor) -> str:
        """An expression for the tensor's address: the base it belongs to, and its offset there in bytes."""
        if not tensor.numel():
            return "0"  # never read
        address = tensor.data_ptr()
        inside = [
            (address != start, i, address - start) for i, start, size in self.places if start <= address < start + size
        ]
        if not inside:
            self.complete = False
            return "0"
        _, base, offset = min(inside)
        return f"a[{base}] + {offset}" if offset else f"a[{base}]"


_recordings: dict[Hashable, Launches] = {}


def launch(key: Hashable, bases: Bases, record: Callable[[Launches], None]) -> None:
    """Replay the launches recorded under ``key``. If there are none, ``record`` launches them.

    The key must hold everything that shapes the launches except the addresses of ``bases``: sizes, strides, types, constants,
    the device. The first base says where to launch.
    """
    found = _recordings.get(key)
    if found is not None and not _is_profiled():
        addresses = [0 if t is None else t.data_ptr() for t in bases]
        if not reduce(or_, addresses) & _MISALIGNED:
            stream = torch._C._cuda_getCurrentRawStream(bases[0].device.index)  # type: ignore[union-attr]
            for call in found.recorded:
                call(addresses, stream)
            return
    launches = Launches(bases)
    record(launches)
    if launches.complete and found is None:
        if len(_recordings) >= _MOST:
            _recordings.clear()
        launches.places.clear()
        _recordings[key] = launches


def _is_profiled() -> bool:
    """Whether a profiler hooks Triton's launches: it wants to see each of them."""
    if knobs is None:
        return False
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
