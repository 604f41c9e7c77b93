"""Launch compiled kernels again without Triton's Python launch path.

``kernel[grid](...)`` binds and inspects every argument. For kernels with 30 arguments that is 25 to 60 µs of host time, and a
layer launches six per step. A later launch with the same shapes differs only in its pointers. So the first launches of a
configuration go through Triton and are recorded; later ones put new pointers into the recorded arguments and call the CUDA driver
or, where that is impossible, the compiled kernel.

Importing this module imports Triton; import it only for CUDA tensors.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from tbbn.accelerators.triton import driver
from tbbn.nn.private import raw_stream

try:
    from triton import knobs
except ImportError:  # an older Triton
    knobs = None

_MISALIGNED = 15  # kernels are compiled for pointers that are multiples of 16
_MOST = 4096  # recordings kept; a program with more configurations starts over
Bases = Sequence[Tensor | None]
Replay = Callable[[Bases, int], bool]


_SLOTS = 64  # different pointers of a call, at most


class Launches:
    """The recorded launches of one call. Tensors among their arguments are ``bases`` of the call, or lie inside one of them."""

    def __init__(self, bases: Bases) -> None:
        self.places = [(i, t.data_ptr(), t.nbytes) for i, t in enumerate(bases) if t is not None]
        self.bases = len(bases)
        self.complete = not any(start & _MISALIGNED for _, start, _ in self.places)
        self.calls: list[str] = []  # each launches a kernel, as Python source
        self.names: dict[str, Any] = {}  # the objects that the calls refer to
        self.slots = (ctypes.c_uint64 * _SLOTS)()  # the driver reads the pointers of a call from here
        self.pointers: list[str] = []  # the pointers to write into the slots, as Python source
        self.prepared: list[driver.PreparedLaunch] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch through Triton, and record the launch."""
        compiled = kernel[grid](*arguments, **options)
        if not self.complete or not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            self.complete = False
            return
        values = (*arguments, *(options[name] for name in kernel.arg_names[len(arguments) :]))
        words = [self._address(v) if isinstance(v, Tensor) else repr(v) for v in values]
        n, grid = len(self.calls), (*grid, 1, 1)[:3]
        given = [self._slot(w) if isinstance(v, Tensor) else v for v, w in zip(values, words, strict=True)]
        prepared = driver.prepare(compiled, grid, given) if len(self.pointers) <= _SLOTS else None
        if prepared is not None:
            self.prepared.append(prepared)
            self.names[f"call{n}"] = prepared.call
            self.calls.append(f"if launch(*call{n}): return failed({n})")
            return
        self.names |= {f"run{n}": compiled.run, f"function{n}": compiled.function, f"data{n}": compiled.packed_metadata}
        x, y, z = grid
        self.calls.append(f"run{n}({x}, {y}, {z}, stream, function{n}, data{n}, None, None, None, {', '.join(words)})")

    def _slot(self, pointer: str) -> int:
        """The address of the slot for a pointer."""
        if pointer not in self.pointers:
            self.pointers.append(pointer)
        return ctypes.addressof(self.slots) + 8 * self.pointers.index(pointer)

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
        return f"a{base} + {offset}" if offset else f"a{base}"

    def replay(self) -> Replay:
        """All launches as one function of the bases and a stream. It launches nothing and returns False if a base is misaligned.

        The function is generated as source with every constant in it: filling lists of arguments takes several times as long.
        """
        given = [i for i, _, _ in self.places]
        lines = [
            "def replay(bases, stream):",
            f"    {', '.join(f'a{i}' for i in range(self.bases))}, = bases",
            *(f"    a{i} = a{i}.data_ptr()" for i in given),
            f"    if ({' | '.join(f'a{i}' for i in given)}) & {_MISALIGNED}: return False",
        ]
        if self.prepared:
            self.names |= {
                "slots": self.slots, "write": struct.Struct(f"={len(self.pointers)}Q").pack_into, "prepared": self.prepared,
                "launch": driver.library().cuLaunchKernelEx, "failed": _failed,
            }  # fmt: skip
            lines += [
                f"    write(slots, 0, {', '.join(self.pointers)})",
                "    if stream != prepared[0].stream:",
                "        for one in prepared: one.move_to(stream)",
            ]
        lines += [*(f"    {call}" for call in self.calls), "    return True"]
        exec("\n".join(lines), self.names)
        return self.names["replay"]


def _failed(number: int) -> bool:
    """Called when the driver refuses a launch: False if it was the first, so that Triton launches or says what is wrong."""
    if number:
        raise RuntimeError("The CUDA driver refused to launch a kernel.")
    return False


class _Thread(threading.local):
    """The recordings of this thread: the driver reads the pointers of a call from memory that belongs to the recording."""

    def __init__(self) -> None:
        self.recordings: dict[Hashable, Replay] = {}


_thread = _Thread()


def replayed(key: Hashable, bases: Bases) -> bool:
    """Replay the launches recorded under ``key``, on the current stream; False if there are none or they do not apply.

    The key must hold everything that shapes the launches except the addresses of ``bases``: sizes, strides, types, constants,
    which bases are None, the device. Kernels are launched on the device of the first base.
    """
    replay = _thread.recordings.get(key)
    if replay is None or _is_profiled():
        return False
    return replay(bases, raw_stream(bases[0].device.index))  # type: ignore[union-attr]


def record(key: Hashable, launches: Launches) -> None:
    """Keep the launches of a call for the next calls with this key, if they can be replayed."""
    recordings = _thread.recordings
    if launches.complete and key not in recordings:
        if len(recordings) >= _MOST:
            recordings.clear()
        recordings[key] = launches.replay()


def _is_profiled() -> bool:
    """Whether a profiler hooks Triton's launches, which must then go through Triton."""
    if knobs is None:
        return False
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
