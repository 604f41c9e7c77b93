"""Named random streams from one seed: a draw depends only on seed and name, never on earlier draws."""

from __future__ import annotations

import hashlib
import json
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream `names`, a pure function of `seed` and `names`.

    A stream is named by its purpose, task, phase and epoch, so that resuming a run needs no saved generator state. The
    names "1" and 1 differ.

    >>> derive(0, "batches", 3) == derive(0, "batches", 3) != derive(0, "batches", 4)
    True
    """
    key = [operator.index(seed), *(name if isinstance(name, str) else operator.index(name) for name in names)]
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for the stream `names`; torch's CPU generator uses the low 32 bits of `derive`."""
    return torch.Generator().manual_seed(derive(seed, *names))


@contextmanager
def seeded_globals(device: torch.device, seed: int, *names: str | int) -> Iterator[None]:
    """Seed the global generators of torch (on the CPU and the device), numpy and random inside the block; then restore them.

    For code that is not ours: ``reset_parameters`` and much else draws from them.
    """
    import numpy as np  # with the layer alone, commands that train nothing read this file without numpy

    derived = derive(seed, *names)
    before, numpy_before = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(derived)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(derived)
        random.seed(derived)
        np.random.seed(derived % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)  # noqa: NPY002
