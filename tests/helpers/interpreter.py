"""Kernels are tested on the CPU with Triton's interpreter, and on a GPU.

Triton decides at import whether it interprets, and another test module may have imported it before. So a file with kernel
tests runs itself again in a process of its own: :func:`interpret`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from tbbn.accelerators.triton import TRITON

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Whether kernels can run in this process. If not, a test file must not import them.
RUNNING = TRITON and (INTERPRETED or torch.cuda.is_available())

needs_gpu = pytest.mark.skipif(not (TRITON and torch.cuda.is_available()), reason="needs a CUDA device and Triton")
on_device = pytest.mark.parametrize(
    "device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
here = pytest.mark.skipif(INTERPRETED, reason="not for the interpreting process")


def interpret(file: str, marked: str = "not nightly") -> None:
    """Run a test file on the interpreter, in a process of its own, and fail if it fails. ``marked`` selects as pytest's -m."""
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        file,
        "-m",
        marked,
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command, env={**env, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def tf32(allowed: bool) -> AbstractContextManager[None]:
    """Allow or forbid tf32 for float32 convolutions inside the block. torch may have locked the flag itself."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed)


def equals_itself_captured(work: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether ``work``, captured as a CUDA graph and replayed, gives the bits of the eager call."""

    def values() -> list[Tensor]:
        return [t.detach() for t in work()]  # a live autograd graph would tie the capture to its stream

    eager = values()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        values()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = values()
    for t in captured:
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


def apart(a: Tensor, b: Tensor) -> float:
    """The norm of ``a - b``, relative to that of ``b``."""
    assert a.shape == b.shape
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
