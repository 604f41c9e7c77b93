"""Pack a folder of images, for `tbbn data pack`."""

from __future__ import annotations

from pathlib import Path

from tbbn.bench.data.packed.workers import Workers
from tbbn.bench.data.packed.writer import PackRequest, PackResult, write_packed
from tbbn.bench.data.sources.listing import chosen_classes, list_folder
from tbbn.bench.data.types import UNREADABLE, Progress
from tbbn.errors import UserError, unknown_name

SIZE = 256


def pack(
    source: Path,
    dest: Path,
    *,
    size: int = SIZE,
    workers: int | None = None,
    classes: Path | None = None,
    split: float = 0.0,
    unreadable: str = "fail",
    overwrite: bool = False,
    shard_bytes: int | None = None,
    on_progress: Progress | None = None,
) -> PackResult:
    """Pack the images in `source` (train/<class>/* and test/<class>/* or val/<class>/*) into the folder `dest`.

    If all images have one size, of at most `size` on both sides, they are stored unchanged. Otherwise they are resized
    so that the shorter side is `size`, and cut to the centre square. `classes` is a file that selects and orders
    classes; `split` divides a folder without test images. Every image is tried once. With `unreadable="fail"` a single error
    names the first unreadable image and counts them all; with "skip" they are left out.
    """
    if unreadable not in UNREADABLE:
        raise unknown_name("way to treat unreadable images", unreadable, UNREADABLE)
    for option, value in (("--size", size), ("--workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"pack: {option} must be at least 1, got {value}")
    if not 0 <= split < 1:
        raise UserError(f"pack: --split must be at least 0 and below 1, got {split}")
    chosen = None if classes is None else chosen_classes(classes)
    listed = list_folder("pack", source, chosen, _test_names(source), split)
    request = PackRequest(listed, size, shard_bytes=shard_bytes)
    return write_packed(
        request, dest, workers=Workers(workers), unreadable=unreadable, overwrite=overwrite, on_progress=on_progress
    )


def _test_names(source: Path) -> tuple[str, str]:
    """Which of test/ and val/ to try first. The published test/ of ImageNet and Tiny-ImageNet has no labels."""
    test = source / "test"
    labelled = any((test / entry.name).is_dir() for entry in (source / "train").glob("*"))
    return ("test", "val") if labelled else ("val", "test")
