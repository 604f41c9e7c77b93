"""One seed expands into named random streams: a draw depends on seed and name, never on what was drawn before."""

from __future__ import annotations

import hashlib
import json
import operator

import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the draws called `names`, a pure function of `seed` and `names`.

    A purpose with its task, phase and epoch names a stream, so no generator state has to be saved to resume a run.
    The names "1" and 1 differ.

    >>> derive(0, "batches", 3) == derive(0, "batches", 3) != derive(0, "batches", 4)
    True
    """
    key = [operator.index(seed), *(name if isinstance(name, str) else operator.index(name) for name in names)]
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for the draws called `names`; torch's CPU generator takes the low 32 bits of `derive`."""
    return torch.Generator().manual_seed(derive(seed, *names))
