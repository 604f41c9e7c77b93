"""The training loop and the code that drives it."""

from tbbn.bench.engine.events import EpochEnded, Event, Loading, Stepped, TaskEnded, Waiting
from tbbn.bench.engine.lanes import run_lanes
from tbbn.bench.engine.loop import Run, run
from tbbn.bench.engine.record import Record

__all__ = ["EpochEnded", "Event", "Loading", "Record", "Run", "Stepped", "TaskEnded", "Waiting", "run", "run_lanes"]
