"""How long runs will take on this machine, and how much they will store."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tbbn.bench.engine.forecast import forecast
from tbbn.bench.models import backbone
from tbbn.bench.report.cost import duration
from tbbn.bench.runs.pending import PendingRun
from tbbn.bench.runs.record import RECORD, load_or_restore
from tbbn.bench.runs.state import SMALL
from tbbn.bench.speed import step_seconds

_ROWS = 64  # batch size of the timed step


def effort(runs: Sequence[PendingRun], *, measure: bool = True) -> str:
    """A sentence on the steps, hours and disk space that these runs need. Disk space assumes the first run's network for all.

    Tasks that a run has finished are not counted; a task that it has only begun is counted in full.
    The hours are for the main phase, one run after another, estimated from a step of 64 rows that is timed here in a few seconds
    for each network. Methods with a teacher or more phases take longer; runs in parallel on a GPU take less.
    """
    config = runs[0].config
    # Seeds and norms do not change the number of steps.
    first = {run.config.method: run.config for run in reversed(runs)}
    tasks = {method: forecast(some).tasks for method, some in first.items()}
    learnt = [_tasks_learnt(run) for run in runs]
    left = [tasks[run.config.method][n:] for run, n in zip(runs, learnt, strict=True)]
    steps = sum(task.all_steps for run_left in left for task in run_left)
    begun = sum(n > 0 for n in learnt)
    words = f"{len(runs)} to train{f' ({begun} resumed)' * (begun > 0)}, {steps} steps in total"
    if measure:
        device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
        step: dict[str, float] = {}  # seconds, by network
        seconds = 0.0
        for run, tasks_left in zip(runs, left, strict=True):
            name, data = run.config.backbone, run.config.data
            if name not in step:
                size = data.crop or data.size or 32
                step[name] = step_seconds(name, run.config.norm.name, run.config.precision, size, device)
            rows = sum(task.all_steps * (task.current + task.memory) for task in tasks_left)
            seconds += step[name] * rows / _ROWS
        times = ", ".join(f"{1000 * value:.2f} ms" for value in step.values())
        words += f", about {duration(seconds)} one after another ({times} per step of {_ROWS} rows)"
    state = sum(t.nbytes for t in backbone(config.backbone).state_dict().values())
    kept = 8 + (2 * config.data.tasks if state <= SMALL else 0)  # two checkpoints of a network, its teacher and more
    return f"{words}; at most {_size(len(runs) * kept * state)} on disk."


def _tasks_learnt(run: PendingRun) -> int:
    return len(load_or_restore(run.directory).accuracy) if (run.directory / RECORD).exists() else 0


def _size(count: float) -> str:
    """
    >>> _size(3e6), _size(2.5e9)
    ('3 MB', '2.5 GB')
    """
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
