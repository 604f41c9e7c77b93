"""Torch's process-wide settings: set for a run, restored after it."""

from __future__ import annotations

import pytest
import torch
from tinyrun import finish, tiny

from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.torch_settings import torch_settings


def test_the_number_of_threads_is_put_back(threads: list[int]) -> None:
    before = threads[-1]
    finish(tiny(threads=before + 1, data__stop_after=1, train__epochs=1))
    assert threads == [before, before + 1, before]


def cuda_flags() -> tuple[str, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark


def test_a_run_goes_where_torch_has_locked_its_global_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.library.opcheck and all of torch.testing's own helpers lock them for the rest of the process.
    flags = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    assert finish(tiny(data__stop_after=1)).record.status == "finished"
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic) == before


def test_a_run_on_a_cpu_touches_the_number_of_threads_alone_and_puts_it_back() -> None:
    before, flags = torch.get_num_threads(), cuda_flags()
    events = Run(tiny(threads=before + 1, data__stop_after=1, train__epochs=1)).events()
    assert {(torch.get_num_threads(), *cuda_flags()) for _ in events} == {(before + 1, *flags)}
    assert (torch.get_num_threads(), *cuda_flags()) == (before, *flags)


def test_cudas_settings_are_put_back_though_a_run_on_a_cpu_began_first(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)  # torch.testing may have locked them
    before = cuda_flags()
    assert before != ("high", True, True, True)
    with torch_settings(tiny(), torch.device("cpu")):
        with torch_settings(tiny(precision="tf32", autotune=True), torch.device("cuda")):
            assert cuda_flags() == ("high", True, True, True)
        assert cuda_flags() == ("high", True, True, True)  # the last one out puts them back
    assert cuda_flags() == before
