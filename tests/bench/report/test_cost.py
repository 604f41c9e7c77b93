"""What runs cost, and what differs between them besides their results."""

from __future__ import annotations

from typing import Any

from records import record

from tbbn.bench.engine.record import Record
from tbbn.bench.report.cost import cost_table, duration
from tbbn.bench.report.groups import groups
from tbbn.bench.report.settings import common_table, differences_table, environment_table
from tbbn.bench.runs.recipe import parse_choice

TWO = [[0.9], [0.5, 0.7]]


def timed(seconds: float, epochs: int, **settings: Any) -> Record:
    few = {"data__name": "synthetic:4x12x4x8", "memory__budget": 4, "batch__size": 32, "train__epochs": epochs // 2}
    made = record(TWO, **few, **settings)
    made.seconds, made.history = seconds, [{"task": t // 2, "phase": "train", "epoch": t % 2} for t in range(epochs)]
    made.environment = {"machine": "x86_64", **({"gpu": "H200"} if seconds > 60 else {})}
    made.splits = [1, 4]
    return made


def test_the_cost_is_the_mean_over_seeds() -> None:
    runs = [timed(10, 4), timed(20, 4, seed=1), timed(90, 4, norm__name="tbbn")]
    cut = timed(5, 4, norm__name="gn")
    cut.status = "interrupted"
    first, second = cost_table(groups([*runs, cut])).rows
    # The 24 images of a task fit into a batch of 32, or into the 24 current rows of one: one step an epoch, 4 in all.
    assert first == ("ft + bn", "15.0 s", "4", "3.75", "3750.00", "-", "8", "x86_64")
    assert any(note.startswith("Memory is not recorded") for note in cost_table(groups(runs)).notes)
    assert second[1:5] == ("1 min 30 s", "4", "22.50", "22500.00") and second[-1] == "H200"


def test_only_norms_that_split_have_a_number_of_splits() -> None:
    norms = ("bn", "cn", "adab2n", "tbbn", "tbbn(case=1)")
    runs = [timed(10, 4, **{k.replace(".", "__"): v for k, v in parse_choice("norm", norm).items()}) for norm in norms]
    unknown = timed(10, 4)
    unknown.config = {**unknown.config, "norm": {"name": "of_a_missing_plugin"}}
    assert [row[5] for row in cost_table(groups([*runs, unknown])).rows] == ["-", "-", "-", "4", "4", "-"]


def test_steps_that_cannot_be_known_are_left_out() -> None:
    with_later_phase, elsewhere = timed(10, 6), timed(10, 4)
    with_later_phase.config["train"]["epochs"] = 2
    elsewhere.config["data"]["name"] = "a-plugins-data"
    for made in (with_later_phase, elsewhere):
        (row,) = cost_table(groups([made])).rows
        assert row[4] == "-"
    assert cost_table(groups([record([], "failed")])).rows == ()


def test_runs_of_a_gpu_that_is_not_here_have_their_steps() -> None:
    (row,) = cost_table(groups([timed(90, 4, device="cuda:7")])).rows
    assert row[2] == "4"


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.94, 60, 3599.4, 3600)] == [
        "0.0 s",
        "59.9 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
    ]


def test_settings_that_differ_are_listed_with_the_runs_that_have_them() -> None:
    methods = ("ft", "er", "lucir", "wa", "ssil", "bic")
    runs = [record(TWO, method__name=m, norm__name=n) for m in methods for n in ("bn", "tbbn")]
    runs.append(record(TWO, method__name="il2m", train__lr=0.5, seed=7, device="cpu", data__root="elsewhere"))
    rows = differences_table(groups(runs)).rows
    assert rows == (("train.lr", "0.5", "il2m"), ("", "0.05", "the other 6"))
    shared = dict(common_table(groups(runs)).rows)
    assert shared["data.name"] == "digits" and "train.lr" not in shared
    assert not {"seed", "device", "data.root", "method.name", "data.class_order_seed"} & set(shared)


def test_only_the_value_of_more_than_half_of_many_runs_is_not_listed_with_all_of_them() -> None:
    methods = ("ft", "er", "lucir", "wa", "ssil", "bic", "il2m", "eeil", "icarl", "derpp")

    def third_column(rare: int, common: int) -> list[str]:
        rates = [0.5] * rare + [0.05] * common
        runs = [record(TWO, method__name=m, train__lr=lr) for m, lr in zip(methods, rates, strict=False)]
        return [row[2] for row in differences_table(groups(runs)).rows]

    assert third_column(1, 4) == ["ft", "er, lucir, wa, ssil"]  # four are few
    assert third_column(4, 5) == ["ft, er, lucir, wa", "the other 5"]
    assert third_column(5, 5) == ["ft, er, lucir, wa, ssil", "bic, il2m, eeil, icarl, derpp"]  # not more than half


def test_environments_are_counted() -> None:
    one, other, third = (record(TWO, seed=seed) for seed in range(3))
    one.environment = {"torch": "2.9", "gpu": "H200"}
    other.environment = third.environment = {"torch": "2.8"}
    third.plugins = [{"name": "mine", "version": "1.0", "brings": ["norm x"]}]
    assert environment_table([one, other, third]).rows == (
        ("torch", "2.9", "1"),
        ("torch", "2.8", "2"),
        ("gpu", "H200", "1"),
        ("gpu", "-", "2"),
        ("plugins", "-", "2"),
        ("plugins", "plugin mine 1.0: norm x", "1"),
    )


def test_steps_are_those_of_a_finished_run() -> None:
    cut = timed(5, 3)
    cut.status = "interrupted"
    cut.config["train"]["epochs"] = 2
    (row,) = cost_table(groups([cut, timed(90, 4, norm__name="tbbn")])).rows
    assert row[4] == "22500.00"


def test_a_finished_run_without_a_task_costs_nothing() -> None:
    empty = timed(5, 4)
    empty.accuracy, empty.splits, empty.exemplars = [], [], []
    assert cost_table(groups([empty])).rows == ()


def test_the_device_is_the_one_that_trained() -> None:
    on_gpu, on_cpu, earlier = timed(10, 4), timed(10, 4, seed=1), timed(10, 4, seed=2)
    both = {"machine": "x86_64", "cpu": "EPYC, AVX512", "gpu": "H200"}
    on_gpu.environment, on_cpu.environment = both | {"device": "cuda"}, both | {"device": "cpu"}
    (row,) = cost_table(groups([on_gpu, on_cpu, earlier])).rows
    assert row[-1] == "H200, EPYC, AVX512, x86_64"
