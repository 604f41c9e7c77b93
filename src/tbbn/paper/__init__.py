"""The paper as data: a recipe for each table and figure."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def recipes() -> dict[str, Path]:
    """Recipe files by name; ``tbbn run NAME`` runs one."""
    folder = Path(str(resources.files(__name__))) / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def describe(recipe: Path) -> str:
    """The recipe's own comment, without the line that shows its command."""
    lines = [line[1:].strip() for line in recipe.read_text().splitlines() if line.startswith("#")]
    return " ".join(line for line in lines if not line.startswith("tbbn run"))
