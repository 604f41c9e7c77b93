"""``tbbn reproduce`` from the command line."""

from __future__ import annotations

import csv
import io
import re
from argparse import Namespace
from pathlib import Path

import pytest
from commandline import Capture, interrupted, mistake

from tbbn.bench.cli import reproduce
from tbbn.bench.cli.common import EXIT_DIVERGED, EXIT_FAILED, EXIT_TIME_LIMIT
from tbbn.bench.cli.main import main
from tbbn.bench.runs.record import load_record
from tbbn.paper.oracle import PROCEDURES
from tbbn.paper.published import find_tables

SETTINGS = (
    *("--data.name", "synthetic:4x12x4x8", "--data.tasks", "2", "--data.validation", "0", "--memory.budget", "8"),
    *("--backbone", "small", "--batch.size", "8", "--batch.augment", "none", "--keep", "last", "--device", "cpu"),
)
TINY = (*SETTINGS, "--norm", "bn,tbbn", "--seeds", "2", "--quiet", "--lanes", "1")


def pictures(said: str) -> list[Path]:
    """The picture that a figure says it wrote, in two formats."""
    svg, png = map(Path, re.findall(r"^figure: (.*)$", said, re.MULTILINE))
    assert (svg.suffix, svg.with_suffix(".png")) == (".svg", png)
    assert svg.read_text().startswith("<?xml") and png.read_bytes().startswith(b"\x89PNG")
    return [svg, png]


def test_a_table_is_run_resumed_and_printed_beside_the_papers(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "table1", "--scale", "0.0125", *TINY)  # 2 of 160 epochs
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith("SCALE 0.0125: a fraction of the epochs. Table 1")
    rows = [line.split()[2:5] for line in said.out.splitlines() if line.startswith("ft + ")]
    assert rows == [["bn", "2", "35.41"], ["tbbn", "2", "38.46"]], "the rows that were asked for"
    assert "4 runs, 0 finished" in said.err and "4 to train, " in said.err and "MB on disk" in said.err
    (folder,) = Path("runs").glob("table1-cifar100-keep-last-scale-0.0125-*")
    assert sorted(file.parent.name for file in folder.glob("*/record.json")) == [
        "ft-bn-0", "ft-bn-1", "ft-tbbn-0", "ft-tbbn-1",
    ]  # fmt: skip

    assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == said.out and "4 runs, 4 finished" in again.err

    shown = ("reproduce", "table1", "--scale", "0.0125", *SETTINGS, "--norm", "bn,tbbn", "--from", str(folder))
    assert main(shown) == 0 and capsys.readouterr().out == said.out
    assert main((*shown, "--norm", "tbbn", "--seeds", "1,")) == 0
    assert [line.split()[2:4] for line in capsys.readouterr().out.splitlines() if line.startswith("ft + ")] == [
        ["tbbn", "1"]
    ]
    assert main((*shown, "--format", "latex")) == 0
    latex = capsys.readouterr().out
    assert latex.startswith(("%", "\\"))
    assert r"\caption{SCALE 0.0125: a fraction" in latex and "\n% A_f = (1/T)" in latex
    assert main((*shown, "--format", "csv")) == 0
    made = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["table"].partition(". ")[0] for row in made} == {"SCALE 0.0125: a fraction of the epochs"}
    assert [row["method + norm"] for row in made] == ["ft + bn", "ft + tbbn"] and made[0]["A_l paper"] == "78.79"
    assert 0 <= float(made[1]["A_f ours"]) <= 100 and len(made[0]) >= 2 + 3 * 4
    assert main((*shown, "--memory.budget", "7")) == 0 and "No finished run" in capsys.readouterr().out


def test_one_run_lies_where_it_would_lie_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("reproduce", "table1", *TINY, "--norm", "bn", "--seeds", "0,", "--train.epochs", "1")) == 0
    assert [file.parent.name for file in Path("runs").rglob("record.json")] == ["ft-bn-0"]


def test_settings_that_say_which_runs_choose_them(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "table1", *SETTINGS, "--train.epochs", "1", "--quiet")
    assert main((*words, "--norm.name", "tbbn", "--seed", "3")) == 0
    said = capsys.readouterr()
    assert [file.parent.name for file in Path("runs").rglob("record.json")] == ["ft-tbbn-3"]
    assert [line.split()[2:4] for line in said.out.splitlines() if line.startswith("ft + ")] == [["tbbn", "1"]]
    assert "seed" not in said.err and "norm.name" not in said.err
    assert "use either --seed or --seeds" in mistake(capsys, *words, "--seed", "3", "--seeds", "2")
    assert "use either --norm or --norm.name" in mistake(capsys, *words, "--norm", "bn", "--norm.name", "tbbn")
    assert "compares ft and joint; leave out --method" in mistake(
        capsys, "reproduce", "fig-oracle", "--method.name", "ft"
    )


def test_a_data_set_of_the_paper_chooses_its_table(capsys: Capture) -> None:
    words = ("reproduce", "table1", "--norm", "bn", "--quiet", "--dry-run")
    for name in ("imagenet100", "cifar100"):
        for data in ("--data", "--data.name"):
            assert main((*words, data, name)) == 0
            said = capsys.readouterr().err
            assert f"table1-{name}" in said and "Different from the recipe" not in said
    assert "use either --data or --data.name" in mistake(
        capsys, *words, "--data", "cifar100", "--data.name", "cifar100"
    )
    assert main((*words, "--data", "imagenet100", "--data.name", "digits", "--data.class_order", "seed")) == 0
    assert "data.name = digits" in capsys.readouterr().err


def test_a_failure_in_one_table_is_in_the_exit_code_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter((0, EXIT_FAILED, EXIT_DIVERGED, 0))
    monkeypatch.setattr(reproduce, "train", lambda *args, **settings: (next(codes), []))
    assert main(("reproduce", "table3", "--quiet", "--out", str(tmp_path))) == EXIT_FAILED
    assert list(codes) == [], "the other tables are still made"


def test_a_dry_run_trains_nothing(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("reproduce", "table1", *TINY, "--dry-run")) == 0
    said = capsys.readouterr()
    assert said.out == "" and "4 to train, " in said.err and not Path("runs").exists()
    (line,) = (line for line in said.err.splitlines() if line.startswith("Different from the recipe: "))
    assert "data.name = synthetic:4x12x4x8; data.tasks = 2; " in line and "device" not in line
    assert line.startswith("Different from the recipe: backbone = small; ")
    words = ("--data.name", "synthetic:4x12x4x8", "--data.tasks", "4", "--norm", "cn", "--quiet", "--dry-run")
    assert main(("reproduce", "table1", *words)) == 0
    implied = "data.tasks = 4; memory.budget = 100; train.epochs = 10.\n"  # by the data set
    assert f"data.name = synthetic:4x12x4x8; {implied}" in capsys.readouterr().err
    assert (
        main(("reproduce", "table1", "--norm", "bn", "--quiet", "--keep", "best", "--batch.size", "64", "--dry-run"))
        == 0
    )
    assert "Not as in the recipe" not in capsys.readouterr().err


def test_the_toy_figure_is_drawn_in_seconds(tmp_path: Path, capsys: Capture) -> None:
    assert main(("reproduce", "fig-toy", "--out", str(tmp_path))) == 0
    said = capsys.readouterr()
    assert "\nTBBN " in said.out and pictures(said.err) == [tmp_path / "fig-toy.svg", tmp_path / "fig-toy.png"]
    assert main(("reproduce", "fig-toy", "--out", str(tmp_path), "--format", "csv")) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["statistics at test time"] for row in rows] == ["batch norm", "continual norm", "TBBN"]


def test_figures_of_runs_print_the_numbers_they_draw(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--scale", "0.0125", *SETTINGS, "--norm", "bn,tbbn", "--seeds", "2", "--quiet")
    assert main(("reproduce", "fig-errors", *words, "--lanes", "1")) == 0
    said = capsys.readouterr()
    assert said.out.startswith("SCALE 0.0125: a fraction of the epochs. Table 1")
    assert "Wrong predictions after the last task by type" in said.out
    assert re.search(r"^Different from the recipe: backbone = small; .*data\.tasks = 2; ", said.out, re.MULTILINE)
    path = pictures(said.err)[0]
    assert path.name == "fig-errors.svg"
    nothing = mistake(capsys, "reproduce", "fig-errors", "--scale", "0.5", "--from", "runs")
    assert "fig-errors: none of these is a finished run of Table 1: fine-tuning" in nothing
    assert "requested settings. Finished runs with other settings, not shown: 4 with data.name = synthetic:" in nothing
    assert main(("reproduce", "table1", *SETTINGS, "--scale", "0.5", "--from", "runs")) == 0
    assert "not shown: 4 with train.scale = 0.0125.\n" in capsys.readouterr().out
    records = {norm: [load_record(f) for f in path.parent.glob(f"ft-{norm}-*")] for norm in ("bn", "tbbn")}
    for norm, of_seeds in records.items():
        (row,) = (line.split() for line in said.out.splitlines() if line.startswith(f"ft + {norm} "))
        assert float(row[4]) == round(sum(sum(record.errors[-1].values()) for record in of_seeds) / 2)

    assert main(("reproduce", "fig-curves", *words, "--method", "ft", "--from", "runs", "--format", "csv")) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["method + norm"] for row in rows] == ["ft + bn", "ft + tbbn"]
    assert all("Table 2" in row["table"] and "Mean accuracy" in row["table"] for row in rows)
    for row, of_seeds in zip(rows, records.values(), strict=True):
        assert row["seeds"] == "2"
        for t in (0, 1):
            means = [sum(record.accuracy[t]) / (t + 1) for record in of_seeds]
            assert float(row[f"after {t + 1} %"]) == pytest.approx(50 * sum(means), abs=0.051)


def test_mistakes_are_one_line(capsys: Capture) -> None:
    assert "unknown table or figure 'tabel1'" in mistake(capsys, "reproduce", "tabel1")
    assert "--scale must be above 0" in mistake(capsys, "reproduce", "table1", "--scale", "2")
    assert "unknown norm of table2 'gn'" in mistake(capsys, "reproduce", "table2", "--norm", "gn")
    assert "no run here" in mistake(capsys, "reproduce", "table2", "--from", "/nonexistent")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fig-toy --lanes 2 --keep last", "fig-toy uses its own data and trains nothing; leave out --keep, --lanes."),
        ("fig-toy --from runs --dry-run", "leave out --from, --dry-run."),
        ("fig-toy --engine ray --train.lr 1", "leave out --engine, --train.lr."),
        ("fig-toy --train.lr 1 --backbone small", "and trains nothing; leave out --train.lr, --backbone."),
        ("fig-oracle --method ft", "fig-oracle compares ft and joint; leave out --method."),
        ("fig-oracle --from runs --lanes 2", "--from trains nothing; leave out --lanes."),
        ("fig-curves --from runs --time-limit 9m --log none", "--from trains nothing; leave out --time-limit, --log."),
        ("fig-errors --from runs --dry-run", "--from trains nothing; leave out --dry-run."),
        ("table1 --from runs --out x", "with --from a table is printed, and nothing is written; leave out --out."),
        ("fig-curves --format xml", "unknown format 'xml'"),
    ],
)
def test_an_option_that_would_not_be_read_is_a_mistake(words: str, said: str, capsys: Capture) -> None:
    assert said in mistake(capsys, "reproduce", *words.split())


def test_settings_choose_among_the_runs_of_the_oracle_experiment(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "fig-oracle", *SETTINGS, "--seeds", "7,", "--quiet")
    tables = []
    for epochs in ("1", "2"):
        assert main((*words, "--lanes", "1", "--train.epochs", epochs)) == 0
        tables.append(capsys.readouterr().out)
    drawn = ("reproduce", "fig-oracle", "--from", "runs", "--time-limit", "9m")
    assert "differ in more than their seed" in mistake(capsys, *drawn)
    for epochs, table in zip(("1", "2"), tables, strict=True):
        assert main((*drawn, "--train.epochs", epochs)) == 0
        assert capsys.readouterr().out == table
    for choice in (("--data", "cifar100"), ("--scale", "0.5"), ("--seed", "8"), ("--keep", "best")):
        assert "needs a finished run of ft" in mistake(capsys, *drawn, *choice)


def test_the_oracle_experiment_on_other_data_is_announced_as_such(capsys: Capture) -> None:
    assert main(["reproduce", "fig-oracle", "--data.name", "digits", "--dry-run", "--quiet"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("Oracle experiment: bn, digits, small, 5 tasks: 6 runs, 0 finished.\n")


def test_a_quirk_must_be_for_one_of_the_rows(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "reproduce",
        "table1",
        *SETTINGS,
        "--seeds",
        "1",
        "--quiet",
        "--quirks",
        "no-affine",
        "--dry-run",
    )
    assert "'no-affine' changes none of these runs" in mistake(capsys, *words, "--norm", "tbbn")
    assert main((*words, "--norm", "tbbn,gn")) == 0


def test_the_steps_of_all_methods_are_announced(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tbbn.paper.effort.step_seconds", lambda *given: 1.0)
    words = [word for word in TINY if word != "--quiet"]
    assert main(("reproduce", "fig-oracle", *words, "--norm", "bn", "--train.epochs", "1", "--dry-run")) == 0
    # Fine-tuning: 24 images in 3 steps, then in 4 beside the memory. Joint training: 3 steps, then 48 images in 6.
    # Each step has 8 rows, and one of 64 takes a second.
    assert "4 to train, 32 steps in total, about 4.0 s one after another" in capsys.readouterr().err


def test_the_time_counts_each_network_and_the_rows_of_its_batches(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tbbn.paper.effort.step_seconds", lambda name, *rest: {"resnet32": 1.0}.get(name, 2.0))
    words = ("--seeds", "1", "--norm", "bn", "--data.stop_after", "1", "--scale", "0.00625", "--dry-run")
    assert main(("reproduce", "table2", "--method", "ft,podnet", *words)) == 0
    # One task and one epoch: 4500 images in 70 batches of 64, and 5000 in 39 of 128, on a network of its own.
    assert "about 3 min 46 s one after another (1000.00 ms, 2000.00 ms per step of 64 rows)" in capsys.readouterr().err


def test_what_a_run_has_learnt_is_not_announced_again(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tbbn.paper.effort.step_seconds", lambda *given: 1.0)
    words = [word for word in TINY if word != "--quiet"]
    words = ["reproduce", "table1", *words, "--seeds", "1", "--train.epochs", "1"]
    interrupted(words, monkeypatch)
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    # Fine-tuning takes 3 steps, then 4, of 8 rows each.
    assert "2 to train (1 resumed), 11 steps in total, about 1.4 s one after another" in capsys.readouterr().err


def test_a_folder_is_named_by_network_kept_epoch_scale_and_every_other_setting() -> None:
    table, name = find_tables("table3")[0], "table3-imagenet100-resnet34-keep-best-scale-0.5"
    assert reproduce._folder_name(table, Namespace(keep="best", scale=0.5, settings={})) == name
    given = {"precision": "bf16", "data.root": "/elsewhere"}
    assert reproduce._folder_name(table, Namespace(keep="best", scale=0.5, settings=given)) == f"{name}-precision=bf16"


def test_methods_that_keep_the_last_epoch_anyway_are_named(capsys: Capture) -> None:
    """PODNet and AFC have it from their protocol: to train them again costs hours and tells nothing."""
    shown = ("reproduce", "table2", "--seeds", "1", "--quiet", "--dry-run")
    main([*shown, "--keep", "last", "--precision", "bf16"])
    note = (
        "podnet, afc: trained as without --keep last, which is their default here; --method ft,eeil,lucir,ssil leaves"
    )
    assert note in capsys.readouterr().err
    for words in (["--precision", "bf16"], ["--keep", "last", "--method", "ft,ssil"]):
        main([*shown, *words])
        assert "as without" not in capsys.readouterr().err


def test_a_method_that_the_table_has_not_is_named(capsys: Capture) -> None:
    assert "unknown method of table2 'x'" in mistake(capsys, "reproduce", "table2", "--method", "x")


def test_the_oracle_experiment_is_run_and_drawn_again_from_its_runs(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "fig-oracle", *TINY, "--norm", "bn", "--train.epochs", "1")
    assert main((*words, "--seeds", "7,")) == 0
    said = capsys.readouterr().out
    assert "Oracle experiment: bn, synthetic:4x12x4x8, small, 2 tasks" in said and "seeds: 1." in said
    assert main(("reproduce", "table1", *TINY, "--norm", "tbbn", "--seeds", "7,", "--train.epochs", "1")) == 0
    capsys.readouterr()
    assert (
        main(
            (
                "reproduce",
                "fig-oracle",
                "--keep",
                "last",
                "--quiet",
                "--from",
                *map(str, Path("runs").glob("table1-*")),
                *map(str, Path("runs").glob("oracle-*")),
            )
        )
        == 0
    )
    assert capsys.readouterr().out == said
    assert "needs a finished run of ft" in mistake(
        capsys, "reproduce", "fig-oracle", "--keep", "last", "--from", "runs", "--seeds", "8,"
    )


def test_all_parts_of_a_command_share_its_time_limit(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tbbn.bench.cli import train
    from tbbn.paper import oracle

    monkeypatch.chdir(tmp_path)
    now, real = 0.0, oracle.refresh_statistics
    monkeypatch.setattr(train.time, "monotonic", lambda: now)

    def slow(context: object) -> None:
        nonlocal now
        now += 100
        real(context)  # type: ignore[arg-type]

    monkeypatch.setattr(oracle, "refresh_statistics", slow)
    words = ("reproduce", "fig-oracle", *TINY, "--norm", "bn", "--train.epochs", "1", "--seeds", "7,")
    assert main((*words, "--time-limit", "50s")) == EXIT_TIME_LIMIT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1] == (
        "tbbn: time limit reached, everything is saved except the oracle experiment on this seed; "
        "run the same command again to continue."
    )
    assert main((*words, "--time-limit", "1h")) == 0
    args = Namespace(time_limit="50s")
    first = train.deadline(args)
    now += 30
    assert train.deadline(args) == first == now + 20, "tables that follow each other have no limit each"


@pytest.mark.parametrize("form", ["csv", "latex"])
def test_an_oracle_table_for_programs_is_alone_on_standard_output_and_names_its_scale(
    form: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "fig-oracle", *TINY, "--norm", "bn", "--scale", "0.01", "--seeds", "7,", "--format", form)
    assert main(words) == 0
    said = capsys.readouterr()
    assert pictures(said.err)[0].name == "fig-oracle.svg" and "figure: " not in said.out
    assert "SCALE 0.01: a fraction of the epochs. Oracle experiment" in said.out
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(said.out)))
        assert [row["procedure"] for row in rows] == list(PROCEDURES)


def test_runs_that_are_there_are_shown_with_any_seed_and_drawn_by_row(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [*SETTINGS, "--train.epochs", "1", "--quiet"]
    assert main(("reproduce", "table1", *settings, "--lanes", "1", "--norm", "bn,tbbn", "--seeds", "7,")) == 0
    capsys.readouterr()
    shown = ("reproduce", "table1", *settings, "--from", "runs")
    assert main(shown) == 0
    rows = [line.split()[2:4] for line in capsys.readouterr().out.splitlines() if line.startswith("ft + ")]
    assert len(rows) > 8 and ["bn", "1"] in rows and ["tbbn", "1"] in rows, "seeds that the recipe does not have, too"
    assert main((*shown, "--format", "csv")) == 0
    assert not capsys.readouterr().out.endswith("\n\n")
    assert main(("reproduce", "fig-errors", *shown[2:], "--norm", "tbbn")) == 0
    out, err = capsys.readouterr()
    assert [path.match("runs/table1-cifar100-keep-last-*/fig-errors.*") for path in pictures(err)] == [True, True]
    assert [line.split()[2] for line in out.splitlines() if line.startswith("ft + ")] == ["tbbn"]


def test_runs_that_a_command_would_forget_are_named(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "table1", *SETTINGS, "--train.epochs", "1", "--quiet", "--lanes", "1", "--norm", "bn")
    interrupted((*words, "--seeds", "3"), monkeypatch)
    capsys.readouterr()
    assert main((*words, "--seeds", "7,8", "--dry-run")) == 0
    assert "a sweep with 2 runs not started yet (ft-bn-1, ft-bn-2)" in capsys.readouterr().err
    assert main((*words, "--seeds", "3", "--dry-run")) == 0 and "no longer" not in capsys.readouterr().err


def test_a_method_alone_chooses_its_rows(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("reproduce", "table1", *TINY, "--norm", "bn", "--seeds", "1", "--train.epochs", "1")) == 0
    capsys.readouterr()
    assert main(("reproduce", "table2", "--method", "lucir", "--from", "runs")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {words[0] for words in lines if words[1:2] == ["+"]} == {"method", "lucir"}
    assert main(("reproduce", "online", "--method", "ft", "--from", "runs")) == 0
    assert "ft + cn(groups=8)" in capsys.readouterr().out
    assert main(("reproduce", "table3", "--format", "csv", "--from", "runs")) == 0
    first = [row[0] for row in csv.reader(io.StringIO(capsys.readouterr().out))]
    assert len(set(first) - {"table"}) == 4 == first.count("table"), "each row names its network"
