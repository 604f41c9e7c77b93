"""Torch's process-wide settings during a run: threads, precision, determinism."""

from __future__ import annotations

import torch

from tbbn.bench.config import RunConfig


class torch_settings:
    """Set torch's process-wide settings for a run. Runs in lanes share them; the last run to leave restores them.

    A run on a CPU changes only the number of threads, because other libraries may have locked the CUDA flags.
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
        if not torch_settings.inside:
            torch_settings.threads_before, torch_settings.cuda_before = torch.get_num_threads(), None
        torch_settings.inside += 1
        if self.threads:
            torch.set_num_threads(self.threads)
        if self.on_gpu:
            if torch_settings.cuda_before is None:
                torch_settings.cuda_before = _cuda_settings()
            _set_cuda("high" if self.tf32 else "highest", self.tf32, True, self.autotune)

    def __exit__(self, *_: object) -> None:
        torch_settings.inside -= 1
        if not torch_settings.inside:
            torch.set_num_threads(torch_settings.threads_before)
            if torch_settings.cuda_before is not None:
                _set_cuda(*torch_settings.cuda_before)


def _cuda_settings() -> tuple[str, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark


def _set_cuda(precision: str, tf32: bool, deterministic: bool, benchmark: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = tf32, deterministic, benchmark
