"""Layers of settings to a config: names are checked, values get their types, the data set's and the protocol's own lie below."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from tbbn.bench.config.protocols import Values, implied
from tbbn.bench.config.settings import CHOICES, SECTIONS, Choice, RunConfig, names
from tbbn.errors import UserError, unknown_name


def resolve(*layers: tuple[str, Values]) -> RunConfig:
    """The config of these layers, each given with the name of where it comes from, for error messages."""
    values: dict[str, Any] = {}
    for where, layer in layers:
        for key, value in layer.items():
            _check_name(key, where)
            values[key] = _typed(key, value, where)
    below = implied(
        values.get("protocol", "clean"),
        values.get("data.name", "digits"),
        values.get("norm.name", "bn"),
        values.get("method.name", "ft"),
        values.get("quirks", ()),
        values.get("data.online", False),
    )
    return _build({**below, **values})


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
    shown = list(default) if isinstance(default, tuple) else default
    raise UserError(f"{where}: {key} must be {kind} (default {shown!r}), got {value!r}.")


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


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value
