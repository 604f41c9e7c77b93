"""Odd surroundings and odd arguments: a run is done or refused in one line."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import PIL.Image
import pytest
from commandline import TINY, Capture, files, mistake
from tinyrun import tiny

from tbbn.bench.cli import train
from tbbn.bench.cli.main import main
from tbbn.bench.runs import checkpoint, recipe
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved
from tbbn.bench.runs.verify import verify

EARLIER = Path(__file__).parents[1] / "runs/earlier_version"  # written by commit 0b492cb


# Arguments.


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--seeds 1000000000", "1000000000 runs are more than the 10000 that a sweep may have; split it"),
        ("--seeds 200 --norm bn,gn,in,sn,tbbn", "this would train 1000 runs; add --yes to train them all, or choose fewer"),
        ("--seeds 9000 --norm bn,gn --yes", "18000 runs are more than the 10000 that a sweep may have"),
        ("--device hpu:0", "device 'hpu:0' cannot be used here: "),
        ("--name=", "--name needs a name; without it, one is made from the settings."),
        (f"--train.lr 1{'0' * 400}", "train.lr must be "),
        (f"--norm.eps 1{'0' * 400}", "eps must be at most 1e+30"),
        (f"--batch.size 1{'0' * 400}", "batch.size must be at most 1048576, got 1000"),
        (f"--seed 1{'0' * 400}", "seed must be "),
        (f"--{'k' * 10**7} 1", "See --help."),
        (f"--norm {'k' * 10**7}", "choose one of: "),
        (f"--norm.{'k' * 10**7} 1", ""),
        (f"{'k' * 10**7}.toml", ""),
    ],
)  # fmt: skip
def test_an_argument_is_refused_in_one_line(words: str, line: str, tmp_path: Path, capsys: Capture) -> None:
    said = mistake(capsys, "run", *TINY[:-2], *words.split(), "--out", str(tmp_path / "out"))
    assert line in said and len(said) < 4200
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        f"[train]\nlr = 1{'0' * 400}",
        f"[train]\nlr = 1e{'9' * 400}",
        f"seed = 1{'0' * 400}",
        f"[norm]\neps = 1{'0' * 400}",
        f"{'k' * 10**6} = 1",
        f"[{'k' * 10**6}]\na = 1",
    ],
)
def test_a_number_or_key_in_a_file_is_refused_in_one_line(text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.toml").write_text(text)
    said = mistake(capsys, "run", str(tmp_path / "a.toml"), "--out", str(tmp_path / "out"))
    assert len(said) < 4200 and [file.name for file in tmp_path.iterdir()] == ["a.toml"]


def test_many_seeds_in_python_take_no_memory() -> None:
    import tbbn
    from tbbn.errors import UserError

    with pytest.raises(UserError, match="1000000000 runs are more than the 10000 that a sweep may have"):
        tbbn.run(seeds=10**9)


@pytest.mark.parametrize(("answer", "is_done"), [("y\n", True), ("n\n", False), ("", False)])
def test_many_runs_are_asked_about(
    answer: str, is_done: bool, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(recipe, "MANY_RUNS", 2)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(train, "_train", lambda runs, *_, **__: len(runs))
    assert main(["run", *TINY, "--seeds", "2", "--out", str(tmp_path)]) == 2  # the number of runs, or a mistake
    said = capsys.readouterr().err
    assert said.startswith("This would train 2 runs. Train them all? [y/N] ")
    assert ("tbbn: nothing was trained." in said) != is_done


# Surroundings.


def test_a_terminal_without_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["run", *TINY, "--seeds", "2", "--out", str(tmp_path), "--name", "ü", "--quiet"]) == 0
    sys.stdout.flush()
    assert rb"\xb1" in written.getvalue() and rb"\xfc" in written.getvalue()  # ± and ü


@pytest.mark.nightly
def test_without_a_home_and_in_ascii_a_process_trains(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": "/proc", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    environment.pop("MPLCONFIGDIR", None)
    words = ["run", *TINY, "--out", str(tmp_path), "--name", "x"]
    done = subprocess.run(
        [sys.executable, "-m", "tbbn.bench.cli.main", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "accuracy curves: " in done.stdout
    assert load_record(tmp_path / "x").status == "finished"


AS_NOBODY = """
import os, sys
from pathlib import Path
from tbbn.bench.cli.main import main
place, commands = Path(sys.argv[1]), [words.split(chr(31)) for words in sys.argv[2:]]
tiny = commands[0][1:-2]
for name in ("read", "hidden"):  # this also loads every module: another user may not read them
    assert main([*commands[0][:-1], name]) == 0
assert main(["data", "pack", str(place / "set"), str(place / "packed"), "--workers", "1", "--quiet"]) == 0
assert main(["report", str(place / "out/read"), "--plot", str(place / "out/a.png")]) == 0
assert main(["verify", str(place / "out/read")]) == 0
(place / "out/hidden").chmod(0o700)
(place / "set/train/a").chmod(0o700)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print("== nobody", file=sys.stderr)
for words in commands:
    print(f"== {main(words)}", file=sys.stderr)
"""


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")
def test_folders_without_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lie in one that others may not enter
        Path(folder).chmod(0o755)
        _folders_without_permission(Path(folder))


def _folders_without_permission(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / "set" / part / "a").mkdir(parents=True)
        PIL.Image.new("RGB", (8, 8)).save(tmp_path / "set" / part / "a" / "1.png")
    out = tmp_path / "out"
    words = [*TINY, "--out", str(out), "--quiet"]
    commands: list[tuple[list[str], str]] = [
        (["run", *words, "--name", "new"], f"{out}/new: Permission denied."),
        (["run", *words, "--name", "read", "--overwrite"], f"{out}/read/.lock: Permission denied."),
        (["show", f"{out}/hidden"], f"{out}/hidden"),
        (["report", f"{out}/hidden"], f"{out}/hidden: Permission denied."),
        (["verify", f"{out}/hidden"], f"{out}/hidden: Permission denied."),
        (["resume", f"{out}/hidden"], f"{out}/hidden: Permission denied."),
        (["run", "--data", f"folder:{tmp_path}/set", *words[2:]], f"{tmp_path}/set/train/a: Permission denied."),
        (["report", f"{out}/read", "--plot", f"{tmp_path}/p.png"], f"{tmp_path}/p.png: Permission denied."),
        (["data", "pack", f"{tmp_path}/set", f"{tmp_path}/new"], f"{tmp_path}/set/train/a: Permission denied."),
        (["data", "pack", f"{out}", f"{tmp_path}/new"], f"{out} needs the folders"),
    ]
    given = [chr(31).join(command) for command, _ in commands]
    given += [chr(31).join(command) for command in (["verify", f"{out}/read"], ["run", *words, "--name", "read"])]
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(tmp_path), *given], capture_output=True, text=True, cwd="/"
    )
    lines = done.stderr.partition("== nobody\n")[2].splitlines()
    assert len(lines) == 2 * len(commands) + 3, done.stderr
    for (_, wanted), line, code in zip(commands, lines[::2], lines[1::2], strict=False):
        assert line.startswith("tbbn: ") and wanted in line and code == "== 2", (wanted, line, code)
    # What may be read is read; only the picture of a finished run cannot be drawn again.
    assert lines[-3] == "== 0" and "no figure: " in lines[-2] and lines[-1] == "== 0"
    assert not (out / "new").exists() and not (tmp_path / "new").exists() and not (tmp_path / "p.png").exists()


# Folders of runs.


def test_a_finished_run_of_an_earlier_version_is_read(tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(EARLIER, tmp_path / "run")
    before = files(tmp_path)
    for words in (["show"], ["report"], ["verify"]):
        assert main([*words, str(tmp_path / "run")]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "not checked: checkpoints (there are none)" in said
    assert "not checked: data (the record is from a version that did not write it)" in said
    assert files(tmp_path) == before
    assert main(["run", str(tmp_path / "run/config.toml"), "--dry-run"]) == 0


def test_an_unfinished_run_of_an_earlier_version_is_resumed_or_refused(tmp_path: Path, capsys: Capture) -> None:
    """Between two tasks its state has what this version needs. Inside a phase it lacks the layout of the rows."""
    config = tiny(norm__name="tbbn")
    run_saved(config, tmp_path / "whole")
    for name, steps in (("between", 6), ("inside", 8)):
        asked = iter(range(10**6))
        run_saved(config, tmp_path / name, every=10.0**6, stop=lambda asked=asked, n=steps: next(asked) >= n)  # type: ignore[misc]
        state, tensors = checkpoint.read(tmp_path / name / checkpoint.NEWEST)
        words = [line for line in state["config"].splitlines() if not line.startswith(("plugins", "affine", "rule"))]
        state["config"] = "\n".join(words)  # options at their defaults were not written
        if state["rows"] is not None:
            del state["rows"]["has_layout"]
        for file in (tmp_path / name).glob("*.safetensors"):
            if file.name != "predictions.safetensors":
                file.unlink()
        checkpoint.save(tmp_path / name, state, tensors)
        assert not [finding for finding in verify(tmp_path / name) if finding.problem]
        if state["position"]["step"]:
            said = mistake(capsys, "resume", str(tmp_path / name), "--quiet")
            assert said.endswith(
                "its checkpoint does not fit this run (KeyError: 'has_layout'); delete it to start again."
            )
        else:
            assert main(["resume", str(tmp_path / name), "--quiet"]) == 0
            assert load_record(tmp_path / name).weights == load_record(tmp_path / "whole").weights
