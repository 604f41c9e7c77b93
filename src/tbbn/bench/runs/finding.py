"""The findings of checking a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One check: its subject, and the problem found or the reason why it was not checked. With neither, it passed."""

    subject: str
    problem: str = ""
    not_checked: str = ""


def compare(subject: str, stored: object, computed: object) -> Finding:
    """Check that the value in the record equals the computed one."""
    return Finding(subject, "" if stored == computed else f"the record says {stored}, recomputed: {computed}.")
