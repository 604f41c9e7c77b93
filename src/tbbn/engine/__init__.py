"""The one training loop."""

from tbbn.engine.lanes import run_lanes
from tbbn.engine.run import EpochEnded, Event, Run, Stepped, TaskEnded, Waiting, run

__all__ = ["EpochEnded", "Event", "Run", "Stepped", "TaskEnded", "Waiting", "run", "run_lanes"]
