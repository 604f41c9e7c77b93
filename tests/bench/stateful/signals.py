"""Run as a program: signals at lines spread over a command: `report`, `pack`, `export`. Prints how many it sent, as JSON.

A report changes no run, and its picture is whole or absent. A pack continues after each signal, and its result is that of an
undisturbed one. An export leaves the folder that was there, or the new one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

import numpy as np
import PIL.Image
from forked import Ended, Fault, command, prepare
from world import TRAIN

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
Contents = dict[str, bytes]


def contents(folder: str) -> Contents:
    return {str(f): f.read_bytes() for f in sorted(Path(folder).rglob("*")) if f.is_file() and f.name != ".lock"}


def signalled(words: list[str], n: int, check: Callable[[Ended], None]) -> Counter[str]:
    """Send a signal at each of ``n`` lines, and check what it leaves; how many commands ended in which way."""
    whole = command(words, count=True)
    assert whole.code == 0, whole
    found = Counter[str]()
    for i in range(n):
        number = SIGNALS[i % len(SIGNALS)]
        ended = command(words, Fault("all", ((int(whole.lines["all"] * (i + 0.5) / n), number),)))
        found[{-number: f"died of {number.name}", 130: "interrupted", 0: "done"}.get(ended.code, str(ended))] += 1
        if ended.code == 130:
            assert ended.err.splitlines()[-1].startswith("tbbn: interrupted;"), ended
        assert "Traceback" not in ended.err and "unexpected" not in ended.err, ended
        check(ended)
    return found


def report(n: int) -> Counter[str]:
    for seed in ("0", "1"):
        assert command(["run", *TRAIN, "--seed", seed, "--name", f"runs/{seed}", "--quiet"]).code == 0
    words = ["report", "runs", "--format", "md", "--plot", "curves.png"]
    whole, before = command(words), contents("runs")
    picture = Path("curves.png").read_bytes()

    def check(ended: Ended) -> None:
        assert contents("runs") == before
        if Path("curves.png").exists():
            assert Path("curves.png").read_bytes() == picture
            Path("curves.png").unlink()
        assert ended.code or ended.out == whole.out, ended

    return signalled(words, n, check)


def pack(n: int) -> Counter[str]:
    dice = np.random.default_rng(0)
    for part, each in (("train", 6), ("test", 2)):
        for i in range(3 * each):
            file = Path(f"images/{part}/class{i % 3}/{i}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(dice.integers(0, 256, (8, 8, 3)).astype(np.uint8)).save(file)
    words = ["data", "pack", "images", "packed", "--workers", "1", "--quiet"]
    assert command(words).code == 0 and len(list(Path("packed").glob("train-*.u8"))) == 6
    whole = contents("packed")
    n_checked = 0

    def check(ended: Ended) -> None:
        nonlocal n_checked
        is_checked = command(["data", "check", "packed", "--quiet"]).code == 0
        assert is_checked == is_whole(), sorted(contents("packed"))
        n_checked += 1
        if ended.code == 0 or n_checked % 3 == 0:  # else the next command continues with what is there
            assert command(words).code == 0 and is_whole(), sorted(contents("packed"))
            shutil.rmtree("packed")

    def is_whole() -> bool:
        return whole.items() <= contents("packed").items()  # a kill may leave receipts of shards that are in the index

    shutil.rmtree("packed")
    return signalled(words, n, check)


def export(n: int) -> Counter[str]:
    for seed in ("0", "1"):
        assert command(["run", *TRAIN, "--seed", seed, "--name", f"runs/{seed}", "--quiet"]).code == 0
    first, second = (["export", f"runs/{seed}", "--out", "exports/x", "--overwrite"] for seed in "01")
    wanted = []
    for words in (first, second, first):
        assert command(words).code == 0
        wanted.append(contents("exports/x"))
    assert wanted[0] == wanted[2] != wanted[1] and len(wanted[1]) == 4

    def check(ended: Ended) -> None:
        found = contents("exports/x")
        assert found in wanted and (ended.code != 0 or found == wanted[1]), sorted(found)
        assert command(first).code == 0 and contents("exports/x") == wanted[0]
        assert [place.name for place in Path("exports").iterdir()] == ["x"], "leftovers are removed"

    return signalled(second, n, check)


def without_onnx() -> None:
    """Write a few bytes instead of an ONNX file, which takes seconds, and do not look for onnxruntime."""
    from tbbn.bench.interchange import export as exporting

    exporting._write_onnx = lambda scores, images, file: file.write_bytes(b"onnx" * 1000)  # type: ignore[assignment]
    exporting.find_spec = lambda name: None if name == "onnxruntime" else importlib.util.find_spec(name)  # type: ignore[assignment]


def small_shards(writer: ModuleType) -> None:
    """Shards of three images of 8x8 pixels, so that a small set has several."""
    writer.SHARD_BYTES = 3 * 192, 3 * 192


def main(what: str, n: int) -> None:
    from tbbn.bench.data.packed import writer

    prepare(TRAIN)
    small_shards(writer)
    without_onnx()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(json.dumps({"report": report, "pack": pack, "export": export}[what](n)))  # noqa: T201
        os.chdir("/")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
