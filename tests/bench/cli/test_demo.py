"""``tbbn demo``: three parts, in order; the runs are those of the demo recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import Capture, mistake

import tbbn.paper
from tbbn.bench.cli.main import main

RECIPE = """
train.epochs = 1
[data]
name = "synthetic:4x12x4x8"
tasks = 2
[memory]
budget = 8
[sweep]
norms = ["bn", "tbbn"]
seeds = [0, 1]
"""


def test_the_demo_shows_mechanism_bench_and_result(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "demo.toml"
    recipe.write_text(RECIPE)
    monkeypatch.setattr(tbbn.paper, "find_recipe", lambda name: recipe)
    assert main(("demo", "--out", str(tmp_path / "runs"), "--quiet")) == 0
    said = capsys.readouterr().out
    mechanism, bench, result = (said.index(f"\n{n}. " if n > 1 else "1. ") for n in (1, 2, 3))
    assert mechanism < said.index("TBBN  ") < bench < said.index("ft + tbbn") < result < said.index("+6.0 [3.8, 8.1]")
    assert (tmp_path / "runs" / "demo" / "toy.png").exists() and (tmp_path / "runs/demo/ft-tbbn-1/record.json").exists()


def test_the_demo_takes_no_options_of_other_runs(capsys: Capture) -> None:
    assert "--engine" in mistake(capsys, "demo", "--engine", "ray")
