"""Every number that affects a run: frozen dataclasses, TOML in and out, and the two protocols.

A config is made of layers, later ones over earlier ones: the fields' defaults, what suits the data set, the protocol, a TOML
file, the command line. Each layer is a flat mapping from dotted names (``train.epochs``) to values.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from tbbn.bench.config.protocols import (
    DATA,
    ONLINE,
    ONLINE_METHOD,
    PAPER,
    PAPER_DATA,
    PAPER_METHOD,
    PROTOCOLS,
    QUIRKS,
    Values,
)
from tbbn.errors import UserError, unknown_name

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


@dataclass(frozen=True)
class Choice:
    """A norm or a method by name, and its options; which options there are, the norm or the method says."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def dict(self) -> dict[str, Any]:
        return dict(self.options)

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={v}" for k, v in self.options)
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class DataConfig:
    name: str = "digits"  # tbbn list datasets
    root: str = "data"  # where data sets lie, and where downloads go
    download: bool = True  # whether missing data may be downloaded
    unreadable: str = "fail"  # an image file that cannot be read is an error, or left out: "skip"
    size: int = 0  # side of the stored images; 0: as they come
    crop: int = 0  # side of what the network sees; 0: the stored size
    tasks: int = 5  # in how many tasks the classes arrive
    stop_after: int = 0  # learn the first so many tasks only; 0: all
    base_classes: int = 0  # classes of the first task, where it is larger than the others
    class_order: str = "seed"  # "seed", "natural", "icarl", or class numbers with commas
    class_order_seed: int = -1  # -1: the run's seed
    validation: float = 0.0  # share of each class's training images held out
    online: bool = False  # a single pass over each task
    stream: str = "auto"  # read a packed set while training, "yes" or "no"; "auto": where it does not fit in memory
    test: str = "all"  # or "whole-batches": the last short batch of each task's test set is not evaluated


@dataclass(frozen=True)
class MemoryConfig:
    budget: int = 100  # exemplars in all; 0: none
    per_class: bool = False  # whether the budget is a number for each class, not a total
    rounding: str = "floor"  # of budget / classes: "floor" or "ceil"
    selection: str = "herding"  # or "random", "entropy", "distance", "reservoir" (online)
    shrink: str = "truncate"  # old classes keep the first of their order, or "reselect"


@dataclass(frozen=True)
class BatchConfig:
    size: int = 64  # rows of a batch, memory rows among them
    ratio: str = "3:1"  # current rows to memory rows
    length: str = "longer"  # an epoch is as long as the "longer" of the two sets, or "current", or "memory"
    last: str = "short"  # short last batches are used, or "drop"ped
    forward: str = "joint"  # one forward for the whole batch, or "separate" ones for its two parts
    current_from: str = "task"  # current rows are of the new task, or of its "union" with the memory
    memory_from: str = "all"  # online: memory rows are of all stored, the new task's among them, or of "past" tasks
    augment: str = "none"  # tbbn list augmentations
    evaluation: int = 500  # images at once where nothing is trained


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 20  # for each task
    lr: float = 0.1  # of SGD, at each task's start
    momentum: float = 0.9  # of SGD
    nesterov: bool = False  # Nesterov's momentum
    weight_decay: float = 5e-4  # of every parameter
    schedule: str = "multistep"  # of the learning rate; or "cosine", "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)  # of "multistep", as shares of the epochs
    gamma: float = 0.1  # of "multistep": the factor at each milestone
    clip_norm: float = 0.0  # largest norm of the gradient; 0: off
    clip_value: float = 0.0  # largest entry of the gradient; 0: off
    keep: str = "last"  # which epoch's weights stay: "last", or "best" by the validation loss of the current task


@dataclass(frozen=True)
class SaveConfig:
    tasks: str = "small"  # keep the state at each task's start: of "small" networks (up to 8 MiB), or "all", "none"


@dataclass(frozen=True)
class RunConfig:
    protocol: str = "clean"  # or "paper": trained as the authors did
    quirks: tuple[str, ...] = ()  # errors of the released code to reproduce: tbbn list quirks
    seed: int = 0  # of everything random
    device: str = "auto"  # a GPU if there is one; or "cpu", "cuda"
    precision: str = "fp32"  # or "tf32", "bf16": arithmetic of convolutions and products; statistics stay float32
    autotune: bool = False  # a GPU times its algorithms first: faster, but bits may differ from one process to the next
    threads: int = 0  # CPU threads; 0: torch's own choice
    backbone: str = "small"  # tbbn list backbones
    norm: Choice = Choice("bn")
    method: Choice = Choice("ft")
    data: DataConfig = field(default_factory=DataConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    @property
    def label(self) -> str:
        """What tables and curves call it. Options that other settings bring along, as ``data.online`` does, are left out."""
        names = self.norm.name, self.method.name
        implied = _implied(self.protocol, self.data.name, *names, self.quirks, self.data.online)

        def said(kind: str, chosen: Choice) -> Choice:
            return Choice(chosen.name, tuple((k, v) for k, v in chosen.options if implied.get(f"{kind}.{k}") != v))

        return f"{said('method', self.method)} + {said('norm', self.norm)}"


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "memory": MemoryConfig,
    "batch": BatchConfig,
    "train": TrainConfig,
    "save": SaveConfig,
}
CHOICES = ("norm", "method")


def resolve(*layers: tuple[str, Values]) -> RunConfig:
    """The config of these layers, each given with the name of where it comes from, for error messages."""
    values: dict[str, Any] = {}
    for where, layer in layers:
        for key, value in layer.items():
            _check_name(key, where)
            values[key] = _typed(key, value, where)
    implied = _implied(
        values.get("protocol", "clean"),
        values.get("data.name", "digits"),
        values.get("norm.name", "bn"),
        values.get("method.name", "ft"),
        values.get("quirks", ()),
        values.get("data.online", False),
    )
    return _build({**implied, **values})


@functools.cache
def _implied(protocol: str, data: str, norm: str, method: str, quirks: tuple[str, ...], online: bool) -> Values:
    """What these settings bring along: what suits the data set, and what protocol, quirks and a single pass ask for."""
    if protocol not in PROTOCOLS:
        raise unknown_name("protocol", protocol, PROTOCOLS)
    below: list[Values] = [DATA.get(data.split(":")[0], {})]
    if protocol == "paper":
        below += [
            PAPER,
            PAPER_DATA.get(data, {}),
            PAPER_METHOD.get(method, {}),
            PAPER_METHOD.get(f"{method}/{data}", {}),
        ]
    for quirk in quirks:
        if quirk not in QUIRKS:
            raise unknown_name("quirk", quirk, QUIRKS)
        if QUIRKS[quirk].applies(norm, method):
            below.append(QUIRKS[quirk].values)
    if online:
        below += [ONLINE, ONLINE_METHOD.get(method, {})]
    return {key: value for layer in below for key, value in layer.items()}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A TOML document as dotted names; ``norm = "gn"`` is short for ``norm.name = "gn"``, and so for method and data.

    >>> flatten({"norm": "gn", "train": {"epochs": 2}})
    {'norm.name': 'gn', 'train.epochs': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif not prefix and key in (*CHOICES, "data"):
            flat[f"{key}.name"] = value
        else:
            flat[prefix + key] = value
    return flat


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, as dotted names."""
    try:
        with open(path, "rb") as file:
            return flatten(tomllib.load(file))
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file.") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a TOML file.") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, numbers too long to read, tables too deep
        raise UserError(f"{path}: not a TOML file: {error}.") from None


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as nested tables, ready for TOML or JSON; :func:`flatten` and :func:`resolve` bring it back."""
    tree: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, Choice):
            tree[f.name] = {"name": value.name, **{k: _plain(v) for k, v in value.options}}
        elif is_dataclass(value):
            tree[f.name] = {g.name: _plain(getattr(value, g.name)) for g in fields(value)}
        else:
            tree[f.name] = _plain(value)
    return tree


def to_toml(config: RunConfig | Mapping[str, Any]) -> str:
    """The config, or the tables given, as a TOML document; of a config every setting is written out."""
    tree = to_dict(config) if isinstance(config, RunConfig) else config
    lines = [f"{k} = {_toml(v)}" for k, v in tree.items() if not isinstance(v, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def names() -> dict[str, Any]:
    """Every setting's dotted name and default, for the command line; norms' and methods' options are not among them."""
    default, found = RunConfig(), {}
    for f in fields(RunConfig):
        value = getattr(default, f.name)
        if f.name in SECTIONS:
            found.update({f"{f.name}.{g.name}": getattr(value, g.name) for g in fields(value)})
        else:
            found[f"{f.name}.name" if f.name in CHOICES else f.name] = value.name if f.name in CHOICES else value
    return found


@functools.cache
def notes() -> dict[str, str]:
    """What the comment beside each setting says, by dotted name, for the command line's help."""
    found = {}
    for prefix, kind in (("", RunConfig), *((f"{name}.", kind) for name, kind in SECTIONS.items())):
        for name, note in re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(kind), re.MULTILINE):
            found[prefix + name] = note
    return found


def parse_value(key: str, text: str) -> Any:
    """A setting's value from the command line, by the type of the setting; an option of a norm or a method by its looks."""
    default = names().get(key)
    if isinstance(default, tuple):
        parts = [p.strip() for p in text.split(",") if p.strip()]
        return tuple(float(p) if key == "train.milestones" and _is_number(p) else p for p in parts)
    if isinstance(default, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if _is_number(text, kind):
            return kind(text)
    return text


def _is_number(text: str, kind: type[int] | type[float] = float) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _check_name(key: str, where: str) -> None:
    section, _, name = key.partition(".")
    if section in CHOICES and name:
        return
    top = [f.name for f in fields(RunConfig)]
    if not name:
        if key in top and key not in SECTIONS and key not in CHOICES:
            return
        if key in SECTIONS:
            raise UserError(f"{where}: {key} is a section, not a setting; write [{key}] and its settings below.")
        raise UserError(f"{where}: {unknown_name('setting', key, top)}")
    if section not in SECTIONS:
        raise UserError(f"{where}: {unknown_name('section', section, [*SECTIONS, *CHOICES])}")
    options = [f.name for f in fields(SECTIONS[section])]
    if name not in options:
        raise UserError(f"{where}: [{section}] has no option {name!r}; {_nearest(name, options)}")


def _nearest(name: str, options: Iterable[str]) -> str:
    return str(unknown_name("option", name, options)).split("; ", 1)[1]


_hints = functools.cache(get_type_hints)  # costs more than everything else here


def _typed(key: str, value: Any, where: str) -> Any:
    section, _, name = key.partition(".")
    if section in CHOICES:
        if name == "name" and not isinstance(value, str):
            raise UserError(f"{where}: {key} must be a name, got {value!r}.")
        if not _is_value(value):
            raise UserError(f"{where}: {key} must be a number, text, true, false, or a list of these, got {value!r}.")
        _check_text(key, f"{name}{value}", where)
        return value
    owner = SECTIONS[section] if name else RunConfig
    default = next(f for f in fields(owner) if f.name == (name or section)).default
    hint = _hints(owner)[name or section]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list | tuple):
        inner = float if hint == tuple[float, ...] else str
        if all(isinstance(v, inner | int) and not isinstance(v, bool) for v in value):
            return tuple(inner(v) for v in value)
    elif hint is str and isinstance(value, str):
        _check_text(key, value, where)
        return value
    elif type(value) is hint:
        return value
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, "a list")
    raise UserError(f"{where}: {key} must be {kind} (default {_plain(default)!r}), got {value!r}.")


def _is_value(value: Any) -> bool:
    """Whether an option's value is one that JSON and TOML both hold."""
    return all(map(_is_value, value)) if isinstance(value, list | tuple) else isinstance(value, str | int | float)


def _check_text(key: str, value: str, where: str) -> None:
    """Refuse text that no config file could hold: Python spells bytes that are not UTF-8 by halves of signs."""
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise UserError(f"{where}: {key} must be text in UTF-8, got {value!r}.")


def _build(values: Values) -> RunConfig:
    made: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    for section, kind in SECTIONS.items():
        made[section] = kind(**{k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(section + ".")})
    for choice in CHOICES:
        own = {k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(choice + ".")}
        name = own.pop("name", getattr(RunConfig(), choice).name)
        made[choice] = Choice(name, tuple(sorted((k, _hashable(v)) for k, v in own.items())))
    return RunConfig(**made)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value


def _escaped(sign: str) -> str:
    return f"\\u{ord(sign):04x}" if ord(sign) < 0x10000 else f"\\U{ord(sign):08x}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A TOML basic string has JSON's escapes; what JSON lets stand and a terminal acts on is escaped too.
        text = json.dumps(value, ensure_ascii=False)
        return "".join(c if c.isprintable() else _escaped(c) for c in text)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)
