"""Recorded launches: what is replayed, with which pointers, and when not."""

from __future__ import annotations

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

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def ordinary(*arguments: Any, PDL: bool, num_warps: int) -> Any:
            values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
            self.ran.append(("ordinary", (*grid, *values, PDL)))
            return SimpleNamespace(run=self.replayed, function=7, packed_metadata=8)

        return ordinary

    def replayed(self, x: int, y: int, z: int, stream: int, function: int, metadata: int, *arguments: Any) -> None:
        assert (stream, function, metadata, arguments[:3]) == (5, 7, 8, (None, None, None))
        self.ran.append(("replayed", (x, y, z, *arguments[3:])))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    from tbbn.accelerators.triton import replay

    monkeypatch.setattr(replay, "_recordings", {})
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
        assert len(replay._recordings) <= 3
