"""``tbbn data pack`` and ``tbbn data check``: images decoded once, for sets of ImageNet's size."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tbbn.bench.cli.common import EXIT_FAILED, Command
from tbbn.errors import printable

_PACK = """Decode a tree of images once, into shards that runs map into memory: SOURCE/train/<class>/* and
SOURCE/val/<class>/* (or test/), or Tiny-ImageNet as published. A pack that was interrupted goes on where it was.

Images of one common size up to --size are stored as they are. All others are resized so that the shorter side is --size,
and the centre square is kept, as torchvision's Resize and CenterCrop do. Evaluation sees what it would see without packing;
a random resized crop is drawn in that square, not in the whole photograph."""

Progress = Callable[[int, int], None]


def add(command: Command) -> None:
    example = "tbbn data pack imagenet100 imagenet100-packed && tbbn run --data packed:imagenet100-packed"
    data = command("data", _data, "Pack images for fast runs, and check what was packed.", example)
    raw = argparse.RawDescriptionHelpFormatter
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION", help="pack or check")
    made = actions.add_parser("pack", help="decode a tree of images once", description=_PACK, formatter_class=raw)
    made.epilog = "example: tbbn data pack tiny-imagenet-200 data/tiny-imagenet-packed --workers 8"
    made.set_defaults(call=_pack)
    made.add_argument("source", metavar="SOURCE", type=Path, help="the folder that holds train/ and val/ or test/")
    made.add_argument("dest", metavar="DEST", type=Path, help="the folder to pack into: new, empty, or begun before")
    made.add_argument("--size", type=int, default=256, help="shorter side of the stored images (default: 256)")
    made.add_argument("--workers", type=int, help="processes that decode (default: one a core)")
    made.add_argument("--classes", metavar="FILE", type=Path, help="pack these classes, one a line, in this order")
    made.add_argument("--unreadable", default="fail", help="images that cannot be read: fail (default) or skip")
    made.add_argument("--overwrite", action="store_true", help="replace a packed set of other images")
    made.add_argument("--json", action="store_true", help="the outcome as JSON")
    made.add_argument("--quiet", action="store_true", help="no progress")
    line = "Read all of a packed set and compare it with its checksums."
    check = actions.add_parser("check", help="compare with the checksums", description=line, formatter_class=raw)
    check.epilog = "example: tbbn data check data/tiny-imagenet-packed"
    check.set_defaults(call=_check)
    check.add_argument("path", metavar="PATH", type=Path, help="a packed set's folder")
    check.add_argument("--json", action="store_true", help="findings as JSON")
    check.add_argument("--quiet", action="store_true", help="no progress")


def _data(chosen: argparse.Namespace) -> int:
    raise AssertionError("an action is required")


def _pack(chosen: argparse.Namespace) -> int:
    from tbbn.bench.data.packed.pack import pack

    began = time.perf_counter()
    with _shown("packing", "images", chosen.quiet) as heard:
        outcome = pack(
            chosen.source.expanduser(),
            chosen.dest.expanduser(),
            size=chosen.size,
            workers=chosen.workers,
            classes=chosen.classes,
            unreadable=chosen.unreadable,
            overwrite=chosen.overwrite,
            on_progress=heard,
        )
    seconds = time.perf_counter() - began
    packed = outcome.packed
    n_train, n_test = (len(labels) for labels in packed.labels)
    found: dict[str, Any] = {
        "path": str(packed.folder),
        "train": n_train,
        "test": n_test,
        "classes": len(packed.classes),
        "shape": list(packed.images[0].shape[1:]),
        "bytes": outcome.n_bytes,
        "shards": sum(len(images.shards) for images in packed.images),
        "decoded": outcome.decoded,
        "skipped": list(packed.skipped),
        "seconds": round(seconds, 3),
    }
    if chosen.json:
        print(json.dumps(found, indent=1))
        return 0
    for file in packed.skipped:
        print(f"left out, unreadable: {printable(file)}", file=sys.stderr)
    height, width = found["shape"][1:]
    what = f"{n_train} + {n_test} images of {len(packed.classes)} classes at {height}x{width}"
    how = f"{outcome.decoded} decoded in {seconds:.0f} s" if outcome.decoded else "packed before"
    left_out = f", {len(packed.skipped)} unreadable left out" if packed.skipped else ""
    print(f"{packed.folder}: {what}, {outcome.n_bytes / 2**30:.2f} GiB ({how}{left_out})")
    print(f"tbbn run --data packed:{packed.folder}")
    return 0


def _check(chosen: argparse.Namespace) -> int:
    from tbbn.bench.data.packed.index import check_packed, open_packed

    folder = chosen.path.expanduser()
    with _shown("checking", "bytes", chosen.quiet) as heard:
        found = check_packed(folder, heard)
    if not found.problems:
        open_packed(folder)
    if chosen.json:
        problems = [{"file": file, "problem": problem} for file, problem in found.problems]
        entry = {"path": str(folder), "shards": found.shards, "bytes": found.n_bytes, "problems": problems}
        print(json.dumps(entry, indent=1))
    else:
        state = f"{len(found.problems)} damaged" if found.problems else "all whole"
        print(f"{folder}: {found.shards} shards, {found.n_bytes / 2**30:.2f} GiB, {state}")
        for file, problem in found.problems:
            print(f"  {file}: {problem}; delete it, and the same tbbn data pack as before makes it anew")
    return EXIT_FAILED if found.problems else 0


@contextmanager
def _shown(name: str, unit: str, quiet: bool) -> Iterator[Progress | None]:
    """Progress on standard error: a bar in a terminal, a line now and then elsewhere."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and find_spec("rich") is not None:
        with _bar(name, unit) as heard:
            yield heard
    else:
        yield _lines(name, unit)


@contextmanager
def _bar(name: str, unit: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{name}: looking at the files", total=None)
        yield lambda done, n: bar.update(task, description=name, completed=done, total=n)


def _lines(name: str, unit: str, every: float = 10.0) -> Progress:
    said = began = time.monotonic()
    first = last = -1  # what was there before does not count for the speed

    def heard(done: int, n: int) -> None:
        nonlocal said, first, last
        now = time.monotonic()
        first = done if first < 0 else first
        if done > max(first, last) and (now - said >= every or done == n):
            said, last = now, done
            speed = (done - first) / (now - began)
            print(f"{name}: {done} of {n} {unit}, {speed:.0f} a second", file=sys.stderr, flush=True)

    return heard
