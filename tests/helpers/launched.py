"""The command line in several processes, as torchrun starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed as dist

from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import load_record

TINY = ("--data", "synthetic:4x14x4x8", "--data.tasks", "2", "--train.epochs", "1", "--batch.size", "8")
# At a high learning rate a ReLU may be on in one run and off in the other, for a difference in the last bit.
TINY += ("--memory.budget", "8", "--device", "cpu", "--threads", "1", "--train.lr", "0.01")


def launch(*words: str, ranks: int = 2) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each rank, without the line that gloo itself prints in torch 2.9."""
    # The store is here, as torchrun has it in its agent: a port that was free when asked for may be taken when it is used.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    given["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tbbn", *words],
            env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    said = [(re.sub(r"(?m)^\[Gloo\] Rank \d+ is connected to .*\n", "", output), errors) for output, errors in said]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def torchrun(*words: str, restarts: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "tbbn", *words]
    given = {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=300, check=False)


def assert_same_results(found: Path, wanted: Path, tolerance: float) -> None:
    """The runs in two folders: the same accuracies and exemplars, and weights that differ by rounding."""
    folders = sorted(file.parent.relative_to(wanted) for file in wanted.rglob("record.json"))
    assert folders and folders == sorted(file.parent.relative_to(found) for file in found.rglob("record.json"))
    for name in folders:
        one, other = load_record(found / name), load_record(wanted / name)
        assert one.status == other.status == "finished"
        assert one.accuracy == other.accuracy and one.exemplars == other.exemplars, name
        weights, expected = (checkpoint.load(folder / name)[1] for folder in (found, wanted))  # type: ignore[index]
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            if value.is_floating_point() and value.numel():
                error = (weights[key] - value).abs().max() / value.abs().max().clamp_min(1e-2)
                assert error < tolerance, f"{name}: {key} differs by {error:.1e}"
            else:
                assert torch.equal(weights[key], value), f"{name}: {key}"
