"""Recipes: TOML files of settings with a ``[sweep]`` table of what to vary."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tbbn.bench.config import Values, merge, parse_value, read_toml, to_toml
from tbbn.errors import UserError

Layer = tuple[str, Values]  # the source of settings, for error messages, and the settings

RECIPE = "runs.toml"  # in a sweep's folder: the recipe of all its runs
_CHECKSUM = "# sha256 of the lines above: "  # the last line of a sweep's recipe
MANY_RUNS = 1000  # from this number on, the command asks for confirmation
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Axes:
    """The varied settings of a sweep: methods and norms, with options as in ``cn(groups=8)``, and seeds."""

    methods: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def n_runs(self) -> int:
        return max(1, len(self.methods)) * max(1, len(self.norms)) * max(1, len(self.seeds))


def check_number(n_runs: int) -> None:
    """Raise for more runs, or seeds, than fit in memory and in a folder."""
    if n_runs > MOST_RUNS:
        raise UserError(
            f"{n_runs} runs are more than the {MOST_RUNS} that a sweep may have; split it, for example by seeds: --seeds "
            "takes a list."
        )


def read_recipe(path: Path) -> tuple[dict[str, Any], Axes]:
    """The settings of a recipe file and its ``[sweep]`` table."""
    values = read_toml(path)
    sweep = {key.removeprefix("sweep."): values.pop(key) for key in list(values) if key.startswith("sweep.")}
    for option, value in sweep.items():
        if option not in ("methods", "norms", "seeds"):
            raise UserError(f"{path}: [sweep] has no option {option!r}; it takes: methods, norms, seeds.")
        kind = int if option == "seeds" else str
        if not isinstance(value, list) or not all(type(v) is kind for v in value):
            expected = "whole numbers" if kind is int else "names"
            raise UserError(f"{path}: sweep.{option} must be a list of {expected}, got {value!r}.")
    return values, Axes(**{option: tuple(value) for option, value in sweep.items()})


def recipe_text(layers: Sequence[Layer], axes: Axes) -> str:
    """A recipe file with these axes, the settings of all layers, and its checksum; later layers override earlier ones."""
    values, owners = merge(*layers)
    sweep = {name: entries for name, entries in asdict(axes).items() if entries}
    for axis, kind in (("methods", "method"), ("norms", "norm")):
        if axis in sweep:  # options of one norm move into its entry, so that the remaining ones apply to all
            owned = {key: (owners[key], values.pop(key)) for key in list(owners) if key.startswith(f"{kind}.")}
            values.pop(f"{kind}.name", None)
            sweep[axis] = [_with_options(kind, entry, owned) for entry in sweep[axis]]
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return _sealed(to_toml({**tree, "sweep": sweep}))


def _sealed(text: str) -> str:
    return f"{text}{_CHECKSUM}{hashlib.sha256(text.encode()).hexdigest()}\n"


def check_sealed(path: Path) -> None:
    """Raise for a sweep's recipe that was modified: its runs would get other settings than those done before."""
    text = path.read_bytes().decode(errors="replace")
    if text != _sealed(text.rpartition(_CHECKSUM)[0]):
        raise UserError(
            f"{path}: was changed or damaged after the sweep wrote it. Run the sweep's own command again to go on with it, "
            f"or start another sweep with this file: tbbn sweep {path} --name NAME"
        )


def _with_options(kind: str, entry: str, owned: dict[str, tuple[str, Any]]) -> str:
    """An entry of a sweep, with the options that other settings give for its name."""
    chosen = parse_choice(kind, entry)
    name = chosen.pop(f"{kind}.name")
    options = {key: value for key, (owner, value) in owned.items() if owner == name} | chosen
    inside = ",".join(f"{key.removeprefix(f'{kind}.')}={value}" for key, value in options.items())
    return f"{name}({inside})" if len(options) > len(chosen) else entry


def split_names(text: str) -> tuple[str, ...]:
    """Split names at top-level commas.

    >>> split_names("bn, cn(groups=8,eps=1e-5),tbbn")
    ('bn', 'cn(groups=8,eps=1e-5)', 'tbbn')
    """
    parts = re.split(r",(?![^()]*\))", text)  # not at a comma after which a bracket closes before one opens
    return tuple(part.strip() for part in parts if part.strip())


def parse_choice(kind: str, text: str) -> dict[str, Any]:
    """``name(option=value, ...)`` as settings.

    >>> parse_choice("norm", "cn(groups=8)")
    {'norm.name': 'cn', 'norm.groups': 8}
    """
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise UserError(f"{kind} must look like name or name(option=value), got {text!r}.")
    found: dict[str, Any] = {f"{kind}.name": match[1]}
    for part in filter(None, (p.strip() for p in (match[2] or "").split(","))):
        option, separator, value = (p.strip() for p in part.partition("="))
        if not separator or not option:
            raise UserError(f"{kind} {match[1]!r}: options must look like option=value, got {part!r}.")
        found[f"{kind}.{option}"] = parse_value(f"{kind}.{option}", value)
    return found


def parse_seeds(text: str) -> tuple[int, ...]:
    """A count of seeds, or a comma-separated list of them.

    >>> parse_seeds("3"), parse_seeds("0,5"), parse_seeds("7,")
    ((0, 1, 2), (0, 5), (7,))
    """
    takes = "--seeds takes a count or a list: 3, or 0,1,2 (one seed: '7,')"
    try:
        seeds = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"{takes}; got {text!r}.") from None
    if "," not in text and seeds:
        if seeds[0] < 1:
            raise UserError(f"{takes}; a count must be at least 1, got {text!r}.")
        check_number(seeds[0])
        seeds = tuple(range(seeds[0]))
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"{takes}; seeds must be distinct and not negative, got {text!r}.")
    return seeds
