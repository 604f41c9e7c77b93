"""Turn layers of settings into a config: check names, types and limits, and add the defaults that settings imply."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tbbn.bench.config.options import default_options
from tbbn.bench.config.protocols import Values, implied
from tbbn.bench.config.settings import CHOICES, PLACE, SECTIONS, SETTINGS, Choice, RunConfig, Setting, inside
from tbbn.errors import UserError, did_you_mean

Layer = tuple[str, Values]
_Choice = TypeVar("_Choice", bound=Choice)
_LONGEST = 200  # characters of a name or a value that an error repeats


def resolve(*layers: Layer | Values, **settings: Any) -> RunConfig:
    """Build a config from layers of settings. Later layers override earlier ones, and keywords override all layers.

    A layer is a mapping of settings, or a pair ``("where", mapping)``, whose name appears in errors. Names are dotted
    (``{"train.epochs": 2}``) or nested (``{"train": {"epochs": 2}}``). If a layer names a norm and sets options of it, a later
    layer with another norm drops those options. Options in a layer that names no norm are kept. Methods work the same way.

    >>> resolve({"method": "eeil", "train.epochs": 2}, seed=1).label
    'eeil + bn'
    """
    values, _ = merge(*layers, settings)
    deciding = ("protocol", "data.name", "norm.name", "method.name", "quirks", "data.online", "train.optimizer")
    below = implied(*(values.get(key, SETTINGS[key].default) for key in deciding))
    return complete(_build({**below, **values}))


def merge(*layers: Layer | Values) -> tuple[dict[str, Any], dict[str, str]]:
    """The checked settings of all layers by dotted name; and for each option given together with a name, that name."""
    values: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for layer in layers:
        where, tree = _named(layer)
        checked = {_checked_name(key, where): _checked_value(key, value, where) for key, value in flatten(tree).items()}
        for section in CHOICES:
            own = {key: value for key, value in checked.items() if key.startswith(f"{section}.")}
            name = own.pop(f"{section}.name", None)
            for key in own:
                owners.pop(key, None)
            if name is not None:
                for key in [k for k, owner in owners.items() if k.startswith(f"{section}.") and owner != name]:
                    del values[key], owners[key]
                owners |= dict.fromkeys(own, name)
        values |= checked
    return values, owners


def _named(layer: Layer | Values) -> Layer:
    if isinstance(layer, Mapping):
        return "settings", layer
    if isinstance(layer, tuple) and len(layer) == 2 and isinstance(layer[0], str) and isinstance(layer[1], Mapping):
        return layer
    raise UserError(
        f"resolve takes mappings such as {{'train.epochs': 2}}, or pairs ('where', mapping), got {_shown(layer)}."
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names. ``norm = "gn"`` is short for ``norm.name = "gn"``; also for method and data.

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
            flat[f"{prefix}{key}"] = value
    return flat


def without_place(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config as dotted names, without those in ``PLACE``, which say where its data are.

    >>> without_place({"data": {"name": "digits", "root": "/mnt"}})
    {'data.name': 'digits'}
    """
    return {key: value for key, value in flatten(tree).items() if key not in PLACE}


def parse_value(key: str, text: str) -> Any:
    """Parse a setting's value from the command line by the setting's type; the type of an option is guessed."""
    kind = SETTINGS[key].kind if key in SETTINGS else None
    if kind is str:
        return text
    if kind in (tuple[str, ...], tuple[float, ...]):
        parts = (p.strip() for p in text.split(",") if p.strip())
        return tuple(_number(p) if kind == tuple[float, ...] else p for p in parts)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return _number(text)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_settings(config: RunConfig) -> None:
    """Raise for the first setting outside its choices or limits, for configs that were not made by :func:`resolve`."""
    for key, setting in SETTINGS.items():
        _check_limits(setting, functools.reduce(getattr, key.split("."), config), "")


def _checked_name(key: str, where: str) -> str:
    section, _, name = key.partition(".")
    if key in SETTINGS or (section in CHOICES and name):
        return key
    if key in SECTIONS:
        raise UserError(f"{where}: {key} is a section, not a setting; write [{key}] and its settings below.")
    if len(key) > _LONGEST:
        raise UserError(f"{where}: unknown setting {_shown(key)}.")
    if section in SECTIONS:
        section, name = next((s, key[len(s) + 1 :]) for s in reversed(SECTIONS) if key.startswith(f"{s}."))
        own = [s.removeprefix(f"{section}.") for s in SETTINGS if s.startswith(f"{section}.")]
        raise UserError(
            f"{where}: [{section}] has no option {name!r}; choose one of: {', '.join(own)}.{did_you_mean(name, own)}"
        )
    known = [*SECTIONS, *CHOICES] if name else [s for s in SETTINGS if "." not in s]
    kind, wrong = ("section", section) if name else ("setting", key)
    near = nearest_setting(key)
    hint = f" Did you mean {near!r}?" if near else did_you_mean(wrong, known)
    raise UserError(f"{where}: unknown {kind} {wrong!r}; choose one of: {', '.join(known)}.{hint}")


def nearest_setting(name: str) -> str:
    """The setting meant by a name without its section or by a common synonym; empty if there is none.

    >>> nearest_setting("lr"), nearest_setting("weight-decay"), nearest_setting("optim"), nearest_setting("zzz")
    ('train.lr', 'train.weight_decay', 'train.optimizer', '')
    """
    plain = name.lower().replace("-", "_")
    if plain in _OTHER_WORDS:
        return _OTHER_WORDS[plain]
    # If several sections have the name, take the shortest: train.lr, not train.first.lr.
    return min((key for key in SETTINGS if key.rpartition(".")[2] == plain), key=len, default="")


_OTHER_WORDS = {
    "learning_rate": "train.lr",
    "optim": "train.optimizer",
    "wd": "train.weight_decay",
    "scheduler": "train.schedule",
    "lr_scheduler": "train.schedule",
    "n_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "dataset": "data.name",
    "n_tasks": "data.tasks",
    "num_tasks": "data.tasks",
    "model": "backbone",
    "arch": "backbone",
    "network": "backbone",
    "exemplars": "memory.budget",
    "num_exemplars": "memory.budget",
    "memory_size": "memory.budget",
    "buffer_size": "memory.budget",
    "memory": "memory.budget",
    "buffer": "memory.budget",
    "bs": "batch.size",
    "gpu": "device",
    "cuda": "device",
    "lr_step": "train.milestones",
    "ntasks": "data.tasks",
    "augmentation": "batch.augment",
}


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[float, ...]: "a list of numbers",
    tuple[str, ...]: "a list of names",
}


def _checked_value(key: str, value: Any, where: str) -> Any:
    """The value, converted to its setting's type."""
    value = _of_python(value)
    if key not in SETTINGS:
        return _checked_option(key, value, where)
    setting = SETTINGS[key]
    try:
        typed = _typed(setting.kind, value)
    except (TypeError, OverflowError):
        kind = "a name" if key.split(".")[0] in CHOICES else _KINDS[setting.kind]
        default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
        raise UserError(f"{where}: {key} must be {kind} (default {default!r}), got {_shown(value)}.") from None
    if isinstance(typed, str):
        _check_text(key, typed, where)
    _check_limits(setting, typed, f"{where}: ")
    return typed


def _of_python(value: Any) -> Any:
    """Convert NumPy numbers and arrays to Python's numbers and lists; anything else is unchanged."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return type(value)(map(_of_python, value)) if type(value) in (list, tuple) else value


def _typed(kind: Any, value: Any) -> Any:
    """Convert a value to a type: an int to a float, a list to a tuple. Any other mismatch is a TypeError."""
    if kind in (tuple[str, ...], tuple[float, ...]) and isinstance(value, list | tuple):
        inner = float if kind == tuple[float, ...] else str
        return tuple(_typed(inner, v) for v in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return value


def _check_limits(setting: Setting, value: Any, prefix: str) -> None:
    if problem := setting.problem(value):
        wrong = [v for v in (value if isinstance(value, tuple) else (value,)) if v not in setting.choices]
        hint = did_you_mean(wrong[0], setting.choices) if setting.choices else ""
        shown = _shown(list(value) if isinstance(value, tuple) else value)
        raise UserError(f"{prefix}{setting.name} {problem}, got {shown}.{hint}")


def _checked_option(key: str, value: Any, where: str) -> Any:
    """The value of a norm's or method's option, which must be representable in both JSON and TOML."""
    if not _is_value(value):
        raise UserError(f"{where}: {key} must be a number, text, true, false, or a list of these, got {_shown(value)}.")
    _check_text(key, f"{key}{value}", where)
    return value


def _is_value(value: Any) -> bool:
    return all(map(_is_value, value)) if isinstance(value, list | tuple) else isinstance(value, str | int | float)


def _check_text(key: str, value: str, where: str) -> None:
    """Raise for lone surrogates, which cannot be written to a file: Python decodes bytes that are not UTF-8 to them."""
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise UserError(f"{where}: {key} must be text in UTF-8, got {_shown(value)}.")


def _shown(value: Any) -> str:
    """The value as shown in errors, shortened to a line or two."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _build(values: Values) -> RunConfig:
    made: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    inner: dict[str, dict[str, Any]] = {}  # by section: its subsections
    for section in reversed(SECTIONS):  # a subsection comes after its section
        outer, _, name = section.rpartition(".")
        own = {name: value for name, value in inside(values, section).items() if "." not in name}
        part = SECTIONS[section](**own, **inner.pop(section, {}))
        if outer:
            inner.setdefault(outer, {})[name] = part
        else:
            made[section] = part
    for section, choice in CHOICES.items():
        options = inside(values, section)
        name = options.pop("name", SETTINGS[f"{section}.name"].default)
        made[section] = choice(name, tuple(sorted(options.items())))
    return RunConfig(**made)


def complete(config: RunConfig) -> RunConfig:
    """The config with every option of its norm and method, including defaults, each with the type of its default.

    :func:`resolve` does this for the names known at that time. Call it again after loading plugins.
    """
    return replace(config, norm=_completed(config.norm, config), method=_completed(config.method, config))


def _completed(chosen: _Choice, config: RunConfig) -> _Choice:
    alike = default_options(chosen.kind, chosen.name)
    given = {option: _like(alike.get(option), value) for option, value in chosen.options}
    options = {**default_options(chosen.kind, chosen.name, backbone=config.backbone), **given}
    return replace(chosen, options=tuple(sorted(options.items())))


def with_defaults(config: RunConfig, kind: str, defaults: Mapping[str, Any]) -> RunConfig:
    """The config with these defaults for its norm's or method's options; its label omits options at their defaults."""
    found = tuple((option, _like(None, default)) for option, default in sorted(defaults.items()))
    return replace(config, **{kind: replace(getattr(config, kind), defaults=found)})


def _like(default: Any, value: Any) -> Any:
    """Make an option's value hashable, and convert a whole number to a float if the default is one."""
    if isinstance(value, list | tuple):
        return tuple(_like(None, v) for v in value)
    if not isinstance(default, float) or type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
