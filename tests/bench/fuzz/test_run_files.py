"""Any change to the files of a run is reported in one line or harmless; no command ends in a traceback."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fuzzing import TINY, call, cases, folder, judge
from hypothesis import strategies as st

from tbbn.bench import config
from tbbn.bench.runs.saved import run_saved

FILES = (
    "record.json",
    "config.toml",
    "predictions.safetensors",
    "checkpoint.safetensors",
    "checkpoint.previous.safetensors",
)
COMMANDS = (
    ["show"],
    ["show", "--json"],
    ["show", "--format", "latex"],
    ["report"],
    ["report", "--format", "md"],
    ["report", "--format", "csv"],
    ["report", "--json"],
    ["report", "--format", "tex"],
    ["report", "--plot", "curves.png"],
    ["report", "--html", "page.html"],
    ["verify"],
    ["verify", "--json"],
    ["resume", "--quiet"],
)


@cache
def originals() -> dict[str, Path]:
    """A finished run and one stopped in its second task, made once for all cases."""
    made = Path(tempfile.mkdtemp(prefix="tbbn-fuzz-"))
    layer = {key: config.parse_value(key, value) for key, value in TINY.items()}
    settings = config.resolve(("test", {**layer, "backbone": "small", "norm.name": "tbbn"}))
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count == 7

    run_saved(settings, made / "finished")
    run_saved(settings, made / "stopped", stop=stop)
    return {name: made / name for name in ("finished", "stopped")}


@pytest.fixture(scope="module", autouse=True)
def no_traces() -> Any:
    yield
    if originals.cache_info().currsize:
        shutil.rmtree(originals()["finished"].parent)
        originals.cache_clear()


def resealed(content: bytes) -> bytes:
    """The content with a matching checksum."""
    found = re.search(rb'"sha256": ?"([0-9a-f]{64})"', content)
    if found is None:
        return content
    start, end = found.span(1)
    blank = content[:start] + b"0" * 64 + content[end:]
    return content[:start] + hashlib.sha256(blank).hexdigest().encode() + content[end:]


JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from([0, 1, -1, 2, 99, 2**63, 10**40, 0.5, -0.5, 1e308, float("nan"), float("inf")]),
        st.sampled_from(
            ["", "x", "\x1b[31mred\x1b[0m", "a\nb", "=cmd()", "a|b", "[/b]", "$x", "_", "\ud800", "\u202e", "9" * 5000]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["", "name", "a.b", "x"]), inner, max_size=2)
    ),
    max_leaves=5,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON tree."""
    found = [path]
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, value in inside:
        found += places(value, (*path, key))
    return found


def changed(tree: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    if not path:
        return value
    tree = dict(tree) if isinstance(tree, dict) else list(tree)
    key, *rest = path
    if rest:
        tree[key] = changed(tree[key], tuple(rest), how, value)
    elif how == "delete":
        del tree[key]
    elif how == "double" and isinstance(tree, list):
        tree.append(tree[key])
    else:
        tree[key] = value
    return tree


def header(content: bytes) -> tuple[Any, bytes]:
    """The parsed header of a safetensors file, its state parsed too, and the bytes of the tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    tree = json.loads(content[8:end])
    metadata = tree.get("__metadata__", {})
    if "state" in metadata:
        metadata["state"] = json.loads(metadata["state"])
    return tree, content[end:]


def with_header(tree: Any, tensors: bytes) -> bytes:
    metadata = tree.get("__metadata__") if isinstance(tree, dict) else None
    if isinstance(metadata, dict) and "state" in metadata:
        tree = {**tree, "__metadata__": {**metadata, "state": json.dumps(metadata["state"])}}
    text = json.dumps(tree, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + tensors


@st.composite
def byte_changes(draw: st.DrawFn, content: bytes) -> bytes:
    place = draw(st.integers(0, max(0, len(content) - 1)))
    if draw(st.booleans()):
        place = min(place, 400)  # most of the structure is at the start of a file
    how = draw(st.sampled_from(["flip", "truncate", "insert", "cut", "fill"]))
    if how == "flip":
        return content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
    if how == "truncate":
        return content[:place]
    if how == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=20)) + content[place:]
    length = draw(st.integers(1, 50))
    return content[:place] + (b"\0" * length if how == "fill" else b"") + content[place + length :]


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, str, bytes | None, list[str], bool]:
    """A run, a file, its new content, a command, and whether the checksum matches."""
    which = draw(st.sampled_from(["finished", "stopped"]))
    name = draw(st.sampled_from(FILES))
    content = (originals()[which] / name).read_bytes()
    kind = draw(st.sampled_from(["bytes", "bytes", "tree", "tree", "tree", "swap", "missing"]))
    seal = draw(st.booleans())
    new: bytes | None
    if kind == "missing":
        new = None
    elif kind == "swap":
        new = (originals()[which] / draw(st.sampled_from(FILES))).read_bytes()
    elif kind == "bytes" or name == "config.toml":
        new = draw(byte_changes(content))
    else:
        tree, rest = header(content) if name.endswith("safetensors") else (json.loads(content), b"")
        path = draw(st.sampled_from(places(tree)))
        how = draw(st.sampled_from(["replace", "replace", "delete", "double"]))
        tree = changed(tree, path, how, draw(JUNK))
        if name == "record.json" and isinstance(tree, dict) and draw(st.booleans()):
            tree.pop("sha256", None)
        new = with_header(tree, rest) if name.endswith("safetensors") else json.dumps(tree, indent=1).encode()
    if new is not None and seal:
        new = resealed(new)
    return which, name, new, draw(st.sampled_from(COMMANDS)), seal


@cases(60, 1000, damages())
def test_damage_is_noticed_or_harmless(case: tuple[str, str, bytes | None, list[str], bool]) -> None:
    which, name, new, command, sealed = case
    with folder() as place:
        directory = place / "run"
        shutil.copytree(originals()[which], directory)
        if new is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(new)
            if name == "checkpoint.safetensors" and sealed:  # otherwise the previous one would be used
                (directory / "checkpoint.previous.safetensors").write_bytes(new)
        words = [str(place / word) if word in ("curves.png", "page.html") else word for word in command[1:]]
        code, out, err = call(command[0], str(directory), *words)
        judge(code, out, err, allowed=(0, 1, 2, 3) if command[0] in ("verify", "resume") else (0, 2))
        whole = new is None or new in [(originals()[which] / other).read_bytes() for other in FILES]
        if command[0] == "verify" and not whole and not sealed:
            assert code in (1, 2), f"a changed {name} was found true"
