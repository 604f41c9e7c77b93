"""Settings on the command line: ``--train.epochs 2`` for every field of the config, and their help."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Collection
from typing import Any

from tbbn.bench import config as cfg
from tbbn.errors import UserError
from tbbn.paper import is_recipe

_AXES = ("data.name", "norm.name", "method.name")  # set by --data, --norm and --method
_LISTS = (
    "--norm",
    "--method",
    "--seeds",
    "--quirks",
    "--log",
    "--train.milestones",
    "--train.first.milestones",
    "--train.betas",
)


def settings_help() -> str:
    """A list of every setting with its default and help."""
    settings = [s for s in cfg.SETTINGS.values() if s.name not in _AXES]
    shown = [f"  --{s.name} {_shown(s.default)}".rstrip() for s in settings]
    width = max(map(len, shown))
    lines = []
    for text, s in zip(shown, settings, strict=True):
        first, *rest = textwrap.wrap(s.line, 120 - width, break_on_hyphens=False)
        lines += [f"{text.ljust(width)}  {first}", *(" " * (width + 2) + line for line in rest)]
    return "\n".join(
        [
            "settings and their defaults (a data set or protocol may change a default; --dry-run shows the result):",
            *lines,
            "",
            "options of the method and the norm: --method.kd 2, --norm.groups 8 (see tbbn list methods, tbbn list norms)",
        ]
    )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_commas(words: list[str]) -> None:
    """Raise for ``--norm bn tbbn``, where argparse would take the second name for a recipe."""
    for option, value, other in zip(words, words[1:], words[2:], strict=False):
        if option in _LISTS and not value.startswith("--") and not other.startswith("--") and not is_recipe(other):
            together = f"{option} {value.rstrip(',')},{other}"
            raise UserError(f"{option} {value} {other}: separate values by commas: {together}.")


def split_plugins(words: list[str]) -> tuple[list[str], list[str]]:
    """Split ``--plugin mine.py`` off any command's words; returns the plugins and the other words."""
    plugins: list[str] = []
    others, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        option, separator, value = word.partition("=")
        if option != "--plugin":
            others.append(word)
            continue
        if not separator:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        if not value:
            raise UserError("--plugin needs a value: a module, or a Python file such as ./mine.py.")
        plugins.append(value)
    return plugins, others


def _hint(option: str, options: Collection[str]) -> str:
    """A hint at the option or setting that was probably meant, such as ``--train.lr`` for ``--lr``."""
    if len(option) >= 200:
        return " See --help."
    if meant := cfg.nearest_setting(option.removeprefix("--")):
        return f" Did you mean --{meant.removesuffix('.name')}?"
    known = [*(f"--{name}" for name in cfg.SETTINGS), *options]
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else " See --help."


def split_settings(words: list[str], options: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Split settings off a command's words; returns the settings and the words left for the command's own ``options``."""
    found: dict[str, Any] = {}
    others, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        option, separator, value = word.partition("=")
        key = option.removeprefix("--")
        if not word.startswith("--") or option in options:
            others.append(word)
            continue
        if key not in cfg.SETTINGS and not key.startswith(("norm.", "method.")):
            raise UserError(f"unknown setting {option}.{_hint(option, options)}")
        if not separator:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif key in cfg.SETTINGS and cfg.SETTINGS[key].kind is bool:
                value = "true"
            else:
                raise UserError(f"--{key} needs a value.")
        found[key] = cfg.parse_value(key, value)
    return found, others
