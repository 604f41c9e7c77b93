"""``tbbn run``: output, files, settings, dry runs."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import TINY, Capture, files, interrupted, mistake
from PIL import Image

from tbbn.bench import config
from tbbn.bench.cli.main import main
from tbbn.bench.cli.train import must_compile_kernels
from tbbn.bench.config.toml import tomllib
from tbbn.bench.runs import sweep
from tbbn.bench.runs.pending import PendingRun
from tbbn.bench.runs.recipe import RECIPE
from tbbn.bench.runs.record import load_record


def test_one_run_leaves_its_record_its_config_and_a_picture(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    folder = tmp_path / "synthetic_4x12x4x8-ft-bn-tasks=2-device=cpu-budget=8-epochs=1-0"
    assert {"accuracy.png", "config.toml", "predictions.safetensors", "record.json"} <= set(files(folder))
    record = load_record(folder)
    assert record.status == "finished" and len(record.accuracy) == 2
    lines = said.out.splitlines()
    assert lines[0].split() == [
        "method",
        "+",
        "norm",
        "seeds",
        "A_f",
        "%",
        "A_a",
        "%",
        "F",
        "%",
        "F_text",
        "%",
        "A_l",
        "%",
    ]
    assert lines[2].split()[:4] == ["ft", "+", "bn", "1"]
    assert lines[2].split()[4] == f"{100 * record.metrics['final_accuracy']:.1f}"
    assert "A_f = (1/T) sum_i a[T,i]" in lines
    assert lines[-1] == f"accuracy curves: {folder / 'accuracy.png'}"


def test_results_go_to_stdout_and_progress_to_stderr(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "run 1/1: ft + bn, seed 0" in said.err and "task 2/2, mean accuracy" in said.err
    assert "task 2/2" not in said.out and "A_f" not in said.err


def test_quiet_prints_only_the_result(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path), "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "ft + bn" in said.out


def test_a_picture_that_cannot_be_written_is_not_a_failure(tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "x" / "accuracy.png"
    (picture / "in the way").mkdir(parents=True)
    assert main(["run", *TINY, "--out", str(tmp_path), "--name", "x", "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == f"no figure: {picture}: Is a directory.\n" and "ft + bn" in said.out
    assert not [name for name in files(tmp_path / "x") if name.startswith(".accuracy")]


def test_a_matplotlib_that_does_not_load_is_not_a_failure(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["run", *TINY, "--out", str(tmp_path), "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("no figure: ") and "ft + bn" in said.out


def test_several_norms_and_seeds_give_one_table_and_one_picture(runs: Path) -> None:
    pictures = [file for file in files(runs) if file.endswith(".png")]
    assert pictures == ["accuracy.png"]
    assert (runs / "accuracy.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    folders = sorted(f.name for f in runs.iterdir() if f.is_dir())
    assert folders == ["ft-bn-0", "ft-bn-1", "ft-gn_groups=8_-0", "ft-gn_groups=8_-1"]


def test_a_finished_run_is_not_run_again(runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run_saved", lambda *_, **__: pytest.fail("ran again"))
    words = ["run", *TINY, "--norm", "bn,gn(groups=8)", "--seeds", "2", "--out", str(runs.parent), "--name", "few"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err.count("already finished, read from") == 4
    assert "gn(groups=8)" in said.out


def test_another_config_in_the_folder_is_refused_unless_overwritten(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--out", str(tmp_path), "--name", "x", "--quiet"]
    assert main(words) == 0
    before = load_record(tmp_path / "x")
    capsys.readouterr()
    line = mistake(capsys, *words, "--train.lr", "0.2")
    there = load_record(tmp_path / "x").run_config.train.lr
    what = f"holds a run with another config (train.lr = {there!r} there, 0.2 now); use --name, --out or --overwrite."
    assert line == f"tbbn: {tmp_path / 'x'}: {what}"
    assert load_record(tmp_path / "x") == before
    assert main([*words, "--train.lr", "0.2", "--overwrite"]) == 0
    assert load_record(tmp_path / "x").run_config.train.lr == 0.2


def test_json_output_has_one_entry_per_run(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--seeds", "4,", "--out", str(tmp_path), "--name", "x", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["method"], entry["norm"], entry["seed"], entry["status"]) == ("ft", "bn", 4, "finished")
    assert entry["directory"] == str(tmp_path / "x")
    assert entry["metrics"] == load_record(tmp_path / "x").metrics


def test_the_command_line_overrides_a_recipe_file(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'method = "er"\n[data]\nname = "synthetic:4x12x4x8"\ntasks = 2\n[train]\nepochs = 5\n[memory]\nbudget = 8\n'
        '[sweep]\nnorms = ["bn", "tbbn"]\nseeds = [0, 1]\n'
    )
    assert main(["run", str(file), "--train.epochs", "1", "--seed", "3", "--out", str(tmp_path), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(e["method"], e["norm"], e["seed"]) for e in entries] == [("er", "bn", 3), ("er", "tbbn", 3)]
    record = load_record(tmp_path / "mine-epochs=1" / "er-bn-3")
    assert record.run_config.train.epochs == 1 and len(record.history) == 2


def test_every_way_to_write_a_setting(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", "--data.name=synthetic", "--norm.name", "gn", "--norm.groups=8", "--data.online", "--dry-run"]
    words += ["--train.schedule", "multistep", "--train.milestones", "0.4,0.8", "--data.class_order_seed", "-1"]
    words += ["--quirks", "no-affine", "--json"]
    assert main(words) == 0
    tree = json.loads(capsys.readouterr().out)["config"]
    assert tree["data"]["name"] == "synthetic" and tree["data"]["online"] is True
    assert tree["norm"] == {"name": "gn", "groups": 8, "affine": False, "channels_per_group": 0, "eps": 1e-5}
    assert tree["train"]["milestones"] == [0.4, 0.8] and tree["data"]["class_order_seed"] == -1


def test_without_arguments_the_demo_runs(capsys: Capture) -> None:
    assert main(["run", "--dry-run", "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)
    assert forecast["runs"] == 6 and forecast["config"]["data"]["name"] == "digits"
    assert [task["classes"] for task in forecast["tasks"]] == [2] * 5
    assert forecast["config"]["memory"]["budget"] == 100


@pytest.mark.parametrize(
    ("norm", "title", "splits"),
    [
        ("tbbn", " r*  steps/epoch", [1, 2]),
        ("bn,tbbn(case=3)", " r* of tbbn(case=3)  steps/epoch", [1, 2]),
        ("bn,weighted,cn", "batch  steps/epoch", [None, None]),
    ],
)
def test_a_dry_run_shows_the_splits_of_norms_that_have_some(
    norm: str, title: str, splits: list[int | None], tmp_path: Path, capsys: Capture
) -> None:
    words = [
        "run",
        *TINY,
        "--batch.size",
        "9",
        "--batch.ratio",
        "2:1",
        "--norm",
        norm,
        "--out",
        str(tmp_path),
        "--dry-run",
    ]
    assert main(words) == 0 and title in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [task["splits"] for task in found["tasks"]] == splits
    assert found.get("splits_of") == (None if splits == [None, None] else norm.removeprefix("bn,"))


def test_a_dry_run_takes_groups_that_only_the_network_can_divide(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--backbone", "resnet18-reduced", "--norm", "gn(groups=5)", "--out", str(tmp_path)]
    assert main([*words, "--dry-run"]) == 0 and "This command would fail" not in capsys.readouterr().out


def test_lanes_give_the_same_results_as_runs_in_sequence(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--norm", "bn,gn(groups=8)", "--seeds", "2", "--out", str(tmp_path), "--name", "few"]
    assert main([*words, "--lanes", "3", "--quiet"]) == 0
    for folder in runs.iterdir():
        if folder.is_dir():
            assert load_record(tmp_path / "few" / folder.name).accuracy == load_record(folder).accuracy


def test_a_sweep_is_refused_in_the_folder_of_a_run(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--out", str(tmp_path), "--quiet", "--name", "one"]
    assert main(words) == 0
    before = files(tmp_path)
    refused = (
        f"{tmp_path / 'one'}: is the folder of a run and cannot hold others; use another --name, or delete the folder."
    )
    capsys.readouterr()
    assert mistake(capsys, *words, "--seeds", "2") == f"tbbn: {refused}"
    assert main([*words, "--seeds", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith(f" This command would fail: {refused}\n")
    assert files(tmp_path) == before


def test_a_run_joins_a_sweep_in_whose_folder_it_is_asked_for(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "two"
    words = ["run", *TINY, "--out", str(tmp_path), "--quiet", "--name", "two"]
    assert main([*words, "--seeds", "2"]) == 0
    before = (folder / RECIPE).read_bytes(), (folder / "accuracy.png").read_bytes()
    capsys.readouterr()
    joins = f"{folder} is the folder of a sweep; this run joins it, in {folder / 'ft-bn-5'}."
    assert main([*words, "--seed", "5", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f" in {folder / 'ft-bn-5'}. Nothing is there yet, and nothing was trained. {joins}\n")
    assert main([*words, "--seed", "5"]) == 0 and joins in capsys.readouterr().err
    assert load_record(folder / "ft-bn-5").status == "finished"
    assert ((folder / RECIPE).read_bytes(), (folder / "accuracy.png").read_bytes()) == before
    assert main([*words, "--seed", "1", "--dry-run"]) == 0, "a run that the sweep has"
    assert "There are 1 finished and 0 unfinished runs" in capsys.readouterr().out
    assert main([*words, "--seed", "1", "--train.lr", "0.5"]) == 2
    assert "ft-bn-1: holds a run with another config" in capsys.readouterr().err
    assert main([*words, "--seeds", "6", "--dry-run", "--overwrite"]) == 0
    assert "There are 3 runs, which would be replaced." in capsys.readouterr().out


def test_a_sweep_says_which_runs_of_another_one_it_forgets(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", *TINY, "--out", str(tmp_path), "--quiet", "--name", "two"]
    interrupted([*words, "--seeds", "3"], monkeypatch)
    capsys.readouterr()
    assert main([*words, "--seeds", "4", "--dry-run"]) == 0 and "no longer" not in capsys.readouterr().out
    lost = "a sweep with 2 runs not started yet (ft-bn-1, ft-bn-2): tbbn resume will no longer start them."
    assert main([*words, "--seeds", "7,8", "--dry-run"]) == 0 and lost in capsys.readouterr().out
    assert main([*words, "--seeds", "7,8"]) == 0 and lost in capsys.readouterr().err


def test_a_diverged_run_has_an_exit_code_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--train.lr", "1e20", "--train.epochs", "3", "--out", str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert "diverged" in said.err and "diverged after 0 of 2 tasks" in said.out


def test_a_failed_run_of_several_has_an_exit_code_too(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sweep.run_saved

    def failing(config: Any, directory: Path, **options: Any) -> Any:
        if config.seed == 0:
            raise RuntimeError("out of luck")
        return real(config, directory, **options)

    monkeypatch.setattr(sweep, "run_saved", failing)
    assert main(["run", *TINY, "--seeds", "2", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "ft + bn, seed 0: failed: RuntimeError: out of luck" in said.err
    assert "1 failed after 0 of 0 tasks, 1 finished" in said.out


def test_a_first_run_on_a_gpu_says_that_kernels_are_compiled(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tbbn.bench.cli.train.must_compile_kernels", lambda runs: True)
    words = ["run", *TINY, "--out", str(tmp_path), "--name"]
    assert main([*words, "a"]) == 0 and main([*words, "b", "--quiet"]) == 0
    assert capsys.readouterr().err.count("compiling GPU kernels: the first step") == 1


def test_kernels_are_compiled_for_runs_on_a_gpu_unless_the_cache_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tbbn.accelerators.triton.TRITON", True)
    on_cpu, on_any = ([PendingRun(config.resolve(("test", {"device": d})), tmp_path)] for d in ("cpu", "auto"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not must_compile_kernels(on_any)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert must_compile_kernels(on_any) and not must_compile_kernels(on_cpu)
    (tmp_path / "cache" / "kernel").mkdir(parents=True)
    assert not must_compile_kernels(on_any)


def test_a_dry_run_prints_config_layout_and_steps_and_does_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--norm", "tbbn", "--seeds", "2", "--dry-run", "--out", str(tmp_path / "none")]) == 0
    said = capsys.readouterr()
    head, _, table = said.out.partition("\ntask ")
    printed = config.resolve(("out", config.flatten(tomllib.loads(head))))
    assert printed.norm.name == "tbbn" and printed.data.tasks == 2 and printed.train.epochs == 1
    rows = [line.split() for line in table.splitlines()[2:4]]
    # 24 images in batches of 64 (or 48 + 16): one step; r* of 24 + 16 rows is that of a whole batch, 48 + 16.
    assert rows == [["1", "2", "24", "0", "64+0", "1", "1", "1"], ["2", "2", "24", "8", "48+16", "2", "1", "1"]]
    assert "2 training steps (main phases)" in said.out and "the first of 2 runs" in said.out
    assert said.out.endswith(" Nothing is there yet, and nothing was trained.\n")
    assert not (tmp_path / "none").exists()


def test_a_dry_run_of_the_paper_has_its_numbers_without_data(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--data", "cifar100", "--protocol", "paper", "--norm", "tbbn", "--dry-run", "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)
    assert [t["steps"] for t in forecast["tasks"]] == [70, 124, 124, 124, 124, 124, 126, 125, 124, 128]
    assert [t["splits"] for t in forecast["tasks"]] == [1, 2, 4, 8, 8, 8, 16, 16, 16, 16]
    assert forecast["steps"] == 160 * (70 + 6 * 124 + 126 + 125 + 128) and forecast["runs"] == 1
    assert forecast["note"] == "" and not list(tmp_path.iterdir())
    assert main(["run", "--data", "imagenet100", "--dry-run"]) == 0
    assert "\nimagenet100: images and steps are estimates, with 1300 training images" in capsys.readouterr().out


def test_other_settings_get_another_folder_and_a_dry_run_says_what_is_there(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", *TINY, "--out", str(tmp_path), "--quiet"]
    for more in ([], ["--train.lr", "0.2"], ["--seed", "1"], ["--seeds", "2"], ["--norm", "gn"]):
        assert main([*words, *more]) == 0
    plain = "synthetic_4x12x4x8-ft-bn-tasks=2-device=cpu-budget=8-epochs=1"
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted(
        [f"{plain}-0", f"{plain}-lr=0.2-0", f"{plain}-1", plain, f"{plain.replace('bn', 'gn')}-0"]
    )
    for more, said in (
        ([], "There are 1 finished and 0 unfinished runs"),
        (["--train.epochs", "2"], "Nothing is there yet, and nothing was trained."),
        (["--train.epochs", "2", "--name", f"{plain}-0"], "This command would fail: "),
    ):
        capsys.readouterr()
        assert main([*words, *more, "--dry-run"]) == 0
        assert said in capsys.readouterr().out.splitlines()[-1]


def test_a_folder_has_the_seed_of_its_run_and_no_two_settings_share_a_name(tmp_path: Path) -> None:
    from tbbn.bench.cli.naming import folder_name

    assert folder_name("", None, "tbbn", {"seed": 7}, seed=7) == "digits-ft-tbbn-7"
    assert folder_name("mine", None, "tbbn", {}, seed=5) == "mine-tbbn-5"  # beside mine-5, the recipe's own norm
    assert folder_name("mine", None, "tbbn", {}) == "mine"  # a sweep's runs have it in their names
    pairs = (("batch.size", "data.size"), ("train.momentum", "norm.momentum"), ("data.tasks", "save.tasks"))
    for one, other in pairs:
        assert folder_name("", None, None, {one: 3}) != folder_name("", None, None, {other: 3})


def test_the_only_seed_of_a_run_is_in_its_folders_name(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('seed = 5\n[data]\nname = "synthetic:4x20x5x8"\ntasks = 2\n')
    for given, ending in (
        (["mine.toml"], "mine-5"),
        (["mine.toml", "--seed", "0"], "mine-0"),
        (["mine.toml", "--norm", "tbbn"], "mine-tbbn-5"),
        (["--seeds", "7,", "--norm", "tbbn"], "digits-ft-tbbn-7"),
    ):
        assert main(["run", *given, "--dry-run"]) == 0
        said = capsys.readouterr()
        assert f"in runs/{ending}. Nothing is there yet" in said.out + said.err


@pytest.mark.parametrize("kind", ["data", "method", "norm"])
def test_an_empty_name_is_not_the_default(kind: str, capsys: Capture) -> None:
    assert f"--{kind} needs a name" in mistake(capsys, "run", f"--{kind}", "")


def test_verify_checks_what_it_can_without_the_data_set(tmp_path: Path, capsys: Capture) -> None:
    from tbbn.bench.runs.verify import verify

    images = tmp_path / "images"
    for part, split, shade in itertools.product("ab", ("train", "test"), range(4)):
        (images / split / part).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (60 * shade, 120, 40 * (part == "a"))).save(images / split / part / f"{shade}.png")
    words = [
        "--data",
        f"folder:{images}",
        "--data.tasks",
        "2",
        "--data.size",
        "8",
        "--backbone",
        "small",
        "--train.epochs",
        "1",
    ]
    assert main(["run", *words, "--memory.budget", "2", "--name", "x", "--out", str(tmp_path), "--device", "cpu"]) == 0
    shutil.rmtree(images)
    capsys.readouterr()
    findings = {finding.subject: finding for finding in verify(tmp_path / "x")}
    assert "images" in findings["results against the labels"].not_checked
    assert not any(finding.problem for finding in findings.values()) and "metrics" in findings
