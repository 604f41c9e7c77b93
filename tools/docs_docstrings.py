"""Docstrings for the site: roles such as ``:func:`` are dropped, and sessions (``>>>``) become code blocks."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:func|class|mod|meth|data|attr):(?=`)")
_SESSION = re.compile(r"(?m)^>>> .*(?:\n(?!\s*$).*)*")


def as_markdown(text: str) -> str:
    """The docstring with Markdown where it had reStructuredText."""
    return _SESSION.sub(lambda found: f"```python\n{found[0]}\n```", _ROLE.sub("", text))


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
