"""Bad input through the command line: one line that names what is wrong, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from commandline import Capture, mistake

from tbbn.bench.cli.main import main
from tbbn.bench.files import NO_SEAL, seal
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import load_record

TINY = ("--data.tasks", "2", "--train.epochs", "1", "--memory.budget", "8", "--device", "cpu", "--threads", "1")
SYNTHETIC = ("--data", "synthetic:4x6x2x8", *TINY)


def write_set(root: Path, n_train: int = 3, side: int = 6) -> Path:
    for seed, name in enumerate(("ant", "bee")):
        for part, n in (("train", n_train), ("test", 1)):
            (root / part / name).mkdir(parents=True)
            for number in range(n):
                pixels = np.random.default_rng([seed, number]).integers(0, 256, (side, side, 3)).astype(np.uint8)
                PIL.Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


# Settings.


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--memory.budget 3", r"a budget of 3 gives none of the 4 classes an exemplar; use at least 4"),
        ("--memory.per_class true --memory.budget 7", r"memory\.budget must be at most 6 for each class, .* got 7;"),
        ("--memory.budget 99999999999", r"memory\.budget must be at most 2147483648, got 99999999999\."),
        (
            "--batch.ratio 1:100",
            r"batch_size 64 at ratio 1:100 leaves no current rows; use a batch_size of at least 101",
        ),
        ("--batch.ratio 0:1", r"both parts of the ratio must be at least 1, got 0:1"),
        ("--batch.size 99999999", r"batch\.size must be at most 1048576, got 99999999\."),
        ("--data.crop 9", r"data\.crop must be at most 8 for images of 8x8, got 9\."),
        ("--data.size 100000", r"data\.size must be at most 4096, got 100000\."),
        ("--data.unreadable x", r"data\.unreadable must be fail or skip, got 'x'\."),
        ("--data.validation 0.0 --train.keep best", r"train\.keep = 'best' needs validation images"),
        ("--threads 5000", r"threads must be at most 1024, got 5000\."),
        ("--train.clip_value 1e300", r"train\.clip_value must be at most 3\.4e\+38, got 1e\+300\."),
        ("--train.lr 1e300", r"train\.lr must be at most 3\.4e\+38, got 1e\+300\."),
        ("--device meta", r"device 'meta' cannot be used here: its tensors hold no data\."),
        ("--norm.eps -1", r"norm 'bn': eps must be at least 1e-30, got -1\.0\."),
        ("--norm.momentum x", r"norm 'bn': momentum must be a number, got 'x'\."),
        ("--norm gn(groups=0)", r"norm 'gn': groups must be at least 1, got 0"),
        ("--norm adab2n(max_tasks=1)", r"norm adab2n\(max_tasks=1\): max_tasks must be at least the 2 tasks, got 1\."),
        (
            "--method bic --data.validation 0.99",
            r"holds out an image of each class, which leaves task 2 without training",
        ),
        ("--norm bn,bn", r"2 runs have the same folder .*ft-bn-0; name each method, norm and seed once\."),
        ("--data synthetic:99999x99999x9x999", r"synthetic: .* bytes of images; the limit is 4294967296"),
    ],
)
def test_an_impossible_setting(words: str, line: str, tmp_path: Path, capsys: Capture) -> None:
    assert re.search(line, mistake(capsys, "run", *SYNTHETIC, *words.split(), "--out", str(tmp_path / "out")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a = 1" + "0" * 5000, "a = " + "[" * 10_000, "a = '\\u0000'\nb"])
def test_an_unreadable_config_file(text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.toml").write_text(text)
    assert "a.toml: not a TOML file: " in mistake(capsys, "run", str(tmp_path / "a.toml"), "--out", str(tmp_path / "o"))
    assert [file.name for file in tmp_path.iterdir()] == ["a.toml"]


def test_text_that_is_not_utf_8(tmp_path: Path, capsys: Capture) -> None:
    line = mistake(capsys, "run", "--data", "folder:/x\udcff", "--out", str(tmp_path / "out"))
    assert line == r"tbbn: command line: data.name must be text in UTF-8, got 'folder:/x\udcff'."


# Data.


def test_control_characters_in_a_folder_name_are_escaped(tmp_path: Path, capsys: Capture) -> None:
    write_set(tmp_path / "set")
    for part in ("train", "test"):
        (tmp_path / "set" / part / "bee").rename(tmp_path / "set" / part / "be\ne\x1b[2J")
    (tmp_path / "set/train/be\ne\x1b[2J/0.png").write_bytes(b"")
    line = mistake(capsys, "run", "--data", f"folder:{tmp_path / 'set'}", *TINY, "--out", str(tmp_path / "out"))
    assert r"train/be\ne\x1b[2J/0.png: is not a readable image" in line


def test_unreadable_images_are_an_error_or_skipped_and_reported(tmp_path: Path, capsys: Capture) -> None:
    broken = write_set(tmp_path / "set") / "train/ant/1.png"
    broken.write_bytes(broken.read_bytes()[:50])
    words = [
        "run",
        "--data",
        f"folder:{tmp_path / 'set'}",
        *TINY,
        "--out",
        str(tmp_path / "out"),
        "--name",
        "x",
        "--quiet",
    ]
    line = mistake(capsys, *words)
    assert f"{broken}: is not a readable image" in line and "data.unreadable = 'skip'" in line
    assert not (tmp_path / "out").exists()
    assert main([*words, "--data.unreadable", "skip"]) == 0
    note = "skipped 1 unreadable image files (train/ant/1.png)."
    assert note in capsys.readouterr().out
    assert load_record(tmp_path / "out/x").skipped == ["train/ant/1.png"]
    assert main(["show", str(tmp_path / "out/x")]) == 0 and note in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "out/x")]) == 0


def test_a_batch_without_variance_is_refused_and_leaves_nothing(tmp_path: Path, capsys: Capture) -> None:
    write_set(tmp_path / "set", n_train=3, side=1)
    words = ["run", "--data", f"folder:{tmp_path / 'set'}", *TINY, "--batch.size", "2", "--out", str(tmp_path / "out")]
    line = mistake(capsys, *words, "--quiet")
    assert "task 1, phase 'train': a batch of one image has no variance to normalise by where maps are 1x1" in line
    assert not (tmp_path / "out").exists()
    assert main([*words, "--quiet", "--batch.last", "drop"]) == 0


@pytest.mark.parametrize("more", [(), ("--seeds", "2"), ("--seeds", "2", "--lanes", "2")])
def test_bad_data_is_one_line_for_any_number_of_runs(more: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    line = mistake(capsys, "run", "--data", "folder:/nowhere", *TINY, *more, "--out", str(tmp_path / "out"))
    assert line.endswith("folder:/nowhere: /nowhere: no such folder")
    assert not (tmp_path / "out").exists()


# Output.


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/tbbn", "/sys/tbbn", "a" * 300])
def test_an_output_folder_that_cannot_be_written(out: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("kept")
    line = mistake(capsys, "run", *SYNTHETIC, "--out", str(tmp_path / out), "--quiet")
    assert line.startswith(f"tbbn: {tmp_path / out}"[:60])
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_a_picture_of_an_unknown_format(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *SYNTHETIC, "--out", str(tmp_path), "--name", "x", "--quiet"]) == 0
    capsys.readouterr()
    line = mistake(capsys, "report", str(tmp_path / "x"), "--plot", str(tmp_path / "new/curves.xyz"))
    assert re.search(r"curves\.xyz: the picture must end in .*\.png.*, got '\.xyz'\.", line)
    line = mistake(capsys, "report", str(tmp_path / "x"), "--plot", str(tmp_path / "x/record.json/curves.png"))
    assert "record.json" in line
    assert "unknown format" in mistake(
        capsys, "report", str(tmp_path / "x"), "--format", "xyz", "--plot", str(tmp_path / "new/curves.png")
    )
    assert not (tmp_path / "new").exists()


def test_an_unexpected_exception_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("tbbn.bench.cli.inspect.doctor", broken)
    monkeypatch.delenv("TBBN_TRACEBACK", raising=False)
    assert main(["doctor"]) == 1
    line = "tbbn: unexpected ZeroDivisionError: by; set TBBN_TRACEBACK=1 to see the traceback.\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("TBBN_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


# Runs.


@pytest.fixture
def run(tmp_path: Path, capsys: Capture) -> Path:
    assert main(["run", *SYNTHETIC, "--out", str(tmp_path), "--name", "x", "--quiet"]) == 0
    capsys.readouterr()
    return tmp_path / "x"


def rewrite(run: Path, **values: Any) -> None:
    """Change values of a record, with a matching checksum."""
    tree = json.loads((run / "record.json").read_text())
    for key, value in values.items():
        section, _, name = key.partition("__")
        if name:
            tree[section][name] = value
        else:
            tree[section] = value
    tree["sha256"] = NO_SEAL
    (run / "record.json").write_bytes(seal(json.dumps(tree, indent=1).encode()))


@pytest.mark.parametrize("command", ["show", "report", "verify", "resume"])
def test_a_run_of_a_newer_version(command: str, run: Path, capsys: Capture) -> None:
    rewrite(run, schema=99)
    assert "record.json: written by a newer version (schema 99; this version reads" in mistake(
        capsys, command, str(run)
    )


def test_a_checkpoint_with_a_valid_checksum_that_does_not_fit_the_run(run: Path, capsys: Capture) -> None:
    rewrite(run, status="interrupted")
    state, tensors = checkpoint.read(run / checkpoint.NEWEST)
    for change, line in (
        ({"position": {"task": "x"}}, "its checkpoint does not fit this run (ValueError: there is no position"),
        ({"position": {"task": 99}}, "its checkpoint does not fit this run (ValueError: there is no position"),
        ({"position": {"place": 0}}, "its checkpoint does not fit this run (TypeError"),
        ({"task_sizes": [1]}, "its checkpoint does not fit this run (RuntimeError"),
        ({"record": None}, "not a record"),
        ({"config": "x"}, "holds a run with another config"),
        ({"schema": 99}, "has schema 99; this version reads"),
    ):
        checkpoint.save(run, {**state, **change}, tensors)  # type: ignore[dict-item]
        checkpoint.save(run, {**state, **change}, tensors)  # type: ignore[dict-item]
        assert line in mistake(capsys, "resume", str(run), "--quiet"), change


def test_a_checkpoint_with_rows_outside_the_data_set(run: Path, capsys: Capture) -> None:
    rewrite(run, status="interrupted")
    state, tensors = checkpoint.read(run / checkpoint.NEWEST)
    for _ in range(2):
        checkpoint.save(run, state, {**tensors, "memory.index": tensors["memory.index"] + 1000})
    assert "memory.index has rows outside the data set" in mistake(capsys, "resume", str(run), "--quiet")


@pytest.mark.parametrize("form", ["text", "md", "csv", "latex"])
def test_control_characters_in_a_record_are_escaped(form: str, run: Path, capsys: Capture) -> None:
    evil = "bn\x1b[2J\x9b31m\nx\r|y\u202e"
    rewrite(run, config__norm={"name": evil}, message="\x1b]0;title\x07", status="failed")
    for words in (["show", str(run)], ["report", str(run)]):
        assert main([*words, "--format", form]) == 0
        said = capsys.readouterr().out
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", said), repr(said)
    assert main(["verify", str(run)]) in (1, 2)
    said = capsys.readouterr()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", said.out + said.err)


def test_curves_with_special_characters_in_their_names(run: Path, capsys: Capture) -> None:
    for name in ("$x^{$", "_hidden", "a\x1b[31m", "\u4e2d"):
        rewrite(run, config__norm={"name": name}, config__method={"name": "_m$"})
        assert main(["report", str(run), "--plot", str(run / "curves.png")]) == 0
    capsys.readouterr()
