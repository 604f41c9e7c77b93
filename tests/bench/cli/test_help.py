"""``--help`` and ``--version``."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commandline import Capture

import tbbn
from tbbn.bench import config
from tbbn.bench.cli.main import build_parser, main


def test_help_of_run_names_every_setting_with_its_default(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for key in config.SETTINGS:
        if key not in ("data.name", "norm.name", "method.name"):
            assert f"  --{key}" in text
    assert "--train.epochs 20 " in text and "a single pass over each task" in text
    assert text.rstrip().endswith(
        "example: tbbn run --data cifar100 --protocol paper --norm bn,tbbn --seeds 3 --train.epochs 2"
    )


@pytest.mark.parametrize("command", build_parser()[1])
def test_every_help_ends_with_an_example(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"example: tbbn {command} ")


def test_the_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"tbbn {tbbn.__version__}\n"


def test_help_and_version_load_no_torch() -> None:
    code = "import sys; from tbbn.bench.cli.main import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
