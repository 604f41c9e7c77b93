"""Several runs on one device, driven from one thread, because a step of a small network does not fill a GPU.

Each run is a generator with its own CUDA stream, a lane. A lane that waits for a result is skipped until the result is ready.
There are no threads, hence no locks, and never two graph captures at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from tbbn.bench.config import RunConfig
from tbbn.bench.engine.events import EpochEnded, Event, Stepped, Waiting
from tbbn.bench.engine.loop import Run, Stop
from tbbn.bench.engine.ranks import ALONE
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.engine.setup import device_of
from tbbn.errors import UserError
from tbbn.plugins import failure

OnEvent = Callable[[int, Event], None]
Drive = Callable[[int, Run], Iterator[Event]]
MAX_LANES = 16  # upper limit when the number of lanes is not given


def run_lanes(
    configs: Sequence[RunConfig],
    n_lanes: int | None,
    *,
    drive: Drive | None = None,
    on_event: OnEvent | None = None,
    on_end: Callable[[int, Record], None] | None = None,
    stop: Stop | None = None,
) -> list[Record]:
    """Do the runs, ``n_lanes`` in parallel. Returns one record per config, equal to the record of the run alone.

    With ``n_lanes=None`` a GPU gets as many lanes as raise the throughput, measured during the runs; a CPU gets one.
    ``drive(i, run)`` yields the events of run ``i`` and may do more between them, such as saving. Once ``stop()`` is true, no
    further run starts and active runs end as "interrupted". If a run fails, the others continue. If no run could start, the first
    error is raised and ``on_end`` is not called.
    """
    shared = {(config.precision, config.threads, config.autotune) for config in configs}
    if len(shared) > 1:
        raise UserError(
            f"lanes: parallel runs must have the same precision, threads and autotune, got {sorted(shared)}; run them separately."
        )
    drive = drive if drive is not None else lambda _, run: run.events(stop)
    tell = [None if on_event is None else partial(on_event, i) for i in range(len(configs))]
    waiting = [Lane(i, config, drive, tell[i]) for i, config in enumerate(configs)]
    waiting.reverse()
    active: list[Lane] = []
    not_started: list[Lane] = []
    records: dict[int, Record] = {}
    on_gpu = torch.cuda.is_available() and all(config.device != "cpu" for config in configs)
    tuner = LaneTuner(min(len(configs), MAX_LANES) if n_lanes is None and on_gpu else 1, _has_memory)
    while waiting or active:
        if stop is not None and stop():
            waiting.clear()
        while waiting and len(active) < (tuner.n if n_lanes is None else n_lanes):
            active.append(waiting.pop())
        any_moved = False
        for lane in list(active):
            if lane.is_ready is not None and not lane.is_ready():
                continue
            any_moved = True
            event = lane.advance()
            tuner.observe(lane.number, event)
            if event is not None:
                if on_event is not None:
                    on_event(lane.number, event)
                continue
            active.remove(lane)
            assert lane.record is not None
            records[lane.number] = lane.record
            if lane.start_error is not None:
                not_started.append(lane)
            elif on_end is not None:
                on_end(lane.number, lane.record)
        if not any_moved:
            time.sleep(5e-5)
    if not_started and len(not_started) == len(configs):
        assert not_started[0].start_error is not None
        raise not_started[0].start_error
    for lane in not_started:
        if on_end is not None:
            on_end(lane.number, records[lane.number])
    return [records[i] if i in records else _interrupted(config) for i, config in enumerate(configs)]


def _interrupted(config: RunConfig) -> Record:
    record = new_record(config)
    record.status = "interrupted"
    return record


def _has_memory(n: int) -> bool:
    """Whether the device has memory for one more lane like the ``n`` active ones, with half a lane to spare."""
    free, _ = torch.cuda.mem_get_info()
    return free > 1.5 * torch.cuda.max_memory_reserved() / n


class Lane:
    """One run, its stream, and the result that it waits for."""

    def __init__(
        self, number: int, config: RunConfig, drive: Drive, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self.number, self.config, self.drive, self.on_event = number, config, drive, on_event
        self.is_ready: Callable[[], bool] | None = None  # checked before the run is advanced
        self.stream: torch.cuda.Stream | None = None
        self.run: Run | None = None
        self.events: Iterator[Event] | None = None
        self.record: Record | None = None
        self.start_error: UserError | None = None

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def advance(self) -> Event | None:
        """The run's next event, or None when the run is over, however it ended."""
        try:
            if self.events is None:
                self.events = self._start()
            with self._on_stream():
                event = next(self.events)
            self.is_ready = event.done if isinstance(event, Waiting) else None
            return event
        except StopIteration:
            assert self.run is not None
            self.record = self.run.record
        except Exception as error:  # a failing run must not end the others
            self.record = self.run.record if self.run is not None else new_record(self.config)
            self.record.status, self.record.message = "failed", failure(error)
        self.run = self.events = None
        return None

    def _start(self) -> Iterator[Event]:
        if torch.cuda.is_available() and self.config.device != "cpu":
            self.stream = torch.cuda.Stream(device_of(self.config))
        with self._on_stream():
            try:
                self.run = Run(self.config, ALONE, self.on_event)
            except UserError as error:
                self.start_error = error
                raise
            return self.drive(self.number, self.run)


class LaneTuner:
    """Finds the number of lanes while they run: adds a lane as long as the last one raised the total speed by 5 %.

    It counts finished epochs, not steps, because a step is enqueued long before it is done. After a lane is added, its first
    epoch, which compiles kernels and captures graphs, is not measured; a measurement then spans at least one whole epoch of every
    lane. A lane that brought no gain is measured once more, because another process may have used the device.
    """

    def __init__(
        self,
        limit: int,
        has_memory: Callable[[int], bool] = lambda n: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.n, self.limit, self.has_memory, self.clock = 1, limit, has_memory, clock
        self.best_speed = 0.0  # steps per second
        self.best_speed_before = 0.0  # with one lane less
        self.n_measured = 0  # measurements with this number of lanes
        self.is_growing = limit > 1
        self._restart()

    def _restart(self) -> None:
        self.enqueued: Counter[int] = Counter()  # steps of each lane since its last epoch ended
        self.epochs: Counter[int] = Counter()  # epochs that each lane has finished
        self.started: float | None = None
        self.steps = 0

    def observe(self, lane: int, event: Event | None) -> None:
        """Count an event of a lane. None means that the lane ended, which restarts the current measurement."""
        if not self.is_growing:
            return
        if event is None:
            self._restart()
        elif isinstance(event, Stepped):
            self.enqueued[lane] += 1
        elif isinstance(event, EpochEnded):
            done, self.enqueued[lane] = self.enqueued[lane], 0
            self.epochs[lane] += 1
            now = self.clock()
            if self.started is not None:
                self.steps += done
                self._decide(now - self.started)
            elif len(self.epochs) >= self.n:
                self.started, self.epochs = now, Counter(dict.fromkeys(self.epochs, 0))

    def _decide(self, seconds: float) -> None:
        if min(self.epochs.values()) < 1 or seconds < 1.0:
            return
        speed = self.steps / seconds
        self.best_speed, self.n_measured = max(self.best_speed, speed), self.n_measured + 1
        can_grow = self.n < self.limit and self.has_memory(self.n)
        is_faster = speed > 1.05 * self.best_speed_before
        self.is_growing = can_grow and (is_faster or self.n_measured < 2)
        if self.is_growing and is_faster:
            self.n, self.n_measured, self.best_speed_before = self.n + 1, 0, self.best_speed
        self._restart()
