"""The tables of ``tbbn speed`` have the rows they should, measured under the conditions of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tbbn.bench import speed
from tbbn.bench.cli import speed as cli
from tbbn.bench.cli.main import main
from tbbn.bench.config import RunConfig
from tbbn.bench.timing import Work
from tbbn.registry import BACKBONES

CPU = torch.device("cpu")


def test_an_epoch_partly_in_the_window_counts_in_proportion() -> None:
    ends = [(10.0, 100), (20.0, 200), (40.0, 300)]
    assert speed.steps_between(ends, 10, 40) == 200
    assert speed.steps_between(ends, 15, 30) == 50 + 50
    assert speed.steps_between(ends, 40, 50) == 0


def test_the_floor_of_a_layer_is_the_bytes_it_must_move() -> None:
    row = speed.time_layer((64, 2, 2, 2), "fp32", "channels_last", CPU, bandwidth=1e9)
    assert row["floor_us"] == pytest.approx(1e6 * (2 * 512 + 3 * 512) * 4 / 1e9)  # x, y; g, x, dx
    assert row["tbbn"]["us"] > 0 and row["tbbn"]["ratio"] > 0 and set(row["bn"]) == {"us"}
    assert "peak_ratio" not in row["tbbn"]  # torch does not count memory on a CPU


def test_a_layer_is_timed_with_the_layout_of_the_papers_last_task(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = []
    balance = speed.tbbn.balance
    monkeypatch.setattr(
        speed.tbbn, "balance", lambda module, **layout: layouts.append(layout) or balance(module, **layout)
    )
    speed.time_layer((64, 2, 2, 2), "fp32", "nchw", CPU, bandwidth=1e9)
    assert layouts and all(layout == {"current": 48, "memory": 16, "past_tasks": 9} for layout in layouts)


def test_lanes_count_the_steps_of_all_runs() -> None:
    row = speed.time_lanes(2, ("bn", "tbbn"), "small", "fp32", CPU, epochs=2, data="synthetic:10x8x1x8", tasks=5)
    assert row["finished"] == 2 and row["lanes"] == 2
    assert row["steps_per_second"] == pytest.approx(1e3 / row["ms_per_step_and_run"])
    assert row["steps_per_second"] == pytest.approx(sum(1e3 / ms for ms in row["ms_per_step_of_a_lane"].values()))
    assert row["steps_per_second"] > 0


def test_the_command_prints_tables_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SHAPES", ((64, 2, 2, 2),))
    words = ["speed", "--device", "cpu", "--backbone", "small", "--lanes", "0"]
    row = {"backbone": "small", "tbbn": {"ms": 1.5, "ratio": 1.25}}
    monkeypatch.setattr(speed, "time_step", lambda *_: row)
    assert main([*words, "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(found[table]) for table in ("layers", "steps", "lanes")] == [2, 1, 0]
    assert found["machine"]["torch"] == torch.__version__
    assert main(words) == 0
    said = capsys.readouterr()
    assert "tbbn ratio" in said.out and "1.250" in said.out
    first, *rows = said.err.splitlines()
    assert re.fullmatch(r"this takes about [\d.]+ s", first)
    assert (rows[0], rows[-1]) == ("1/3 layers: 64x2x2x2 fp32 nchw", "3/3 steps: small fp32")


def test_a_row_that_runs_out_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> dict[str, object]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(speed, "SHAPES", ((64, 2, 2, 2),))
    monkeypatch.setattr(speed, "time_step", full)
    found = speed.measure_speed(CPU, backbones=("small",), n_lanes=())
    assert found["steps"] == [{"what": "small fp32", "failed": "out of memory"}] and len(found["layers"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--norm tbn", "unknown norm 'tbn'; choose one of: adab2n, bn,"),
        ("--backbone resnet33", "unknown backbone 'resnet33'; choose one of: "),
        ("--lanes two", "--lanes must be comma-separated numbers, such as 1,4,8; got 'two'."),
        ("--epochs 1", "--epochs must be at least 2 (the first epoch is not timed), got 1."),
        ("--device gpu", "unknown device 'gpu'; use 'cuda' for a GPU, 'cpu' or 'auto'."),
        ("--device cpu --precision bf16", "--precision must be fp32 on a CPU, got bf16."),
    ],
)
def test_a_mistake_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_step_is_timed_with_the_precision_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []

    @contextmanager
    def torch_settings(config: RunConfig, device: torch.device) -> Iterator[None]:
        inside.append(config.precision)
        yield
        inside.append("out")

    def work(*_: object) -> Work:
        assert inside == ["tf32"]
        return lambda: None

    monkeypatch.setattr(speed, "torch_settings", torch_settings)
    monkeypatch.setattr(speed, "step_work", work)
    monkeypatch.setattr(speed, "time_interleaved", lambda works, device, seconds: {name: [1.0] for name in works})
    assert speed.time_step("small", ("bn",), "tf32", 8, CPU)["bn"] == {"ms": 1e3}
    assert inside == ["tf32", "out"]


@pytest.mark.parametrize(("seconds", "calls"), [(30.0, 2), (0.5, 5), (1e-3, 51)])
def test_a_step_is_timed_within_seconds_however_slow_it_is(seconds, calls, monkeypatch):
    done = []
    monkeypatch.setattr(speed, "step_work", lambda *_: lambda: done.append(1))

    def clock(work, n):
        for _ in range(n):
            work()
        return seconds

    monkeypatch.setattr(speed, "device_clock", lambda device: clock)
    assert speed.step_seconds("small", "bn", "fp32", 8, CPU) == seconds and len(done) == calls


def test_the_estimate_counts_rows_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_seconds(name: str, *_: object, limit: float) -> float:
        if name == "resnet18":
            raise torch.OutOfMemoryError
        return {"small": 0.01, "resnet32": 1.0}[name]

    monkeypatch.setattr(speed, "step_seconds", step_seconds)
    given = {"norms": ("tbbn",), "precisions": ("fp32",), "epochs": 4}
    layers = 2 * 3 * 1.0
    alone = speed.estimate_seconds(CPU, backbones=("small", "resnet32", "resnet18"), n_lanes=(), **given)
    assert alone == pytest.approx(layers + (2 * 0.01 * 5 + 6) + (2 * 1.0 * 5 + 2 * 1.0 * 9))
    lanes = speed.estimate_seconds(CPU, backbones=("small",), n_lanes=(1, 2), **given)
    assert lanes - (layers + 6.1) == pytest.approx(3 * 0.01 * 4 * (70 + 80))  # three runs, four epochs of two tasks


def test_a_long_row_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(cli.time, "monotonic", lambda: now)
    progress = cli._Progress()
    progress.row("9/9 lanes: 1 x fp32")
    for now in range(25):
        progress.share(now / 24)
    assert capsys.readouterr().err.splitlines() == ["9/9 lanes: 1 x fp32", "  8 %", "  50 %", "  92 %"]
    shares: list[float] = []
    given = {"data": "synthetic:10x8x1x8", "tasks": 5, "on_share": shares.append}
    speed.time_lanes(2, ("bn", "tbbn"), "small", "fp32", CPU, epochs=2, **given)
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_a_backbone_is_timed_with_images_of_the_size_it_is_for() -> None:
    assert set(speed.IMAGENET) < set(BACKBONES)
    for_cifar = ["resnet32", "resnet18-cifar", "resnet18-reduced", "small"]
    assert [speed._size(name) for name in (*for_cifar, "resnet18", "resnet18-lucir")] == [32] * 4 + [224] * 2
