"""The folder name of a run or sweep without ``--name``: made from its settings, so that other settings get another folder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from tbbn.bench.config import PLACE

_LEFT_OUT = ("plugins", *PLACE)  # long, and they rarely distinguish runs
_LONGEST = 120  # characters of a name; file systems allow 255


def folder_name(
    recipe: str, method: str | None, norm: str | None, given: Mapping[str, Any], *, seed: int | None = None
) -> str:
    """The recipe's name, or data set, method and norm, followed by every setting that was given.

    The name of a single run includes its seed, so that a sweep over seeds gets a different folder. For a recipe with several
    runs, methods and norms appear only in the names of the runs' own folders.

    >>> folder_name("", "ft,lucir", "bn", {"data.name": "cifar100", "data.tasks": 6, "data.root": "/x"})
    'cifar100-ft+lucir-bn-tasks=6'
    >>> folder_name("", None, "tbbn", {"batch.size": 32, "norm.momentum": 0.5}, seed=7)
    'digits-ft-tbbn-batch.size=32-norm.momentum=0.5-7'
    >>> folder_name("demo", None, None, {"train.epochs": 2})
    'demo-epochs=2'
    """
    rest = {key: value for key, value in given.items() if key not in (*_LEFT_OUT, "seed")}
    if recipe:
        parts = [recipe] if seed is None else [recipe, *(name for name in (method, norm) if name)]
    else:
        parts = [str(rest.pop("data.name", "digits")), method or "ft", norm or "bn"]
    parts += [f"{_short(key)}={_text(value)}" for key, value in sorted(rest.items())]
    if seed is not None:
        parts.append(str(seed))
    name = re.sub(r"[^\w.=+-]+", "_", "-".join(parts).replace(",", "+")).strip("_")
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def _short(key: str) -> str:
    """A setting without its section, unless another setting has the same name."""
    section, _, name = key.partition(".")
    return key if section in ("norm", "method", "save") or key == "batch.size" else name or key


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
