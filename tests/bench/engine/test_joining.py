"""How the processes of a launch find each other: ranks as threads with one store, and the calls to torch of one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tbbn.bench.engine import joining
from tbbn.errors import UserError


def agreed(store: dist.Store, size: int) -> list[str]:
    """The name that each rank comes to."""
    with ThreadPoolExecutor(size) as pool:
        asked = [pool.submit(joining._agreed_name, store, rank, size) for rank in range(size)]
        return [future.result(timeout=30) for future in asked]


def test_ranks_agree_on_a_new_name_in_a_store_that_has_words_of_the_dead() -> None:
    store = dist.HashStore()
    names = [agreed(store, 3) for _ in range(3)]  # a launch, and two restarts with its store
    assert [len(set(each)) for each in names] == [1, 1, 1]
    assert len({each[0] for each in names}) == 3
    for name in (each[0] for each in names):
        assert len(name) == 16 and store.add(f"tbbn/confirmed/{name}", 0) == 2


def test_a_rank_takes_no_answer_that_was_for_another() -> None:
    store = dist.HashStore()
    store.set("tbbn/answer/1", "another-word old-name")
    store.set("tbbn/hello/1", "another-word")
    first, second = agreed(store, 2)
    assert first == second != "old-name"
    assert store.add("tbbn/confirmed/old-name", 0) == 0


def test_a_rank_that_waits_leaves_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: dict[int, list[float]] = {0: [], 1: []}

    class Late(Exception):
        pass

    for rank in (0, 1):

        def pause(seconds: float, rank: int = rank) -> None:
            pauses[rank].append(seconds)
            if len(pauses[rank]) == 3:
                raise Late

        monkeypatch.setattr(joining.time, "sleep", pause)
        with pytest.raises(Late):  # the other rank does not come
            joining._agreed_name(dist.HashStore(), rank, 2)
    assert pauses == {0: [0.02] * 3, 1: [0.02] * 3}


@pytest.mark.parametrize(
    ("given", "launched"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"RANK": "0", "MASTER_ADDR": "x"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x"}, False),
    ],
)
def test_a_launch_is_known_by_its_environment(
    given: dict[str, str], launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert joining.is_launched() is launched


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (2, "cpu:gloo,cuda:nccl")])
def test_a_rank_joins_with_patience_and_has_a_gpu_of_its_own(
    gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    day = timedelta(days=1)

    def rendezvous(where: str, timeout: timedelta) -> Any:
        calls.append(("rendezvous", where, timeout))
        return iter([(dist.HashStore(), 0, 1)])

    def begin(backend: str, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        calls.append((backend, type(store), rank, world_size, timeout))

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda i: calls.append(("device", i)))
    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("end"))
    monkeypatch.setattr(joining, "ProcessRanks", lambda: "ranks")
    with suppress(KeyError), joining.joined() as ranks:
        calls.append(ranks)
        raise KeyError
    device = [("device", 1)] if gpus else []
    assert calls == [*device, ("rendezvous", "env://", day), (backend, dist.PrefixStore, 0, 1, day), "ranks", "end"]


def test_more_processes_than_gpus_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    said = r"rank 2 has no GPU of its own: this machine has 2; start at most 2 processes on it, or hide"
    with pytest.raises(UserError, match=said), joining.joined():
        pass


LEAVES = """
import os
import torch
from torch import distributed as dist
from tbbn.bench.engine.joining import joined

with joined():
    before = len(os.listdir("/proc/self/task"))
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()  # imports much of torch.distributed
    import torch.distributed.nn  # and this
    dist.broadcast(torch.zeros(1), 0)
assert not dist.is_initialized()
print(before, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
def test_no_thread_of_the_group_is_left_after_it() -> None:
    """One that is left may release a tensor while Python exits, which aborts the process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    given |= {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", LEAVES]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split()[-2:])
    assert before - after >= 3  # gloo's
