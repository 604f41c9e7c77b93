"""Standard error without a reader: drop progress and messages, and let the command continue."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Droppable:
    """A stream that drops text if it cannot be written, because its reader is gone (``2>&1 | head -1``) or it is closed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """From now on write to /dev/null, because flushing buffered text at exit would fail again."""
        to_nowhere(self.stream)
        self.stream = open(os.devnull, "w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def to_nowhere(stream: TextIO) -> None:
    """Redirect a stream's file descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def fill_closed_descriptors() -> None:
    """Open standard streams that were closed at the start (``2>&-``), so that no file of a run gets their descriptor."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)


@contextmanager
def droppable_stderr() -> Iterator[None]:
    """Make standard error droppable, also if it was closed at the start, when ``sys.stderr`` is None."""
    real = sys.stderr
    sys.stderr = Droppable(real if real is not None else open(os.devnull, "w"))  # noqa: SIM115
    try:
        yield
    finally:
        sys.stderr = real
