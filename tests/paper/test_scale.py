"""What the whole paper takes, computed from measurements, and that the page with it is current."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scale() -> Any:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "tools" / "scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scale"]


def test_the_page_is_current(scale: Any) -> None:
    assert scale.page() in (ROOT / "docs" / "scale.md").read_text(), "python tools/scale.py makes it"


def test_the_longest_job_bounds_the_time_and_so_does_the_sum(scale: Any) -> None:
    assert scale.makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2) == pytest.approx(7.0)  # 3 2 2 and 3 2
    assert scale.makespan([5.0, 1.0], 64) == pytest.approx(5.0)
    assert scale.makespan([5.0, 1.0], 1) == pytest.approx(6.0)


def test_small_runs_share_a_gpu_and_large_ones_do_not(scale: Any) -> None:
    small = scale.Work("t", "cifar100", False, 9, 1, 10.0)
    large = scale.Work("t", "imagenet100", True, 2, 1, 100.0)
    assert scale.jobs([small, large]) == [scale.START + s for s in (80.0, 10.0, 100.0, 100.0)]


def test_the_estimate_of_fine_tuning_is_what_was_measured(scale: Any) -> None:
    """Eight runs of CIFAR-100 in eight lanes took 769 s from command to table (docs/speed.md)."""
    times = scale.measured()
    work = next(work for work in scale.works(times) if (work.table, work.data) == ("table1", "cifar100"))
    assert 8 * work.seconds == pytest.approx(769, rel=0.05)
    assert times.method["ft"] == 1.0 and 1.2 < times.method["lucir"] < 2.5
