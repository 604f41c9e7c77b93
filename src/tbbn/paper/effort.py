"""How long runs will take on this machine, and how much they will store."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tbbn.bench.engine.forecast import forecast
from tbbn.bench.models import backbone
from tbbn.bench.report.cost import duration
from tbbn.bench.runs.pending import PendingRun
from tbbn.bench.runs.state import SMALL
from tbbn.bench.speed import step_seconds


def effort(runs: Sequence[PendingRun], *, measure: bool = True) -> str:
    """A sentence on the steps, the hours and the disk space of these runs; a step and a network are judged by the first's.

    Hours are those of the main phase, one run after another, from the time of a step measured here in a few seconds; methods
    with a teacher or more phases take longer, runs in parallel on a GPU less.
    """
    config = runs[0].config
    # Seeds and norms change no steps.
    first = {run.config.method: run.config for run in reversed(runs)}
    of_method = {method: forecast(some).all_steps for method, some in first.items()}
    steps = sum(of_method[run.config.method] for run in runs)
    words = f"{len(runs)} to do, {steps} steps in all"
    if measure:
        device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
        size = config.data.crop or config.data.size or 32
        seconds = step_seconds(config.backbone, config.norm.name, config.precision, size, device)
        words += f", about {duration(steps * seconds)} one after another ({1000 * seconds:.2f} ms a step)"
    state = sum(t.nbytes for t in backbone(config.backbone).state_dict().values())
    kept = 8 + (2 * config.data.tasks if state <= SMALL else 0)  # two checkpoints of a network, its teacher and more
    return f"{words}; at most {_size(len(runs) * kept * state)} on disk."


def _size(count: float) -> str:
    """
    >>> _size(3e6), _size(2.5e9)
    ('3 MB', '2.5 GB')
    """
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
