"""CUDA graphs: a function of device tensors, captured once and replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CapturedFunction:
    """Calls ``function(*tensors)`` a few times eagerly, then captures it as a CUDA graph and replays the graph.

    The function must not wait for the device, must take tensors of the same shapes each time, and returns nothing: it writes its
    results to its own tensors. The eager calls have the same effect as the replayed ones.
    """

    EAGER_CALLS = 3

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0
        self._inputs: list[Tensor] = []  # what the graph reads

    def __call__(self, *inputs: Tensor) -> None:
        self._calls += 1
        if self._calls == 1:
            self._inputs = [given.clone() for given in inputs]
        # Eager calls use these inputs too: Triton compiles for the alignment of arguments, which it cannot do while capturing.
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        if self._calls <= self.EAGER_CALLS:
            self.function(*self._inputs)
            return
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # On the caller's stream: cuDNN and cuBLAS keep a workspace per stream, so graphs captured on a common stream would share
        # it when they are replayed in parallel.
        stream = torch.cuda.current_stream()
        own = None if stream == torch.cuda.default_stream() else stream
        # Calls of other threads do not disturb the capture.
        with _no_garbage_collection(), torch.cuda.graph(self.graph, stream=own, capture_error_mode="thread_local"):
            self.function(*self._inputs)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: destroying an old graph or event during a capture makes the capture fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
