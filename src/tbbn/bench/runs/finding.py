"""What a check of a run found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One check: its subject, and the problem found, or why it could not be made. Without either it passed."""

    subject: str
    problem: str = ""
    not_checked: str = ""


def compare(subject: str, stored: object, computed: object) -> Finding:
    """The check that the record has what was computed."""
    return Finding(subject, "" if stored == computed else f"the record says {stored}, recomputed: {computed}.")
