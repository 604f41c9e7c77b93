"""The default logger: one line of JSON per epoch and task, in ``log.jsonl`` in the folder of the run."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tbbn.bench.loggers.base import RunInfo, Scalars

LOG = "log.jsonl"


class JsonLines:
    """Appends one line per event; a new run replaces the file. ``tbbn show --follow`` reads it."""

    def start(self, run: RunInfo) -> None:
        self.file = run.directory / LOG
        if not run.resumed:
            self.file.unlink(missing_ok=True)
        process = {"pid": os.getpid(), "host": platform.node()}
        self._write("start", name=run.name, tasks=run.tasks, resumed=run.resumed, **process, config=dict(run.config))

    def epoch(self, number: int, values: Mapping[str, Any]) -> None:
        self._write("epoch", number=number, **values)

    def task(self, epoch: int, number: int, accuracy: Sequence[float], metrics: Scalars) -> None:
        self._write("task", number=epoch, task=number, accuracy=list(accuracy), metrics=dict(metrics))

    def finish(self, status: str, metrics: Scalars) -> None:
        self._write("end", status=status, metrics=dict(metrics))

    def _write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values})
        # Opened for each line, so that a kill loses nothing and a sweep of many runs keeps no files open.
        with self.file.open("ab") as file:
            cut = file.tell() > 0 and not _ends_a_line(self.file)  # a kill may cut off a line; then start a new one
            file.write(b"\n" * cut + line.encode() + b"\n")


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as content:
        content.seek(-1, os.SEEK_END)
        return content.read() == b"\n"


def read_lines(file: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The events of a log from byte ``start`` on, each with the position after it. Incomplete lines are skipped."""
    with file.open("rb") as content:
        content.seek(start)
        for line in content:
            if not line.endswith(b"\n"):
                return  # still being written
            start += len(line)
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event, start
