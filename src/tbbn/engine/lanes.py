"""Many runs on one device from one thread: a step of a small network does not fill a GPU.

Each run is a generator with a stream of its own. Whoever waits for a result is passed over until it is there. There are no
threads, so no locks, and captures never meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from tbbn.config import RunConfig
from tbbn.engine.events import Event, Waiting
from tbbn.engine.run import Run
from tbbn.errors import UserError
from tbbn.record import Record, new_record

OnEvent = Callable[[int, Event], None]
Stop = Callable[[], bool]


class Lane:
    """One run, its stream, and what it is waiting for."""

    def __init__(self, number: int, config: RunConfig, directory: Path | None, stop: Stop | None = None) -> None:
        self.number, self.config, self.directory, self.stop = number, config, directory, stop
        self.done: Callable[[], bool] | None = None
        self.stream: torch.cuda.Stream | None = None
        self.job: Run | None = None
        self.events: Iterator[Event] | None = None
        self.record: Record | None = None

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def advance(self) -> Event | None:
        """The run's next event; None when it is over, however it ended."""
        try:
            if self.events is None:
                if torch.cuda.is_available() and self.config.device != "cpu":
                    self.stream = torch.cuda.Stream()
                with self._on_stream():
                    self.job = Run(self.config)
                    self.events = self.job.recorded(self.directory, stop=self.stop)
            with self._on_stream():
                event = next(self.events)
            self.done = event.done if isinstance(event, Waiting) else None
            return event
        except StopIteration:
            assert self.job is not None
            self.record = self.job.record
        except Exception as error:  # one lane's failure must not end the others
            self.record = self.job.record if self.job is not None else new_record(self.config)
            self.record.status, self.record.message = "failed", f"{type(error).__name__}: {error}"
            if self.directory is not None:
                self.record.save(self.directory)
        self.job = self.events = None
        return None


def run_lanes(
    configs: Sequence[RunConfig],
    n_lanes: int,
    *,
    directories: Sequence[Path] | None = None,
    on_event: OnEvent | None = None,
    on_end: Callable[[int, Record], None] | None = None,
    stop: Stop | None = None,
) -> list[Record]:
    """Do the runs, ``n_lanes`` at a time; records in the order of the configs, each equal to that of the run alone.

    Once ``stop`` says yes the runs at work save themselves and end as "interrupted", and no other begins.
    """
    shared = {(config.precision, config.threads) for config in configs}
    if len(shared) > 1:
        raise UserError(f"lanes: runs side by side share precision and threads, got {sorted(shared)}; run them apart.")
    places: Sequence[Path | None] = directories if directories is not None else [None] * len(configs)
    waiting = [Lane(i, config, place, stop) for i, (config, place) in enumerate(zip(configs, places, strict=True))]
    waiting.reverse()
    active: list[Lane] = []
    records: dict[int, Record] = {}
    while waiting or active:
        if stop is not None and stop():
            waiting.clear()
        while waiting and len(active) < n_lanes:
            active.append(waiting.pop())
        moved = False
        for lane in list(active):
            if lane.done is not None and not lane.done():
                continue
            moved = True
            event = lane.advance()
            if event is not None:
                if on_event is not None:
                    on_event(lane.number, event)
                continue
            active.remove(lane)
            assert lane.record is not None
            records[lane.number] = lane.record
            if on_end is not None:
                on_end(lane.number, lane.record)
        if not moved:
            time.sleep(5e-5)
    return [records[i] if i in records else _not_begun(config) for i, config in enumerate(configs)]


def _not_begun(config: RunConfig) -> Record:
    record = new_record(config)
    record.status = "interrupted"
    return record
