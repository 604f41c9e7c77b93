from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys

import pytest
import torch

from tbbn.bench.seeds import derive, generator


def test_derive_is_the_hash_of_seed_and_names_written_as_json():
    digest = hashlib.blake2b(b'[7, "batches", 3]', digest_size=8).digest()
    assert derive(7, "batches", 3) == int.from_bytes(digest, "big") // 2


def test_names_seeds_and_kinds_give_distinct_63_bit_values():
    names = [(), ("a",), ("b",), ("a", "b"), ("ab",), ("a", 1), ("a", "1"), ("a", 11), ("a", 1, 1), (1,), (-1,)]
    values = [derive(seed, *name) for seed, name in itertools.product(range(50), names)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**63 for value in values)
    assert max(values) > 2**62


def test_derive_is_the_same_in_another_process():
    code = "from tbbn.bench.seeds import derive; print(derive(3, 'augment', 2))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == derive(3, "augment", 2)


def test_generator_repeats_and_ignores_the_global_generator():
    torch.manual_seed(0)
    first = torch.rand(5, generator=generator(1, "x"))
    torch.manual_seed(9)
    assert torch.equal(first, torch.rand(5, generator=generator(1, "x")))
    assert not torch.equal(first, torch.rand(5, generator=generator(1, "y")))


def test_names_that_are_neither_text_nor_integers_are_refused():
    with pytest.raises(TypeError):
        derive(0, 1.5)
