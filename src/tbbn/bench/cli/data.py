"""``tbbn data pack`` and ``tbbn data check``: large data sets whose images are decoded only once."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tbbn.bench.cli.common import EXIT_FAILED, Command
from tbbn.errors import printable

_PACK = """Decode a folder of images once, into files that runs memory-map: SOURCE/train/<class>/* and SOURCE/val/<class>/*
(or test/), or Tiny-ImageNet as published. An interrupted pack continues where it stopped.

If all images have one size of at most --size, they are stored unchanged. Otherwise they are resized so that the shorter side
is --size, and centre-cropped to a square, like torchvision's Resize and CenterCrop. Evaluation then sees exactly what it
would see without packing; random resized crops are drawn inside that square, not in the whole image."""


def add(command: Command) -> None:
    example = "tbbn data pack imagenet100 imagenet100-packed && tbbn run --data packed:imagenet100-packed"
    data = command("data", _data, "Pack images for fast loading, and check packed data sets.", example)
    raw = argparse.RawDescriptionHelpFormatter
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION", help="pack or check")
    made = actions.add_parser("pack", help="decode a folder of images once", description=_PACK, formatter_class=raw)
    made.epilog = "example: tbbn data pack tiny-imagenet-200 data/tiny-imagenet-packed --workers 8"
    made.set_defaults(call=_pack)
    made.add_argument("source", metavar="SOURCE", type=Path, help="folder that holds train/ and val/ or test/")
    made.add_argument("dest", metavar="DEST", type=Path, help="output folder: new, empty, or from an interrupted pack")
    made.add_argument("--size", type=int, default=256, help="shorter side of the stored images (default: 256)")
    made.add_argument("--workers", type=int, help="worker processes (default: one per core)")
    made.add_argument("--classes", metavar="FILE", type=Path, help="text file with the classes to use, in order")
    made.add_argument(
        "--split", type=float, default=0.0, help="fraction of each class's images for testing, if there is no test set"
    )
    made.add_argument("--unreadable", default="fail", help="unreadable images: fail (default) or skip")
    made.add_argument("--overwrite", action="store_true", help="replace a packed set of different images")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.add_argument("--quiet", action="store_true", help="show no progress")
    line = "Read a packed set completely and compare it with its checksums."
    check = actions.add_parser("check", help="compare with the checksums", description=line, formatter_class=raw)
    check.epilog = "example: tbbn data check data/tiny-imagenet-packed"
    check.set_defaults(call=_check)
    check.add_argument("path", metavar="PATH", type=Path, help="folder of a packed set")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.add_argument("--quiet", action="store_true", help="show no progress")


def _data(args: argparse.Namespace) -> int:
    raise AssertionError("argparse requires an action")


def _pack(args: argparse.Namespace) -> int:
    from tbbn.bench.data.packed.pack import pack
    from tbbn.bench.progress import counter

    start = time.perf_counter()
    with counter("packing", "images", quiet=args.quiet) as on_progress:
        result = pack(
            args.source.expanduser(),
            args.dest.expanduser(),
            size=args.size,
            workers=args.workers,
            classes=args.classes,
            split=args.split,
            unreadable=args.unreadable,
            overwrite=args.overwrite,
            on_progress=on_progress,
        )
    seconds, packed = time.perf_counter() - start, result.packed
    n_train, n_test = (len(labels) for labels in packed.labels)
    found: dict[str, Any] = {
        "path": str(packed.folder),
        "train": n_train,
        "test": n_test,
        "classes": len(packed.classes),
        "shape": list(packed.images[0].shape[1:]),
        "bytes": packed.n_bytes,
        "shards": sum(len(images.shards) for images in packed.images),
        "decoded": result.decoded,
        "skipped": list(packed.skipped),
        "seconds": round(seconds, 3),
    }
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for file in packed.skipped:
        print(f"skipped, unreadable: {printable(file)}", file=sys.stderr)
    height, width = found["shape"][1:]
    what = f"{n_train} + {n_test} images of {len(packed.classes)} classes at {height}x{width}"
    how = f"{result.decoded} decoded in {seconds:.0f} s" if result.decoded else "already packed"
    skipped = f", {len(packed.skipped)} unreadable skipped" if packed.skipped else ""
    print(f"{packed.folder}: {what}, {packed.n_bytes / 2**30:.2f} GiB ({how}{skipped})")
    print(f"tbbn run --data packed:{packed.folder}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from tbbn.bench.data.packed.index import check_packed, open_packed
    from tbbn.bench.progress import counter

    folder = args.path.expanduser()
    with counter("checking", "bytes", quiet=args.quiet) as on_progress:
        found = check_packed(folder, on_progress)
    if not found.problems:
        open_packed(folder)
    if args.json:
        problems = [{"file": file, "problem": problem} for file, problem in found.problems]
        entry = {"path": str(folder), "shards": found.shards, "bytes": found.n_bytes, "problems": problems}
        print(json.dumps(entry, indent=1))
    else:
        state = f"{len(found.problems)} damaged" if found.problems else "OK"
        print(f"{folder}: {found.shards} shards, {found.n_bytes / 2**30:.2f} GiB: {state}")
        for file, problem in found.problems:
            print(f"  {file}: {problem}; delete it and run the same tbbn data pack again to restore it")
    return EXIT_FAILED if found.problems else 0
