"""What there is to choose from, and what this machine has: the contents of ``tbbn list`` and ``tbbn doctor``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

from tbbn.bench.config.protocols import QUIRKS
from tbbn.errors import UserError


def _methods() -> dict[str, str]:
    from tbbn.bench.methods import METHODS

    return {name: kind.description for name, kind in METHODS.items()}


def _norms() -> dict[str, str]:
    """What each norm is, and every option it takes: its own, then those that are batch norm's too."""
    from tbbn.nn import DESCRIPTIONS
    from tbbn.nn.convert import _accepted, _classes

    shared = _accepted(_classes("bn")[-1])
    found = {}
    for name, line in DESCRIPTIONS.items():
        options = _accepted(_classes(name)[-1]) - {"device", "dtype"}
        what, _, bracket = line.partition(" (")  # which may name some of them, with a default
        said = {part.partition("=")[0]: part for part in re.findall(r"[\w=.]+", bracket)}
        own = ", ".join(said.get(option, option) for option in sorted(options - shared))
        every = "; ".join(filter(None, (own, ", ".join(sorted(options & shared)))))
        found[name] = f"{what if own else line} ({every})".lstrip()
    return found


def _datasets() -> dict[str, str]:
    from tbbn.bench.data.loading import available

    return available()


def _backbones() -> dict[str, str]:
    from tbbn.bench.models import backbones

    return backbones()


def _recipes() -> dict[str, str]:
    from tbbn.paper import describe, recipes

    return {name: describe(path) for name, path in recipes().items()}


def _augmentations() -> dict[str, str]:
    from tbbn.bench.data.augment import augmentations

    return augmentations()


def _quirks() -> dict[str, str]:
    return {name: quirk.line for name, quirk in QUIRKS.items()}


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "methods": _methods,
    "norms": _norms,
    "datasets": _datasets,
    "backbones": _backbones,
    "recipes": _recipes,
    "augmentations": _augmentations,
    "quirks": _quirks,
}


def doctor(root: str) -> dict[str, dict[str, Any]]:
    """Versions, device and free disk; and which data sets lie under ``root``."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from tbbn.accelerators.native import binding as native
    from tbbn.bench.data.loading import found
    from tbbn.bench.runs.record import environment

    facts = environment()
    for package in ("torchvision", "triton", "numpy", "rich", "matplotlib", "safetensors", "scikit-learn"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    try:
        from tbbn.bench.vision import torchvision

        if not torchvision().extension._has_ops():
            facts["torchvision"] += ", without its compiled ops; models, transforms and data sets work all the same"
    except (UserError, ImportError, RuntimeError) as error:
        facts["torchvision"] = f"{facts['torchvision']}, cannot be used: {error}"
    facts["cpu kernel"] = native.status()
    facts["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    facts["free disk here"] = f"{shutil.disk_usage('.').free / 2**30:.0f} GiB"
    data = {name: "found" if there else "not found" for name, there in found(root).items()}
    return {"environment": facts, "data": data}
