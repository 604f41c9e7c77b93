"""The one training loop."""

from tbbn.engine.run import EpochEnded, Event, Run, Stepped, TaskEnded, run

__all__ = ["EpochEnded", "Event", "Run", "Stepped", "TaskEnded", "run"]
