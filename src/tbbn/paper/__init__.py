"""The paper as data: a recipe for each table and figure."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from tbbn.bench.config import read_toml
from tbbn.errors import UserError, unknown_name


def recipes() -> dict[str, Path]:
    """Recipe files by name; ``tbbn run NAME`` runs one."""
    folder = Path(str(resources.files(__name__))) / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def describe(recipe: Path) -> str:
    """The recipe's own comment, without the line that shows its command."""
    lines = [line[1:].strip() for line in recipe.read_text().splitlines() if line.startswith("#")]
    return " ".join(line for line in lines if not line.startswith("tbbn run"))


def is_recipe(name: str) -> bool:
    """Whether it is the name of a recipe, or of a file that may be one."""
    return name in recipes() or name.endswith(".toml") or (Path(name).exists() and not Path(name).is_dir())


def read_recipe(name: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A recipe by name or a TOML file: its path, its settings, and its [sweep] table."""
    if not is_recipe(name) and not Path(name).is_dir():
        raise unknown_name("recipe", name, recipes())
    path = recipes().get(name, Path(name))
    values = read_toml(path)
    sweep = {key.removeprefix("sweep."): values.pop(key) for key in list(values) if key.startswith("sweep.")}
    for option, value in sweep.items():
        if option not in ("methods", "norms", "seeds"):
            raise UserError(f"{path}: [sweep] has no option {option!r}; it takes: methods, norms, seeds.")
        kind = int if option == "seeds" else str
        if not isinstance(value, list) or not all(type(v) is kind for v in value):
            raise UserError(
                f"{path}: sweep.{option} must be a list of {'seeds' if kind is int else 'names'}, got {value!r}."
            )
    return path, values, sweep
