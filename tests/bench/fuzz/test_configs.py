"""Any config, valid or not, trains a tiny run or is refused in one line and leaves nothing behind."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import tomli_w
from fuzzing import TINY, call, cases, folder, judge, run
from hypothesis import strategies as st

from tbbn.bench import config as cfg
from tbbn.bench.config.protocols import PROTOCOLS, QUIRKS
from tbbn.registry import AUGMENTATIONS, BACKBONES, METHODS, NORMS

# Values of settings besides the default. Numbers of epochs are small, and image sizes small or absurd: a merely large value
# would be a valid config that trains for long.
CHOICES: dict[str, list[Any]] = {
    "protocol": sorted(PROTOCOLS),
    "quirks": sorted(QUIRKS),
    "seed": [0, 1, 2**31, 2**32 - 1, 2**64, 10**30],
    "device": ["cpu", "auto", "cuda:99", "meta", "xpu", "cpu:3"],
    "precision": ["fp32", "tf32", "bf16"],
    "threads": [0, 1, 2, 10**9],
    "backbone": ["small", "small", "small", *(name for name in BACKBONES if "110" not in name and "56" not in name)],
    "data.name": ["synthetic:4x6x2x8", "synthetic:4x3x1x4", "synthetic:3x2x1x4+synthetic:3x2x1x4", "synthetic:4x6x2x7"],
    "data.root": ["data", "/nowhere", "~", "~nobody", "d", "\0"],
    "data.size": [0, 1, 2, 4, 9, 16, 10**9],
    "data.crop": [0, 1, 2, 7, 8, 9, 10**9],
    "data.tasks": [1, 2, 3, 4, 10**9],
    "data.stop_after": [0, 1, 2, 3, 99],
    "data.base_classes": [0, 1, 2, 3, 4, 99],
    "data.class_order": ["seed", "natural", "icarl", "3,1,0,2", "0,1", "0,0,1,2", "0,1,2,", "1,x", ","],
    "data.class_order_seed": [-2, -1, 0, 5, 2**32 - 1, 2**32, 10**30],
    "data.validation": [0.0, 0.1, 0.5, 0.99, 1.0],
    "data.unreadable": ["fail", "skip"],
    "data.stream": ["auto", "yes", "no"],
    "data.test": ["all", "whole-batches"],
    "memory.budget": [0, 1, 3, 4, 8, 24, 10**9, 10**30],
    "memory.rounding": ["floor", "ceil"],
    "memory.selection": ["herding", "random", "entropy", "distance", "reservoir"],
    "memory.shrink": ["truncate", "reselect"],
    "batch.size": [1, 2, 3, 4, 64, 10**9, 10**30],
    "batch.ratio": [
        "3:1",
        "1:1",
        "1:3",
        "7:1",
        "1:7",
        "0:1",
        "1:0",
        "1:100",
        "100:1",
        "1",
        "1:1:1",
        "-1:1",
        "9" * 30 + ":1",
    ],
    "batch.length": ["longer", "current", "memory"],
    "batch.last": ["short", "drop"],
    "batch.forward": ["joint", "separate"],
    "batch.current_from": ["task", "union"],
    "batch.augment": sorted(AUGMENTATIONS),
    "batch.evaluation": [1, 3, 500, 10**30],
    "train.epochs": [1, 2],
    "train.lr": [1e-300, 1e-3, 0.1, 10.0, 1e30, 1e308],
    "train.momentum": [0.0, 0.9, 1.0, 5.0],
    "train.weight_decay": [0.0, 0.1, 1e30],
    "train.schedule": ["multistep", "cosine", "constant"],
    "train.milestones": [0.0, 0.5, 1.0],
    "train.gamma": [0.1, 1.0, 1e-300, 1e300],
    "train.clip_norm": [0.0, 1e-9, 1.0, 1e300],
    "train.clip_value": [0.0, 1e-9, 1.0, 1e300],
    "train.keep": ["last", "best"],
}
GARBAGE: list[Any] = [
    "",
    "x",
    "-1",
    "0",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "true",
    "[1]",
    "{}",
    "é\u202e\x1b[31m",
    "\ud800",
    "a" * 300,
]
NO_GARBAGE_BUT_TEXT = ("train.epochs",)  # a large number would take long
OPTIONS: dict[str, list[Any]] = {
    "groups": [1, 2, 4, 8, 3, 0, -1, 33, 10**9],
    "eps": [1e-5, 1e-3, 0.0, -1.0, 1e300],
    "momentum": [0.1, 0.0, 1.0, 2.0, -1.0],
    "rule": ["paper", "x"],
}


def in_words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def option_names(kind: str, name: str) -> dict[str, Any]:
    """The options of a method or a norm, with their defaults if known."""
    if kind == "method":
        return {f.name: f.default for f in fields(METHODS.get(name))} if name in METHODS else {}
    if name not in NORMS:
        return {}
    norm = NORMS.get(name)
    layer = norm[-1] if isinstance(norm, tuple) else norm
    found = inspect.signature(layer).parameters.values()  # type: ignore[arg-type]
    return {p.name: p.default for p in found if p.default is not p.empty and p.name not in ("device", "dtype")}


@st.composite
def options(draw: st.DrawFn, kind: str, name: str, odd: bool) -> dict[str, str]:
    """Options of a method or a norm; if `odd`, also unknown ones and values of any type."""
    own = option_names(kind, name)
    found = {}
    for option in draw(
        st.lists(st.sampled_from([*own, "nothing"] if odd or not own else [*own]), max_size=2, unique=True)
    ):
        if option not in own and not odd:
            continue
        default = own.get(option)
        values = [True, False] if isinstance(default, bool) else OPTIONS.get(option, [1, 2, 0.5, 0, 3.0])
        values = [0, 1, 2] if "epochs" in option else values  # keep it short
        values = [*values, -1, "x", True, "0.5"] if odd else values
        found[option] = in_words(draw(st.sampled_from(values)))
    # Second phases are long by default.
    return found | {o: "1" for o in own if "epochs" in o and o not in found}


@st.composite
def configs(draw: st.DrawFn) -> list[str]:
    """Words of the command line: a tiny run, and up to five settings that are valid, nearly valid or invalid."""
    odd = draw(st.integers(0, 2)) == 0
    known = {key: setting.default for key, setting in cfg.SETTINGS.items()}
    given = dict(TINY) | {"backbone": "small"}
    names = [key for key in known if key not in ("norm.name", "method.name")]
    for key in draw(st.lists(st.sampled_from(names), max_size=5, unique=True)):
        value = draw(st.sampled_from(CHOICES.get(key, [True, False] if isinstance(known[key], bool) else [known[key]])))
        if odd and key not in NO_GARBAGE_BUT_TEXT and draw(st.integers(0, 3)) == 0:
            value = draw(st.sampled_from(GARBAGE))
        given[key] = in_words(value)
    if given.get("data.online") == "true":
        given.pop("train.epochs")
    if given.get("train.keep") == "best" and "data.validation" not in given:
        given["data.validation"] = "0.2"
    words = [f"--{key}={value}" for key, value in given.items()]
    for kind, registry in (("norm", NORMS), ("method", METHODS)):
        name = draw(st.sampled_from([*registry, *(["zzz", "", "a(b", "bn,bn"] if odd else [])]))
        words.append(f"--{kind}={name}")
        words += [f"--{kind}.{option}={value}" for option, value in draw(options(kind, name, odd)).items()]
    if draw(st.integers(0, 9)) == 0:
        words.append(
            draw(st.sampled_from(["--lanes=2", "--seeds=2", "--sed=1", "--overwrite", "--dry-run", "--json", "extra"]))
        )
    return words


@cases(50, 1000, configs())
def test_a_config_runs_or_is_refused(words: list[str]) -> None:
    """As settings on the command line."""
    with folder() as place:
        if "--dry-run" in words or "--seeds=2" in words:
            judge(*call("run", *words, "--out", str(place / "out"), "--quiet"), allowed=(0, 1, 2, 3))
            return
        run(place / "out", *words)


def in_toml(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip()


SCALARS = st.one_of(
    st.sampled_from(["1", "-1", "0.5", "nan", "inf", "-inf", "true", '""', '"x"', '"\\u0000"', "1979-05-27", "9" * 40]),
    st.text(st.characters(codec="utf-8"), max_size=5).map(in_toml),
)
LISTS = st.lists(SCALARS, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
VALUES = st.one_of(
    SCALARS,
    SCALARS,
    LISTS,
    LISTS.map(lambda inner: "{a = " + inner + "}"),
    SCALARS.map(lambda inner: "[[{a = " + inner + "}]]"),
)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """TOML documents with our sections and values of the right type or any other; and some that are not TOML."""
    odd = draw(st.booleans())
    lines = []
    sections = st.sampled_from([*cfg.SECTIONS, *(["norm", "method", "sweep", "zzz"] if odd else [])])
    for section in ["", *draw(st.lists(sections, max_size=3, unique=True))]:
        kind = cfg.SECTIONS.get(section, cfg.RunConfig)
        names = [f.name for f in fields(kind) if f.name not in (*cfg.SECTIONS, "norm", "method")]
        if section in ("norm", "method", "sweep", "zzz"):
            names = ["name", "groups", "norms", "methods"]
        lines += [f"[{section}]"] if section else []
        for name in draw(st.lists(st.sampled_from([*names, *(["zzz"] if odd else [])]), max_size=2, unique=True)):
            key = f"{section}.{name}" if section else name
            if name in ("epochs", "threads"):  # keep it short
                continue
            value = draw(st.sampled_from(CHOICES.get(key, [True, 1, "x"])))
            if key in ("norm.name", "method.name"):
                value = draw(st.sampled_from(sorted(NORMS if section == "norm" else ("ft", "er", "wa"))))
            value = [value] if key in ("quirks", "train.milestones") else value
            lines.append(f"{name} = {draw(VALUES) if odd and draw(st.booleans()) else in_toml(value)}")
    text = "\n".join(lines).encode(errors="surrogatepass")
    if odd and draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.binary(max_size=6)) + text[place:]
    return text


@cases(35, 400, documents())
def test_a_config_file_runs_or_is_refused(text: bytes) -> None:
    """As a TOML file, where values have types; options on the command line make it tiny."""
    with folder() as place:
        (place / "a.toml").write_bytes(text)
        words = [f"--{key}={value}" for key, value in TINY.items()]
        for kind, name in (("norm", "bn"), ("method", "ft")):
            words += [] if f"[{kind}]".encode() in text else [f"--{kind}={name}"]
        run(place / "out", str(place / "a.toml"), *words, "--backbone=small", "--seeds=0,")


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a." * 2_000 + "b = 1", "[" + "a." * 5_000 + "b]"])
def test_a_deeply_nested_config_file_is_one_line(text: str) -> None:
    with folder() as place:
        (place / "a.toml").write_text(text)
        assert run(place / "out", str(place / "a.toml")) == 2
