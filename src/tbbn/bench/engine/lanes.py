"""Many runs on one device from one thread: a step of a small network does not fill a GPU.

Each run is a generator with a stream of its own. Whoever waits for a result is passed over until it is there. There are no
threads, so no locks, and captures never meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tbbn.bench.config import RunConfig
from tbbn.bench.engine.events import EpochEnded, Event, Stepped, Waiting
from tbbn.bench.engine.loop import Run, Stop
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.engine.setup import device_of
from tbbn.errors import UserError

OnEvent = Callable[[int, Event], None]
Drive = Callable[[int, Run], Iterator[Event]]
MOST = 16  # lanes that are tried where their number is to be found


class LaneTuner:
    """How many lanes pay, found while they work: one more as long as that made all of them together faster by 5 %.

    Epochs' ends are counted, not steps: a step is enqueued long before it is done. After each growth the new lane's first
    epoch, in which it is captured, passes unmeasured; then every lane does at least one whole epoch. A growth that did not pay
    is measured once more: kernels may have been compiled meanwhile, or something else was at work on the device.
    """

    def __init__(
        self, limit: int, room: Callable[[int], bool] = lambda n: True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.n, self.limit, self.room, self.clock = 1, limit, room, clock
        self.best = 0.0  # steps a second
        self.fewer = 0.0  # and with one lane less, at best
        self.looks = 0  # measurements with this number of lanes
        self.growing = limit > 1
        self._begin()

    def _begin(self) -> None:
        self.enqueued: dict[int, int] = {}  # steps of each lane since its last epoch's end
        self.ends: dict[int, int] = {}  # epochs each lane has ended
        self.since: float | None = None
        self.steps = 0

    def event(self, lane: int, event: Event | None) -> None:
        """Take notice of a lane's event; None is its end, after which what was being measured begins again."""
        if not self.growing:
            return
        if event is None:
            self._begin()
        elif isinstance(event, Stepped):
            self.enqueued[lane] = self.enqueued.get(lane, 0) + 1
        elif isinstance(event, EpochEnded):
            done, self.enqueued[lane] = self.enqueued.get(lane, 0), 0
            self.ends[lane] = self.ends.get(lane, 0) + 1
            now = self.clock()
            if self.since is not None:
                self.steps += done
                self._judge(now)
            elif len(self.ends) >= self.n:
                self.since, self.ends = now, dict.fromkeys(self.ends, 0)

    def _judge(self, now: float) -> None:
        assert self.since is not None
        if min(self.ends.values()) < 1 or now - self.since < 1.0:
            return
        speed = self.steps / (now - self.since)
        self.best, self.looks = max(self.best, speed), self.looks + 1
        can, paid = self.n < self.limit and self.room(self.n), speed > 1.05 * self.fewer
        self.growing = can and (paid or self.looks < 2)
        if self.growing and paid:
            self.n, self.looks, self.fewer = self.n + 1, 0, self.best
        self._begin()


def _room(n: int) -> bool:
    """Whether the device has memory for one more lane like the ``n`` there are, and half of one to spare."""
    free, _ = torch.cuda.mem_get_info()
    return free > 1.5 * torch.cuda.max_memory_reserved() / n


class Lane:
    """One run, its stream, and what it is waiting for."""

    def __init__(self, number: int, config: RunConfig, drive: Drive) -> None:
        self.number, self.config, self.drive = number, config, drive
        self.done: Callable[[], bool] | None = None
        self.stream: torch.cuda.Stream | None = None
        self.job: Run | None = None
        self.events: Iterator[Event] | None = None
        self.record: Record | None = None
        self.mistake: UserError | None = None  # why the run could not begin

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def advance(self) -> Event | None:
        """The run's next event; None when it is over, however it ended."""
        try:
            if self.events is None:
                if torch.cuda.is_available() and self.config.device != "cpu":
                    self.stream = torch.cuda.Stream(device_of(self.config))
                with self._on_stream():
                    self.job = self._begun()
                    self.events = self.drive(self.number, self.job)
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
        self.job = self.events = None
        return None

    def _begun(self) -> Run:
        try:
            return Run(self.config)
        except UserError as error:
            self.mistake = error
            raise


def run_lanes(
    configs: Sequence[RunConfig],
    n_lanes: int | None,
    *,
    drive: Drive | None = None,
    on_event: OnEvent | None = None,
    on_end: Callable[[int, Record], None] | None = None,
    stop: Stop | None = None,
) -> list[Record]:
    """Do the runs, ``n_lanes`` at a time; records in the order of the configs, each equal to that of the run alone.

    None finds the number of lanes while they work, on a GPU; a CPU is busy with one.
    ``drive`` makes the events of run ``i``; it may do more around them, such as saving. Once ``stop`` says yes no other run
    begins, and those at work end as "interrupted". Where none of the runs could begin, the first one's error is raised and
    ``on_end`` is called for none.
    """
    shared = {(config.precision, config.threads, config.autotune) for config in configs}
    if len(shared) > 1:
        raise UserError(
            f"lanes: runs side by side share precision, threads and autotune, got {sorted(shared)}; run them apart."
        )
    events: Drive = drive if drive is not None else lambda _, run: run.events(stop)
    waiting = [Lane(i, config, events) for i, config in enumerate(configs)]
    waiting.reverse()
    active: list[Lane] = []
    mistaken: list[Lane] = []
    records: dict[int, Record] = {}
    on_gpu = torch.cuda.is_available() and all(config.device != "cpu" for config in configs)
    growth = LaneTuner(min(len(configs), MOST) if n_lanes is None and on_gpu else 1, _room)
    while waiting or active:
        if stop is not None and stop():
            waiting.clear()
        while waiting and len(active) < (growth.n if n_lanes is None else n_lanes):
            active.append(waiting.pop())
        moved = False
        for lane in list(active):
            if lane.done is not None and not lane.done():
                continue
            moved = True
            event = lane.advance()
            growth.event(lane.number, event)
            if event is not None:
                if on_event is not None:
                    on_event(lane.number, event)
                continue
            active.remove(lane)
            assert lane.record is not None
            records[lane.number] = lane.record
            if lane.mistake is not None:
                mistaken.append(lane)
            elif on_end is not None:
                on_end(lane.number, lane.record)
        if not moved:
            time.sleep(5e-5)
    if mistaken and len(mistaken) == len(configs):
        assert mistaken[0].mistake is not None
        raise mistaken[0].mistake
    for lane in mistaken:
        if on_end is not None:
            on_end(lane.number, records[lane.number])
    return [records[i] if i in records else _not_begun(config) for i, config in enumerate(configs)]


def _not_begun(config: RunConfig) -> Record:
    record = new_record(config)
    record.status = "interrupted"
    return record
