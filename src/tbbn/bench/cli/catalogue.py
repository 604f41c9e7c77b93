"""What there is to choose from, and what this machine has: the contents of ``tbbn list`` and ``tbbn doctor``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tbbn.bench.config.protocols import QUIRKS
from tbbn.errors import UserError
from tbbn.plugins import load_installed
from tbbn.registry import AUGMENTATIONS, BACKBONES, BUILT_IN, DATASETS, METHODS, NORMS, REGISTRIES, Registry

Listed = dict[str, dict[str, Any]]  # by name: a line, and for what is registered its origin and options


def _registered(registry: Registry[Any]) -> Listed:
    return {
        name: {
            "line": entry.description,
            "origin": str(entry.origin),
            "options": {option: {"default": o.default, "help": o.help} for option, o in entry.options.items()},
        }
        for name, entry in registry.describe().items()
    }


def _methods() -> Listed:
    return dict(sorted(_registered(METHODS).items()))  # registered in the order of their imports


def _datasets() -> Listed:
    return _registered(DATASETS) | {"A+B": {"line": "several of these one after the other, at 32x32 and in RGB"}}


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
    "quirks": _quirks,
}


def lines(entries: Listed) -> Iterator[str]:
    """A list as text: a line for each name, its origin where it is a plugin's, and its options below."""
    width = max(map(len, entries))
    for name, entry in entries.items():
        origin = entry.get("origin", str(BUILT_IN))
        yield f"{name.ljust(width)}  {entry['line']}{'' if origin == str(BUILT_IN) else f'  [{origin}]'}".rstrip()
        options = entry.get("options", {})
        shown = {
            option: option if o["default"] is None else f"{option}={o['default']}" for option, o in options.items()
        }
        by_help: dict[str, list[str]] = {}
        for option, o in options.items():
            by_help.setdefault(o["help"], []).append(shown[option])
        left = {line: ", ".join(texts) for line, texts in by_help.items()}
        for line, text in left.items():
            yield f"{' ' * width}    {text.ljust(max(map(len, left.values())))}  {line}".rstrip()


def doctor(root: str) -> dict[str, dict[str, Any]]:
    """Versions, device and free disk; and which data sets lie under ``root``."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from tbbn.accelerators.native import binding as native
    from tbbn.bench.data.loading import found
    from tbbn.bench.engine.record import environment

    facts = environment()
    for package in ("torchvision", "triton", "numpy", "rich", "matplotlib", "safetensors", "scikit-learn"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    try:
        from tbbn.bench.vision import torchvision

        if not torchvision().extension._has_ops():
            facts["torchvision"] += "; without its compiled ops (models, transforms and data sets still work)"
    except (UserError, ImportError, RuntimeError) as error:
        facts["torchvision"] = f"{facts['torchvision']}, cannot be used: {error}"
    facts["cpu kernel"] = native.diagnosis()
    facts["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    facts["free disk here"] = f"{shutil.disk_usage('.').free / 2**30:.0f} GiB"
    data = {name: "found" if there else "not found" for name, there in found(root).items()}
    return {"environment": facts, "plugins": _plugins(), "data": data}


def _plugins() -> dict[str, str]:
    """What each plugin brings; one that cannot be loaded is a line too."""
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
