"""Write a packed set: image files decoded once, in parallel, into shards.

Every shard is written atomically and then gets a receipt, a small JSON file with its checksum and a digest of its sources.
Packing that was killed continues with the shards that have no valid receipt. The index is made from the receipts and written
last.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from tbbn.bench.data.packed.index import (
    INDEX,
    KIND,
    PARTS,
    SCHEMA,
    PackedSet,
    index_digest,
    is_packed,
    open_packed,
    read_index,
)
from tbbn.bench.data.packed.shards import Shard, ShardJob
from tbbn.bench.data.packed.workers import Workers
from tbbn.bench.data.sources.decoding import unreadable_error
from tbbn.bench.data.sources.listing import FolderListing
from tbbn.bench.data.types import Listing, Progress
from tbbn.bench.files import LOCK, is_leftover, locked, write_atomic
from tbbn.errors import UserError, printable

CHANNELS = 3
SHARD_BYTES = (1 << 22, 1 << 28)  # minimum and maximum
_MAX_SHARDS = 256  # if SHARD_BYTES allows it; not fewer, because every worker needs several shards to write
_STORAGE = "storage.json"
_OWN_FILES = re.compile(r"(index|storage)\.json|\.lock|(train|test)-\d{5}\.(u8|json)")


class NoRoom(UserError):
    """The disk has no room for the set."""


@dataclass(frozen=True)
class PackResult:
    packed: PackedSet
    decoded: int  # images decoded this time


@dataclass(frozen=True)
class Storage:
    """How images are stored. Decided once and kept in `storage.json`, so that packing continues the same way."""

    made_from: str  # digest of the files, their labels and the requested size
    shape: tuple[int, int, int]  # (C, H, W) of every stored image
    square: bool  # whether images are resized and cut to that shape; otherwise all have it
    images_per_shard: int


@dataclass(frozen=True, eq=False)
class PackRequest:
    """What to pack: the files of a folder, as squares of side `size`.

    With `keep_common_size`, images that all have one size, of at most `size` on both sides, keep it.
    """

    listed: FolderListing
    size: int
    keep_common_size: bool = True
    shard_bytes: int | None = None  # by default chosen by `images_per_shard`
    skip_option: str = "--unreadable skip"  # how the user leaves unreadable images out

    def images_per_shard(self, image_bytes: int) -> int:
        if self.shard_bytes is not None:
            return max(1, self.shard_bytes // image_bytes)
        return images_per_shard(self.listed.n_images, image_bytes)


def write_packed(
    request: PackRequest,
    dest: Path,
    *,
    workers: Workers,
    unreadable: str = "fail",
    overwrite: bool = False,
    wait: bool = False,
    on_progress: Progress | None = None,
) -> PackResult:
    """Bring the packed set in `dest` up to date with the request, decoding only what is missing.

    `overwrite` replaces a set of other images. If another process is packing into `dest`, this is an error; with `wait`,
    this process waits for it instead.
    """
    _check_folder(dest)
    fingerprints = [_fingerprints(request.listed.folder, listing) for listing in request.listed.listings]
    if (done := _up_to_date(request, dest, fingerprints)) is not None:
        return PackResult(done, 0)
    with locked(dest, wait=wait), workers:
        storage = _saved_storage(request, dest, fingerprints) or _decide_storage(request, fingerprints, workers)
        jobs = _jobs(request, dest, storage, fingerprints)
        todo = _unfinished(dest, [job for own in jobs.values() for job in own], overwrite)
        _check_room(dest, todo)
        # Written only now, because a refused request must not change another set's file.
        write_atomic(dest / _STORAGE, json.dumps(asdict(storage)).encode())
        n_all, n_todo = request.listed.n_images, sum(len(job.images) for job in todo)
        workers.write(todo, None if on_progress is None else lambda done: on_progress(n_all - n_todo + done, n_all))
        if todo or not is_packed(dest):
            _write_index(request, dest, storage.shape, jobs, unreadable)
        return PackResult(open_packed(dest), n_todo)


def images_per_shard(n: int, image_bytes: int) -> int:
    """Images in a shard of a set of `n`.

    The size of a shard is a power of two, so that adding an image seldom moves all others. It does not depend on the number
    of workers, so that packing may continue with another number.
    """
    least, most = SHARD_BYTES
    wanted = 1 << (-(-n * image_bytes // _MAX_SHARDS) - 1).bit_length()
    return max(1, sorted((least, wanted, most))[1] // image_bytes)


def _check_folder(dest: Path) -> None:
    """Refuse a folder that holds anything but a packed set."""
    if dest.exists() and not dest.is_dir():
        raise UserError(f"{dest}: is a file; choose a folder to pack into")
    for entry in dest.iterdir() if dest.is_dir() else ():
        if not _OWN_FILES.fullmatch(entry.name) and not is_leftover(entry):
            raise UserError(
                f"{dest}: holds {printable(entry.name)!r}, which is not part of a packed set; choose an empty folder"
            )


# What to store, and how. -----------------------------------------------------------------------------------------------


def _fingerprints(source: Path, listing: Listing) -> list[bytes]:
    """Each file's path, length, modification time and label, which reveal a changed file without reading it."""
    lines = []
    for file, label in zip(listing.files, listing.labels, strict=True):
        try:
            status = file.stat()
            state = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            state = "missing"
        lines.append(f"{file.relative_to(source)}\0{state}\0{label}\n".encode(errors="surrogateescape"))
    return lines


def _digest(what: object, lines: Sequence[bytes]) -> str:
    digest = hashlib.sha256(repr(what).encode())
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def _made_from(request: PackRequest, fingerprints: Sequence[list[bytes]]) -> str:
    listed = [_digest("", lines) for lines in fingerprints]
    return _digest((SCHEMA, request.size, request.keep_common_size, *listed), ())


def _saved_storage(request: PackRequest, dest: Path, fingerprints: Sequence[list[bytes]]) -> Storage | None:
    """The storage chosen by an earlier, unfinished packing of these images; None if there was none."""
    try:
        saved = json.loads((dest / _STORAGE).read_text())
        channels, height, width = map(int, saved["shape"])
        shape, square, per_shard = (channels, height, width), bool(saved["square"]), int(saved["images_per_shard"])
        if saved["made_from"] != _made_from(request, fingerprints) or min(*shape, per_shard) < 1:
            return None
    except (OSError, ValueError, TypeError, KeyError):  # missing or invalid
        return None
    if request.shard_bytes is not None:
        per_shard = request.images_per_shard(prod(shape))
    return Storage(saved["made_from"], shape, square, per_shard)


def _decide_storage(request: PackRequest, fingerprints: Sequence[list[bytes]], workers: Workers) -> Storage:
    common = None
    if request.keep_common_size:
        files = [file for listing in request.listed.listings for file in listing.files]
        common = workers.common_shape(files, request.size, CHANNELS)
    shape = common or (CHANNELS, request.size, request.size)
    made_from, per_shard = _made_from(request, fingerprints), request.images_per_shard(prod(shape))
    return Storage(made_from, shape, common is None, per_shard)


def _jobs(
    request: PackRequest, dest: Path, storage: Storage, fingerprints: Sequence[list[bytes]]
) -> dict[str, list[ShardJob]]:
    """The shards of each part."""
    shape, square, each = storage.shape, storage.square, storage.images_per_shard
    jobs: dict[str, list[ShardJob]] = {}
    for part, listing, lines in zip(PARTS, request.listed.listings, fingerprints, strict=True):
        jobs[part] = []
        for number, start in enumerate(range(0, len(listing.files), each)):
            some = slice(start, start + each)
            file = dest / f"{part}-{number:05}.u8"
            digest = _digest((SCHEMA, shape, square), lines[some])
            jobs[part].append(
                ShardJob(file, request.listed.folder, listing.files[some], listing.labels[some], shape, square, digest)
            )
    return jobs


# What exists already. --------------------------------------------------------------------------------------------------


def _up_to_date(request: PackRequest, dest: Path, fingerprints: Sequence[list[bytes]]) -> PackedSet | None:
    """The set in `dest` if it is complete and made from exactly these images. Needs no lock and no write permission."""
    storage = _saved_storage(request, dest, fingerprints)
    if storage is None:
        return None
    jobs = [job for own in _jobs(request, dest, storage, fingerprints).values() for job in own]
    return None if not _same_images(dest, jobs) or _damaged(dest, jobs) else open_packed(dest)


def _unfinished(dest: Path, jobs: Sequence[ShardJob], overwrite: bool) -> list[ShardJob]:
    """The shards still to be written; deletes files that stand in their place."""
    wanted = {job.file.name for job in jobs}
    if _same_images(dest, jobs):
        return _damaged(dest, jobs)
    if is_packed(dest) and not overwrite:
        raise UserError(
            f"{dest}: holds a packed set of other images or another size; choose another folder, or use --overwrite"
        )
    (dest / INDEX).unlink(missing_ok=True)
    for entry in dest.iterdir():
        if entry.name not in (LOCK, _STORAGE, *wanted) and entry.with_suffix(".u8").name not in wanted:
            entry.unlink()
    return [job for job in jobs if not job.is_done()]


def _same_images(dest: Path, jobs: Sequence[ShardJob]) -> bool:
    """Whether the complete set in `dest` was made from the same images as these jobs."""
    try:
        indexed = _indexed_shards(dest)
    except UserError:  # missing, damaged, or of another version: none of its shards is trusted
        return False
    return {name: shard.digest for name, shard in indexed.items()} == {job.file.name: job.digest for job in jobs}


def _damaged(dest: Path, jobs: Sequence[ShardJob]) -> list[ShardJob]:
    """The shards of a complete set that are missing or of a wrong size."""
    indexed = _indexed_shards(dest)

    def size(file: Path) -> int:
        return file.stat().st_size if file.is_file() else -1

    return [job for job in jobs if size(job.file) != indexed[job.file.name].images * job.image_bytes]


def _indexed_shards(dest: Path) -> dict[str, Shard]:
    index = read_index(dest)
    return {shard["file"]: Shard(**shard) for part in PARTS for shard in index["shards"][part]}


def _check_room(dest: Path, todo: Sequence[ShardJob]) -> None:
    needed = sum(len(job.images) * job.image_bytes for job in todo)
    free = shutil.disk_usage(dest).free
    if needed > free:
        raise NoRoom(
            f"{dest}: needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; lower --size, or use another disk"
        )


def _write_index(
    request: PackRequest, dest: Path, shape: tuple[int, int, int], jobs: dict[str, list[ShardJob]], unreadable: str
) -> None:
    """Write the index from the receipts, and delete the receipts."""
    before = (
        _indexed_shards(dest) if is_packed(dest) else {}
    )  # a repaired set has receipts for the repaired shards only
    shards = {
        part: [job.read_receipt() if job.receipt.exists() else before[job.file.name] for job in own]
        for part, own in jobs.items()
    }
    broken = [": ".join(entry) for own in shards.values() for shard in own for entry in shard.unreadable]
    if broken and unreadable == "fail" and not before:
        raise unreadable_error(printable(broken[0]), len(broken), request.listed.n_images, request.skip_option)
    for part, own in shards.items():
        labels = {label for shard in own for label, _ in shard.labels}
        empty = [name for label, name in enumerate(request.listed.classes) if label not in labels]
        if empty:
            raise UserError(
                f"{request.listed.folder}: class {printable(empty[0])!r} has no readable image in {part}; add some or remove it"
            )
    index = {"kind": KIND, "schema": SCHEMA, "shape": list(shape), "classes": list(request.listed.classes)}
    index["shards"] = {part: [asdict(shard) for shard in own] for part, own in shards.items()}
    write_atomic(dest / INDEX, json.dumps({**index, "sha256": index_digest(index)}, indent=1).encode())
    for job in (job for own in jobs.values() for job in own):
        job.receipt.unlink(missing_ok=True)
