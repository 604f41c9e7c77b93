"""The paper's experiments as recipes (TOML files that ``tbbn run NAME`` takes by name), and its tables as printed.

Does not import torch, because every command needs the names.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tbbn.bench.config import read_toml
from tbbn.errors import unknown_name


def recipes() -> dict[str, Path]:
    """The recipe files by name; ``tbbn run NAME`` runs one."""
    folder = Path(str(resources.files(__name__))) / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def describe(recipe: Path) -> str:
    """The recipe's opening comment, without the lines that show its commands."""
    lines = [line[1:].strip() for line in recipe.read_text().splitlines() if line.startswith("#")]
    return " ".join(line for line in lines if not line.startswith(("tbbn run", "tbbn reproduce", "tbbn sweep")))


def is_recipe(name: str) -> bool:
    """Whether this is the name of a recipe of the paper, or of a file that may be a recipe."""
    return name in recipes() or name.endswith(".toml") or (Path(name).exists() and not Path(name).is_dir())


def find_recipe(name: str) -> Path:
    """The file of a recipe, which is given by name or as a TOML file."""
    if not is_recipe(name) and not Path(name).is_dir():
        raise unknown_name("recipe", name, recipes())
    return recipes().get(name, Path(name))


@cache
def printed_tables() -> list[dict[str, Any]]:
    """The entries of ``published.toml``."""
    entries: list[dict[str, Any]] = read_toml(Path(str(resources.files(__name__))) / "published.toml")["table"]
    return entries


def table_names() -> list[str]:
    return list(dict.fromkeys(entry["name"] for entry in printed_tables()))
