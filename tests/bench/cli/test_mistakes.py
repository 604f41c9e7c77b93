"""A mistake on the command line or in a recipe: one line, exit code 2, nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commandline import TINY, Capture, mistake

from tbbn.bench.cli.main import main


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", r"missing command: demo, run, sweep, .*\. Try tbbn demo, or tbbn --help\."),
        ("rnu", r"unknown command 'rnu'; .*Did you mean 'run'\?"),
        ("run --train.epoch 3", r"unknown setting --train\.epoch\. Did you mean --train\.epochs\?"),
        ("run --sed 3", r"unknown setting --sed\. Did you mean --seed\?"),
        ("run --lr 0.1", r"unknown setting --lr\. Did you mean --train\.lr\?"),
        ("run --optimizer adamw", r"unknown setting --optimizer\. Did you mean --train\.optimizer\?"),
        ("run --weight-decay 0", r"unknown setting --weight-decay\. Did you mean --train\.weight_decay\?"),
        ("run --dataset cifar100", r"unknown setting --dataset\. Did you mean --data\?"),
        (
            "run --train.optimizer adamW",
            r"train\.optimizer must be sgd, adam or adamw, got 'adamW'\. Did you mean 'adamw'\?",
        ),
        ("run --zzzzzz 3", r"unknown setting --zzzzzz\. See --help\."),
        ("run --dry", r"unknown setting --dry\. Did you mean --dry-run\?"),
        ("run --train.epochs", r"--train\.epochs needs a value\."),
        ("run --train.epochs x", r"command line: train\.epochs must be a whole number \(default 20\), got 'x'\."),
        ("run --train.lr nan", r"train\.lr must be positive, got nan\."),
        ("run --protocol papr", r"protocol must be clean or paper, got 'papr'\. Did you mean 'paper'\?"),
        ("run --norm tbn", r"unknown norm 'tbn'; .*Did you mean 'tbbn'\?"),
        ("run --norm bn,gn(groups=7)", r"gn: groups=7 does not divide 32 channels"),
        ("run --norm gn(groups", r"norm must look like name or name\(option=value\)"),
        ("run --method fft", r"unknown method 'fft'; .*Did you mean 'ft'\?"),
        ("run --method.kd 1", r"'ft' takes no options, got 'kd'"),
        ("run --seeds x", r"--seeds takes a count or a list: 3, or 0,1,2 .*; got 'x'\."),
        ("run --seed 1 --seeds 2", r"use either --seed or --seeds"),
        ("run --lanes 0", r"--lanes must be a number from 1, or auto; got '0'\."),
        ("run --lanes x", r"--lanes must be a number from 1, or auto; got 'x'\."),
        ("run dem", r"unknown recipe 'dem'; .*Did you mean 'demo'\?"),
        ("run missing.toml", r"missing\.toml: no such config file\."),
        ("run demo extra", r"unrecognized arguments: extra"),
        ("run --data sythetic", r"unknown dataset 'sythetic'; .*Did you mean 'synthetic'\?"),
        ("run --data synthetic:4x12x4x8 --data.tasks 5", r"4 classes cannot fill 5 tasks; use at most 4 tasks"),
        ("run --data folder:/nowhere", r"folder:/nowhere: /nowhere: no such folder$"),
        ("run --data folder:/nowhere --data.split 0.2", r"folder:/nowhere: /nowhere: no such folder$"),
        ("run --data folder:", r"dataset 'folder' needs an argument after a colon: folder:PATH"),
        ("run --data packed:", r"dataset 'packed' needs an argument after a colon: packed:PATH"),
        ("run --memory 200", r"unknown setting --memory\. Did you mean --memory\.budget\?"),
        ("run --gpu 0", r"unknown setting --gpu\. Did you mean --device\?"),
        (
            "run --train.optimizer adamw --train.momentum 0.5",
            r"train\.momentum has no effect with train\.optimizer = 'adamw'; leave one of them out\.",
        ),
        ("run --train.betas 0.8,0.9", r"train\.betas has no effect with train\.optimizer = 'sgd'; "),
        (
            "run --train.schedule cosine --train.milestones 0.5",
            r"train\.milestones has no effect with train\.schedule = ",
        ),
        (
            "run --train.schedule constant --train.gamma 0.5",
            r"train\.gamma has no effect with train\.schedule = 'constant'",
        ),
        ("run --data mnist --data.download false --data.root /nowhere", r"mnist"),
        ("list method", r"unknown list 'method'; .*Did you mean 'methods'\?"),
        ("run --norm bn tbbn", r"--norm bn tbbn: separate values by commas: --norm bn,tbbn\."),
        ("run demo --norm bn, tbbn", r"separate values by commas: --norm bn,tbbn\."),
        ("sweep --method ft er --seeds 2", r"separate values by commas: --method ft,er\."),
        ("run --log wandb mlflow", r"separate values by commas: --log wandb,mlflow\."),
        ("run --train.betas 0.9 0.99", r"separate values by commas: --train\.betas 0\.9,0\.99\."),
        ("speed --norm bn tbbn", r"separate values by commas: --norm bn,tbbn\."),
        ("list", r"missing WHAT: one of methods, norms, .*, quirks; see tbbn list --help\."),
        ("data", r"missing ACTION: pack or check; see tbbn data --help\."),
        ("data pck", r"invalid choice: 'pck' \(choose from '?pack'?, '?check'?\)"),
        ("data pack x", r"^tbbn: missing DEST: output folder: .*; see tbbn data pack --help\."),
        ("show", r"missing RUN: the folder of a run, such as runs/demo/ft-tbbn-0; see tbbn show --help\."),
        ("report", r"missing RUN: folders of runs or sweeps; see tbbn report --help\."),
        ("show /nowhere", r"/nowhere: no run here; the folder of a run holds a record\.json\."),
        ("report /nowhere", r"/nowhere: no run here"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    words: str, line: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(line, mistake(capsys, *words.split()))
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_recipe_file_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "a.toml"
    for text, line in (
        ("[train]\nepoch = 3\n", r"a\.toml: \[train\] has no option 'epoch'; .*Did you mean 'epochs'\?"),
        ("[sweep]\nnorm = ['bn']\n", r"a\.toml: \[sweep\] has no option 'norm'; it takes: methods, norms, seeds\."),
        ("[sweep]\nnorms = 'bn'\n", r"a\.toml: sweep\.norms must be a list of names, got 'bn'\."),
        ("[sweep]\nseeds = ['0']\n", r"a\.toml: sweep\.seeds must be a list of whole numbers, got \['0'\]\."),
        ("= 3", r"a\.toml: not a TOML file"),
    ):
        file.write_text(text)
        assert re.search(line, mistake(capsys, "run", str(file), "--out", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert main(["run", *TINY, "--out", str(tmp_path / "file"), "--quiet"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"tbbn: {tmp_path / 'file'}") and said.err.count("\n") == 1
