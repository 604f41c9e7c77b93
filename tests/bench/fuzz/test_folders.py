"""Any folder tree is a data set or is refused in one line and leaves nothing behind."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from fuzzing import cases, folder, run
from hypothesis import strategies as st


def picture(kind: str) -> bytes:
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    if kind == "16bit":
        image: Any = PIL.Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    else:
        image = PIL.Image.fromarray(pixels[:4] if kind == "flat" else pixels).convert(
            {"grey": "L", "alpha": "RGBA"}.get(kind, "RGB")
        )
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


PICTURES = {kind: picture(kind) for kind in ("plain", "grey", "alpha", "16bit", "flat")}
NAMES = st.one_of(
    st.sampled_from(
        [
            "a",
            "b",
            "c",
            "A",
            "a ",
            "0",
            "00",
            "10",
            "-1",
            ".hidden",
            "val_annotations.txt",
            "images",
            "\u202e",
            "a\nb",
            "é",
            "e\u0301",
        ]
    ),
    st.text(min_size=1, max_size=8).filter(
        lambda name: "/" not in name and "\0" not in name and name not in (".", "..")
    ),
    st.binary(min_size=1, max_size=4)
    .map(os.fsdecode)
    .filter(lambda name: "/" not in name and "\0" not in name and name not in (".", "..")),
)
CONTENTS = st.one_of(
    st.sampled_from(sorted(PICTURES)).map(lambda kind: ("file", PICTURES[kind])),
    st.tuples(st.just("file"), st.binary(max_size=30)),
    st.integers(1, 80).map(lambda n: ("file", PICTURES["plain"][:n])),
    st.tuples(st.integers(8, 90), st.integers(0, 255)).map(lambda p: ("file", flipped(PICTURES["plain"], *p))),
    st.sampled_from(
        [("folder", None), ("link", "."), ("link", ".."), ("link", "nowhere"), ("link", "self"), ("pipe", None)]
    ),
)


def flipped(content: bytes, place: int, value: int) -> bytes:
    place %= len(content)
    return content[:place] + bytes([value]) + content[place + 1 :]


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Paths and their content; mostly complete data sets with something odd in them."""
    tree: dict[str, tuple[str, Any]] = {}
    classes = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    test = draw(st.sampled_from(["test", "test", "test", "val", "tset"]))
    for part in ("train", test):
        for name in classes:
            for number in range(draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 3))):
                tree[f"{part}/{name}/{number}.png"] = ("file", PICTURES["plain"])
    for _ in range(draw(st.integers(0, 3))):
        where = draw(
            st.sampled_from(
                ["", "train", test, f"train/{classes[0]}", f"{test}/{classes[-1]}", f"train/{classes[0]}/deep"]
            )
        )
        name = draw(st.one_of(NAMES, st.sampled_from(["x.png", "y.JPG", "z.gif", "0.png", "x.webp"])))
        tree[f"{where}/{name}"] = draw(CONTENTS)
    words = []
    if draw(st.booleans()):
        words.append(f"--data.unreadable={draw(st.sampled_from(['skip', 'fail']))}")
    if draw(st.booleans()):
        words.append(f"--data.size={draw(st.sampled_from([1, 4, 8]))}")
    return tree, [*words, f"--data.tasks={draw(st.sampled_from([1, 1, 1, len(classes), 2]))}"]


def plant(root: Path, tree: dict[str, tuple[str, Any]]) -> None:
    for name, (kind, content) in tree.items():
        path = root / name.lstrip("/")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                path.write_bytes(content)
            elif kind == "folder":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            else:
                path.symlink_to(path.name if content == "self" else content)
        except OSError:  # a file in place of a folder, a name too long: the case is what could be written
            continue


@cases(50, 600, trees())
def test_a_tree_is_read_or_refused(case: tuple[dict[str, tuple[str, Any]], list[str]]) -> None:
    tree, words = case
    with folder() as place:
        (place / "set").mkdir()
        plant(place / "set", tree)
        words = [
            *words,
            f"--data.name=folder:{place / 'set'}",
            "--train.epochs=1",
            "--memory.budget=8",
            "--batch.size=4",
        ]
        run(place / "out", *words, "--device=cpu", "--threads=1", "--backbone=small")
