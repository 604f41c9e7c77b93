"""The error that a user can fix: one line that says what is required, what was given, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_NAME = 200


class UserError(ValueError):
    """A mistake in a call, a config, a file or on the command line. The CLI prints it as one line and exits with 2."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for an unknown name: lists the known names and suggests the nearest spelling.

    >>> unknown_name("norm", "tbn", ["bn", "tbbn"])
    UserError("unknown norm 'tbn'; choose one of: bn, tbbn. Did you mean 'tbbn'?")
    """
    known = sorted(known)
    return UserError(f"unknown {kind} {name!r}; choose one of: {', '.join(known)}.{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest spelling as a question with a space before it; empty if nothing is near.

    >>> did_you_mean("tbn", ["bn", "tbbn"])
    " Did you mean 'tbbn'?"
    """
    if len(name) > _LONGEST_NAME:  # not a misspelling, and slow to compare
        return ""
    near = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def printable(text: str) -> str:
    """Escape all unprintable characters, so that text stays on one line and cannot control the terminal.

    Names come from files: a folder may have any name, and a record may have been written by anyone.

    >>> printable("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message.

    >>> one_line(KeyError("a"))
    "KeyError: 'a'"
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
