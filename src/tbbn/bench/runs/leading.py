"""A run over several ranks: rank 0 decides, reads and writes; the others follow.

Before a run, rank 0 sends its state, which contains the config, and all ranks continue from it. Other ranks need no access to the
folders of runs. If a rank fails, the whole launch ends: torchrun restarts it, and rank 0 resumes from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tbbn.bench.config import parse_toml, resolve
from tbbn.bench.engine import loop
from tbbn.bench.engine.events import Event
from tbbn.bench.engine.loop import Run, Stop
from tbbn.bench.engine.ranks import ProcessRanks
from tbbn.bench.runs import checkpoint, state

LEADER = "rank 0"


@contextmanager
def leading(run: Run) -> Iterator[None]:
    """Make the other ranks, if any, do the same run as this one for the duration of the block."""
    if run.ranks.size > 1:
        run.ranks.announce(state.encoded(run))
    yield
    run.ranks.ended()  # not after an error: the others are in the middle of the run


def follow(ranks: ProcessRanks, stop: Stop) -> None:
    """Take part in all runs that rank 0 announces."""
    while content := ranks.receive():
        values, tensors = checkpoint.decode(content, LEADER)
        config = resolve((LEADER, parse_toml(values["config"])))

        def drive(run: Run, values: dict = values, tensors: dict = tensors) -> Iterator[Event]:
            state.restore(run, values, tensors, LEADER)
            yield from run.events(stop)

        loop.run(config, drive=drive, ranks=ranks)
        ranks.ended()
