"""``tbbn show --follow``: show the accuracy matrix of a run while it trains, from its ``log.jsonl``."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tbbn.bench.loggers import LOG, read_lines
from tbbn.errors import UserError, printable

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 24  # epochs in the loss curve
_POLL = 0.5  # seconds


def follow(directory: Path, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Print a line for each task when it ends, and on a terminal the current epoch below, until the run ends."""
    file = directory / LOG
    if not file.exists():
        raise UserError(f"{directory}: no {LOG} here; it is written from the first epoch, unless --log is none.")
    show = _Display(live=sys.stdout.isatty())
    for event in _events(file, sleep):
        show.event(event)
    return 0


def _events(file: Path, sleep: Callable[[float], None]) -> Iterator[dict[str, Any]]:
    """All events in the file, followed by new ones as they are written, until the run ends."""
    position, alive = 0, {"event": "", "pid": 0}
    while True:
        if file.exists() and file.stat().st_size < position:
            position = 0  # another run replaced the file
        found = list(read_lines(file, position)) if file.exists() else []
        for event, end in found:
            position = end
            if event["event"] == "start":
                alive = event
            yield event
            if event["event"] == "end":
                alive = {"event": "", "pid": 0}
        if not found:
            if alive["event"] == "":
                return
            if not _is_running(alive):
                yield {"event": "gone"}
                return
            sleep(_POLL)


def _is_running(start: dict[str, Any]) -> bool:
    if start.get("host") != platform.node() or not isinstance(start.get("pid"), int):
        return True  # unknown for another machine; Ctrl-C ends the command
    try:
        os.kill(start["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class _Display:
    def __init__(self, live: bool) -> None:
        self.live, self.tasks, self.phase = live, 0, ("", -1)
        self.losses: list[float] = []  # of the last epochs of this phase
        self.bars = _BARS if "utf" in (sys.stdout.encoding or "").lower() else ".:-=+*#@"

    def event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            self.tasks = event["tasks"]
            self._line(
                f"{event['name']}{' (resumed)' if event['resumed'] else ''}: accuracy % on each task after each task"
            )
        elif kind == "epoch":
            self._epoch(event)
        elif kind == "task":
            row = " ".join(f"{100 * value:5.1f}" for value in event["accuracy"])
            mean = 100 * sum(event["accuracy"]) / len(event["accuracy"])
            self._line(f"{event['task'] + 1:3}/{self.tasks}: {row}   mean {mean:.1f}")
        elif kind == "end":
            self._line(event["status"])
        elif kind == "gone":
            self._line("the process of this run has ended; tbbn resume continues the run")

    def _epoch(self, event: dict[str, Any]) -> None:
        if (phase := (event["phase"], event["task"])) != self.phase:
            self.phase, self.losses = phase, []
        loss = event.get("total", 0.0)
        self.losses = [*self.losses, loss][-_WIDTH:]
        if self.live:
            where = f"task {event['task'] + 1}/{self.tasks} {event['phase']} epoch {event['epoch'] + 1}"
            print(f"\r\033[K{printable(where)}  loss {loss:.3f} {self._curve()}", end="", flush=True)

    def _curve(self) -> str:
        low, high = min(self.losses), max(self.losses)
        top = len(self.bars) - 1
        return "".join(self.bars[round(top * (loss - low) / ((high - low) or 1))] for loss in self.losses)

    def _line(self, text: str) -> None:
        clear = "\r\033[K" if self.live else ""  # clears the line of the current epoch
        print(f"{clear}{printable(text)}", flush=True)
