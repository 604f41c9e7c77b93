"""The settings of a phase, and of the process while a run is at work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tbbn.bench.config import RunConfig
from tbbn.bench.methods import Phase


@dataclass(frozen=True)
class Hyper:
    """The settings of a phase, all filled in."""

    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    schedule: str
    milestones: tuple[float, ...]
    gamma: float
    keep: str

    @classmethod
    def of(cls, config: RunConfig, phase: Phase) -> Hyper:
        train = config.train

        def pick(name: str) -> Any:
            own = getattr(phase, name)
            return getattr(train, name) if own is None else own

        return cls(
            epochs=pick("epochs"),
            lr=pick("lr") * phase.lr_factor,
            momentum=pick("momentum"),
            weight_decay=pick("weight_decay"),
            schedule=pick("schedule"),
            milestones=train.milestones,
            gamma=train.gamma,
            keep=pick("keep"),
        )

    def lr_at(self, epoch: int) -> float:
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
        if self.schedule == "multistep":
            # Rounded up, so that a short run does not pass a milestone before its first step; less what a product may be off by.
            passed = sum(epoch >= math.ceil(m * self.epochs - 1e-9) for m in self.milestones)
            return self.lr * self.gamma**passed
        return self.lr


class settings:
    """Torch's process-wide settings as a run wants them. Runs side by side share them; the last one out puts them back.

    On a CPU only the number of threads is touched: what concerns CUDA alone may be locked by others.
    """

    inside = 0
    threads_before: int
    cuda_before: tuple[str, bool, bool, bool] | None

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.threads = config.threads
        self.on_gpu = device.type == "cuda"
        self.tf32 = config.precision != "fp32"
        self.autotune = config.autotune

    def __enter__(self) -> None:
        if not settings.inside:
            settings.threads_before, settings.cuda_before = torch.get_num_threads(), None
        settings.inside += 1
        if self.threads:
            torch.set_num_threads(self.threads)
        if self.on_gpu:
            if settings.cuda_before is None:
                settings.cuda_before = _cuda_settings()
            _set_cuda("high" if self.tf32 else "highest", self.tf32, True, self.autotune)

    def __exit__(self, *_: object) -> None:
        settings.inside -= 1
        if not settings.inside:
            torch.set_num_threads(settings.threads_before)
            if settings.cuda_before is not None:
                _set_cuda(*settings.cuda_before)


def _cuda_settings() -> tuple[str, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark


def _set_cuda(precision: str, tf32: bool, deterministic: bool, benchmark: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = tf32, deterministic, benchmark
