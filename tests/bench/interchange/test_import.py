"""``tbbn import``: FACIL's flags and PyCIL's JSON become recipes, with a line for everything that was given."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Capture, mistake

from tbbn.bench.cli.main import main
from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.engine.phase import PhaseSettings
from tbbn.bench.methods import Phase
from tbbn.bench.runs.recipe import read_recipe

LUCIR = "--approach lucir --num-tasks 10 --nc-first-task 50 --num-exemplars 2000 --exemplar-selection herding --batch-ratio 3"
PYCIL: dict[str, Any] = {
    "prefix": "reproduce", "dataset": "cifar100", "memory_size": 2000, "memory_per_class": 20, "fixed_memory": False,
    "shuffle": True, "init_cls": 10, "increment": 10, "model_name": "icarl", "convnet_type": "resnet32", "device": ["0"],
    "seed": [1993],
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def facil(capsys: Capture, flags: str) -> tuple[RunConfig, str]:
    """The config of FACIL's flags, and what was said about them."""
    assert main(["import", "facil", "--overwrite", "--", *flags.split()]) == 0
    return resolve(read_recipe(Path("facil.toml"))[0]), capsys.readouterr().out


def pycil(capsys: Capture, **changes: Any) -> tuple[RunConfig, str]:
    Path("config.json").write_text(json.dumps({**PYCIL, **changes}))
    assert main(["import", "pycil", "config.json", "--overwrite"]) == 0
    return resolve(read_recipe(Path("config.toml"))[0]), capsys.readouterr().out


def test_facils_flags_and_defaults_become_a_recipe(capsys: Capture) -> None:
    config, said = facil(capsys, LUCIR.replace(" --batch-ratio 3", ""))
    assert config.protocol == "clean" and "FACIL shuffles exemplars into the task's images" in said
    assert (config.method.name, config.data.tasks, config.data.base_classes) == ("lucir", 10, 50)
    assert (config.memory.budget, config.memory.selection, config.batch.ratio) == (2000, "herding", "3:1")
    assert (config.train.epochs, config.train.lr, config.train.momentum, config.train.weight_decay) == (200, 0.1, 0, 0)
    assert (config.data.validation, config.train.keep, config.memory.rounding) == (0.1, "best", "ceil")
    assert config.backbone == "resnet32" and config.batch.size == 64 and config.data.class_order == "seed"
    lines = said.splitlines()
    assert "taken over      --num-tasks 10  ->  data.tasks = 10" in lines
    assert "taken over      --momentum 0.0 (FACIL's default)  ->  train.momentum = 0.0" in lines
    assert any(
        re.match(r"differs +--lr-patience 5 .* ->  train\.schedule = 'multistep': FACIL divides", li) for li in lines
    )
    assert lines[-1] == "wrote facil.toml; look at it with tbbn run facil.toml --dry-run"
    assert main(["run", "facil.toml", "--dry-run", "--json"]) == 0
    assert [task["classes"] for task in json.loads(capsys.readouterr().out)["tasks"]] == [50, 6, 6, 6, 6, 6, 5, 5, 5, 5]


@pytest.mark.parametrize(
    ("flags", "settings", "line"),
    [
        (
            "--approach eeil --lamb 2 --T 3 --nepochs-finetuning 5",
            {"kd": 2.0, "temperature": 3.0, "balanced_epochs": 5},
            "",
        ),
        ("--approach eeil", {"balanced_lr_factor": 0.01}, r"--lr-finetuning-factor 0\.01 \(FACIL's default\)"),
        (
            "--approach bic --num-bias-epochs 9 --lamb 2",
            {"correction_epochs": 9},
            r"no counterpart  --lamb 2\.0  ->  bic has no",
        ),
        ("--approach lucir --K 3 --remove-margin-ranking", {"top_k": 3, "ranking": 0.0}, ""),
        ("--approach icarl --lamb 0.5", {"kd": 0.5}, ""),
        ("--approach finetuning", {}, r"differs +finetuning without exemplars"),
    ],
)
def test_flags_of_approaches_become_options(flags: str, settings: dict[str, Any], line: str, capsys: Capture) -> None:
    config, said = facil(capsys, flags)
    assert {**config.method.dict(), **settings} == config.method.dict()
    assert re.search(line, said)


def test_flags_of_the_papers_authors_choose_the_norm(capsys: Capture) -> None:
    norms = {
        "--tbbn": "tbbn",
        "--cn --cn-num 8": "cn(groups=8)",
        "--GroupNorm --gn 4": "gn(groups=4)",
        "--SwitchNorm": "sn",
    }
    assert {flags: str(facil(capsys, flags)[0].norm) for flags in norms} == norms
    config, said = facil(capsys, "--lr-scheduler multisteplr --datasets cifar100_icarl --bn-momentum 0.2")
    assert config.data.class_order == "icarl" and config.norm.dict()["momentum"] == 0.2 and "lr-patience" not in said


def test_a_command_of_the_papers_authors_is_their_protocol(capsys: Capture) -> None:
    # As in their run_cifar100.sh.
    flags = "--gpu 0 --seed 0 --approach ssil --datasets cifar100 --network resnet32 --batch-size 64 --num-tasks 10"
    flags += " --nepochs 160 --num-exemplars 2000 --lr-factor 10 --weight-decay 0.0001 --exemplar-selection herding"
    flags += " --num-workers 8 --exp-name x"
    config, said = facil(capsys, f"{flags} --tbbn --batch-ratio 3 --nc-first-task 10")
    expected = resolve(protocol="paper", data="cifar100", method="ssil", norm="tbbn")
    same = replace(config, data=replace(config.data, base_classes=0), train=replace(config.train, clip_norm=0.0))
    assert same == expected, "but for a first task of as many classes as the others, and clipping at 10000"
    assert not re.search(r"^differs", said, re.MULTILINE)


def test_what_has_no_counterpart_is_said_and_written_into_the_recipe(capsys: Capture) -> None:
    _, said = facil(capsys, "--gpu 2 --fix-bn --warmup-nepochs 3 --nosuch 1 --network alexnet")
    for line in (
        r"no counterpart  --gpu 2  ->  the device is chosen when the recipe runs",
        r"no counterpart  --fix-bn  ->  statistics are never fixed",
        r"no counterpart  --warmup-nepochs 3  ->  it trains the new head alone",
        r"no counterpart  --nosuch  ->  not a flag of FACIL",
        r"no counterpart  --network alexnet  ->  the data set's default network",
    ):
        assert re.search(line, said) and re.search(f"# {line}", Path("facil.toml").read_text())


def test_pycils_config_and_the_values_in_its_code_become_a_recipe(capsys: Capture) -> None:
    config, said = pycil(capsys)
    assert (config.method.name, config.data.tasks, config.data.base_classes, config.seed) == ("icarl", 10, 0, 1993)
    assert (config.memory.budget, config.memory.per_class, config.batch.size) == (2000, False, 128)
    # Its learning rates, epoch by epoch: 0.1, a tenth of it from epochs 60, 120 and 170 of 200; later 80 and 120 of 170.
    for task, epochs, milestones in ((0, 200, (60, 120, 170)), (1, 170, (80, 120))):
        settings = PhaseSettings.of(config, Phase(), task)
        expected = [0.1 * 0.1 ** sum(epoch >= m for m in milestones) for epoch in range(epochs)]
        assert [settings.lr_at(epoch) for epoch in range(settings.epochs)] == pytest.approx(expected)
        assert settings.weight_decay == (2e-4 if task else 5e-4) and settings.momentum == 0.9
    assert "no counterpart  device" in said and "epochs = 170 (in PyCIL's code)" in said


def test_pycils_keys_override_the_values_in_its_code(capsys: Capture) -> None:
    changes = {"model_name": "wa", "epochs": 3, "milestones": [2], "init_cls": 50, "increment": 20, "seed": [1, 2]}
    config, said = pycil(capsys, **changes, fixed_memory=True, shuffle=False, typo=1)
    assert PhaseSettings.of(config, Phase(), 1).lr_at(1) == 0.1 > PhaseSettings.of(config, Phase(), 1).lr_at(2)
    assert (config.data.base_classes, config.data.tasks, config.data.class_order) == (50, 4, "natural")
    assert (config.memory.budget, config.memory.per_class) == (20, True)
    assert "differs         init_cls = 50, increment = 20" in said and "PyCIL's last task has 10 classes" in said
    assert "no counterpart  typo = 1  ->  not a key of PyCIL" in said
    assert read_recipe(Path("config.toml"))[1].seeds == (1, 2)
    assert pycil(capsys, model_name="podnet", convnet_type="cosine_resnet32")[0].train.schedule == "cosine"
    assert pycil(capsys, model_name="finetune")[0].memory.budget == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "facil -- --approach ewc",
            r"FACIL's approach 'ewc' has no counterpart here; those that have one: bic, .*ssil\.$",
        ),
        ("facil -- --datasets vggface2", r"FACIL's data set 'vggface2' has no counterpart here"),
        ("facil -- --num-tasks x", r"tbbn import facil: argument --num-tasks: invalid int value: 'x'\.$"),
        ("facil", r"needs FACIL's flags after --: tbbn import facil -- --approach"),
        ("pycil", r"needs a PyCIL config: tbbn import pycil exps/icarl\.json$"),
        ("pycil nowhere.json", r"nowhere\.json: no such file\.$"),
        ("pycil broken.json", r"broken\.json: not a JSON file: "),
        ("pycil empty.json", r"empty\.json: not a config of PyCIL; it must have a model_name\.$"),
        ("pycil der.json", r"PyCIL's model 'der' has no counterpart here"),
        ("pycil short.json", r"short\.json: 'dataset' is missing, which PyCIL needs\.$"),
        ("avalanche", r"tbbn import takes facil or pycil, got 'avalanche'\.$"),
        (
            "facil --out there.toml -- --lr 1",
            r"there\.toml: exists; choose another file with --out, or add --overwrite\.$",
        ),
    ],
)
def test_what_cannot_be_imported_is_one_line(words: str, line: str, capsys: Capture) -> None:
    files = {"broken": "{", "empty": "{}", "der": '{"model_name": "der"}', "short": '{"model_name": "wa"}'}
    for name, text in files.items():
        Path(f"{name}.json").write_text(text)
    Path("there.toml").write_text("")
    before = sorted(Path().iterdir())
    assert re.search(line, mistake(capsys, "import", *words.split()))
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lrate": "fast"}, r"PyCIL's lrate must be a number, got \"fast\"\.$"),
        ({"init_weight_decay": None}, r"PyCIL's init_weight_decay must be a number, got null\.$"),
        ({"seed": []}, r"PyCIL's seed must be a whole number or a list of them, got \[\]\.$"),
        ({"seed": [1, "x"]}, r"PyCIL's seed must be a whole number or a list of them, got \[1, \"x\"\]\.$"),
        ({"model_name": []}, r"PyCIL's model '\[\]' has no counterpart here"),
        ({"milestones": [float("inf")]}, r"config\.json: a value has the wrong type \(cannot convert float infinity"),
        ({"increment": 0}, r"config\.json: a value has the wrong type \(integer division or modulo by zero\)\.$"),
        ({"dataset": {}}, r"config\.json: a value has the wrong type \(unhashable type"),
    ],
)
def test_a_value_of_the_wrong_type_is_one_line(changes: dict[str, Any], line: str, capsys: Capture) -> None:
    Path("config.json").write_text(json.dumps({**PYCIL, **changes}))
    assert re.search(line, mistake(capsys, "import", "pycil", "config.json"))
