"""Join the processes that a launcher such as torchrun started."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module

import torch
from torch import distributed as dist

from tbbn.bench.engine.ranks import ProcessRanks
from tbbn.errors import UserError

PATIENCE = timedelta(days=1)  # a rank may wait while another downloads data; torchrun notices a process that died


def is_launched() -> bool:
    """Whether this process is one of several that were started together."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def joined() -> Iterator[ProcessRanks]:
    """Join the ranks of this launch for the duration of the block. Each gets its own GPU if there are any."""
    local, on_gpu = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.is_available()
    if on_gpu and local >= (n_gpus := torch.cuda.device_count()):
        raise UserError(
            f"rank {local} has no GPU of its own: this machine has {n_gpus}; start at most {n_gpus} processes on it, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs."
        )
    if on_gpu:
        torch.cuda.set_device(local)
    # Training imports this module by way of torch's optimizers. Its functions then keep the default group of that moment as a
    # default argument, beyond destroy_process_group. Gloo's threads live as long as the group, and one that releases a tensor
    # while Python exits aborts the process. Imported before there is a group, they keep None.
    import_module("torch.distributed.nn.functional")
    store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
    store = dist.PrefixStore(_agreed_name(store, rank, size), store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield ProcessRanks()
    finally:
        dist.destroy_process_group()


def _agreed_name(store: dist.Store, rank: int, size: int) -> str:
    """A name that only the processes of this launch know.

    After a restart torchrun gives the new processes the store of the old ones, which still has the addresses of the dead ones.
    So each rank writes a random word, and rank 0 answers every word that it sees with the name until all ranks have confirmed it.
    """
    word = secrets.token_hex(8)
    if rank:
        store.set(f"tbbn/hello/{rank}", word)
        while True:
            if store.check([f"tbbn/answer/{rank}"]):
                heard, _, name = store.get(f"tbbn/answer/{rank}").decode().partition(" ")
                if heard == word:
                    store.add(f"tbbn/confirmed/{name}", 1)
                    return name
            time.sleep(0.02)
    while store.add(f"tbbn/confirmed/{word}", 0) < size - 1:
        for other in range(1, size):
            if store.check([f"tbbn/hello/{other}"]):
                heard = store.get(f"tbbn/hello/{other}").decode()
                store.set(f"tbbn/answer/{other}", f"{heard} {word}")
        time.sleep(0.02)
    return word
