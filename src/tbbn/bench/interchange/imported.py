"""The result of an import: settings for a recipe, and a line for every setting of the other program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tbbn.bench.config import resolve, to_toml
from tbbn.errors import UserError

TAKEN, DIFFERS, MISSING = "taken over", "differs", "no counterpart"


@dataclass(frozen=True)
class Line:
    """How one setting of the other program was imported."""

    kind: str  # TAKEN, DIFFERS or MISSING
    given: str  # as written for the other program
    here: str  # the setting here, or why there is none

    def __str__(self) -> str:
        return f"{self.kind.ljust(len(MISSING))}  {self.given}  ->  {self.here}"


@dataclass
class Imported:
    """A recipe being built."""

    settings: dict[str, Any] = field(default_factory=dict)  # by dotted name
    seeds: list[int] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def take(self, given: str, **settings: Any) -> None:
        """Import a setting unchanged; a double underscore in a name stands for the dot."""
        self.lines.append(Line(TAKEN, given, self._set(settings)))

    def differ(self, given: str, why: str, **settings: Any) -> None:
        """Import the nearest counterpart of a setting, and say how it differs."""
        here = self._set(settings)
        self.lines.append(Line(DIFFERS, given, f"{here}: {why}" if here else why))

    def miss(self, given: str, why: str) -> None:
        self.lines.append(Line(MISSING, given, why))

    def _set(self, settings: Mapping[str, Any]) -> str:
        dotted = {name.replace("__", "."): value for name, value in settings.items()}
        self.settings |= dotted
        return ", ".join(f"{name} = {_shown(value)}" for name, value in dotted.items())

    def recipe(self, title: str) -> str:
        """The recipe as TOML, with comments at the top. Raises for settings that this version does not accept."""
        resolve(("the imported recipe", self.settings))
        tree: dict[str, Any] = {}
        for name, value in self.settings.items():
            *sections, last = name.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        if self.seeds:
            tree["sweep"] = {"seeds": self.seeds}
        kinds = {kind: [line for line in self.lines if line.kind == kind] for kind in (DIFFERS, MISSING)}
        notes = [f"# {line}" for kind in kinds.values() for line in kind]
        return "\n".join([f"# {title}", *notes, "", to_toml(tree)])


def no_counterpart(what: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that cannot be run here at all."""
    return UserError(f"{what} {name!r:.60} has no counterpart here; those that have one: {', '.join(sorted(known))}.")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
