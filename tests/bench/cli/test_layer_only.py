"""A layer-only install: the bench's commands say what to install, the others work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import Capture, mistake

import tbbn
from tbbn.bench import extras
from tbbn.bench.cli.main import build_parser, main
from tbbn.errors import UserError

ROOT = Path(__file__).parents[3]

# As after `pip install tbbn`: none of the extra's packages can be imported.
LAYER_ONLY = f"""
import sys, warnings
warnings.simplefilter("ignore")  # torch's, about numpy
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {tuple(extras.PACKAGES)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from tbbn.bench.cli.main import main
for words in sys.argv[1:]:
    print("##", words, main(words.split()), flush=True)
"""


def test_commands_of_the_bench_name_the_extra_and_the_others_work() -> None:
    bench = [name for name in build_parser()[1] if name not in extras.WITHOUT]
    words = ["run", "sweep --norm bn", "demo", "resume x", "verify x", "speed", "data check x", "reproduce table1"]
    words += ["slots x", "drift x", "epochs", "shares", "import facil", "export x"]
    assert {word.split()[0] for word in words} == set(bench)
    others = [
        "list norms",
        "doctor",
        "completion fish",
        "report results/cifar100-ft-last",
        "show results/cifar100-ft-last/ft-bn-0",
    ]
    done = subprocess.run(
        [sys.executable, "-c", LAYER_ONLY, *words, *others], capture_output=True, text=True, cwd=ROOT, check=True
    )
    for word in words:
        assert f"## {word} 2" in done.stdout
        assert re.search(
            rf"tbbn: tbbn {word.split()[0]} needs torchvision, .*tomli-w; pip install 'tbbn\[bench\]'\.", done.stderr
        )
    for word in others:
        assert f"## {word} 0" in done.stdout
    assert re.search(r"scikit-learn +not installed; pip install 'tbbn\[bench\]'", done.stdout)
    assert done.stderr.count("\n") == len(words), done.stderr


def test_only_what_is_missing_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "PACKAGES", {"numpy": "numpy", "no_such_module": "no-such"})
    assert mistake(capsys, "run") == "tbbn: tbbn run needs no-such; pip install 'tbbn[bench]'."
    assert main(["list", "norms"]) == 0


def test_the_packages_are_those_of_the_extra() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^bench = \[(.*?)^\]", text, re.S | re.M)
    assert listed is not None
    names = set(re.findall(r'^  "([\w-]+)', listed[1], re.M)) - {"tomli"}
    assert set(extras.PACKAGES.values()) == names


def test_the_python_api_names_the_extra_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "missing", lambda: ["numpy", "scikit-learn"])
    for call in (tbbn.run, tbbn.sweep):
        with pytest.raises(UserError, match=r"^tbbn\.run needs numpy, scikit-learn; pip install 'tbbn\[bench\]'\.$"):
            call()
