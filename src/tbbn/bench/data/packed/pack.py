"""Packing: a tree of image files decoded once, by several processes, into the shards of a packed data set.

Each shard is written beside its place, flushed and renamed, and then gets a receipt: a small JSON file with its
checksum and a digest of what it was made from. A pack that was killed goes on with the shards that have none; the index
is made of the receipts and written last.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tbbn.bench.data.packed.index import (
    INDEX,
    KIND,
    PARTS,
    SCHEMA,
    Packed,
    index_digest,
    is_packed,
    open_packed,
    read_index,
)
from tbbn.bench.data.packed.shards import Job, Shard
from tbbn.bench.data.packed.workers import Workers
from tbbn.bench.data.sources.folders import chosen_classes, list_folder
from tbbn.bench.data.sources.images import UNREADABLE, Listing, Progress
from tbbn.bench.files import LOCK, is_leftover, locked, write_atomic
from tbbn.errors import UserError, printable, unknown_name

SIZE = 256
CHANNELS = 3
SHARD_BYTES = (1 << 22, 1 << 28)  # least and most
_SHARDS = 256  # at most, where that is possible: one process writes a shard, and there should be some for each
_PLAN = "plan.json"
_OURS = re.compile(r"(index|plan)\.json|\.lock|(train|test)-\d{5}\.(u8|json)")


@dataclass(frozen=True)
class Outcome:
    """What lies in the folder after packing."""

    packed: Packed
    n_bytes: int
    decoded: int  # images decoded this time


def pack(
    source: Path,
    dest: Path,
    *,
    size: int = SIZE,
    workers: int | None = None,
    classes: Path | None = None,
    unreadable: str = "fail",
    overwrite: bool = False,
    shard_bytes: int | None = None,
    on_progress: Progress | None = None,
) -> Outcome:
    """Pack the tree `source` of train/<class>/* and test or val/<class>/* into the folder `dest`.

    Images that all have one size, of at most `size` on both sides, are stored as they are. Others are resized so that the
    shorter side is `size` and cut to the centre square. `classes` names a file that picks and orders classes.
    `unreadable` is "fail" or "skip"; either way every image is tried once, and the error names and counts the bad ones.
    """
    if unreadable not in UNREADABLE:
        raise unknown_name("way to treat unreadable images", unreadable, UNREADABLE)
    for option, value in (("--size", size), ("--workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"pack: {option} must be at least 1, got {value}")
    chosen = None if classes is None else chosen_classes(classes)
    names, _, listings = list_folder("pack", source, chosen, _test_names(source))
    _check_folder(dest)
    with locked(dest), Workers(workers) as pool:
        plan = _stored(source, dest, listings, size, shard_bytes, pool)
        (channels, height, width), square, each = plan["shape"], plan["square"], plan["each"]
        shape = (channels, height, width)
        jobs = {
            part: _jobs(source, dest / part, listing, shape, square, each)
            for part, listing in zip(PARTS, listings, strict=True)
        }
        todo = _left(dest, [job for own in jobs.values() for job in own], overwrite)
        write_atomic(
            dest / _PLAN, json.dumps(plan).encode()
        )  # not before: what is refused leaves the other set's as it is
        _check_room(dest, todo)
        n_all, n_todo = sum(len(listing.files) for listing in listings), sum(len(job.images) for job in todo)
        pool.write(todo, None if on_progress is None else lambda done: on_progress(n_all - n_todo + done, n_all))
        if todo or not is_packed(dest):
            _finish(dest, names, shape, jobs, unreadable)
    found = open_packed(dest)
    return Outcome(found, sum(images.shape.numel() for images in found.images), n_todo)


def _shard_images(n: int, row: int) -> int:
    """Images of ``row`` bytes in a shard of a set of ``n``: a power of two of bytes, so that one image more seldom matters.

    However many workers there are: others can go on with it.
    """
    least, most = SHARD_BYTES
    wanted = 1 << max(0, -(-n * row // _SHARDS) - 1).bit_length()
    return max(1, min(most, max(least, wanted)) // row)


def _test_names(source: Path) -> tuple[str, str]:
    """Where to look for the test images: ImageNet's and Tiny-ImageNet's published test/ have no labels."""
    test = source / "test"
    labelled = test.is_dir() and any((test / entry.name).is_dir() for entry in (source / "train").glob("*"))
    return ("test", "val") if labelled else ("val", "test")


def _stored(
    source: Path, dest: Path, listings: Sequence[Listing], size: int, shard_bytes: int | None, pool: Workers
) -> dict[str, Any]:
    """The shape (C, H, W) of the stored images, whether they are squares cut from others, and how many ("each") a shard has.

    Found once, then kept: what has been begun goes on so.
    """
    made_from = hashlib.sha256(repr((SCHEMA, size)).encode())
    for listing in listings:
        made_from.update(_listing_digest(source, listing.files, listing.labels))
    plan = _plan(dest, made_from.hexdigest())
    if plan is None:
        files = [file for listing in listings for file in listing.files]
        found = pool.common_shape(files, size, CHANNELS)
        channels, height, width = found or (CHANNELS, size, size)
        plan = {"made_from": made_from.hexdigest(), "shape": [channels, height, width], "square": found is None}
        plan["each"] = _shard_images(len(files), channels * height * width)
    if shard_bytes is not None:
        channels, height, width = plan["shape"]
        plan["each"] = max(1, shard_bytes // (channels * height * width))
    return plan


def _plan(dest: Path, made_from: str) -> dict[str, Any] | None:
    """What was decided when this was begun; None if nothing was, or of other images."""
    try:
        plan = json.loads((dest / _PLAN).read_text())
        if plan["made_from"] == made_from:
            channels, height, width = map(int, plan["shape"])
            large = SHARD_BYTES[1] // (channels * height * width)  # in sets from before this was written down
            each = max(1, int(plan.get("each", large)))
            return {**plan, "shape": [channels, height, width], "square": bool(plan["square"]), "each": each}
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError):  # there is none, or it is of no use
        pass
    return None


def _listing_digest(source: Path, files: Sequence[Path], labels: Sequence[int]) -> bytes:
    digest = hashlib.sha256()
    for file, label in zip(files, labels, strict=True):
        digest.update(f"{file.relative_to(source)}\0{_state(file)}\0{label}\n".encode(errors="surrogateescape"))
    return digest.digest()


def _jobs(
    source: Path, stem: Path, listing: Listing, shape: tuple[int, int, int], square: bool, each: int
) -> list[Job]:
    jobs = []
    for number, start in enumerate(range(0, len(listing.files), each)):
        files, labels = listing.files[start : start + each], listing.labels[start : start + each]
        digest = hashlib.sha256(repr((SCHEMA, shape, square)).encode())
        digest.update(_listing_digest(source, files, labels))
        name = stem.with_name(f"{stem.name}-{number:05}.u8")
        jobs.append(Job(name, source, files, labels, shape, square, digest.hexdigest()))
    return jobs


def _state(file: Path) -> str:
    """What tells a file from a changed one without reading it."""
    try:
        state = file.stat()
    except OSError:
        return "missing"
    return f"{state.st_size} {state.st_mtime_ns}"


def _left(dest: Path, jobs: Sequence[Job], overwrite: bool) -> list[Job]:
    """The shards that are still to be written; what is in the way of them is removed."""
    wanted = {job.file.name: job for job in jobs}
    if is_packed(dest) and _same(dest, wanted):
        indexed = _indexed(dest)
        return [job for job in jobs if _size(job.file) != indexed[job.file.name].images * job.row]
    if is_packed(dest) and not overwrite:
        raise UserError(
            f"{dest}: holds a packed set of other images, or of another size; choose another folder, or --overwrite"
        )
    (dest / INDEX).unlink(missing_ok=True)
    for entry in dest.iterdir():
        if entry.name not in (LOCK, _PLAN, *wanted) and entry.with_suffix(".u8").name not in wanted:
            entry.unlink()
    return [job for job in jobs if not job.is_done()]


def _indexed(dest: Path) -> dict[str, Shard]:
    index = read_index(dest)
    return {shard["file"]: Shard(**shard) for part in PARTS for shard in index["shards"][part]}


def _same(dest: Path, wanted: dict[str, Job]) -> bool:
    """Whether the whole set that lies there was made from what these jobs are made from."""
    try:
        indexed = _indexed(dest)
    except UserError:  # damaged, or of another version: no shard of it is trusted
        return False
    return {file: shard.digest for file, shard in indexed.items()} == {f: job.digest for f, job in wanted.items()}


def _finish(
    dest: Path, names: Sequence[str], shape: tuple[int, int, int], jobs: dict[str, list[Job]], unreadable: str
) -> None:
    """Write the index from the receipts, and remove these."""
    before = _indexed(dest) if is_packed(dest) else {}
    shards = {
        part: [job.read_receipt() if job.receipt.exists() else before[job.file.name] for job in own]
        for part, own in jobs.items()
    }
    broken = [entry for own in shards.values() for shard in own for entry in shard.unreadable]
    if broken and unreadable == "fail" and not before:
        file, reason = map(printable, broken[0])
        count = f"; {len(broken)} images are unreadable" if len(broken) > 1 else ""
        raise UserError(f"{file}: {reason}{count}; mend them and pack again, or leave them out with --unreadable skip")
    for part, own in shards.items():
        there = {label for shard in own for label, _ in shard.labels}
        missing = [name for label, name in enumerate(names) if label not in there]
        if missing:
            raise UserError(f"pack: class {printable(missing[0])!r} has no readable image in {part}; leave it out")
    index = {"kind": KIND, "schema": SCHEMA, "shape": list(shape), "classes": list(names)}
    index["shards"] = {part: [asdict(shard) for shard in own] for part, own in shards.items()}
    write_atomic(dest / INDEX, json.dumps({**index, "sha256": index_digest(index)}, indent=1).encode())
    for job in (job for own in jobs.values() for job in own):
        job.receipt.unlink(missing_ok=True)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _check_room(dest: Path, todo: Sequence[Job]) -> None:
    needed = sum(len(job.images) * job.row for job in todo)
    free = shutil.disk_usage(dest).free
    if needed > free:
        raise UserError(
            f"{dest}: needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; lower --size, or use another disk"
        )


def _check_folder(dest: Path) -> None:
    """Refuse a folder that holds anything but a packed set."""
    if dest.exists() and not dest.is_dir():
        raise UserError(f"{dest}: is a file; give a folder to pack into")
    for entry in dest.iterdir() if dest.is_dir() else ():
        if not _OURS.fullmatch(entry.name) and not is_leftover(entry):
            raise UserError(f"{dest}: holds {printable(entry.name)!r}, no part of a packed set; give an empty folder")
