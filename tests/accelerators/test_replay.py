"""Recorded launches: what is replayed, with which pointers, and when not."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import here

pytestmark = here


class Kernel:
    """What Triton's compiled kernels are to the recorder; ``ran`` has every launch, ordinary or replayed."""

    arg_names = ("x", "out", "n", "SIZE", "PDL")

    def __init__(self) -> None:
        self.ran: list[tuple[str, tuple[Any, ...]]] = []
        self.compiled = SimpleNamespace()  # what else a compiled kernel knows

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def ordinary(*arguments: Any, PDL: bool, num_warps: int) -> Any:
            values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
            self.ran.append(("ordinary", (*grid, *values, PDL)))
            return SimpleNamespace(run=self.replayed, function=7, packed_metadata=8, **vars(self.compiled))

        return ordinary

    def replayed(self, x: int, y: int, z: int, stream: int, function: int, metadata: int, *arguments: Any) -> None:
        assert (stream, function, metadata, arguments[:3]) == (5, 7, 8, (None, None, None))
        self.ran.append(("replayed", (x, y, z, *arguments[3:])))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    from tbbn.accelerators.triton import replay

    monkeypatch.setattr(replay, "_thread", replay._Thread())
    monkeypatch.setattr(replay, "raw_stream", lambda device: 5)
    return Kernel()


def norm(kernel: Kernel, x: torch.Tensor, key: object = "key") -> tuple[torch.Tensor, torch.Tensor]:
    """A launch that reads ``x`` and writes the second half of its scratch."""
    from tbbn.accelerators.triton import replay

    work = torch.empty(2, 8)
    bases = [x, None, work]
    if not replay.replayed(key, bases):
        launches = replay.Launches(bases)
        launches.launch(kernel, (3, 2), x, work[1], 8, 16, PDL=False, num_warps=4)
        replay.record(key, launches)
    return x, work


def test_the_second_launch_of_a_key_is_replayed_with_its_own_pointers(kernel: Kernel) -> None:
    for name in ("ordinary", "replayed", "replayed"):
        x, work = norm(kernel, torch.zeros(8))
        grid = (3, 2) if name == "ordinary" else (3, 2, 1)
        assert kernel.ran[-1] == (name, (*grid, x.data_ptr(), work.data_ptr() + 32, 8, 16, False))


def test_another_key_is_recorded_anew(kernel: Kernel) -> None:
    norm(kernel, torch.zeros(8), "one")
    norm(kernel, torch.zeros(8), "two")
    assert [name for name, _ in kernel.ran] == ["ordinary", "ordinary"]


def test_a_misaligned_tensor_is_launched_the_ordinary_way(kernel: Kernel) -> None:
    """Kernels are compiled for pointers that are multiples of 16."""
    odd = torch.zeros(9)[1:]
    norm(kernel, odd)  # not recorded
    norm(kernel, torch.zeros(8))
    norm(kernel, odd)  # not replayed
    norm(kernel, torch.zeros(8))
    assert [name for name, _ in kernel.ran] == ["ordinary", "ordinary", "ordinary", "replayed"]


def test_a_pointer_to_nothing_known_is_not_recorded(kernel: Kernel) -> None:
    from tbbn.accelerators.triton import replay

    elsewhere = torch.zeros(8)
    launches = replay.Launches([torch.zeros(8)])
    launches.launch(kernel, (1,), elsewhere, elsewhere, 8, 16, PDL=False, num_warps=4)
    replay.record("key", launches)
    assert [name for name, _ in kernel.ran] == ["ordinary"]
    assert not replay.replayed("key", [torch.zeros(8)])


def test_a_profiler_sees_every_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    from tbbn.accelerators.triton import replay

    norm(kernel, torch.zeros(8))
    hooked = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=lambda metadata: None))
    monkeypatch.setattr(replay, "knobs", hooked)
    norm(kernel, torch.zeros(8))
    assert [name for name, _ in kernel.ran] == ["ordinary", "ordinary"]


def test_the_number_of_recordings_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    from tbbn.accelerators.triton import replay

    monkeypatch.setattr(replay, "_MOST", 3)
    for i in range(10):
        norm(kernel, torch.zeros(8), i)
        assert len(replay._thread.recordings) <= 3


class Driver:
    """The two functions of the CUDA driver that a prepared launch needs; ``seen`` has what they are given."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.error = sizes, 0
        self.seen: list[tuple[Any, ...]] = []
        self.cuFuncGetParamInfo = self.parameter
        number = ctypes.CFUNCTYPE(ctypes.c_int, *4 * [ctypes.c_void_p])
        self.cuLaunchKernelEx = number(self.launch)

    def parameter(self, function: int, index: int, offset: Any, size: Any) -> int:
        assert function == 7
        if index == len(self.sizes):
            return 1
        size._obj.value = self.sizes[index]
        return 0

    def launch(self, config: int, function: int, places: int, extra: int | None) -> int:
        x, y, z, threads, *_, shared = struct.unpack("7I", ctypes.string_at(config, 28))
        stream, attributes, count = struct.unpack("QQI", ctypes.string_at(config + 32, 20))
        early = count and struct.unpack("QI", ctypes.string_at(attributes, 12))
        given = struct.unpack(f"{len(self.sizes)}Q", ctypes.string_at(places, 8 * len(self.sizes)))
        types = {1: "b", 4: "i", 8: "Q"}
        values = [
            struct.unpack(types[n], ctypes.string_at(place, n))[0] for n, place in zip(self.sizes, given, strict=True)
        ]
        self.seen.append(((x, y, z, threads, shared), stream, early, values))
        assert (function, extra) == (7, None)
        return self.error


@pytest.fixture
def cuda(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Driver:
    from tbbn.accelerators.triton import driver

    found = Driver([8, 8, 4, 8, 8])
    monkeypatch.setattr(driver, "library", lambda: found)
    types = dict(zip(Kernel.arg_names, ("*fp32", "*fp32", "i32", "constexpr", "constexpr"), strict=True))
    kernel.compiled = SimpleNamespace(
        src=SimpleNamespace(signature=types),
        metadata=SimpleNamespace(
            num_warps=4, num_ctas=1, shared=256, launch_pdl=True, launch_cooperative_grid=False, global_scratch_size=0
        ),
    )
    return found


def test_the_driver_gets_what_triton_would_give_it(kernel: Kernel, cuda: Driver) -> None:
    norm(kernel, torch.zeros(8))
    for _ in range(2):
        x, work = norm(kernel, torch.zeros(8))
        assert cuda.seen.pop() == ((3, 2, 1, 128, 256), 5, (6, 1), [x.data_ptr(), work.data_ptr() + 32, 8, 0, 0])
    assert [name for name, _ in kernel.ran] == ["ordinary"]


def test_a_kernel_with_other_parameters_is_left_to_triton(kernel: Kernel, cuda: Driver) -> None:
    cuda.sizes = [8, 8, 4, 8]
    norm(kernel, torch.zeros(8))
    norm(kernel, torch.zeros(8))
    assert [name for name, _ in kernel.ran] == ["ordinary", "replayed"] and not cuda.seen


def test_triton_says_what_is_wrong_with_a_first_launch(kernel: Kernel, cuda: Driver) -> None:
    norm(kernel, torch.zeros(8))
    cuda.error = 201  # a thread without a context
    norm(kernel, torch.zeros(8))
    assert [name for name, _ in kernel.ran] == ["ordinary", "ordinary"] and len(cuda.seen) == 1


def test_every_thread_has_recordings_of_its_own(kernel: Kernel, cuda: Driver) -> None:
    """The pointers of a call are in memory that the driver reads without Python's lock."""
    norm(kernel, torch.zeros(8))
    thread = threading.Thread(target=norm, args=(kernel, torch.zeros(8)))
    thread.start()
    thread.join()
    assert [name for name, _ in kernel.ran] == ["ordinary", "ordinary"] and not cuda.seen
