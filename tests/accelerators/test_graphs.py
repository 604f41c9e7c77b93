"""What surrounds the capture of a CUDA graph. Captures themselves need a GPU: ``tests/bench/engine/test_gpu.py``."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tbbn.accelerators.graphs import CapturedFunction


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every capture; a graph that is replayed does nothing."""
    found: list[dict[str, Any]] = []

    class Graph:
        def replay(self) -> None:
            pass

    @contextmanager
    def graph(made: Graph, **options: Any):
        found.append(options)
        yield

    class Stream:
        pass

    mine = Stream()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mine)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: None)
    return found


def test_no_garbage_is_collected_during_a_capture(captures):
    collecting = []
    function = CapturedFunction(lambda x: collecting.append(gc.isenabled()))
    for _ in range(5):
        function(torch.zeros(2))
    assert collecting == [True, True, True, False]  # three eager calls, the capture, a replay
    assert gc.isenabled() and len(captures) == 1


def test_collection_stays_off_where_the_user_turned_it_off(captures):
    gc.disable()
    try:
        function = CapturedFunction(lambda x: None)
        for _ in range(4):
            function(torch.zeros(2))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_failed_capture_turns_collection_on_again(captures, monkeypatch):
    def fails(x: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(CapturedFunction, "EAGER_CALLS", 0)
    with pytest.raises(RuntimeError, match="no memory"):
        CapturedFunction(fails)(torch.zeros(2))
    assert gc.isenabled()


def test_other_threads_may_call_cuda_during_a_capture_on_the_lanes_own_stream(captures):
    function = CapturedFunction(lambda x: None)
    for _ in range(4):
        function(torch.zeros(2))
    assert captures == [{"stream": torch.cuda.current_stream(), "capture_error_mode": "thread_local"}]
