"""The one training loop."""

from tbbn.engine.events import EpochEnded, Event, Stepped, TaskEnded, Waiting
from tbbn.engine.lanes import run_lanes
from tbbn.engine.run import Run, run

__all__ = ["EpochEnded", "Event", "Run", "Stepped", "TaskEnded", "Waiting", "run", "run_lanes"]
