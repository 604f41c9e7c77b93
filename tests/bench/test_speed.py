"""The benchmark measures what it says: known times come out, and every table has the rows it should have."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tbbn.bench import speed as bench
from tbbn.bench.cli.main import main
from tbbn.bench.config import RunConfig

CPU = torch.device("cpu")


def test_a_race_tells_how_much_longer_one_takes() -> None:
    seen = bench.race({"bn": lambda: time.sleep(0.002), "tbbn": lambda: time.sleep(0.006)}, CPU, seconds=0.3)
    assert bench.ratio(seen, "tbbn") == pytest.approx(3, rel=0.3)
    assert bench.ratio(seen, "bn") == 1
    assert all(t >= 0.002 for t in seen["bn"])


def test_the_steps_of_an_epoch_are_cut_in_proportion() -> None:
    ends = [(10.0, 100), (20.0, 200), (40.0, 300)]
    assert bench._between(ends, 10, 40) == 200
    assert bench._between(ends, 15, 30) == 50 + 50
    assert bench._between(ends, 40, 50) == 0


def test_the_floor_of_a_layer_is_the_bytes_it_must_move() -> None:
    row = bench.layer((64, 2, 2, 2), "fp32", "channels_last", CPU, speed=1e9)
    assert row["floor_us"] == pytest.approx(1e6 * (2 * 512 + 3 * 512) * 4 / 1e9)  # x, y; g, x, dx
    assert row["tbbn"]["us"] > 0 and row["tbbn"]["ratio"] > 0 and set(row["bn"]) == {"us"}
    assert "peak_ratio" not in row["tbbn"]  # a CPU does not count


def test_a_layer_is_measured_with_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    balance = bench.tbbn.balance
    monkeypatch.setattr(
        bench.tbbn, "balance", lambda module, **layout: told.append(layout) or balance(module, **layout)
    )
    bench.layer((64, 2, 2, 2), "fp32", "nchw", CPU, speed=1e9)
    assert told and all(layout == bench.LAYOUT for layout in told)


def test_lanes_count_the_steps_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    row = bench.lanes(2, ("bn", "tbbn"), "small", "fp32", CPU, epochs=2, data="synthetic:10x8x1x8", tasks=5)
    assert row["finished"] == 2 and row["lanes"] == 2
    assert row["steps_per_second"] == pytest.approx(1e3 / row["ms_per_step_and_run"])
    assert row["steps_per_second"] == pytest.approx(sum(1e3 / ms for ms in row["ms_per_step_of_a_lane"].values()))
    assert row["steps_per_second"] > 0


def test_the_command_prints_tables_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHAPES", ((64, 2, 2, 2),) * 3)
    words = ["bench", "--device", "cpu", "--backbone", "small", "--lanes", "0", "--quiet"]
    monkeypatch.setattr(bench, "step", lambda name, norms, *_: {"backbone": name, "tbbn": {"ms": 1.5, "ratio": 1.25}})
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(found[table]) for table in ("layers", "steps", "lanes")] == [6, 1, 0]
    assert found["machine"]["torch"] == torch.__version__
    assert main(words) == 0
    out = capsys.readouterr()
    assert "tbbn ratio" in out.out and "1.250" in out.out and out.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--norm tbn", "unknown norm 'tbn'; choose one of: adab2n, bn,"),
        ("--backbone resnet33", "unknown backbone 'resnet33'; choose one of: "),
        ("--lanes two", "--lanes must be numbers with commas, got 'two'."),
        ("--epochs 1", "--epochs must be at least 2, the first being left out, got 1."),
        ("--device gpu", "unknown device 'gpu'; use 'cuda' for a GPU, 'cpu' or 'auto'."),
        ("--device cpu --precision bf16", "--precision: a CPU is measured in fp32, got bf16."),
    ],
)
def test_a_mistake_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_step_is_measured_with_the_precision_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []

    @contextmanager
    def as_run(config: RunConfig, device: torch.device) -> Iterator[None]:
        inside.append(config.precision)
        yield
        inside.append("out")

    def work(*_: object) -> bench.Work:
        assert inside == ["tf32"]
        return lambda: None

    monkeypatch.setattr(bench, "as_run", as_run)
    monkeypatch.setattr(bench, "step_work", work)
    monkeypatch.setattr(bench, "race", lambda works, device, seconds: {name: [1.0] for name in works})
    assert bench.step("small", ("bn",), "tf32", 8, CPU)["bn"] == {"ms": 1e3}
    assert inside == ["tf32", "out"]
