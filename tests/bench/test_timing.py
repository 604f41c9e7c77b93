"""Timing in interleaved rounds, with a clock that is not the wall's."""

from __future__ import annotations

import pytest
import torch

from tbbn.bench.timing import Work, captured, device_clock, median_ratio, peak_memory, time_interleaved

CPU = torch.device("cpu")


def test_rounds_alternate_and_each_candidate_gets_its_share_of_the_time() -> None:
    calls: list[tuple[str, int]] = []
    cost = {"bn": 0.001, "tbbn": 0.003}

    def clock(work: Work, n: int) -> float:
        calls.append((work(), n))
        return cost[work()]

    candidates: dict[str, Work] = {name: lambda name=name: name for name in cost}
    times = time_interleaved(candidates, CPU, seconds=0.36, rounds=3, clock=clock)
    assert times == {"bn": [0.001] * 3, "tbbn": [0.003] * 3}
    rounds = calls[4:]  # after a warm-up and an estimate of each
    # 0.36 s over 3 rounds and 2 candidates: 0.06 s each, so 60 calls of 1 ms or 20 of 3 ms.
    assert rounds == [("tbbn", 20), ("bn", 60), ("bn", 60), ("tbbn", 20), ("tbbn", 20), ("bn", 60)]


@pytest.mark.parametrize(("cost", "calls"), [(1e-9, 200), (10.0, 1)])
def test_fast_work_is_capped_and_slow_work_runs_at_least_once(cost: float, calls: int) -> None:
    seen: list[int] = []
    time_interleaved({"bn": lambda: None}, CPU, rounds=2, clock=lambda _, n: seen.append(n) or cost)  # type: ignore[func-returns-value]
    assert seen[2:] == [calls, calls]


def test_ratios_are_taken_within_a_round() -> None:
    times = {"bn": [1.0, 10.0, 2.0], "tbbn": [2.0, 20.0, 6.0]}  # the second round was slow for both
    assert median_ratio(times, "tbbn") == 2.0
    assert median_ratio(times, "bn") == 1.0


def test_the_clock_calls_the_work_as_often_as_asked() -> None:
    done: list[None] = []
    assert device_clock(CPU)(lambda: done.append(None), 7) > 0
    assert len(done) == 7


def test_a_cpu_captures_no_graph_and_counts_no_memory() -> None:
    def work() -> None: ...

    assert captured(work, CPU) is work
    assert peak_memory(work, CPU) == 0
