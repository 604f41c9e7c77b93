"""The contents of ``tbbn list`` (available names) and ``tbbn doctor`` (the state of this machine)."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tbbn.bench.config.protocols import QUIRKS
from tbbn.errors import UserError
from tbbn.plugins import load_installed
from tbbn.registry import AUGMENTATIONS, BACKBONES, BUILT_IN, DATASETS, LOGGERS, METHODS, NORMS, REGISTRIES, Registry

_BUILT_IN = "built in"
Listed = dict[str, dict[str, Any]]  # by name: a line, and for registered names their origin and options


def _registered(registry: Registry[Any]) -> Listed:
    return {
        name: {
            "line": entry.description,
            "origin": _BUILT_IN if entry.origin == BUILT_IN else str(entry.origin),
            "options": {
                option: {"default": o.default, "help": o.help, "accepts": o.accepts}
                for option, o in entry.options.items()
            },
        }
        for name, entry in registry.describe().items()
    }


def _methods() -> Listed:
    return dict(sorted(_registered(METHODS).items()))  # sorted, because they are registered in import order


def _datasets() -> Listed:
    return _registered(DATASETS) | {
        "A+B": {"line": "several of these in sequence, at 32x32 and in RGB", "origin": _BUILT_IN}
    }


def _recipes() -> Listed:
    from tbbn.paper import describe, recipes

    return {name: {"line": describe(path)} for name, path in recipes().items()}


def _quirks() -> Listed:
    return {name: {"line": quirk.line} for name, quirk in QUIRKS.items()}


LISTS: dict[str, Callable[[], Listed]] = {
    "methods": _methods,
    "norms": partial(_registered, NORMS),
    "datasets": _datasets,
    "backbones": partial(_registered, BACKBONES),
    "recipes": _recipes,
    "augmentations": partial(_registered, AUGMENTATIONS),
    "loggers": partial(_registered, LOGGERS),
    "quirks": _quirks,
}


def lines(entries: Listed, width: int = 80) -> Iterator[str]:
    """A list as text of this width: the names under each origin with a line each, and each name's options below it."""
    column = max(map(len, entries)) + 4
    heading = ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].get("origin", "") not in ("", _BUILT_IN)):
        if entry.get("origin", "") != heading:
            heading = entry["origin"]
            yield f"{heading}:"
        yield from _columns(f"  {name}", entry["line"], column, width)
        yield from _option_lines(entry.get("options", {}), width)


def _option_lines(options: dict[str, dict[str, Any]], width: int) -> Iterator[str]:
    """Options with the same help share a line; those that a norm takes from the layer it replaces come last."""
    by_help: dict[str, list[str]] = {}
    for name, o in sorted(options.items(), key=lambda item: item[1]["default"] is None):
        help = f"{o['help']} [{o['accepts']}]".strip() if o["accepts"] else o["help"]
        by_help.setdefault(help, []).append(name if o["default"] is None else f"{name}={_text(o['default'])}")
    shown = {help: ", ".join(names) for help, names in by_help.items()}
    column = min(max(map(len, shown.values()), default=0), 2 * width // 5) + 8
    for help, text in shown.items():
        yield from _columns(f"      {text}", help, column, width)


def _columns(left: str, right: str, column: int, width: int) -> Iterator[str]:
    """Text in two columns; a left text that is too long for its column gets its own line."""
    if len(left) + 2 > column and right:
        yield left
        left = ""
    for part in textwrap.wrap(right, max(width - column, 20), break_on_hyphens=False, break_long_words=False) or [""]:
        yield f"{left.ljust(column)}{part}".rstrip()
        left = ""


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def doctor(root: str) -> dict[str, dict[str, Any]]:
    """Versions, device and free disk space, and which data sets are under ``root``."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from tbbn.accelerators.native import binding as native
    from tbbn.bench.data.loading import found
    from tbbn.bench.engine.record import environment
    from tbbn.bench.extras import PACKAGES, missing

    facts = environment()
    absent = missing()
    for package in (*PACKAGES.values(), "triton"):
        try:
            facts[package] = "not installed; pip install 'tbbn[bench]'" if package in absent else version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    try:
        from tbbn.bench.vision import torchvision

        if not torchvision().extension._has_ops():
            facts["torchvision"] += (
                "; built for another torch: tbbn works around it, but import torchvision fails in your own code (docs/faq.md)"
            )
    except (UserError, ImportError, RuntimeError) as error:
        if "torchvision" not in absent:
            facts["torchvision"] = f"{facts['torchvision']}, not usable: {error}"
    facts["cpu kernel"] = native.diagnosis()
    facts["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    facts["free disk space"] = f"{shutil.disk_usage('.').free / 2**30:.0f} GiB"
    data = {name: "found" if there else "not found" for name, there in found(root).items()} if not absent else {}
    return {"environment": facts, "plugins": _plugins(), "data": data}


def _plugins() -> dict[str, str]:
    """The names that each plugin registers; a plugin that cannot be loaded is listed with its error."""
    found: dict[str, list[str]] = {}
    try:
        load_installed()
    except UserError as error:
        found["(installed)"] = [str(error)]
    for registry in REGISTRIES:
        for name, entry in registry.registered().items():
            if entry.origin != BUILT_IN:
                found.setdefault(str(entry.origin), []).append(f"{registry.kind} {name}")
    return {plugin: ", ".join(names) for plugin, names in found.items()} or {"none": ""}
