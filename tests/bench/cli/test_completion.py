"""Completion scripts, asked by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from commandline import Capture, mistake

from tbbn.bench import config
from tbbn.bench.cli.main import build_parser, main

BASH = """source {script}
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_tbbn
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

CASES = {
    "tbbn re": {"resume", "reproduce", "report"},
    "tbbn run --norm t": {"tbbn"},
    "tbbn run --norm bn,c": {"bn,cn"},
    "tbbn sweep --data cifar1": {"cifar10", "cifar100"},
    "tbbn run --train.k": {"--train.keep"},
    "tbbn run --train.keep ": {"last", "best"},
    "tbbn run --data.online ": {"true", "false"},
    "tbbn run --seed 3 --dry": {"--dry-run"},
    "tbbn list b": {"backbones"},
    "tbbn reproduce fig-t": {"fig-toy"},
    "tbbn data c": {"check"},
    "tbbn completion f": {"fish"},
    "tbbn run --out ": set(),  # left to the shell: files
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with (folder / shell).open("w") as file, redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return folder


def ask(*command: str) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("line", CASES)
def test_bash(line: str, scripts: Path) -> None:
    words = " ".join(f"'{word}'" for word in line.split(" "))
    assert ask("bash", "-c", BASH.format(script=scripts / "bash", words=words)) == CASES[line]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
@pytest.mark.parametrize("line", [line for line in CASES if "," not in line and not line.endswith("--out ")])
def test_fish(line: str, scripts: Path) -> None:
    assert ask("fish", "-N", "-c", f"source {scripts / 'fish'}; complete -C '{line}'") == CASES[line]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_takes_the_script(scripts: Path) -> None:
    assert ask("zsh", "-f", "-c", f"source {scripts / 'zsh'}; print ${{_comps[tbbn]}}") == {
        "_bash_complete -o bashdefault -o default -F _tbbn"
    }


def test_every_command_and_setting_is_known(scripts: Path) -> None:
    text = (scripts / "bash").read_text()
    for name in build_parser()[1]:
        assert f"{name}' '*)" in text
    for name in config.SETTINGS:
        assert f"--{name} " in text


def test_an_unknown_shell_is_one_line(capsys: Capture) -> None:
    assert mistake(capsys, "completion", "zhs").endswith("Did you mean 'zsh'?")
