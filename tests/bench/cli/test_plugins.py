"""Plugins from the command line: installed packages, files and recipes that bring one of each kind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import TINY, Capture, files, interrupted, mistake
from plugin import CODE, WORDS, install

from tbbn.bench.cli.main import main
from tbbn.bench.config import read_toml
from tbbn.plugins import temporary
from tbbn.registry import NORMS

KINDS = {"methods": "tempered", "norms": "rms", "datasets": "stripes", "backbones": "tiny", "augmentations": "dim"}
DEFAULTS = {"method": {"temperature": 2.0}, "norm": {"eps": 1e-5, "affine": True, "power": 0.5}}
BRINGS = ["method tempered", "norm rms", "backbone tiny", "augmentation dim", "dataset stripes"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with temporary(fresh=True):
        yield tmp_path
    for name in ("striped", "clashing", "broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def record(folder: str) -> Any:
    return json.loads((Path(folder) / "record.json").read_text())


def test_an_installed_package_in_a_process_of_its_own(tmp_path: Path) -> None:
    install(tmp_path / "site")
    path = os.pathsep.join([str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    words = [sys.executable, "-m", "tbbn", "run", *WORDS, "--name", "mine", "--json"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["status"] == "finished"
    assert record("runs/mine")["plugins"] == [
        {"name": "striped", "version": "1.2", "brings": BRINGS, "defaults": DEFAULTS}
    ]


def test_an_installed_package_is_listed_with_origin_options_and_defaults(installed: Path, capsys: Capture) -> None:
    for what, name in KINDS.items():
        assert main(["list", what]) == 0
        built_in, text = capsys.readouterr().out.split("\nstriped 1.2:\n")
        assert built_in.startswith("built in:\n") and text.split()[0] == name
        if what == "methods":
            assert "\n      temperature=2.0  softens the logits\n" in text
        if what == "norms":
            assert "\n      power=0.5\n" in text
        if what == "backbones":
            assert "one convolution" in text
        assert main(["list", what, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[name]["origin"] == "striped 1.2"


def test_runs_of_a_package_are_read_without_it(
    installed: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", *WORDS, "--name", "mine", "--quiet"]) == 0
    assert main(["verify", "runs/mine"]) == 0
    assert "runs/mine: OK" in capsys.readouterr().out
    assert main(["verify", "runs/mine", "--retrain-task", "2"]) == 0
    capsys.readouterr()
    with temporary_absence(installed, monkeypatch):
        assert main(["show", "runs/mine"]) == 0
        said = capsys.readouterr().out
        assert "plugin striped 1.2: method tempered, norm rms" in said
        assert said.startswith("tempered + rms(power=0.4), stripes, seed 0: finished\n"), "as with the plugin"
        assert main(["report", "runs/mine"]) == 0
        assert "\ntempered + rms(power=0.4) " in capsys.readouterr().out
        assert main(["verify", "runs/mine"]) == 0
        said = capsys.readouterr().out
        assert "OK" in said and "dataset 'stripes' comes from a plugin that is not loaded" in said
        assert main(["verify", "runs/mine", "--json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)
        reasons = {finding["subject"]: finding["not_checked"] for finding in entry["findings"]}
        assert reasons["results against the labels"] == "dataset 'stripes' comes from a plugin that is not loaded"
        assert main(["verify", "runs/mine", "--retrain-task", "2"]) == 2
        wanted = "runs/mine: method 'tempered' comes from the plugin striped 1.2, which is not loaded; install it"
        assert wanted in capsys.readouterr().err
        assert wanted in mistake(capsys, "run", *WORDS, "--name", "mine")  # the record there knows its plugin
        assert "unknown method 'tempered'" in mistake(capsys, "run", *WORDS, "--name", "another")


def temporary_absence(site: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if the package had never been installed."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(site)])
    sys.modules.pop("striped", None)
    return temporary(fresh=True)


def test_resuming_without_the_package_names_it(
    installed: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(["run", *WORDS, "--name", "mine", "--quiet"], monkeypatch)
    capsys.readouterr()
    with temporary_absence(installed, monkeypatch):
        error = mistake(capsys, "resume", "runs/mine")
        assert (
            "runs/mine: method 'tempered' comes from the plugin striped 1.2, which is not loaded; install it" in error
        )
    monkeypatch.syspath_prepend(installed)
    with temporary(fresh=True):
        assert main(["resume", "runs/mine", "--quiet"]) == 0
    assert record("runs/mine")["status"] == "finished"


def test_a_file_does_the_same(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    sha = hashlib.sha256(CODE.encode()).hexdigest()
    assert main(["list", "methods", "--plugin", "mine.py"]) == 0
    assert f"\nmine.py {sha[:12]}:\n  tempered " in capsys.readouterr().out
    interrupted(["run", *WORDS, "--plugin", "mine.py", "--name", "filed", "--quiet"], monkeypatch)
    assert record("runs/filed")["plugins"] == [
        {"name": "mine.py", "file_sha256": sha, "brings": BRINGS, "defaults": DEFAULTS}
    ]
    assert read_toml("runs/filed/config.toml")["plugins"] == ["mine.py"]
    capsys.readouterr()
    moved = (tmp_path / "mine.py").rename(tmp_path / "moved.py")
    with temporary(fresh=True):
        wanted = f"tbbn: runs/filed: plugin mine.py: no such file in {tmp_path}; if the file is elsewhere, add --plugin PATH."
        assert mistake(capsys, "resume", "runs/filed") == wanted
        assert main(["show", "runs/filed"]) == 0
        capsys.readouterr()
    moved.write_text(CODE + "# another\n")
    with temporary(fresh=True):
        error = mistake(capsys, "resume", "runs/filed", "--plugin", "moved.py")
        assert (
            "runs/filed: the plugin mine.py has changed since this run began; to resume it, restore the file; to train anew, "
            "use tbbn run with --name, --out or --overwrite." in error
        )
    moved.write_text(CODE)
    with temporary(fresh=True):
        assert main(["resume", "runs/filed", "--plugin=moved.py", "--quiet"]) == 0
    assert record("runs/filed")["status"] == "finished"
    moved.rename(tmp_path / "mine.py")
    with temporary(fresh=True):
        assert main(["run", *WORDS, "--plugin", "mine.py", "--name", "filed", "--json"]) == 0  # already finished
    (tmp_path / "mine.py").write_text(CODE + "# another\n")
    with temporary(fresh=True):
        words = ["run", *WORDS, "--plugin", "mine.py", "--name", "filed"]
        capsys.readouterr()
        assert "runs/filed: is finished, but the plugin mine.py has changed since; to keep" in mistake(capsys, *words)
        assert "This command would fail: runs/filed: is finished, but" in dry_run(capsys, *words)
        assert main(["resume", "runs/filed"]) == 0, "nothing is left to train"
        assert main([*words, "--overwrite", "--quiet"]) == 0


def dry_run(capsys: Capture, *words: str) -> str:
    assert main([*words, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_sweep_is_resumed_elsewhere_only_with_the_place_of_its_plugin(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.py").write_text(CODE)
    assert main(["run", *WORDS, "--seeds", "2", "--plugin", "mine.py", "--name", "both", "--quiet"]) == 0
    shutil.rmtree("runs/both/tempered-rms_power=0.4_-1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    with temporary(fresh=True):
        error = mistake(capsys, "resume", "../runs/both")
        place = tmp_path / "elsewhere"
        assert error == (
            f"tbbn: ../runs/both: plugin mine.py: no such file in {place}; if the file is elsewhere, add --plugin PATH."
        )
        assert main(["resume", "../runs/both", "--plugin", "../mine.py", "--quiet"]) == 0


def test_only_what_would_be_trained_needs_its_plugin_as_it_was(capsys: Capture) -> None:
    Path("mine.py").write_text(CODE)
    words = ["run", *TINY, "--plugin", "mine.py", "--method", "tempered,ft", "--norm", "rms,bn", "--name", "all"]
    assert main([*words, "--quiet"]) == 0
    Path("mine.py").write_text(CODE + "# another\n")
    for lost, changed in (("tempered-bn-0", "method tempered"), ("ft-rms-0", "norm rms"), ("ft-bn-0", "")):
        folder = Path("runs/all") / lost
        folder.rename("lost")
        capsys.readouterr()
        with temporary(fresh=True):
            assert "runs/all/tempered-rms-0: is finished, but the plugin mine.py has" in mistake(capsys, *words)
            if changed:
                error = mistake(capsys, "resume", "runs/all", "--quiet")
                assert (
                    error.startswith(f"tbbn: {folder}: {changed} has changed since runs/all/") and not folder.exists()
                )
                Path("lost").rename(folder)
            else:
                assert main(["resume", "runs/all", "--quiet"]) == 0
                assert record(str(folder))["status"] == "finished"


def test_a_recipe_names_its_plugins(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "other.py").write_text(CODE.replace('"tempered"', '"cold"').partition("@tbbn.register_norm")[0])
    settings = 'data = "stripes"\nbackbone = "tiny"\n[train]\nepochs = 1\n[memory]\nbudget = 8\n'
    sweep = '[sweep]\nmethods = ["tempered(temperature=3)", "ft"]\nnorms = ["rms", "bn"]\n'
    (tmp_path / "recipe.toml").write_text('plugins = ["mine.py"]\n' + settings + sweep)
    words = ["run", "recipe.toml", "--data.tasks", "2", "--device", "cpu", "--json", "--quiet", "--name", "recipe"]
    assert main(words) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {e["status"] for e in entries} == {"finished"} and len(entries) == 4
    found = record("runs/recipe/ft-bn-0")
    assert found["config"]["plugins"] == ["mine.py"]
    assert found["plugins"][0]["brings"] == ["backbone tiny", "dataset stripes"]
    with temporary(fresh=True):
        assert main(["resume", "runs/recipe", "--quiet"]) == 0  # finds the plugin by its config
        capsys.readouterr()
    with temporary(fresh=True):
        assert main([*words, "--plugin", "other.py", "--method", "cold", "--name", "both", "--dry-run"]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["plugins"] == ["mine.py", "other.py"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["list", "methods", "--plugin", "broken.py"],
            "plugin broken.py cannot be loaded: ZeroDivisionError: division by zero",
        ),
        (["doctor", "--plugin", "broken.py"], "plugin broken.py cannot be loaded"),
        (["data", "check", "x", "--plugin", "broken.py"], "plugin broken.py cannot be loaded"),
        (["run", *TINY, "--plugin", "nothing.py"], "plugin nothing.py: no such file in "),
        (["run", *TINY, "--plugin=nothing_here"], "plugin nothing_here: no such module; install it, or give a file"),
        (["run", *TINY, "--plugins", "nothing_here"], "plugin nothing_here: no such module"),
        (["run", *TINY, "--plugins", "nothing.py"], "plugin nothing.py: no such file in "),
        (["sweep", *TINY, "--plugins", "nothing.py", "--dry-run"], "plugin nothing.py: no such file in "),
        (["run", "recipe.toml"], "plugin nothing.py: no such file in "),
        (["run", *TINY, "--plugin", "."], "plugin '.': must be a module's name or a Python file, such as ./mine.py."),
        (["run", *TINY, "--plugin", ".mine"], "plugin '.mine': must be a module's name or a Python file"),
        (
            ["run", *TINY, "--plugin", "./"],
            "plugin ./: is a folder; give a Python file such as ./mine.py, or a module's",
        ),
        (
            ["run", *TINY, "--plugin", "./recipe.toml"],
            "plugin ./recipe.toml: must be a Python file, with the ending .py.",
        ),
        (["run", "--plugin"], "--plugin needs a value"),
        (["show", "--plugin", "--json"], "--plugin needs a value"),
        (["run", *TINY, "--plugin", "clash.py"], "norm 'bn' is already registered by tbbn; clash.py "),
    ],
)
def test_mistakes_are_one_line(words: list[str], wanted: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "clash.py").write_text("import tbbn\n@tbbn.register_norm('bn')\nclass Norm: ...\n")
    (tmp_path / "recipe.toml").write_text('plugins = ["nothing.py"]\n')
    assert wanted in mistake(capsys, *words)
    assert not [name for name in files(tmp_path) if name.startswith("runs/")]


def test_ctrl_c_while_a_plugin_loads_interrupts_and_leaves_no_names(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine.py").write_text(CODE + "\nraise KeyboardInterrupt\n")
    for words in (["list", "norms", "--plugin", "mine.py"], ["run", *TINY, "--plugins", "mine.py", "--norm", "rms"]):
        assert main(words) == 130
        said = capsys.readouterr()
        assert said.err == "tbbn: interrupted; run the same command again to resume.\n" and said.out == ""
        assert "rms" not in NORMS


def test_a_broken_package_stops_only_who_needs_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "broken", "0.1", "import nothing_like_it")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert main(["run", *TINY, "--quiet", "--name", "mine"]) == 0
    assert main(["show", "runs/mine"]) == 0
    capsys.readouterr()
    wanted = "plugin broken cannot be loaded: ModuleNotFoundError: No module named 'nothing_like_it'"
    assert wanted in mistake(capsys, "list", "norms")
    assert wanted in mistake(capsys, "run", *TINY, "--method", "another")
    assert main(["doctor"]) == 0
    assert "nothing_like_it" in capsys.readouterr().out
